//! Dispatch queue, free of I/O. Senders each have a queue of their own and take turns, so none can starve the others.

use std::collections::{BTreeMap, VecDeque};

/// Decision for the dispatch at the front of a sender's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueDecision {
    Take,
    /// The dispatch keeps its position. Within the same queue, only a dispatch with a reservation may overtake it.
    Wait,
}

/// Queued dispatches, by sender.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: BTreeMap<String, VecDeque<T>>,
    /// Senders with waiting dispatches, next in line first.
    turns: VecDeque<String>,
    length: usize,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), turns: VecDeque::new(), length: 0 }
    }
}

impl<T> Queue<T> {
    pub fn len(&self) -> usize {
        self.length
    }

    pub fn push(&mut self, sender: &str, item: T) {
        let queue = self.waiting.entry(sender.to_owned()).or_default();
        if queue.is_empty() {
            self.turns.push_back(sender.to_owned());
        }
        queue.push_back(item);
        self.length += 1;
    }

    /// Takes the next dispatch that can run and moves its sender to the back of the line.
    ///
    /// A sender's dispatches run in order, with one exception: if the first has to wait, the next one accepted by
    /// `can_overtake` goes ahead. `can_overtake` requires a reservation, which may be the very one the first dispatch
    /// is waiting to see released.
    pub fn pop(
        &mut self,
        mut decide: impl FnMut(&T) -> QueueDecision,
        can_overtake: impl Fn(&T) -> bool,
    ) -> Option<T> {
        for turn in 0..self.turns.len() {
            let queue = self.waiting.get_mut(&self.turns[turn])?;
            let first = queue.front().filter(|first| decide(first) == QueueDecision::Take).map(|_| 0);
            let next = first.or_else(|| {
                queue.iter().enumerate().skip(1).find(|(_, item)| can_overtake(item)).map(|(index, _)| index)
            });
            let Some(index) = next else { continue };
            let item = queue.remove(index);
            let is_empty = queue.is_empty();
            if let Some(sender) = self.turns.remove(turn) {
                if is_empty {
                    self.waiting.remove(&sender);
                } else {
                    self.turns.push_back(sender);
                }
            }
            self.length -= usize::from(item.is_some());
            return item;
        }
        None
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.values().flatten()
    }

    /// Removes the first match.
    pub fn remove(&mut self, is_match: impl Fn(&T) -> bool) -> Option<T> {
        let (sender, index) = self.waiting.iter().find_map(|(sender, queue)| {
            let index = queue.iter().position(&is_match)?;
            Some((sender.clone(), index))
        })?;
        let queue = self.waiting.get_mut(&sender)?;
        let item = queue.remove(index);
        if queue.is_empty() {
            self.waiting.remove(&sender);
            self.turns.retain(|turn| *turn != sender);
        }
        self.length -= usize::from(item.is_some());
        item
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pop_all(queue: &mut Queue<(&'static str, u32)>) -> Vec<(&'static str, u32)> {
        std::iter::from_fn(|| queue.pop(|_| QueueDecision::Take, |_| false)).collect()
    }

    #[test]
    fn senders_take_turns() {
        let mut queue = Queue::default();
        for (sender, number) in [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1), ("b", 2)] {
            queue.push(sender, (sender, number));
        }
        assert_eq!((queue.len(), queue.iter().count()), (6, 6));
        let next = queue.pop(
            |(sender, _)| if *sender == "a" { QueueDecision::Wait } else { QueueDecision::Take },
            |_| false,
        );
        assert_eq!(next, Some(("b", 1)));
        assert_eq!(queue.remove(|item| *item == ("a", 2)), Some(("a", 2)));
        assert_eq!(pop_all(&mut queue), [("a", 1), ("c", 1), ("b", 2), ("a", 3)]);
        assert_eq!((queue.len(), queue.iter().count()), (0, 0));
    }

    /// The first dispatch waits until the second one's reservation is released.
    #[test]
    fn reserved_dispatch_overtakes_a_waiting_one() {
        let mut queue = Queue::default();
        for number in 0..3 {
            queue.push("a", number);
        }
        assert_eq!(queue.pop(|_| QueueDecision::Wait, |number| *number == 1), Some(1));
        assert_eq!(queue.pop(|_| QueueDecision::Wait, |_| false), None);
        assert_eq!(queue.pop(|_| QueueDecision::Take, |_| true), Some(0));
    }

    proptest! {
        /// A new sender waits for at most one dispatch from each other sender.
        #[test]
        fn senders_are_served_round_robin(greedy_count in 1_usize..50, other_senders in 1_usize..10) {
            let mut queue = Queue::default();
            for number in 0..greedy_count {
                queue.push("greedy", ("greedy".to_owned(), number));
            }
            for other in 0..other_senders {
                queue.push(&format!("o{other}"), (format!("o{other}"), 0));
            }
            let mut greedy_taken = 0;
            for _ in 0..=other_senders {
                let (sender, _) = queue.pop(|_| QueueDecision::Take, |_| false).unwrap();
                greedy_taken += usize::from(sender == "greedy");
            }
            prop_assert_eq!(greedy_taken, 1);
            prop_assert_eq!(queue.len(), greedy_count - 1);
        }
    }
}

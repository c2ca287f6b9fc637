//! The queue: pure. Each sender has its own queue, and senders take turns, so that no sender starves the others.

use std::collections::{BTreeMap, VecDeque};

/// Decision about the first dispatch of a sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    Take,
    /// Not now: it and those behind it keep their positions.
    Wait,
}

/// The waiting dispatches, by sender.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: BTreeMap<String, VecDeque<T>>,
    /// Senders with waiting dispatches; the first is next.
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

    pub fn push(&mut self, sender: &str, one: T) {
        let queue = self.waiting.entry(sender.to_owned()).or_default();
        if queue.is_empty() {
            self.turns.push_back(sender.to_owned());
        }
        queue.push_back(one);
        self.length += 1;
    }

    /// Takes the next dispatch that can run, and moves its sender to the end. A sender's first goes first; if it must
    /// wait, the first one behind it that already has its reservation passes it: it may be waiting for that one to end.
    pub fn pop(&mut self, mut decide: impl FnMut(&T) -> Turn, is_reserved: impl Fn(&T) -> bool) -> Option<T> {
        for at in 0..self.turns.len() {
            let queue = self.waiting.get_mut(&self.turns[at])?;
            let first = queue.front().filter(|first| decide(first) == Turn::Take).map(|_| 0);
            let found = first.or_else(|| {
                queue.iter().enumerate().skip(1).find(|(_, one)| is_reserved(one)).map(|(index, _)| index)
            });
            let Some(index) = found else { continue };
            let one = queue.remove(index);
            let is_empty = queue.is_empty();
            if let Some(sender) = self.turns.remove(at) {
                if is_empty {
                    self.waiting.remove(&sender);
                } else {
                    self.turns.push_back(sender);
                }
            }
            self.length -= usize::from(one.is_some());
            return one;
        }
        None
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.values().flatten()
    }

    /// Removes the first match.
    pub fn remove(&mut self, is_match: impl Fn(&T) -> bool) -> Option<T> {
        let (sender, at) = self.waiting.iter().find_map(|(sender, queue)| {
            let at = queue.iter().position(&is_match)?;
            Some((sender.clone(), at))
        })?;
        let queue = self.waiting.get_mut(&sender)?;
        let one = queue.remove(at);
        if queue.is_empty() {
            self.waiting.remove(&sender);
            self.turns.retain(|turn| *turn != sender);
        }
        self.length -= usize::from(one.is_some());
        one
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(queue: &mut Queue<(&'static str, u32)>) -> Vec<(&'static str, u32)> {
        std::iter::from_fn(|| queue.pop(|_| Turn::Take, |_| false)).collect()
    }

    #[test]
    fn senders_take_turns() {
        let mut queue = Queue::default();
        for (sender, number) in [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1), ("b", 2)] {
            queue.push(sender, (sender, number));
        }
        assert_eq!((queue.len(), queue.iter().count()), (6, 6));
        let next = queue.pop(|(sender, _)| if *sender == "a" { Turn::Wait } else { Turn::Take }, |_| false);
        assert_eq!(next, Some(("b", 1)));
        assert_eq!(queue.remove(|one| *one == ("a", 2)), Some(("a", 2)));
        assert_eq!(all(&mut queue), [("a", 1), ("c", 1), ("b", 2), ("a", 3)]);
        assert_eq!((queue.len(), queue.iter().count()), (0, 0));
    }

    /// The first waits for the second's reservation.
    #[test]
    fn reserved_dispatch_passes_a_waiting_first() {
        let mut queue = Queue::default();
        for number in 0..3 {
            queue.push("a", number);
        }
        assert_eq!(queue.pop(|_| Turn::Wait, |number| *number == 1), Some(1));
        assert_eq!(queue.pop(|_| Turn::Wait, |_| false), None);
        assert_eq!(queue.pop(|_| Turn::Take, |_| true), Some(0));
    }

    proptest! {
        /// A new sender waits for at most one dispatch of each other sender.
        #[test]
        fn senders_are_served_round_robin(many in 1_usize..50, others in 1_usize..10) {
            let mut queue = Queue::default();
            for number in 0..many {
                queue.push("greedy", ("greedy".to_owned(), number));
            }
            for other in 0..others {
                queue.push(&format!("o{other}"), (format!("o{other}"), 0));
            }
            let mut greedy = 0;
            for _ in 0..=others {
                let (sender, _) = queue.pop(|_| Turn::Take, |_| false).unwrap();
                greedy += usize::from(sender == "greedy");
            }
            prop_assert_eq!(greedy, 1);
            prop_assert_eq!(queue.len(), many - 1);
        }
    }
}

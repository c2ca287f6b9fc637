//! The choices in a run, drawn from a seed or enumerated.

/// Makes each choice in a run.
pub trait Choices {
    /// Returns a number below `count`, which must not be 0.
    fn pick(&mut self, count: usize) -> usize;
}

/// SplitMix64 (Steele, Lea, Flood 2014): the same seed gives the same run.
pub struct SeededChoices(pub u64);

impl Choices for SeededChoices {
    fn pick(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % count as u64).expect("a remainder below a usize fits in a usize")
    }
}

/// Enumerates every run as a number whose digits are the choices, least significant digit last.
#[derive(Default)]
pub struct ExhaustiveChoices {
    digits: Vec<(usize, usize)>,
    position: usize,
}

impl ExhaustiveChoices {
    /// Advances to the next run. Returns `false` after the last one.
    pub fn next_run(&mut self) -> bool {
        self.digits.truncate(self.position);
        self.position = 0;
        while let Some((digit, count)) = self.digits.pop() {
            if digit + 1 < count {
                self.digits.push((digit + 1, count));
                return true;
            }
        }
        false
    }
}

impl Choices for ExhaustiveChoices {
    fn pick(&mut self, count: usize) -> usize {
        if self.position == self.digits.len() {
            self.digits.push((0, count));
        }
        let (digit, earlier_count) = self.digits[self.position];
        assert_eq!(earlier_count, count, "a replayed run had a different number of options");
        self.position += 1;
        digit
    }
}

#[test]
fn exhaustive_choices_visit_every_run_once() {
    let mut choices = ExhaustiveChoices::default();
    let mut runs = Vec::new();
    loop {
        let first = choices.pick(2);
        let second = if first == 0 { choices.pick(3) } else { 0 };
        runs.push((first, second));
        if !choices.next_run() {
            break;
        }
    }
    assert_eq!(runs, [(0, 0), (0, 1), (0, 2), (1, 0)]);
}

//! The choices of a run: drawn from a seed, or enumerated.

/// Decides each choice of a run.
pub trait Choices {
    /// A number below `of`, which is not 0.
    fn pick(&mut self, of: usize) -> usize;
}

/// SplitMix64 (Steele, Lea, Flood 2014): the same seed gives the same run.
pub struct Seeded(pub u64);

impl Choices for Seeded {
    fn pick(&mut self, of: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % of as u64).expect("below a usize")
    }
}

/// Enumerates every run as a number whose digits are the choices, least significant digit last.
#[derive(Default)]
pub struct Exhaustive {
    digits: Vec<(usize, usize)>,
    at: usize,
}

impl Exhaustive {
    /// Advances to the next run; `false` after the last.
    pub fn next_run(&mut self) -> bool {
        self.digits.truncate(self.at);
        self.at = 0;
        while let Some((digit, of)) = self.digits.pop() {
            if digit + 1 < of {
                self.digits.push((digit + 1, of));
                return true;
            }
        }
        false
    }
}

impl Choices for Exhaustive {
    fn pick(&mut self, of: usize) -> usize {
        if self.at == self.digits.len() {
            self.digits.push((0, of));
        }
        let (digit, known) = self.digits[self.at];
        assert_eq!(known, of, "a replayed run makes the same choices");
        self.at += 1;
        digit
    }
}

#[test]
fn exhaustive_schedule_visits_every_run_once() {
    let mut choices = Exhaustive::default();
    let mut seen = Vec::new();
    loop {
        let first = choices.pick(2);
        let second = if first == 0 { choices.pick(3) } else { 0 };
        seen.push((first, second));
        if !choices.next_run() {
            break;
        }
    }
    assert_eq!(seen, [(0, 0), (0, 1), (0, 2), (1, 0)]);
}

//! Seeded random numbers (SplitMix64), the only randomness in a plan.

pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        // Adjacent seeds must not give similar plans.
        Self(seed.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(0x9E37_79B9))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Returns `true` with a probability of `chance` percent.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.next() % 100 < chance
    }

    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }

    /// Returns an index into `weights`, chosen in proportion to its weight.
    pub fn pick_weighted(&mut self, weights: &[u32]) -> usize {
        let mut offset = self.next() % u64::from(weights.iter().sum::<u32>());
        for (index, weight) in weights.iter().enumerate() {
            if offset < u64::from(*weight) {
                return index;
            }
            offset -= u64::from(*weight);
        }
        weights.len() - 1
    }
}

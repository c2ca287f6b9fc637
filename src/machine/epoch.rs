//! The epoch: one more than the highest of any machine that the slot ever had. It fences a replaced machine.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Starts at 1. Zero stands for "no machine yet" and is never a machine's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u32);

/// Above it, nothing that the store says is believed to be an epoch: the database counts in 32 bits with a sign.
pub const MAX_EPOCH: Epoch = Epoch(i32::MAX.unsigned_abs() - 1);

/// How far the store may be ahead of the platform's database, which may be a restored older copy. What claims to be further
/// ahead was not written by a machine of ours.
const MAX_AHEAD: u32 = 1000;

impl Epoch {
    pub const NONE: Self = Self(0);

    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The highest epoch that is believed where the database knows this one.
    #[must_use]
    pub fn believable(self) -> Self {
        Self(self.0.saturating_add(MAX_AHEAD)).min(MAX_EPOCH)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Epoch {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

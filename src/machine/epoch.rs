//! A machine's epoch: a number that is higher than that of every earlier machine in its slot. It fences replaced
//! machines.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An epoch. A slot's first machine has epoch 1; zero means "no machine yet".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u32);

/// The highest valid epoch. The database stores signed 32-bit numbers, and the next epoch must also fit.
pub const MAX_EPOCH: Epoch = Epoch(i32::MAX.unsigned_abs() - 1);

/// Maximum number of epochs by which the store may be ahead of the platform's database, which may have been restored
/// from an older copy. A higher epoch is implausible: no slot gets that many machines after the copy was made.
const MAX_EPOCHS_AHEAD: u32 = 1000;

impl Epoch {
    pub const NONE: Self = Self(0);

    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Returns the highest plausible epoch for a slot whose highest known epoch is this one.
    #[must_use]
    pub fn max_plausible(self) -> Self {
        Self(self.0.saturating_add(MAX_EPOCHS_AHEAD)).min(MAX_EPOCH)
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

//! Days whose interactions are in `usage.jsonl`, all of them: they need not be counted again.
//!
//! A day's file only grows: as long as it has the length that it had when it was counted, its lines are those. A seal holds
//! only beside the sum that it was made for: where lines of `usage.jsonl` are gone, the day is counted again.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use super::ledger::Totals;
use crate::fsx::{self, FileError};

/// Days, as they were when all that is in their files was written to `usage.jsonl`.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seals {
    days: BTreeMap<Date, Seal>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// Of the day's files, in bytes.
    pub length: u64,
    pub totals: Totals,
}

impl Seals {
    /// What cannot be read is none: the days are counted again.
    pub fn read(file: &Path) -> Self {
        let text = fsx::read_if_exists(file).ok().flatten();
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    /// # Errors
    /// [`FileError`].
    pub fn write(&self, file: &Path) -> Result<(), FileError> {
        fsx::write_atomic(file, &serde_json::to_vec(self).expect("plain fields are JSON"), 0o600)
    }

    pub fn holds(&self, day: Date, seal: &Seal) -> bool {
        self.days.get(&day) == Some(seal)
    }

    /// These and no others.
    pub fn of(days: impl IntoIterator<Item = (Date, Seal)>) -> Self {
        Self { days: days.into_iter().collect() }
    }
}

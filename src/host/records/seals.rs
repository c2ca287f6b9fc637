//! Days whose interactions are in `usage.jsonl`, all of them: they need not be counted again.
//!
//! A day's file only grows: as long as it has the length that it had when it was counted, its lines are those.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::fsx::{self, FileError};

/// The lengths of the files of days, when all that is in them was written to `usage.jsonl`.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seals {
    days: BTreeMap<Date, u64>,
}

impl Seals {
    /// What cannot be read is none: the days are counted again.
    pub fn read(file: &Path) -> Self {
        let text = fsx::read_if_there(file).ok().flatten();
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    /// # Errors
    /// [`FileError`].
    pub fn write(&self, file: &Path) -> Result<(), FileError> {
        fsx::write_atomic(file, &serde_json::to_vec(self).expect("plain fields are JSON"), 0o600)
    }

    pub fn holds(&self, day: Date, length: u64) -> bool {
        self.days.get(&day) == Some(&length)
    }

    /// These and no others.
    pub fn of(days: impl IntoIterator<Item = (Date, u64)>) -> Self {
        Self { days: days.into_iter().collect() }
    }
}

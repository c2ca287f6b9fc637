//! Seals mark days whose interactions are fully counted in `usage.jsonl`, so that they need not be recounted.
//!
//! A day's files only grow, so an unchanged length means unchanged lines. A seal is valid only for the totals it was
//! created with: if lines in `usage.jsonl` are lost, the day is recounted.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use super::ledger::Totals;
use svc_base::fsx::{self, FileError};

/// Sealed days, as stored in the seal file.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seals {
    days: BTreeMap<Date, Seal>,
}

/// State of a day's interactions at the time of the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// Total length of the day's files, in bytes.
    pub length: u64,
    /// The day's totals in `usage.jsonl`.
    pub totals: Totals,
}

impl Seals {
    /// Reads the seals. A missing, unreadable or invalid file is treated as empty, so the days are recounted.
    pub fn read(file: &Path) -> Self {
        let text = fsx::read_if_exists(file).ok().flatten();
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    pub fn write(&self, file: &Path) -> Result<(), FileError> {
        fsx::write_atomic(file, &serde_json::to_vec(self).expect("plain fields serialize to JSON"), 0o600)
    }

    /// Returns whether the day was sealed with this length and these totals.
    pub fn contains(&self, day: Date, seal: &Seal) -> bool {
        self.days.get(&day) == Some(seal)
    }

    pub fn new(days: impl IntoIterator<Item = (Date, Seal)>) -> Self {
        Self { days: days.into_iter().collect() }
    }
}

//! A verified snapshot that did not become the latest: it has lost much of what the one before it holds, and nobody has
//! said that this is meant.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::layout::Layout;
use crate::clock;
use crate::fsx::{self, FileError};

const FORMAT: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldSnapshot {
    version: u32,
    /// The snapshot that waits.
    pub key: String,
    /// The one that stays the latest.
    pub latest: String,
    /// What is missing, in words.
    pub loss: String,
    /// Since when snapshots in a row have lost as much.
    #[serde(with = "clock::wire")]
    pub since: Timestamp,
    /// How many snapshots in a row agree.
    pub agreeing: u32,
}

impl HeldSnapshot {
    /// The first one that is held back in favour of `latest`.
    pub fn new(key: String, latest: String, loss: String) -> Self {
        Self { version: FORMAT, key, latest, loss, since: clock::now_ms(), agreeing: 1 }
    }

    /// The next one in a row that has lost as much.
    #[must_use]
    pub fn followed_by(self, key: String, loss: String) -> Self {
        Self { key, loss, agreeing: self.agreeing.saturating_add(1), ..self }
    }

    /// What is not readable holds nothing back.
    ///
    /// # Errors
    /// When the file is there and the disk does not return it.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_there(&layout.held_snapshot())?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// # Errors
    /// [`FileError`].
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields are JSON");
        fsx::write_atomic(&layout.held_snapshot(), &text, 0o644)
    }

    /// Nothing is held back any more.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn clear(layout: &Layout) -> Result<(), FileError> {
        fsx::remove_if_there(&layout.held_snapshot())
    }
}

impl fmt::Display for HeldSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, latest, loss, since, .. } = self;
        let since = clock::rfc3339_ms(*since);
        write!(
            f,
            "{loss}: since {since} snapshots are kept and {latest} stays the latest; the newest is {key}"
        )
    }
}

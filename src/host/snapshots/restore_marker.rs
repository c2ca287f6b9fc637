//! `/opt/svc/restore-complete`: the marker of the gate. It says which database this machine serves.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;
use crate::store::snapshot::DatabaseIdentity;

const FORMAT: u32 = 1;

/// What opened the gate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Marker {
    version: u32,
    #[serde(with = "clock::wire_option")]
    pub completed_at: Option<Timestamp>,
    /// `null`: an empty start.
    pub snapshot: Option<String>,
    /// Absent in markers of releases before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database_identity: Option<DatabaseIdentity>,
}

impl Marker {
    pub fn new(snapshot: Option<String>, identity: DatabaseIdentity) -> Self {
        Self {
            version: FORMAT,
            completed_at: Some(clock::now_ms()),
            snapshot,
            database_identity: Some(identity),
        }
    }

    /// The same marker, which names a database from now on.
    #[must_use]
    pub fn naming(self, identity: DatabaseIdentity) -> Self {
        Self { database_identity: Some(identity), ..self }
    }

    /// `None`: the gate is shut. A marker that is not readable opened the gate all the same, and names no database.
    ///
    /// # Errors
    /// When it is there and the disk does not return it.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.restore_complete())?;
        Ok(text.map(|text| serde_json::from_slice(&text).unwrap_or_default()))
    }

    /// # Errors
    /// [`FileError`].
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("a marker of plain fields is JSON");
        // On a machine the directory is root's, and the marker a link to where this program may write.
        let place = fsx::through_link(&layout.restore_complete());
        fsx::write_atomic(&place, &text, 0o644)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_of_earlier_releases_name_no_database() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        assert_eq!(Marker::read(&layout).unwrap(), None, "the gate is shut");
        let earlier = r#"{"version":1,"completedAt":"2026-01-02T03:04:05.000Z","snapshot":null}"#;
        for text in ["", "{}", earlier] {
            fsx::write_atomic(&layout.restore_complete(), text.as_bytes(), 0o644).unwrap();
            let marker = Marker::read(&layout).unwrap().unwrap();
            assert_eq!(marker.database_identity, None, "{text}");
        }
    }
}

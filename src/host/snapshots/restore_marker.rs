//! `/opt/svc/restore-complete`: the restore gate's marker, which identifies the database this machine serves.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::fsx::{self, FileError};
use svc_store::snapshot::DatabaseIdentity;

const FORMAT_VERSION: u32 = 1;

/// Marker contents, replaced by every restore, import or adoption.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RestoreMarker {
    version: u32,
    #[serde(with = "clock::wire_option")]
    pub completed_at: Option<Timestamp>,
    /// Key of the restored or imported snapshot; `None` if the machine started with an empty database, or adopted one.
    pub snapshot: Option<String>,
    /// Absent from markers written by earlier releases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database_identity: Option<DatabaseIdentity>,
}

impl RestoreMarker {
    pub fn new(snapshot: Option<String>, identity: DatabaseIdentity) -> Self {
        Self {
            version: FORMAT_VERSION,
            completed_at: Some(clock::now_ms()),
            snapshot,
            database_identity: Some(identity),
        }
    }

    /// Sets the database identity.
    #[must_use]
    pub fn with_identity(self, identity: DatabaseIdentity) -> Self {
        Self { database_identity: Some(identity), ..self }
    }

    /// Reads the marker, or returns `None` if the gate is closed. A marker that doesn't parse still opens the gate, but
    /// doesn't identify a database.
    ///
    /// # Errors
    /// [`FileError`] if the file exists but cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.restore_complete())?;
        Ok(text.map(|text| serde_json::from_slice(&text).unwrap_or_default()))
    }

    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        // On a real machine, root owns the directory and the marker is a symlink into one that we can write to.
        let target = fsx::resolve_link(&layout.restore_complete());
        fsx::write_atomic(&target, &text, 0o644)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_accepts_marker_without_identity() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        assert_eq!(RestoreMarker::read(&layout).unwrap(), None, "the gate is closed");
        let earlier = r#"{"version":1,"completedAt":"2026-01-02T03:04:05.000Z","snapshot":null}"#;
        for text in ["", "{}", earlier] {
            fsx::write_atomic(&layout.restore_complete(), text.as_bytes(), 0o644).unwrap();
            let marker = RestoreMarker::read(&layout).unwrap().unwrap();
            assert_eq!(marker.database_identity, None, "{text}");
        }
    }
}

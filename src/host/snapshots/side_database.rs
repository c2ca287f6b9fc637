//! The side database: a snapshot loaded next to the owner's database, to copy tables back from.
//!
//! The gateway and `svc-db-backup` share the request file and the state file that this module defines. The gateway
//! serves the state.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::fsx::{self, FileError};
use svc_machine::choice::must_be_one_of;
use svc_store::snapshot::TableCount;

/// The side database's name in the machine's PostgreSQL.
pub const SIDE_DATABASE: &str = "svc_side";
/// Maximum number of tables per copy.
pub const MAX_TABLES: usize = 500;

/// How a copy treats rows that exist in the snapshot, in the owner's database, or in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
#[derive(strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_mode)]
pub enum CopyMode {
    /// Insert missing rows; existing rows are not touched
    Missing,
    /// Restore the snapshot's rows; newer rows stay
    Overwrite,
    /// Restore the table as it was; newer rows are deleted
    Replace,
}

impl CopyMode {
    pub const NAMES: &'static [&'static str] = <Self as strum::VariantNames>::VARIANTS;
}

fn unknown_mode(_: &str) -> String {
    must_be_one_of(CopyMode::NAMES)
}

/// Selects the snapshot to open.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotChoice {
    /// The snapshot's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Without a key: the last snapshot taken at or before this time. Without either, the latest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
}

/// Tables to copy back, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableCopy {
    /// `schema.table`, as listed in the state.
    pub tables: Vec<String>,
    pub mode: CopyMode,
    /// Copy, count, and roll back.
    pub dry_run: bool,
    /// Take a snapshot of the current database first.
    pub backup: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum SideAction {
    Open(SnapshotChoice),
    Copy(TableCopy),
    Close,
}

/// The request file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SideRequest {
    pub request_id: String,
    #[serde(with = "clock::wire")]
    pub requested_at: Timestamp,
    pub action: SideAction,
}

impl SideRequest {
    /// Creates a request with a new id. The id of the HTTP request is not used, because a client may repeat it, and a
    /// copy with the id of an earlier one counts as complete.
    pub fn new(action: SideAction) -> Self {
        Self { request_id: uuid::Uuid::now_v7().to_string(), requested_at: clock::now_ms(), action }
    }

    /// Writes the request file. Returns `false` if a request is already pending.
    pub fn submit(&self, layout: &Layout) -> Result<bool, FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::create_atomic(&layout.request("side"), &text, 0o600)
    }

    /// Reads the pending request. The inner error means that the file does not parse: a retry is pointless.
    pub fn read(layout: &Layout) -> Result<Option<Result<Self, serde_json::Error>>, FileError> {
        let text = fsx::read_if_exists(&layout.request("side"))?;
        Ok(text.map(|text| serde_json::from_slice(&text)))
    }

    /// Removes the served request.
    pub fn remove(layout: &Layout) -> Result<(), FileError> {
        fsx::remove_if_exists(&layout.request("side"))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SideStatus {
    Closed,
    Opening,
    Open,
    Copying,
    /// The side database could not be opened; `error` has the reason.
    Failed,
}

/// The result of copying one table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CopiedTable {
    /// `schema.table`
    pub name: String,
    /// The table was missing and was recreated.
    #[serde(rename = "created")]
    pub was_recreated: bool,
    pub inserted: u64,
    pub updated: u64,
    pub deleted: u64,
    /// Rows of the snapshot that were skipped because of a unique constraint.
    pub skipped: u64,
    /// Columns of the snapshot that the table no longer has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Other objects that were dropped together with the recreated table, and were recreated too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recreated: Vec<String>,
    /// Objects that were dropped together with the recreated table, but were not recreated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_recreated: Vec<String>,
}

/// The result of the last copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CopyResult {
    pub request_id: String,
    #[serde(with = "clock::wire")]
    pub at: Timestamp,
    pub mode: CopyMode,
    pub dry_run: bool,
    /// Why the copy failed. If it failed before its commit, `tables` contains only missing tables that were recreated
    /// (in a dry run: would be), and the rows of all others are unchanged. If only dependents could not be added,
    /// `tables` also contains the copied tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub tables: Vec<CopiedTable>,
}

/// The state of the side database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SideState {
    pub version: u32,
    pub status: SideStatus,
    #[serde(with = "clock::wire")]
    pub updated_at: Timestamp,
    /// The id of the request that led to this state.
    pub request_id: String,
    /// Key of the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The owner's tables in the snapshot.
    #[serde(default)]
    pub tables: Vec<TableCount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_copy: Option<CopyResult>,
    /// Missing tables that the running copy recreates in one transaction: after an interruption, either all of them
    /// exist or none do.
    #[serde(default, skip_serializing_if = "Vec::is_empty", rename = "making")]
    pub recreating: Vec<String>,
}

impl SideState {
    const FORMAT_VERSION: u32 = 1;

    pub fn new(status: SideStatus, request_id: &str) -> Self {
        Self {
            version: Self::FORMAT_VERSION,
            status,
            updated_at: clock::now_ms(),
            request_id: request_id.to_owned(),
            key: None,
            tables: Vec::new(),
            error: None,
            last_copy: None,
            recreating: Vec::new(),
        }
    }

    /// Reads the last written state; `None` if the file does not exist, does not parse, or has another version.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.side_database_state())?;
        let state = text.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        Ok(state.filter(|state| state.version == Self::FORMAT_VERSION))
    }

    pub fn write(&mut self, layout: &Layout) -> Result<(), FileError> {
        self.updated_at = clock::now_ms();
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.side_database_state(), &text, 0o600)
    }
}

#[cfg(test)]
mod tests {
    use svc_http::request_id;

    use super::*;

    #[test]
    fn submit_refuses_second_pending_request() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        assert!(SideRequest::read(&layout).unwrap().is_none());
        let copy =
            TableCopy { tables: vec!["a.b".into()], mode: CopyMode::Missing, dry_run: true, backup: true };
        let request = SideRequest::new(SideAction::Copy(copy));
        assert!(request.submit(&layout).unwrap());
        assert!(!SideRequest::new(SideAction::Close).submit(&layout).unwrap());
        assert_eq!(SideRequest::read(&layout).unwrap().unwrap().unwrap(), request);
        SideRequest::remove(&layout).unwrap();
        assert!(SideRequest::new(SideAction::Open(SnapshotChoice::default())).submit(&layout).unwrap());
    }

    #[tokio::test]
    async fn new_request_has_new_id_if_http_id_is_repeated() {
        let create = || {
            request_id::scope("repeated-id".to_owned().into(), async { SideRequest::new(SideAction::Close) })
        };
        let (first, second) = (create().await, create().await);
        assert_ne!(first.request_id, second.request_id);
    }

    #[test]
    fn mode_parses_only_its_names() {
        for name in CopyMode::NAMES {
            let mode: CopyMode = name.parse().unwrap();
            assert_eq!(serde_json::to_value(mode).unwrap(), *name);
        }
        assert!("all".parse::<CopyMode>().is_err());
    }
}

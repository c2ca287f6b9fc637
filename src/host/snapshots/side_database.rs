//! The side database: a snapshot loaded alongside the owner's database, for copying tables back.
//!
//! The gateway and `svc-db-backup` communicate through the request and state files defined here. The gateway serves the
//! state.

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

/// How a copy reconciles the snapshot's rows with the owner's.
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
    /// If there is no key, the last snapshot taken at or before this time. Defaults to the latest snapshot.
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
    /// Creates a request with a fresh id. The HTTP request id won't do: clients may reuse it, and a copy with an
    /// earlier copy's id is treated as complete.
    pub fn new(action: SideAction) -> Self {
        Self { request_id: uuid::Uuid::now_v7().to_string(), requested_at: clock::now_ms(), action }
    }

    /// Writes the request file. Returns `false` if a request is already pending.
    pub fn submit(&self, layout: &Layout) -> Result<bool, FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::create_atomic(&layout.request("side"), &text, 0o600)
    }

    /// Reads the pending request. The inner error means the file doesn't parse, so retrying is pointless.
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
    /// The side database could not be opened; see `error`.
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
    /// Snapshot rows skipped due to a unique constraint.
    pub skipped: u64,
    /// Snapshot columns missing from the current table.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Other objects dropped along with the table and recreated with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recreated: Vec<String>,
    /// Objects dropped along with the table but not recreated.
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
    /// Error message if the copy failed. After a failure before the commit, `tables` only lists missing tables that
    /// were recreated (or would be, in a dry run), and rows in all other tables are unchanged. If only dependents
    /// couldn't be added, `tables` also lists the copied tables.
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
    /// Id of the request that led to this state.
    pub request_id: String,
    /// Snapshot key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The owner's tables in the snapshot.
    #[serde(default)]
    pub tables: Vec<TableCount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_copy: Option<CopyResult>,
    /// Missing tables that the running copy recreates in one transaction, so after an interruption either all of them
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

    /// Reads the last persisted state, or returns `None` if the file is missing, doesn't parse, or has a different
    /// version.
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
    async fn new_request_ignores_http_request_id() {
        let create = || {
            request_id::scope("repeated-id".to_owned().into(), async { SideRequest::new(SideAction::Close) })
        };
        let (first, second) = (create().await, create().await);
        assert_ne!(first.request_id, second.request_id);
    }

    #[test]
    fn copy_mode_parses_only_known_names() {
        for name in CopyMode::NAMES {
            let mode: CopyMode = name.parse().unwrap();
            assert_eq!(serde_json::to_value(mode).unwrap(), *name);
        }
        assert!("all".parse::<CopyMode>().is_err());
    }
}

//! The side database: a snapshot in a database beside the owner's, from which tables are copied back.
//!
//! Here is what gateway and `svc-db-backup` share of it: how something is asked (a request file, as for a backup), and
//! what is known of it (a file that the gateway shows).

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;
use crate::http::request_id;
use crate::store::snapshot::TableCount;

/// Its name at the machine's PostgreSQL.
pub const DATABASE: &str = "svc_side";
/// As many tables are copied by one request.
pub const MOST_TABLES: usize = 500;

/// What becomes of rows that the snapshot and the owner's database both know, or only one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Rows that are gone come back; no row that is there is touched
    Missing,
    /// Rows of the snapshot come back as they were; rows that came since stay
    Overwrite,
    /// The table becomes what it was: rows that came since go
    Replace,
}

impl Mode {
    pub const WORDS: [&str; 3] = ["missing", "overwrite", "replace"];
}

impl std::str::FromStr for Mode {
    type Err = &'static str;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "missing" => Ok(Self::Missing),
            "overwrite" => Ok(Self::Overwrite),
            "replace" => Ok(Self::Replace),
            _ => Err("must be missing, overwrite or replace"),
        }
    }
}

/// Which snapshot is meant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Chosen {
    /// The one with this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Without a key: the last one taken at this time or earlier. Without either, the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
}

/// Tables to copy back, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Copy {
    /// `schema.table`, as the state lists them.
    pub tables: Vec<String>,
    pub mode: Mode,
    /// It is done, counted, and undone.
    pub dry_run: bool,
    /// A snapshot of what is there now is taken first.
    pub backup: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum Action {
    Open(Chosen),
    Copy(Copy),
    Close,
}

/// The request file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    pub request_id: String,
    #[serde(with = "clock::wire")]
    pub requested_at: Timestamp,
    pub action: Action,
}

impl Request {
    /// For the request of now.
    pub fn new(action: Action) -> Self {
        Self { request_id: request_id::current(), requested_at: clock::now_ms(), action }
    }

    /// Asks, unless something is asked already: then the answer is `false`.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn ask(&self, layout: &Layout) -> Result<bool, FileError> {
        let text = serde_json::to_vec(self).expect("plain fields are JSON");
        fsx::create_atomic(&layout.request("side"), &text, 0o600)
    }

    /// What is asked; a file that cannot be read as a request is one that nobody can serve, and says so.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn read(layout: &Layout) -> Result<Option<Result<Self, serde_json::Error>>, FileError> {
        let text = fsx::read_if_exists(&layout.request("side"))?;
        Ok(text.map(|text| serde_json::from_slice(&text)))
    }

    /// It is served.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn remove(layout: &Layout) -> Result<(), FileError> {
        fsx::remove_if_exists(&layout.request("side"))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Closed,
    Opening,
    Open,
    Copying,
    /// It could not be opened; `error` says why.
    Failed,
}

/// What was done to one table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CopiedTable {
    /// `schema.table`
    pub name: String,
    /// It was not there any more, and was made again with what belongs to it.
    pub created: bool,
    pub inserted: u64,
    pub updated: u64,
    pub deleted: u64,
    /// Rows of the snapshot that stayed away, because another row has what must be unique.
    pub skipped: u64,
    /// Columns of the snapshot that the table does not have any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Of a table that was made again: what depended on it, was dropped with it, and is there again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recreated: Vec<String>,
    /// What depended on it and is not made again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_recreated: Vec<String>,
}

/// How the last copy ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Copied {
    pub request_id: String,
    #[serde(with = "clock::wire")]
    pub at: Timestamp,
    pub mode: Mode,
    pub dry_run: bool,
    /// Of a copy that failed: why. What `tables` then names is done, the rest is as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub tables: Vec<CopiedTable>,
}

/// What is known of the side database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    pub version: u32,
    pub status: Status,
    #[serde(with = "clock::wire")]
    pub updated_at: Timestamp,
    /// Of the request that brought it here.
    pub request_id: String,
    /// Of the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The owner's tables in it.
    #[serde(default)]
    pub tables: Vec<TableCount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_copy: Option<Copied>,
    /// Of a copy under way: tables that it makes again, all or none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub making: Vec<String>,
}

impl State {
    const VERSION: u32 = 1;

    pub fn new(status: Status, request_id: &str) -> Self {
        Self {
            version: Self::VERSION,
            status,
            updated_at: clock::now_ms(),
            request_id: request_id.to_owned(),
            key: None,
            tables: Vec::new(),
            error: None,
            last_copy: None,
            making: Vec::new(),
        }
    }

    /// The state as it was last written; `None` where there was never one, or none that can be read.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.side_state())?;
        let state = text.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        Ok(state.filter(|state| state.version == Self::VERSION))
    }

    /// # Errors
    /// [`FileError`].
    pub fn write(&mut self, layout: &Layout) -> Result<(), FileError> {
        self.updated_at = clock::now_ms();
        let text = serde_json::to_vec(self).expect("plain fields are JSON");
        fsx::write_atomic(&layout.side_state(), &text, 0o600)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_asked_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        assert!(Request::read(&layout).unwrap().is_none());
        let copy = Copy { tables: vec!["a.b".into()], mode: Mode::Missing, dry_run: true, backup: true };
        let request = Request::new(Action::Copy(copy));
        assert!(request.ask(&layout).unwrap());
        assert!(!Request::new(Action::Close).ask(&layout).unwrap());
        assert_eq!(Request::read(&layout).unwrap().unwrap().unwrap(), request);
        Request::remove(&layout).unwrap();
        assert!(Request::new(Action::Open(Chosen::default())).ask(&layout).unwrap());
    }

    #[test]
    fn a_mode_is_one_of_its_words() {
        for word in Mode::WORDS {
            let mode: Mode = word.parse().unwrap();
            assert_eq!(serde_json::to_value(mode).unwrap(), word);
        }
        assert!("all".parse::<Mode>().is_err());
    }
}

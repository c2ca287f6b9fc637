//! An object store, a machine in its own directory, and the results of `svc-db-backup` in the store.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use super::database;
use kit::pg::PgServer;
use kit::s3::S3Server;

pub const BUCKET: &str = "svc-bench";
const USER: &str = "user_bench";
const SLOT: &str = "primary";

/// The object store, which runs in this process.
pub struct BenchStore {
    pub server: S3Server,
}

/// A snapshot as recorded in the pointer.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    key: String,
    pub size_bytes: u64,
}

#[derive(Deserialize)]
struct Pointer {
    seq: u64,
    snapshot: Option<Snapshot>,
}

#[derive(Deserialize)]
struct Sidecar {
    tables: Vec<Table>,
}

#[derive(Deserialize)]
struct Table {
    name: String,
    rows: u64,
}

impl BenchStore {
    pub fn start(dir: &Path) -> Result<Self> {
        let server = S3Server::start(dir)?;
        server.create_bucket(BUCKET);
        Ok(Self { server })
    }

    /// Returns the pointer's sequence number; 0 if there is no pointer.
    pub fn pointer_seq(&self) -> Result<u64> {
        Ok(self.read_pointer()?.map_or(0, |pointer| pointer.seq))
    }

    /// Verifies the snapshot from the backup that just ran: the pointer must have advanced by one, the dump must have
    /// the recorded size, the recorded row counts must match the database, and no upload may be incomplete.
    /// `previous_seq` is the pointer's `seq` before that backup.
    pub fn verify_snapshot(&self, previous_seq: u64, scale: u32) -> Result<Snapshot> {
        let pointer = self.read_pointer()?.context("there is no pointer")?;
        let expected_seq = previous_seq + 1;
        ensure!(pointer.seq == expected_seq, "the pointer is at {}, expected {expected_seq}", pointer.seq);
        let snapshot = pointer.snapshot.context("the pointer names no snapshot")?;
        let key = self.object_key(&snapshot);
        ensure!(
            self.object_size(&key) == Some(snapshot.size_bytes),
            "the size of {key} differs from the pointer"
        );
        let sidecar: Sidecar =
            self.read_json(&format!("{key}.json"))?.context("the snapshot has no sidecar")?;
        let recorded: Vec<(&str, u64)> =
            sidecar.tables.iter().map(|table| (&*table.name, table.rows)).collect();
        ensure!(recorded == database::tables(scale), "unexpected row counts in the sidecar: {recorded:?}");
        ensure!(self.server.uploads(BUCKET).is_empty(), "an upload is incomplete");
        Ok(snapshot)
    }

    pub fn object_key(&self, snapshot: &Snapshot) -> String {
        format!("{USER}/{SLOT}/{}", snapshot.key)
    }

    pub fn object_size(&self, key: &str) -> Option<u64> {
        self.server
            .objects(BUCKET, key)
            .into_iter()
            .find(|object| object.key == key)
            .map(|object| object.size)
    }

    /// Deletes an object. The store keeps the previous content of a key, so the object is first overwritten with an
    /// empty one.
    pub fn purge(&self, key: &str) {
        self.server.write(BUCKET, key, "");
        self.server.remove(BUCKET, key);
    }

    fn read_pointer(&self) -> Result<Option<Pointer>> {
        self.read_json(&format!("{USER}/{SLOT}/system/db/latest"))
    }

    fn read_json<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        let text = self.server.read(BUCKET, key);
        text.map(|text| serde_json::from_slice(&text).with_context(|| key.to_owned())).transpose()
    }
}

/// A machine's directory, and its programs' environment.
pub struct MachineDir {
    root: TempDir,
    env: Vec<(String, String)>,
}

impl MachineDir {
    /// Creates a machine with an empty directory, and therefore with a closed restore gate.
    pub fn new(dir: &Path, store: &BenchStore, server: &PgServer) -> Result<Self> {
        let root = tempfile::Builder::new().prefix("machine-").tempdir_in(dir)?;
        let settings = [
            ("PATH", std::env::var("PATH")?),
            ("SVC_ROOT", root.path().display().to_string()),
            ("SVC_MACHINE_ID", uuid::Uuid::now_v7().to_string()),
            ("SVC_USER_ID", USER.to_owned()),
            ("SVC_HANDLE", "ada".to_owned()),
            ("SVC_SLOT", SLOT.to_owned()),
            ("SVC_EPOCH", "1".to_owned()),
            ("SVC_RESTORE_MODE", "required".to_owned()),
            ("SVC_PG_BIN_DIR", server.binaries().dir().display().to_string()),
            ("DATABASE_URL", server.url(database::NAME)),
            ("TMPDIR", root.path().join("tmp").display().to_string()),
        ];
        fs::create_dir(root.path().join("tmp"))?;
        let mut env = store.server.env(BUCKET);
        env.extend(settings.map(|(name, value)| (name.to_owned(), value)));
        Ok(Self { root, env })
    }

    /// Writes the marker that opens the restore gate.
    pub fn open_gate(&self) -> Result<()> {
        let marker = self.marker_path();
        fs::create_dir_all(marker.parent().context("the marker has no parent directory")?)?;
        Ok(fs::write(marker, "")?)
    }

    pub fn is_gate_open(&self) -> bool {
        self.marker_path().exists()
    }

    fn marker_path(&self) -> PathBuf {
        self.root.path().join("opt/svc/restore-complete")
    }

    /// Returns a command that runs one of the machine's programs, with its unit's environment.
    pub fn command(&self, svc: &Path, applet: &str) -> Command {
        let mut command = Command::new(svc);
        command.arg(applet).env_clear().envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Returns the total size of the files in the machine's directory.
    pub fn disk_bytes(&self) -> Result<u64> {
        let (mut total, mut dirs) = (0, vec![self.root.path().to_owned()]);
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
                let (entry, meta) = entry.and_then(|entry| entry.metadata().map(|meta| (entry, meta)))?;
                if meta.is_dir() {
                    dirs.push(entry.path());
                } else {
                    total += meta.len();
                }
            }
        }
        Ok(total)
    }
}

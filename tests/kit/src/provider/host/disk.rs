//! A host's disk: a directory that serves as `/`, with the init's state files.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::user_data::UserData;

#[derive(Debug, Clone)]
pub(super) struct Disk {
    pub(super) root: PathBuf,
}

/// The port and password of the host's database, which stay the same across starts.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DatabaseRecord {
    pub(super) port: u16,
    pub(super) password: String,
}

impl Disk {
    /// Writes the user-data files, like cloud-init at the first boot. Does nothing on later boots.
    pub(super) fn apply_user_data(&self, user_data: &str) -> Result<()> {
        let marker = self.root.join("var/lib/cloud/instance/boot-finished");
        if marker.exists() {
            return Ok(());
        }
        UserData::parse(user_data)?.write_files(&self.root)?;
        fs::create_dir_all(self.root.join("var/lib/cloud/instance"))?;
        fs::write(marker, "")?;
        Ok(())
    }

    pub(super) fn has_release(&self) -> bool {
        self.opt_path("current").exists()
    }

    /// Returns the path of a unit's program in the current release.
    pub(super) fn program(&self, unit: &str) -> PathBuf {
        self.opt_path("bin").join(unit)
    }

    pub(super) fn opt_path(&self, path: &str) -> PathBuf {
        self.root.join("opt/svc").join(path)
    }

    pub(super) fn state_path(&self, path: &str) -> PathBuf {
        self.root.join("var/lib/svc").join(path)
    }

    /// Returns the path of a unit's log file; creates its directory.
    pub(super) fn log_path(&self, unit: &str) -> Result<PathBuf> {
        let dir = self.root.join("var/log");
        fs::create_dir_all(&dir)?;
        Ok(dir.join(format!("{unit}.log")))
    }

    pub(super) fn append_log(&self, unit: &str, bytes: &[u8]) -> Result<()> {
        let mut log = fs::OpenOptions::new().create(true).append(true).open(self.log_path(unit)?)?;
        Ok(log.write_all(bytes)?)
    }

    pub(super) fn database_dir(&self) -> PathBuf {
        self.root.join("var/lib/postgresql/16/main")
    }

    pub(super) fn database_record(&self) -> Result<Option<DatabaseRecord>> {
        match fs::read(self.database_file()) {
            Ok(json) => Ok(Some(serde_json::from_slice(&json).context("cannot parse the database record")?)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context("cannot read the database record"),
        }
    }

    /// Adds `DATABASE_URL` to `host.env` if it is missing, then writes the record. This must be the last step of the
    /// database's creation, so that an incomplete database is recreated.
    pub(super) fn save_database_record(&self, record: &DatabaseRecord, url: &str) -> Result<()> {
        let env = self.opt_path("env/host.env");
        let existing = fs::read_to_string(&env).unwrap_or_default();
        if !existing.lines().any(|line| line.starts_with("DATABASE_URL=")) {
            let separator = if existing.is_empty() || existing.ends_with('\n') { "" } else { "\n" };
            fs::create_dir_all(self.opt_path("env"))?;
            let mut file = fs::OpenOptions::new().create(true).append(true).open(&env)?;
            writeln!(file, "{separator}DATABASE_URL={url}")?;
        }
        fs::write(self.database_file(), serde_json::to_vec(record)?)?;
        Ok(())
    }

    fn database_file(&self) -> PathBuf {
        self.root.join("var/lib/postgresql/server.json")
    }

    pub(super) fn exists(&self) -> bool {
        Path::new(&self.root).is_dir()
    }
}

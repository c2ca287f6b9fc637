//! Copies of a prepared cluster: `initdb` takes half a second of CPU time, and the tests start hundreds of servers.
//!
//! A copy gets its own system identifier, because backups and restores distinguish clusters by it. The identifier is
//! recorded in `pg_control`, which ends with a checksum, and in the first page of each WAL segment.

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::binaries::{PgBinaries, check_user_namespace};
use super::server::START_TIMEOUT;
use crate::{child, fetch};

const CONTROL_FILE: &str = "global/pg_control";
const WAL_DIR: &str = "pg_wal";
const PASSWORD_FILE: &str = "password";
/// Offset of the system identifier in a WAL segment: after its first page's standard header.
const WAL_IDENTIFIER_OFFSET: u64 = 24;

/// Creates a cluster in the existing, empty directory `data`.
pub(super) fn initdb(binaries: &PgBinaries, data: &Path, password: &str, options: &[&str]) -> Result<()> {
    check_user_namespace()?;
    let password_file = tempfile::NamedTempFile::new()?;
    fs::write(&password_file, password)?;
    let mut initdb: Command = binaries.server_command("initdb");
    initdb.args(INITDB_OPTIONS).args(options).arg("--pgdata").arg(data);
    initdb.arg("--pwfile").arg(password_file.path());
    child::run(initdb, START_TIMEOUT).context("cannot create a PostgreSQL cluster")?;
    Ok(())
}

const INITDB_OPTIONS: [&str; 6] = [
    "--username=postgres",
    "--auth=scram-sha-256",
    "--encoding=UTF8",
    "--locale=C",
    "--no-sync",
    "--no-instructions",
];
/// Options for the prepared cluster. The superuser's password is verified with one iteration, because the tests open
/// thousands of connections.
const PREPARED_OPTIONS: [&str; 1] = ["--set=scram_iterations=1"];

/// A cluster under `target/tools`; servers start from copies of it.
pub(super) struct PreparedCluster {
    dir: PathBuf,
    pub password: String,
}

impl PreparedCluster {
    /// Returns the prepared cluster for these programs, creating it on first use.
    pub fn locate_or_create(binaries: &PgBinaries) -> Result<Self> {
        let inputs = format!("{:?} {INITDB_OPTIONS:?} {PREPARED_OPTIONS:?}", binaries.dir());
        let name = format!("pg-cluster-{}", &hex::encode(Sha256::digest(inputs))[..12]);
        let dir = fetch::locate_or_create(&fetch::target_dir(), &name, |dir| {
            let password = uuid::Uuid::new_v4().simple().to_string();
            let data = dir.join("data");
            fs::create_dir(&data)?;
            initdb(binaries, &data, &password, &PREPARED_OPTIONS)?;
            Ok(fs::write(dir.join(PASSWORD_FILE), password)?)
        })?;
        let password = fs::read_to_string(dir.join(PASSWORD_FILE))?;
        Ok(Self { dir, password })
    }

    /// Copies the cluster into the missing or empty directory `data`.
    pub fn copy_to(&self, data: &Path) -> Result<()> {
        fs::create_dir_all(data.parent().unwrap_or(data))?;
        copy_dir(&self.dir.join("data"), data)?;
        set_system_identifier(data, uuid::Uuid::new_v4().as_u64_pair().0 >> 1)
            .with_context(|| format!("cannot set the system identifier of {}", data.display()))
    }
}

fn copy_dir(from: &Path, to: &Path) -> Result<()> {
    // PostgreSQL rejects a data directory that other users can access.
    match fs::DirBuilder::new().mode(0o700).create(to) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error.into()),
        _ => fs::set_permissions(to, std::os::unix::fs::PermissionsExt::from_mode(0o700))?,
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)
                .with_context(|| format!("cannot copy to {}", target.display()))?;
        }
    }
    Ok(())
}

fn set_system_identifier(data: &Path, identifier: u64) -> Result<()> {
    let path = data.join(CONTROL_FILE);
    let mut control = fs::read(&path)?;
    let checksum_offset = find_checksum_offset(&control).context("pg_control has no checksum")?;
    control[..8].copy_from_slice(&identifier.to_ne_bytes());
    let checksum = crc32c(&control[..checksum_offset]);
    control[checksum_offset..checksum_offset + 4].copy_from_slice(&checksum.to_ne_bytes());
    fs::write(&path, control)?;
    for segment in fs::read_dir(data.join(WAL_DIR))? {
        let segment = segment?;
        if segment.file_type()?.is_file() {
            let file = File::options().write(true).open(segment.path())?;
            file.write_all_at(&identifier.to_ne_bytes(), WAL_IDENTIFIER_OFFSET)?;
        }
    }
    Ok(())
}

/// Returns the offset of the checksum, which covers everything before it and is followed by zeros only.
fn find_checksum_offset(control: &[u8]) -> Option<usize> {
    let length = control.iter().rposition(|byte| *byte != 0)? + 1;
    let candidates =
        (length.saturating_sub(4)..=length).filter(|offset| offset % 4 == 0 && offset + 4 <= control.len());
    candidates
        .into_iter()
        .find(|offset| crc32c(&control[..*offset]).to_ne_bytes() == control[*offset..*offset + 4])
}

/// Computes a CRC-32C as PostgreSQL does.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 & 0_u32.wrapping_sub(crc & 1)))
    })
}

#[cfg(test)]
mod tests {
    use super::super::{PgOptions, PgServer};
    use super::*;

    #[test]
    fn crc32c_has_the_standard_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[tokio::test]
    async fn copied_clusters_have_distinct_system_identifiers() -> Result<()> {
        let binaries = PgBinaries::locate_or_fetch(&fetch::target_dir())?;
        let identifier = async |server: &PgServer| -> Result<String> {
            let client = server.connect("postgres").await?;
            let sql = "SELECT system_identifier::text FROM pg_control_system()";
            Ok(client.query_one(sql, &[]).await?.get(0))
        };
        let first = PgServer::start(&binaries, PgOptions::default()).await?;
        let second = PgServer::start(&binaries, PgOptions::default()).await?;
        let first_identifier = identifier(&first).await?;
        assert_ne!(first_identifier, identifier(&second).await?);
        // Recovery reads the patched WAL.
        first.create_database("svc").await?;
        first.kill9().await?;
        first.restart().await?;
        assert_eq!(identifier(&first).await?, first_identifier);
        first.connect("svc").await?;
        Ok(())
    }
}

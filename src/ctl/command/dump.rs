//! Downloads a snapshot's dump through the platform, into a file or only to verify its SHA-256.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use futures_util::StreamExt;
use sha2::{Digest, Sha256};

use crate::api::{ApiClient, CallError};
use crate::progress::Progress;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::fsx::FileError;
use svc_base::partial_file::PartialFile;
use svc_base::quantity::format_bytes;
use svc_store::key::SnapshotCursor;
use svc_wire::backup::{Backup, BackupPage};

/// Maximum number of consecutive failed attempts. An attempt that receives data restarts the count.
const MAX_ATTEMPTS: u32 = 6;
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// Finds the snapshot with this key, of which the last part is enough; without a key, the latest snapshot.
///
/// # Errors
/// [`Exit::Refused`] if there is no such snapshot, or the error of a failed call.
pub async fn find(api: &ApiClient, machine: &str, key: Option<&str>) -> Result<Backup, Failure> {
    let not_found = || {
        let what = key.map_or_else(|| "latest snapshot".to_owned(), |key| format!("snapshot {key}"));
        let error = anyhow!("there is no {what}\n  next: `svcctl backup list {machine}` shows the snapshots");
        Failure::new(Exit::Refused, error)
    };
    let query = match key {
        None => vec![("latest", "true".to_owned())],
        // Requests the page that starts with this key: keys are listed in descending order, and `~` sorts after them.
        Some(key) => {
            let name = key.rsplit('/').next().unwrap_or(key);
            let cursor: SnapshotCursor =
                format!("system/db/snapshots/{name}~").parse().map_err(|_| not_found())?;
            vec![("limit", "1".to_owned()), ("cursor", cursor.as_str().to_owned())]
        }
    };
    let page: BackupPage = api.get(&["vps", machine, "backups"], &query).await?.parse()?;
    let matches = |backup: &Backup| match key {
        Some(key) => backup.key == key || backup.name() == key,
        None => backup.latest,
    };
    page.backups.into_iter().find(matches).ok_or_else(not_found)
}

/// Reads a whole snapshot and compares it with its record.
///
/// # Errors
/// [`Exit::Refused`] if it does not match, or the error of a failed download.
pub async fn verify(api: &ApiClient, machine: &str, backup: &Backup) -> Result<(), Failure> {
    let mut sink = Sink::Hash { length: 0, digest: Sha256::new() };
    sink.download_with_retries(api, machine, backup).await?;
    sink.check(backup)
}

/// Downloads a snapshot to `into`. Resumes from `<into>.partial`, if it exists, and starts over if that file turns out
/// to be from another snapshot.
///
/// # Errors
/// [`Exit::Refused`] if `into` already exists or the download does not match its record; [`Exit::Internal`] if a file
/// cannot be read or written; or the error of a failed download. A failure leaves `into` unchanged.
pub async fn download(api: &ApiClient, machine: &str, backup: &Backup, into: &Path) -> Result<(), Failure> {
    if into.exists() {
        let error =
            anyhow!("{} already exists\n  next: choose another --output, or move the file", into.display());
        return Err(Failure::new(Exit::Refused, error));
    }
    let mut name = into.as_os_str().to_owned();
    name.push(".partial");
    let partial = PathBuf::from(name);
    let opened = PartialFile::open(partial.clone(), backup.size_bytes);
    let mut sink = Sink::File(opened.or_exit(Exit::Internal)?);
    let is_resumed = sink.length() > 0;
    sink.download_with_retries(api, machine, backup).await?;
    let mut checked = sink.check(backup);
    // The partial file may be from another snapshot: by default, each download is of the latest one.
    if checked.is_err() && is_resumed {
        if let Sink::File(file) = &mut sink {
            file.restart().or_exit(Exit::Internal)?;
        }
        sink.download_with_retries(api, machine, backup).await?;
        checked = sink.check(backup);
    }
    if let Err(failure) = checked {
        // A later download must not resume from wrong bytes.
        fs::remove_file(&partial).ok();
        return Err(failure);
    }
    if let Sink::File(file) = &sink {
        file.sync().or_exit(Exit::Internal)?;
    }
    fs::rename(&partial, into).map_err(FileError::wrap("rename", &partial)).or_exit(Exit::Internal)
}

/// The destination for the bytes.
enum Sink {
    /// Hashes the bytes and does not store them.
    Hash {
        length: u64,
        digest: Sha256,
    },
    File(PartialFile),
}

impl Sink {
    fn length(&self) -> u64 {
        match self {
            Self::Hash { length, .. } => *length,
            Self::File(partial) => partial.length(),
        }
    }

    fn sha256(&self) -> String {
        match self {
            Self::Hash { digest, .. } => hex::encode(digest.clone().finalize()),
            Self::File(partial) => partial.sha256(),
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        match self {
            Self::Hash { length, digest } => {
                digest.update(bytes);
                *length += bytes.len() as u64;
                Ok(())
            }
            Self::File(partial) => partial.append(bytes),
        }
    }

    async fn download_with_retries(
        &mut self,
        api: &ApiClient,
        machine: &str,
        backup: &Backup,
    ) -> Result<(), Failure> {
        let progress = Progress::with_total_bytes(backup.size_bytes);
        let mut attempts = 0;
        while self.length() < backup.size_bytes {
            let before = self.length();
            let result = self.download_rest(api, machine, backup, &progress).await;
            let error = match result {
                // The response is complete; if the object is shorter than its record says, it is damaged.
                Ok(()) => return Ok(()),
                Err(ReadError::Permanent(failure)) => return Err(failure),
                Err(ReadError::Transient(error)) => error,
            };
            attempts = if self.length() > before { 1 } else { attempts + 1 };
            if attempts >= MAX_ATTEMPTS {
                let total = format_bytes(backup.size_bytes);
                let error = anyhow!("{error}; received {} of {total}", format_bytes(self.length()));
                return Err(Failure::new(Exit::Unavailable, error));
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
        Ok(())
    }

    async fn download_rest(
        &mut self,
        api: &ApiClient,
        machine: &str,
        backup: &Backup,
        progress: &Progress,
    ) -> Result<(), ReadError> {
        let path = ["vps", machine, "backups", backup.name()];
        let opened = api.open_download(&path, self.length()).await;
        let response = opened.map_err(|error| match error {
            CallError::Unreachable { .. } | CallError::TimedOut { .. } => ReadError::Transient(error.into()),
            error => ReadError::Permanent(error.into()),
        })?;
        let mut bytes = response.bytes_stream();
        let mut reported_at = Instant::now();
        while let Some(chunk) = bytes.next().await {
            let chunk = chunk.map_err(|error| ReadError::Transient(error.without_url().into()))?;
            self.append(&chunk).map_err(|error| ReadError::Permanent(Failure::new(Exit::Internal, error)))?;
            if reported_at.elapsed() > Duration::from_millis(100) {
                progress.set_bytes(self.length());
                reported_at = Instant::now();
            }
        }
        Ok(())
    }

    fn check(&self, backup: &Backup) -> Result<(), Failure> {
        let found = self.sha256();
        if self.length() == backup.size_bytes && found == backup.sha256 {
            return Ok(());
        }
        let error = anyhow!(
            "{} does not match its record: it has {} bytes with the SHA-256 {found}, but the record has {} bytes with {}\n  next: \
             `svcctl backup now <machine>` takes a new snapshot; `svcctl backup list <machine>` shows others to recover \
             from",
            backup.key,
            self.length(),
            backup.size_bytes,
            backup.sha256
        );
        Err(Failure::new(Exit::Refused, error))
    }
}

/// Why a download stopped.
enum ReadError {
    /// A retry would not help.
    Permanent(Failure),
    Transient(anyhow::Error),
}

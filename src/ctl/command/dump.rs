//! Downloads a snapshot's dump through the platform, into a file or only to verify its SHA-256.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use futures_util::StreamExt;
use sha2::{Digest, Sha256};

use crate::applet::{Exit, Failure, OrExit};
use crate::ctl::api::{Api, CallError};
use crate::ctl::progress::Progress;
use crate::ctl::show::backup::{Backup, Backups};
use crate::ctl::show::size;
use crate::fsx::FileError;
use crate::partial::Partial;
use crate::store::key::SnapshotCursor;

/// Maximum attempts without a new byte.
const TRIES: u32 = 6;
const PAUSE: Duration = Duration::from_secs(2);

/// The snapshot with this key, or with this last part of a key; without a key, the latest.
///
/// # Errors
/// [`Failure`]; `Refused` if there is none.
pub async fn find(api: &Api, machine: &str, key: Option<&str>) -> Result<Backup, Failure> {
    let none = || {
        let what = key.map_or_else(|| "latest snapshot".to_owned(), |key| format!("snapshot {key}"));
        let error = anyhow!("there is no {what}\n  next: `svcctl backup list {machine}`");
        Failure::new(Exit::Refused, error)
    };
    let query = match key {
        None => vec![("latest", "true".to_owned())],
        // The page that starts with this key.
        Some(key) => {
            let name = key.rsplit('/').next().unwrap_or(key);
            let cursor: SnapshotCursor =
                format!("system/db/snapshots/{name}~").parse().map_err(|_| none())?;
            vec![("limit", "1".to_owned()), ("cursor", cursor.as_str().to_owned())]
        }
    };
    let page: Backups = api.get(&["vps", machine, "backups"], &query).await?.read()?;
    let is_it = |backup: &Backup| match key {
        Some(key) => backup.key == key || backup.name() == key,
        None => backup.latest,
    };
    page.backups.into_iter().find(is_it).ok_or_else(none)
}

/// Reads a whole snapshot and compares it with its record.
///
/// # Errors
/// [`Failure`]; `Refused` if it does not match.
pub async fn verify(api: &Api, machine: &str, backup: &Backup) -> Result<(), Failure> {
    let mut taken = Taken::Nowhere { length: 0, digest: Sha256::new() };
    taken.complete(api, machine, backup).await?;
    taken.check(backup)
}

/// Downloads a snapshot to `into`. Resumes from `<into>.partial`, if it exists.
///
/// # Errors
/// [`Failure`]; `into` is not created then.
pub async fn download(api: &Api, machine: &str, backup: &Backup, into: &Path) -> Result<(), Failure> {
    if into.exists() {
        let error = anyhow!("{} already exists\n  next: choose another --output, or move the file", into.display());
        return Err(Failure::new(Exit::Refused, error));
    }
    let mut name = into.as_os_str().to_owned();
    name.push(".partial");
    let partial = PathBuf::from(name);
    let opened = Partial::open(partial.clone(), backup.size_bytes);
    let mut taken = Taken::Into(opened.or_exit(Exit::Internal)?);
    taken.complete(api, machine, backup).await?;
    if let Err(failure) = taken.check(backup) {
        // The wrong bytes cannot be resumed from.
        fs::remove_file(&partial).ok();
        return Err(failure);
    }
    if let Taken::Into(whole) = &taken {
        whole.sync().or_exit(Exit::Internal)?;
    }
    fs::rename(&partial, into).map_err(FileError::at("rename", &partial)).or_exit(Exit::Internal)
}

/// The destination of the bytes.
enum Taken {
    /// Only hashes them.
    Nowhere {
        length: u64,
        digest: Sha256,
    },
    Into(Partial),
}

impl Taken {
    fn length(&self) -> u64 {
        match self {
            Self::Nowhere { length, .. } => *length,
            Self::Into(partial) => partial.length(),
        }
    }

    fn sha256(&self) -> String {
        match self {
            Self::Nowhere { digest, .. } => hex::encode(digest.clone().finalize()),
            Self::Into(partial) => partial.sha256(),
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        match self {
            Self::Nowhere { length, digest } => {
                digest.update(bytes);
                *length += bytes.len() as u64;
                Ok(())
            }
            Self::Into(partial) => partial.append(bytes),
        }
    }

    async fn complete(&mut self, api: &Api, machine: &str, backup: &Backup) -> Result<(), Failure> {
        let progress = Progress::of_bytes(backup.size_bytes);
        let mut tries = 0;
        while self.length() < backup.size_bytes {
            let before = self.length();
            let end = self.read_on(api, machine, backup, &progress).await;
            match end {
                Ok(()) => {}
                Err(Broken::Ours(failure)) => return Err(failure),
                Err(Broken::Theirs(error)) => {
                    tries = if self.length() > before { 1 } else { tries + 1 };
                    if tries >= TRIES {
                        let whole = size(backup.size_bytes);
                        let error = anyhow!("{error}; received {} of {whole}", size(self.length()));
                        return Err(Failure::new(Exit::Unavailable, error));
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        Ok(())
    }

    async fn read_on(
        &mut self,
        api: &Api,
        machine: &str,
        backup: &Backup,
        progress: &Progress,
    ) -> Result<(), Broken> {
        let path = ["vps", machine, "backups", backup.name()];
        let opened = api.open(&path, self.length()).await;
        let answer = opened.map_err(|error| match error {
            CallError::Unreachable { .. } | CallError::NoAnswer { .. } => Broken::Theirs(error.into()),
            error => Broken::Ours(error.into()),
        })?;
        let mut bytes = answer.bytes_stream();
        let mut told = Instant::now();
        while let Some(chunk) = bytes.next().await {
            let chunk = chunk.map_err(|error| Broken::Theirs(error.without_url().into()))?;
            self.append(&chunk).map_err(|error| Broken::Ours(Failure::new(Exit::Internal, error)))?;
            if told.elapsed() > Duration::from_millis(100) {
                progress.bytes(self.length());
                told = Instant::now();
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
            "{} does not match its record: {} bytes with the SHA-256 {found}, recorded are {} with {}\n  next: \
             `svcctl backup now` takes a new one; `svcctl backup list` shows others to recover from",
            backup.key,
            self.length(),
            backup.size_bytes,
            backup.sha256
        );
        Err(Failure::new(Exit::Refused, error))
    }
}

/// The reason why a download stopped.
enum Broken {
    /// A retry would not help.
    Ours(Failure),
    Theirs(anyhow::Error),
}

//! Downloads a snapshot dump through the platform, either to a file or just to verify its SHA-256.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use futures_util::StreamExt;
use sha2::{Digest, Sha256};

use crate::api::ApiClient;
use crate::progress::Progress;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::fsx::FileError;
use svc_base::partial_file::PartialFile;
use svc_base::quantity::format_bytes;
use svc_store::key::SnapshotCursor;
use svc_wire::backup::{Backup, BackupPage};

/// Maximum number of consecutive failed attempts. Receiving data restarts the count.
const MAX_ATTEMPTS: u32 = 6;
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// Finds a snapshot by its key or the last part of it, or the latest snapshot if there's no key.
///
/// # Errors
/// [`Exit::Refused`] if there's no such snapshot, or the error of a failed call.
pub async fn find_snapshot(api: &ApiClient, machine_id: &str, key: Option<&str>) -> Result<Backup, Failure> {
    let not_found = || {
        let snapshot = key.map_or_else(|| "latest snapshot".to_owned(), |key| format!("snapshot {key}"));
        let error = anyhow!(
            "machine {machine_id} has no {snapshot}\n  next: run `svcctl backup list {machine_id}` to see the \
             snapshots"
        );
        Failure::new(Exit::Refused, error)
    };
    let query = match key {
        None => vec![("latest", "true".to_owned())],
        // Keys are listed in descending order and `key~` sorts just after `key`, so the page after this cursor starts
        // with the key itself.
        Some(key) => {
            let name = key.rsplit('/').next().unwrap_or(key);
            let cursor: SnapshotCursor =
                format!("system/db/snapshots/{name}~").parse().map_err(|_| not_found())?;
            vec![("limit", "1".to_owned()), ("cursor", cursor.as_str().to_owned())]
        }
    };
    let page: BackupPage = api.get(&["vps", machine_id, "backups"], &query).await?.parse()?;
    let is_match = |backup: &Backup| match key {
        Some(key) => backup.key == key || backup.name() == key,
        None => backup.latest,
    };
    page.backups.into_iter().find(is_match).ok_or_else(not_found)
}

/// Downloads a whole snapshot, without storing it, and verifies it against its sidecar.
///
/// # Errors
/// [`Exit::Refused`] on a mismatch, or the error of a failed download.
pub async fn verify(api: &ApiClient, machine_id: &str, backup: &Backup) -> Result<(), Failure> {
    let mut sink = Sink::Hash { length: 0, digest: Sha256::new() };
    sink.download_with_retries(api, machine_id, backup).await?;
    sink.check(backup)
}

/// Downloads a snapshot to `output`, resuming from `<output>.partial` if it exists. Starts over if that file turns out
/// to be from another snapshot.
///
/// # Errors
/// [`Exit::Refused`] if `output` already exists or the download doesn't match the sidecar; [`Exit::Internal`] on file
/// I/O errors; or the error of a failed download. `output` is left unchanged on failure.
pub async fn download(
    api: &ApiClient,
    machine_id: &str,
    backup: &Backup,
    output: &Path,
) -> Result<(), Failure> {
    if output.exists() {
        let error =
            anyhow!("{} already exists\n  next: choose another --output, or move the file", output.display());
        return Err(Failure::new(Exit::Refused, error));
    }
    let mut name = output.as_os_str().to_owned();
    name.push(".partial");
    let partial = PathBuf::from(name);
    let opened = PartialFile::open(partial.clone(), backup.size_bytes);
    let mut sink = Sink::File(opened.or_exit(Exit::Internal)?);
    let is_resumed = sink.length() > 0;
    sink.download_with_retries(api, machine_id, backup).await?;
    let mut checked = sink.check(backup);
    // The partial file may be from another snapshot, since downloads default to the latest one.
    if checked.is_err() && is_resumed {
        if let Sink::File(file) = &mut sink {
            file.restart().or_exit(Exit::Internal)?;
        }
        sink.download_with_retries(api, machine_id, backup).await?;
        checked = sink.check(backup);
    }
    if let Err(failure) = checked {
        // Don't let a later download resume from bad data.
        fs::remove_file(&partial).ok();
        return Err(failure);
    }
    if let Sink::File(file) = &sink {
        file.sync().or_exit(Exit::Internal)?;
    }
    fs::rename(&partial, output).map_err(FileError::wrap("rename", &partial)).or_exit(Exit::Internal)
}

/// Destination of the downloaded bytes.
enum Sink {
    /// Hashes the bytes without storing them.
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
        machine_id: &str,
        backup: &Backup,
    ) -> Result<(), Failure> {
        let progress = Progress::with_total_bytes(backup.size_bytes);
        let mut attempts = 0;
        while self.length() < backup.size_bytes {
            let before = self.length();
            let result = self.download_rest(api, machine_id, backup, &progress).await;
            let failure = match result {
                // The response is complete. If it's shorter than the sidecar says, the object is corrupt.
                Ok(()) => return Ok(()),
                Err(DownloadError::Permanent(failure)) => return Err(failure),
                Err(DownloadError::Transient(failure)) => failure,
            };
            attempts = if self.length() > before { 1 } else { attempts + 1 };
            if attempts >= MAX_ATTEMPTS {
                return Err(prepend_received_bytes(failure, self.length(), backup.size_bytes));
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
        Ok(())
    }

    async fn download_rest(
        &mut self,
        api: &ApiClient,
        machine_id: &str,
        backup: &Backup,
        progress: &Progress,
    ) -> Result<(), DownloadError> {
        let path = ["vps", machine_id, "backups", backup.name()];
        let opened = api.open_download(&path, self.length()).await;
        let response = opened.map_err(|error| {
            if error.is_transient() {
                DownloadError::Transient(error.into())
            } else {
                DownloadError::Permanent(error.into())
            }
        })?;
        let mut bytes = response.bytes_stream();
        let mut reported_at = Instant::now();
        while let Some(chunk) = bytes.next().await {
            let chunk = chunk.map_err(|error| {
                DownloadError::Transient(Failure::new(Exit::Unavailable, error.without_url()))
            })?;
            self.append(&chunk)
                .map_err(|error| DownloadError::Permanent(Failure::new(Exit::Internal, error)))?;
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
            "{} does not match its sidecar: it is {} bytes with SHA-256 {found}, but the sidecar says {} bytes \
             and {}\n  next: run `svcctl backup now <machine>` to take a new snapshot, or `svcctl backup list \
             <machine>` to find another one to recover from",
            backup.key,
            self.length(),
            backup.size_bytes,
            backup.sha256
        );
        Err(Failure::new(Exit::Refused, error))
    }
}

/// Errors from a download attempt, classified for retries.
enum DownloadError {
    /// Not worth retrying.
    Permanent(Failure),
    Transient(Failure),
}

/// Prepends the number of bytes received, since failure messages end with advice.
fn prepend_received_bytes(failure: Failure, received: u64, total: u64) -> Failure {
    let (received, total) = (format_bytes(received), format_bytes(total));
    let context = format!("the download stopped after {received} of {total}");
    Failure::new(failure.exit, failure.error.context(context))
}

#[cfg(test)]
mod tests {
    use secrecy::SecretString;
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::api::CallError;
    use crate::api_problem::failure_json;
    use svc_base::error_chain::format_chain;

    /// Makes one attempt to download 8 bytes from a platform that sends `response` and closes the connection. Returns
    /// the transient failure.
    async fn fail_attempt(response: &'static str) -> Failure {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            stream.write_all(response.as_bytes()).await.unwrap();
        });
        let api = ApiClient::new(base, &SecretString::from("secret"), Duration::from_secs(10)).unwrap();
        let backup: Backup =
            serde_json::from_value(json!({"key": "system/db/snapshots/1.dump", "sizeBytes": 8})).unwrap();
        let progress = Progress::with_total_bytes(backup.size_bytes);
        let mut sink = Sink::Hash { length: 0, digest: Sha256::new() };
        match sink.download_rest(&api, "m", &backup, &progress).await {
            Err(DownloadError::Transient(failure)) => {
                prepend_received_bytes(failure, sink.length(), backup.size_bytes)
            }
            Err(DownloadError::Permanent(failure)) => panic!("permanent failure: {failure:?}"),
            Ok(()) => panic!("download succeeded"),
        }
    }

    #[tokio::test]
    async fn transient_problem_keeps_code_exit_and_advice() {
        let failure = fail_attempt(
            "HTTP/1.1 503 X\r\nconnection: close\r\n\r\n{\"code\":\"store_unavailable\",\"detail\":\"Down.\"}",
        )
        .await;
        assert_eq!(
            format_chain(failure.error.as_ref()),
            "the download stopped after 0 B of 8 B: Down. (store_unavailable)\n  next: \
             check the object store, then try again"
        );
        let printed = failure_json(&failure);
        assert_eq!(
            (&printed["code"], &printed["exit"], &printed["next"]),
            (&json!("store_unavailable"), &json!(75), &json!("check the object store, then try again"))
        );
    }

    #[tokio::test]
    async fn interrupted_body_reports_cause() {
        let failure = fail_attempt("HTTP/1.1 200 X\r\ncontent-length: 8\r\n\r\nabc").await;
        let message = format_chain(failure.error.as_ref());
        assert_eq!(failure.exit, Exit::Unavailable);
        assert!(message.starts_with("the download stopped after 3 B of 8 B: "), "{message}");
        assert!(message.contains("end of file before message length reached"), "{message}");
    }

    #[test]
    fn received_bytes_are_kept_out_of_advice() {
        let base = "http://platform.example".parse().unwrap();
        let failure = Failure::from(CallError::Unreachable { base, reason: "refused".to_owned() });
        let printed = failure_json(&prepend_received_bytes(failure, 3, 8));
        let detail = printed["detail"].as_str().unwrap();
        assert!(detail.starts_with("the download stopped after 3 B of 8 B: the platform at"), "{printed}");
        assert!(printed["next"].as_str().unwrap().ends_with("or --platform-url"), "{printed}");
    }
}

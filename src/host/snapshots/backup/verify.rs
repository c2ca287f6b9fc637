//! `svc-db-backup verify`: re-reads stored snapshots to find unreadable ones before they're needed.

use std::collections::BTreeMap;
use std::time::Instant;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::settings::BackupSettings;
use super::verify_object;
use super::verify_object::VerifyObjectError;
use super::verify_schedule;
use crate::records::backup::Status;
use crate::snapshots::check_log::{CheckKind, CheckRecord};
use crate::system::backoff::Backoff;
use crate::system::lock::Lock;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::clock;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::{self, FileError};
use svc_base::quantity::pluralize;
use svc_http::problem::format_chain;
use svc_store::StoreError;
use svc_store::key;
use svc_store::snapshot::{self, Sidecar, SnapshotUnusable};
use svc_store::snapshots;

/// Fail points of a run.
pub const FAILPOINTS: &[&str] = &["verify.begin", "verify.read", "verify.read_recorded", "verify.recorded"];

/// Snapshots to verify.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VerifyTargets {
    /// The snapshot referenced by the pointer.
    Latest,
    /// Today's share of all snapshots, sized so that each is read within the configured number of days.
    DailyShare,
    All,
    /// Specific snapshots, by key.
    Named(Vec<String>),
}

#[derive(Debug, thiserror::Error)]
enum VerifyError {
    #[error("the object store could not be read")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Object(#[from] VerifyObjectError),
    #[error(transparent)]
    File(#[from] FileError),
    /// Snapshots that earlier runs failed to verify and this run didn't read.
    #[error("{} could not be verified at the last attempt ({key}: {reason})", pluralize(*count, "snapshot"))]
    Unverified { count: u64, key: String, reason: String },
    #[error("stopped by a signal")]
    Stopped,
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl VerifyError {
    fn is_store_failure(&self) -> bool {
        matches!(self, Self::Store(_) | Self::Object(VerifyObjectError::Store(_)))
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) | Self::Object(VerifyObjectError::Store(error)) => {
                crate::system::store::to_exit(error)
            }
            Self::Stopped => Exit::TryAgain,
            _ => Exit::Internal,
        }
    }
}

/// `verified.json`: when each snapshot was last read in full, any damage found by that read, and any later inconclusive
/// read.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReadHistory {
    version: u32,
    /// Includes damaged snapshots; otherwise they'd remain the least recently read and take up every day's share.
    read_at: BTreeMap<String, Timestamp>,
    /// Snapshots found damaged by their last complete read, each with a description.
    #[serde(default)]
    damaged: BTreeMap<String, String>,
    /// Snapshots whose last read was inconclusive.
    #[serde(default)]
    failed: BTreeMap<String, FailedRead>,
}

/// An inconclusive read, for example because `pg_restore` was killed.
#[derive(Debug, Serialize, Deserialize)]
struct FailedRead {
    at: Timestamp,
    error: String,
}

impl ReadHistory {
    const FORMAT_VERSION: u32 = 1;

    /// Loads the history. A malformed file or unsupported version is treated as empty: snapshots are then read earlier
    /// than needed, and known damage isn't reported until the next read finds it.
    fn read(settings: &BackupSettings) -> Result<Self, FileError> {
        let text = fsx::read_if_exists(&settings.layout.verification_history())?;
        let history = text.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        let supported = history.filter(|history| history.version == Self::FORMAT_VERSION);
        Ok(supported.unwrap_or_else(|| Self { version: Self::FORMAT_VERSION, ..Self::default() }))
    }

    /// Records a finished read with any damage it found, and persists the history.
    fn record_read(
        &mut self,
        settings: &BackupSettings,
        key: &str,
        damage: Option<&str>,
    ) -> Result<(), FileError> {
        match damage {
            Some(reason) => self.damaged.insert(key.to_owned(), reason.to_owned()),
            None => self.damaged.remove(key),
        };
        self.failed.remove(key);
        self.read_at.insert(key.to_owned(), clock::now_ms());
        self.write(settings)
    }

    /// Records an inconclusive read and persists the history. Damage found by an earlier read is retained.
    fn record_failure(
        &mut self,
        settings: &BackupSettings,
        key: &str,
        error: String,
    ) -> Result<(), FileError> {
        self.failed.insert(key.to_owned(), FailedRead { at: clock::now_ms(), error });
        self.write(settings)
    }

    fn write(&self, settings: &BackupSettings) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("maps of plain fields serialize to JSON");
        let written = fsx::write_atomic_or_in_place(&settings.layout.verification_history(), &text, 0o600);
        written.inspect_err(|error| {
            tracing::error!(error = %format_chain(error), "could not record the verification result");
        })
    }

    /// Returns an error if any snapshots remain unverified.
    fn unverified_error(&self) -> Option<VerifyError> {
        let (key, FailedRead { error, .. }) = self.failed.first_key_value()?;
        Some(VerifyError::Unverified {
            count: self.failed.len() as u64,
            key: key.clone(),
            reason: error.clone(),
        })
    }

    /// Drops snapshots not in `keys`.
    fn retain(&mut self, keys: &[String]) {
        self.read_at.retain(|key, _| keys.contains(key));
        self.damaged.retain(|key, _| keys.contains(key));
        self.failed.retain(|key, _| keys.contains(key));
    }
}

/// The results of a run.
#[derive(Default)]
struct VerifyResults {
    /// Number of intact snapshots.
    intact: u64,
    /// Total size of the intact snapshots.
    bytes: u64,
    /// Set if only one snapshot is read.
    single_key: Option<String>,
    /// Keys of damaged snapshots, each with a description of the damage.
    damaged: Vec<(String, String)>,
}

/// Verifies snapshots and records the results. `stop` ends the run early; snapshots read by then are still recorded.
///
/// # Errors
/// `Refused` if every snapshot was read and at least one is damaged, or an earlier run found damage in a snapshot
/// outside today's share; `TryAgain` if stopped; the store's exit code if the object store can't be read; otherwise
/// `Internal`.
pub async fn run(
    _lock: &Lock,
    settings: &BackupSettings,
    targets: &VerifyTargets,
    stop: impl Future<Output = ()>,
) -> Result<(), Failure> {
    let started = Instant::now();
    let mut results = VerifyResults::default();
    let outcome = tokio::select! {
        outcome = verify_all(settings, targets, &mut results) => outcome,
        () = stop => Err(VerifyError::Stopped),
    };
    let error = match (&outcome, results.damaged.as_slice()) {
        (Err(error), _) => Some(format_chain(error)),
        (Ok(()), [(_, reason), ..]) => Some(reason.clone()),
        (Ok(()), []) => None,
    };
    let check = CheckRecord {
        version: CheckRecord::FORMAT_VERSION,
        timestamp: clock::now_ms(),
        check: CheckKind::Verify,
        status: if error.is_none() { Status::Success } else { Status::Error },
        snapshots: results.intact,
        size_bytes: results.bytes,
        duration_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        key: results.single_key,
        damaged: results.damaged.iter().map(|(key, _)| key.clone()).collect(),
        error,
    };
    let recorded = check.write(&settings.layout);
    failpoint::trigger("verify.recorded").or_exit(Exit::Internal)?;
    outcome.map_err(|error| Failure::new(error.exit(), error))?;
    match results.damaged.as_slice() {
        [] => {
            recorded.or_exit(Exit::Internal)?;
            println!(
                "read in full and found intact: {}, {} bytes",
                pluralize(check.snapshots, "snapshot"),
                check.size_bytes
            );
            Ok(())
        }
        damaged => {
            let lines: Vec<_> = damaged.iter().map(|(_, reason)| format!("  {reason}")).collect();
            let error = anyhow::anyhow!(
                "found damage in {} of {}:\n{}\n  next: run `svc-db-backup run` to take a new snapshot now",
                damaged.len(),
                pluralize(damaged.len() as u64 + check.snapshots, "snapshot"),
                lines.join("\n")
            );
            Err(Failure::new(Exit::Refused, error))
        }
    }
}

async fn verify_all(
    settings: &BackupSettings,
    targets: &VerifyTargets,
    results: &mut VerifyResults,
) -> Result<(), VerifyError> {
    failpoint::trigger("verify.begin")?;
    let mut history = ReadHistory::read(settings)?;
    let keys = select_keys(settings, targets, &mut history, results).await?;
    if let [key] = keys.as_slice() {
        results.single_key = Some(key.clone());
    }
    // Each write contains the whole history, so only the last result matters.
    let mut write_result = Ok(());
    let mut failure = None;
    for key in keys {
        match verify_one(settings, &key).await {
            Ok(sidecar) => {
                failpoint::trigger("verify.read")?;
                write_result = history.record_read(settings, &key, None);
                failpoint::trigger("verify.read_recorded")?;
                results.intact += 1;
                results.bytes += sidecar.size_bytes;
                tracing::info!(key, bytes = sidecar.size_bytes, "snapshot intact");
            }
            Err(VerifyFailure::Damaged(reason)) => {
                tracing::error!(key, reason, "a snapshot is damaged");
                write_result = history.record_read(settings, &key, Some(&reason));
                results.damaged.push((key, reason));
            }
            Err(VerifyFailure::Inconclusive(error)) if error.is_store_failure() => return Err(error),
            // A snapshot that can never be read, say for lack of memory, must not starve the others, either in this run
            // or by taking up every day's share.
            Err(VerifyFailure::Inconclusive(error)) => {
                let reason = format_chain(&error);
                tracing::error!(key, error = reason, "could not verify snapshot");
                write_result = history.record_failure(settings, &key, reason);
                failure.get_or_insert(error);
            }
        }
    }
    if failure.is_none() && results.damaged.is_empty() && *targets == VerifyTargets::DailyShare {
        // Reported every day until a later read verifies them.
        failure = history.unverified_error();
    }
    match failure {
        Some(error) => Err(error),
        None if results.damaged.is_empty() => Ok(write_result?),
        // Damage takes precedence over a failed history write, which has already been logged.
        None => Ok(()),
    }
}

/// Returns the target snapshot keys in read order. An unusable latest snapshot is reported as damaged without being
/// read, since its content might turn out intact. For the daily share, known damage to other snapshots is added to the
/// results.
async fn select_keys(
    settings: &BackupSettings,
    targets: &VerifyTargets,
    history: &mut ReadHistory,
    results: &mut VerifyResults,
) -> Result<Vec<String>, VerifyError> {
    if let VerifyTargets::Named(keys) = targets {
        return Ok(keys.clone());
    }
    if *targets == VerifyTargets::Latest {
        return match snapshot::find_latest(&settings.bucket, &settings.slot).await {
            Ok(latest) => Ok(vec![latest.key]),
            Err(SnapshotUnusable::Absent) => Ok(Vec::new()),
            Err(SnapshotUnusable::Damaged { key, reason }) => {
                let message = format!("{key} is not usable: {reason}");
                results.single_key = Some(key.clone());
                results.damaged.push((key, message));
                Ok(Vec::new())
            }
            Err(SnapshotUnusable::Store(error)) => Err(error.into()),
        };
    }
    let all = snapshots::list_keys(&settings.bucket, &settings.slot).await?;
    history.retain(&all);
    let mut snapshots: Vec<(String, Timestamp)> = all
        .into_iter()
        .map(|key| (key.clone(), key::taken_at(&key).unwrap_or(Timestamp::UNIX_EPOCH)))
        .collect();
    // Newest first: keys start with the snapshot time.
    snapshots.sort_unstable_by(|a, b| b.cmp(a));
    if *targets == VerifyTargets::All {
        return Ok(snapshots.into_iter().map(|(key, _)| key).collect());
    }
    let now = clock::now_ms();
    let failed_at = history.failed.iter().map(|(key, failed)| (key.clone(), failed.at)).collect();
    let last_reads = verify_schedule::list_last_reads(&snapshots, &history.read_at, &failed_at, now);
    let selected = verify_schedule::select_today(last_reads, now, settings.verify_within_days);
    // Damage is reported every day until a later read finds the snapshot intact.
    let known_damage = history.damaged.iter().filter(|(key, _)| !selected.contains(key));
    results.damaged.extend(known_damage.map(|(key, reason)| (key.clone(), reason.clone())));
    Ok(selected)
}

/// A failed verification.
enum VerifyFailure {
    /// Describes the damage, including the snapshot key.
    Damaged(String),
    /// The state of the snapshot is unknown.
    Inconclusive(VerifyError),
}

async fn verify_one(settings: &BackupSettings, key: &str) -> Result<Sidecar, VerifyFailure> {
    let sidecar = snapshot::load(&settings.bucket, &settings.slot, key).await;
    let sidecar = sidecar.map_err(|unusable| match unusable {
        SnapshotUnusable::Store(error) => VerifyFailure::Inconclusive(error.into()),
        error => VerifyFailure::Damaged(error.to_string()),
    })?;
    let mut backoff = Backoff::new(settings.outage_timeout);
    let (bucket, slot, tools) = (&settings.bucket, &settings.slot, &settings.tools);
    match verify_object::verify_object(bucket, slot, tools, &sidecar, &mut backoff).await {
        Ok(()) => Ok(sidecar),
        Err(error) if error.is_damage() => {
            Err(VerifyFailure::Damaged(format!("{key}: {}", format_chain(&error))))
        }
        Err(error) => Err(VerifyFailure::Inconclusive(error.into())),
    }
}

//! `svc-db-backup verify`: snapshots are read again from the store, so that one which has become unreadable is known
//! before it is needed.

use std::collections::BTreeMap;
use std::time::Instant;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Settings;
use super::verify_object;
use super::verify_object::RereadError;
use super::verify_schedule;
use crate::applet::{Exit, Failure, OrExit};
use crate::clock;
use crate::failpoint::{self, Injected};
use crate::fsx::{self, FileError};
use crate::host;
use crate::host::snapshots::check_log::{Check, CheckKind, Status};
use crate::host::system::backoff::Backoff;
use crate::host::system::lock::Lock;
use crate::http::problem::chain;
use crate::store::StoreError;
use crate::store::key;
use crate::store::snapshot::{self, SideRecord, Unusable};
use crate::store::snapshots;

/// The places of a run where a test can stop it.
pub const POINTS: &[&str] = &["verify.begin", "verify.read", "verify.noted", "verify.recorded"];

/// Which snapshots are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// The one that the pointer names.
    Latest,
    /// Today's share of all: each within the days that the settings give.
    Share,
    All,
    /// By their keys.
    Named(Vec<String>),
}

#[derive(Debug, thiserror::Error)]
enum VerifyError {
    #[error("the object store could not be read")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Reread(#[from] RereadError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("stopped by a signal")]
    Stopped,
    #[error(transparent)]
    Injected(#[from] Injected),
}

impl VerifyError {
    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) | Self::Reread(RereadError::Store(error)) => host::system::store::exit(error),
            Self::Stopped => Exit::TryAgain,
            _ => Exit::Internal,
        }
    }
}

/// When each snapshot was last read in full by this program: `verified.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Memory {
    version: u32,
    read_at: BTreeMap<String, Timestamp>,
}

impl Memory {
    const VERSION: u32 = 1;

    /// What cannot be read is begun anew: snapshots are then read earlier than they need.
    fn read(settings: &Settings) -> Result<Self, FileError> {
        let text = fsx::read_if_exists(&settings.layout.verified())?;
        let memory = text.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        let known = memory.filter(|memory| memory.version == Self::VERSION);
        Ok(known.unwrap_or(Self { version: Self::VERSION, read_at: BTreeMap::new() }))
    }

    fn note(&mut self, settings: &Settings, key: &str) -> Result<(), FileError> {
        self.read_at.insert(key.to_owned(), clock::now_ms());
        let text = serde_json::to_vec(self).expect("a map of plain fields is JSON");
        fsx::write_atomic(&settings.layout.verified(), &text, 0o600)
    }
}

/// What a run has found until now.
#[derive(Default)]
struct Found {
    whole: u64,
    bytes: u64,
    only: Option<String>,
    damaged: Vec<(String, String)>,
}

/// Reads them and records what was found. `stop` ends it early; what was read by then counts.
///
/// # Errors
/// [`Failure`]; `Refused` where a snapshot is not as it was written.
pub async fn run(
    _lock: &Lock,
    settings: &Settings,
    which: &Which,
    stop: impl Future<Output = ()>,
) -> Result<(), Failure> {
    let began = Instant::now();
    let mut found = Found::default();
    let end = tokio::select! {
        end = read_all(settings, which, &mut found) => end,
        () = stop => Err(VerifyError::Stopped),
    };
    let error = match (&end, found.damaged.as_slice()) {
        (Err(error), _) => Some(chain(error)),
        (Ok(()), [(_, why), ..]) => Some(why.clone()),
        (Ok(()), []) => None,
    };
    let check = Check {
        version: Check::VERSION,
        timestamp: clock::now_ms(),
        check: CheckKind::Verify,
        status: if error.is_none() { Status::Success } else { Status::Error },
        snapshots: found.whole,
        size_bytes: found.bytes,
        duration_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
        key: found.only,
        damaged: found.damaged.iter().map(|(key, _)| key.clone()).collect(),
        error,
    };
    check.write(&settings.layout).or_exit(Exit::Internal)?;
    failpoint::pass("verify.recorded").or_exit(Exit::Internal)?;
    end.map_err(|error| Failure::new(error.exit(), error))?;
    match found.damaged.as_slice() {
        [] => {
            println!(
                "{} snapshots, {} bytes, read in full: as they were written",
                check.snapshots, check.size_bytes
            );
            Ok(())
        }
        damaged => {
            let told: Vec<_> = damaged.iter().map(|(_, why)| format!("  {why}")).collect();
            let error = anyhow::anyhow!(
                "{} of {} snapshots are not as they were written:\n{}\n  next: `svc-db-backup run` takes a new one at once",
                damaged.len(),
                damaged.len() as u64 + check.snapshots,
                told.join("\n")
            );
            Err(Failure::new(Exit::Refused, error))
        }
    }
}

async fn read_all(settings: &Settings, which: &Which, found: &mut Found) -> Result<(), VerifyError> {
    failpoint::pass("verify.begin")?;
    let mut memory = Memory::read(settings)?;
    let keys = keys(settings, which, &mut memory).await?;
    if let [only] = keys.as_slice() {
        found.only = Some(only.clone());
    }
    for key in keys {
        match read_one(settings, &key).await {
            Ok(side) => {
                failpoint::pass("verify.read")?;
                memory.note(settings, &key)?;
                failpoint::pass("verify.noted")?;
                found.whole += 1;
                found.bytes += side.size_bytes;
                tracing::info!(key, bytes = side.size_bytes, "a snapshot is as it was written");
            }
            Err(Verdict::Damaged(why)) => {
                tracing::error!(key, why, "a snapshot is not as it was written");
                found.damaged.push((key, why));
            }
            Err(Verdict::Unknown(error)) => return Err(error),
        }
    }
    Ok(())
}

async fn keys(settings: &Settings, which: &Which, memory: &mut Memory) -> Result<Vec<String>, VerifyError> {
    if let Which::Named(keys) = which {
        return Ok(keys.clone());
    }
    if *which == Which::Latest {
        return match snapshot::latest(&settings.bucket, &settings.slot).await {
            Ok(latest) => Ok(vec![latest.key]),
            Err(Unusable::Absent) => Ok(Vec::new()),
            Err(Unusable::Damaged { key, .. }) => Ok(vec![key]),
            Err(Unusable::Store(error)) => Err(error.into()),
        };
    }
    let all = snapshots::keys(&settings.bucket, &settings.slot).await?;
    memory.read_at.retain(|key, _| all.contains(key));
    let mut taken: Vec<(String, Timestamp)> = all
        .into_iter()
        .map(|key| (key.clone(), key::taken_at(&key).unwrap_or(Timestamp::UNIX_EPOCH)))
        .collect();
    taken.sort_unstable_by(|a, b| b.cmp(a));
    if *which == Which::All {
        return Ok(taken.into_iter().map(|(key, _)| key).collect());
    }
    let known = verify_schedule::known(&taken, &memory.read_at);
    Ok(verify_schedule::of_today(known, clock::now_ms(), settings.verify_within_days))
}

/// What is wrong.
enum Verdict {
    Damaged(String),
    /// Nothing is known of the snapshot.
    Unknown(VerifyError),
}

async fn read_one(settings: &Settings, key: &str) -> Result<SideRecord, Verdict> {
    let side = snapshot::by_key(&settings.bucket, &settings.slot, key).await;
    let side = side.map_err(|unusable| match unusable {
        Unusable::Store(error) => Verdict::Unknown(error.into()),
        error => Verdict::Damaged(error.to_string()),
    })?;
    let mut patience = Backoff::new(settings.store_deadline);
    let (bucket, slot, tools) = (&settings.bucket, &settings.slot, &settings.tools);
    match verify_object::reread(bucket, slot, tools, &side, &mut patience).await {
        Ok(()) => Ok(side),
        Err(error) if error.is_damage() => Err(Verdict::Damaged(format!("{key}: {}", chain(&error)))),
        Err(error) => Err(Verdict::Unknown(error.into())),
    }
}

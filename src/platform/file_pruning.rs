//! Prunes the repositories of file backups: each slot's repository once per `FILES_PRUNE_SECONDS`, and on request.
//!
//! Only the platform deletes objects. The retention policy of the slot's plan determines which snapshots have expired.
//! Packs that no snapshot needs are marked, and deleted after 72 hours. The snapshot that the pointer names is always
//! kept.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use svc_base::error_chain::format_chain;
use svc_base::failpoint::InjectedFailure;
use svc_base::untrusted_text::truncate_printable;
use svc_files::prune::{PruneOptions, PruneReport, prune};
use svc_files::retention::RetentionPolicy;
use svc_files::{Cache, FilesError, Repository};
use svc_http::request_id;
use svc_machine::name::{IdpUserId, Slot};
use svc_machine::plan::Plan;
use svc_store::StoreError;
use svc_store::files_pointer;
use svc_store::key::SlotPrefix;
use tokio::sync::Semaphore;

use crate::context::Platform;
use crate::db::{self, DbError};
use crate::files_keys;
use crate::keys::KeyError;

/// How long a pack that no snapshot needs is kept after it is marked: longer than any restore, and one day longer than
/// a save may take without checking the index again (`MAX_UNCHECKED_DURATION` in `src/files/save/mod.rs`).
const GRACE_PERIOD: SignedDuration = SignedDuration::from_hours(72);
/// How long after its start a dry run that found damage may still search for a damaged snapshot. It is shorter than the
/// dry run's timeout.
const DRY_RUN_SEARCH_TIMEOUT: Duration = Duration::from_secs(15);
/// Number of newest entries that a prune retains in the pointer log.
const RETAINED_LOG_ENTRIES: u64 = 1000;
/// Maximum interval between polls for a due slot.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(60);
/// The fraction of `FILES_PRUNE_SECONDS` after which a prune that failed, was killed, or deferred packs is repeated.
const RETRY_FRACTION: f64 = 0.1;

/// The reason a repository was not pruned.
#[derive(Debug, thiserror::Error)]
pub enum PruneError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("cannot read the pointer of the file backups, or trim its log")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error("the pointer names an invalid snapshot")]
    InvalidPointer,
    #[error("the prune did not finish within {} s", PRUNE_TIMEOUT.as_secs())]
    Timeout,
    #[error("the platform stopped; the next prune resumes the work")]
    Stopped,
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

/// Limits how many prunes run concurrently in this process, because each loads an index into memory.
static PRUNE_PERMITS: Semaphore = Semaphore::const_new(WORKERS);
/// Limits how many dry runs are in progress in this process, for the same reason.
static DRY_RUN_PERMITS: Semaphore = Semaphore::const_new(1);
/// Number of tasks in each process that run [`run`].
pub const WORKERS: usize = 2;
/// Maximum duration of one prune: far longer than a large repository takes, so only a hostile repository reaches it.
pub const PRUNE_TIMEOUT: Duration = Duration::from_secs(4 * 3600);

/// How long a slot stays claimed without a renewal. A claim expires if its process is killed or loses its database
/// connection. The claim of a prune that deferred packs expires immediately.
const CLAIM_TTL: Duration = Duration::from_secs(180);
const CLAIM_RENEWAL_INTERVAL: Duration = Duration::from_secs(45);

/// The interval if regular prunes are disabled. A requested prune still runs, because a request sets the time of the
/// slot's last prune to 1970.
const DISABLED_PRUNE_INTERVAL: Duration = Duration::from_secs(20 * 365 * 24 * 3600);
/// The delay before a failed or unfinished prune is repeated if regular prunes are disabled.
const DISABLED_RETRY_DELAY: Duration = Duration::from_secs(3600);

/// Prunes due repositories, one at a time, until the platform stops. Several tasks may run this function concurrently.
pub async fn run(platform: Arc<Platform>) {
    let configured = platform.config.timing.files_prune_interval;
    let (interval, retry_delay) = if configured.is_zero() {
        (DISABLED_PRUNE_INTERVAL, DISABLED_RETRY_DELAY)
    } else {
        (configured, configured.mul_f64(RETRY_FRACTION))
    };
    loop {
        let was_due = request_id::run_with_new_id(prune_next(&platform, interval, retry_delay)).await;
        let delay = match was_due {
            Ok(true) => Duration::ZERO,
            Ok(false) => (interval / 10).min(MAX_POLL_INTERVAL),
            Err(error) => {
                tracing::warn!(error = %format_chain(&error), "database error while pruning file backups; retrying");
                MAX_POLL_INTERVAL
            }
        };
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(delay) => {}
        }
    }
}

/// Prunes one due repository. Returns whether any was due.
async fn prune_next(platform: &Platform, interval: Duration, retry_delay: Duration) -> Result<bool, DbError> {
    let session = platform.db.session().await?;
    let claimed = db::files_keys::claim_prune(&session, interval, retry_delay, CLAIM_TTL).await?;
    drop(session);
    let Some((user, slot)) = claimed else { return Ok(false) };
    let result = match (user.parse::<IdpUserId>(), slot.parse::<Slot>()) {
        // When the platform stops, the future is dropped. The next run continues: see the invariant of
        // `svc_files::prune`.
        (Ok(parsed_user), Ok(parsed_slot)) => tokio::select! {
            () = platform.stop.cancelled() => Err(PruneError::Stopped),
            result = prune_slot(platform, &parsed_user, &parsed_slot, false) => result,
            () = tokio::time::sleep(PRUNE_TIMEOUT) => Err(PruneError::Timeout),
            never = keep_claimed(platform, &user, &slot) => match never {},
        },
        _ => return Ok(true),
    };
    let session = platform.db.session().await?;
    let (error, advance) = match result {
        Ok(report) => {
            log_report(&user, &slot, &report);
            if report.deferred_packs > 0 {
                db::files_keys::record_unfinished_prune(&session, &user, &slot).await?;
                return Ok(true);
            }
            (None, Duration::ZERO)
        }
        Err(PruneError::Stopped) => {
            // The slot is due again immediately, so that a prune that an operator has requested is not lost.
            db::files_keys::release_prune_claim(&session, &user, &slot).await?;
            return Ok(true);
        }
        Err(error) => {
            let text = format_chain(&error);
            tracing::warn!(user, slot, error = text, "cannot prune the file backups of a slot");
            (Some(truncate_printable(&text)), interval - retry_delay)
        }
    };
    db::files_keys::record_prune(&session, (&user, &slot), error.as_deref(), advance).await?;
    Ok(true)
}

/// Renews the claim of a running prune; never returns.
async fn keep_claimed(platform: &Platform, user: &str, slot: &str) -> Infallible {
    loop {
        tokio::time::sleep(CLAIM_RENEWAL_INTERVAL).await;
        let renew = async {
            let session = platform.db.session().await?;
            db::files_keys::renew_prune_claim(&session, user, slot, CLAIM_TTL).await
        };
        if let Err(error) = renew.await {
            tracing::warn!(user, slot, error = %format_chain(&error), "cannot renew the claim of a prune");
        }
    }
}

fn log_report(user: &str, slot: &str, report: &PruneReport) {
    if report.removed_snapshots + report.marked_packs + report.deleted_packs + report.deferred_packs > 0 {
        tracing::info!(
            user,
            slot,
            kept_snapshots = report.kept_snapshots,
            removed_snapshots = report.removed_snapshots,
            marked_packs = report.marked_packs,
            deleted_packs = report.deleted_packs,
            deferred_packs = report.deferred_packs,
            "pruned the file backups of a slot"
        );
    }
}

/// Prunes a slot's repository or, with `is_dry_run`, reports what pruning would do. Returns an empty report if the slot
/// has no key or no repository. The caller must apply a timeout.
///
/// # Errors
/// [`PruneError`], except `Timeout` and `Stopped`. Completed work is kept; the next run continues.
pub async fn prune_slot(
    platform: &Platform,
    user: &IdpUserId,
    slot: &Slot,
    is_dry_run: bool,
) -> Result<PruneReport, PruneError> {
    let start = Instant::now();
    // Dry runs must not wait for the workers.
    let permits = if is_dry_run { &DRY_RUN_PERMITS } else { &PRUNE_PERMITS };
    let _permit = permits.acquire().await;
    let session = platform.db.session().await?;
    let key = files_keys::find(&session, &platform.seal, (user, slot)).await?;
    let subscription = db::slots::find_subscription(&session, user, slot).await?;
    drop(session);
    let Some(key) = key else { return Ok(PruneReport::default()) };
    let prefix = SlotPrefix::new(user, slot);
    let repository = Repository::open(platform.bucket.clone(), prefix.files(), &key, Cache::none()).await?;
    let Some(repository) = repository else { return Ok(PruneReport::default()) };
    let pointer = files_pointer::read(&platform.bucket, &prefix).await?;
    let latest = pointer.and_then(|pointer| pointer.value.snapshot);
    let protected = match latest.map(|snapshot| snapshot.id.parse()) {
        Some(Ok(id)) => vec![id],
        Some(Err(_)) => return Err(PruneError::InvalidPointer),
        None => Vec::new(),
    };
    let options = PruneOptions {
        policy: retention_policy(subscription.map(|subscription| subscription.plan)),
        protected,
        grace_period: GRACE_PERIOD,
        now: Timestamp::now(),
        is_dry_run,
        search_deadline: is_dry_run.then(|| start + DRY_RUN_SEARCH_TIMEOUT),
    };
    let report = prune(&repository, &options).await?;
    if !is_dry_run {
        files_pointer::trim_log(&platform.bucket, &prefix, RETAINED_LOG_ENTRIES).await?;
    }
    Ok(report)
}

/// Returns a plan's retention policy. Without a subscription, it is that of the smallest plan.
fn retention_policy(plan: Option<Plan>) -> RetentionPolicy {
    let default_policy = RetentionPolicy::default();
    match plan {
        Some(Plan::Builder | Plan::Max) => default_policy,
        Some(Plan::Starter) | None => {
            RetentionPolicy { monthly: Some(SignedDuration::from_hours(366 * 24)), ..default_policy }
        }
    }
}

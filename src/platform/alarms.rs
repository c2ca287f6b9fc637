//! Alarms: problems with the whole fleet or the provider, not with a single machine. `svcctl fleet` lists them.
//!
//! A blocking alarm blocks work until its cause is resolved or an operator releases it; other alarms are informational.
//! A release of `servers_missing` expires; a release of `unknown_servers` applies only to the servers listed when it
//! was made.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::config::Timing;
use super::context::Platform;
use super::db::alarms::{self, AlarmLifetime, AlarmRow, RaiseOutcome};
use super::db::unknown_servers::UnknownServerCounts;
use super::db::{self, DbError};
use super::listing_interval::listing_interval;
use svc_http::problem::format_chain;
use svc_provider::{ErrorKind, ProviderError};
use svc_wire::alarm as wire;

/// How long a release allows the work that an alarm blocks. Does not apply to unknown servers, which are released
/// individually.
pub const RELEASE_TTL: Duration = Duration::from_secs(3600);
/// Minimum time for which an alarm stays active after it was raised; see [`Alarm::ttl`].
const MIN_TTL: Duration = Duration::from_secs(300);
/// How long an alarm about a single event stays active after it was raised.
const EVENT_TTL: Duration = Duration::from_secs(86_400);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// Many live machines' servers are missing from the provider's list. Until an operator releases the alarm, none of
    /// these machines is marked as failed.
    ServersMissing,
    /// The provider lists servers with this installation's label that belong to no machine in the database. None is
    /// deleted until an operator releases it.
    UnknownServers,
    ProviderUnauthorized,
    ProviderLimit,
    ProviderCapacity,
    /// Operations that only a newer release supports are waiting for it.
    UnknownOperations,
    /// The store names a later holder of a slot than the database does.
    DatabaseBehindStore,
    /// A slot's fence is signed, but no active platform key verifies it.
    UnverifiedFence,
    /// Hosts send tokens that were not issued with an active platform key.
    HostTokensRejected,
    /// The verification of a release has paused its rollout.
    RolloutHalted,
}

impl Alarm {
    pub const ALL: [Self; 10] = [
        Self::ServersMissing,
        Self::UnknownServers,
        Self::ProviderUnauthorized,
        Self::ProviderLimit,
        Self::ProviderCapacity,
        Self::UnknownOperations,
        Self::DatabaseBehindStore,
        Self::UnverifiedFence,
        Self::HostTokensRejected,
        Self::RolloutHalted,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::ServersMissing => "servers_missing",
            Self::UnknownServers => "unknown_servers",
            Self::ProviderUnauthorized => "provider_unauthorized",
            Self::ProviderLimit => "provider_limit",
            Self::ProviderCapacity => "provider_capacity",
            Self::UnknownOperations => "unknown_operations",
            Self::DatabaseBehindStore => "database_behind_store",
            Self::UnverifiedFence => "unverified_fence",
            Self::HostTokensRejected => "host_tokens_refused",
            Self::RolloutHalted => "rollout_halted",
        }
    }

    /// Returns how long the alarm stays active after [`raise_or_log`], unless it is raised again. A persistent cause
    /// raises it again within two passes; `pass_interval` is the longer of the intervals between two passes of the
    /// reconciler and between two listings of the servers.
    fn ttl(self, pass_interval: Duration) -> Duration {
        match self {
            Self::DatabaseBehindStore | Self::UnverifiedFence => EVENT_TTL,
            _ => MIN_TTL.max(3 * pass_interval),
        }
    }

    /// Returns whether the alarm blocks work until its cause is resolved or an operator releases it.
    pub fn is_blocking(self) -> bool {
        matches!(self, Self::ServersMissing | Self::UnknownServers)
    }

    /// Describes when a non-blocking alarm ends.
    pub fn ends_when(self) -> &'static str {
        match self {
            Self::DatabaseBehindStore | Self::UnverifiedFence => "a day after it was last raised",
            Self::RolloutHalted => "when an operator resumes or aborts the rollout",
            _ => "automatically, a few minutes after its cause is resolved",
        }
    }

    /// Returns the recommended action for the operator.
    pub fn advice(self) -> &'static str {
        match self {
            Self::ServersMissing => {
                "check the project and the token at the provider; the alarm ends when the servers are listed again. If they are \
                 really lost, `svcctl alarm release servers_missing` allows the platform, for one hour, to mark their \
                 machines as failed"
            }
            Self::UnknownServers => {
                "if the platform's database was restored from an older copy, find out to whom these servers belong. Until they \
                 are released, neither they nor any kept servers are deleted. `svcctl alarm release unknown_servers` deletes \
                 the servers listed now, with their disks, each ORPHAN_GRACE_SECONDS after it was first seen"
            }
            Self::ProviderUnauthorized => {
                "the provider does not accept PROVIDER_API_TOKEN: set a valid one with write access; operations then resume"
            }
            Self::ProviderLimit => {
                "raise the project's limit at the provider, or delete unused resources; operations then resume"
            }
            Self::ProviderCapacity => {
                "the provider has no capacity for this type in this location; operations are retried until capacity is available"
            }
            Self::UnknownOperations => {
                "run a release that supports these operations on at least one platform process"
            }
            Self::DatabaseBehindStore => {
                "the platform's database was restored from an older copy: outdated recoveries and deletions stop automatically. \
                 See \"The platform's database was restored from an older copy\" in docs/operating/recovery.md"
            }
            Self::UnverifiedFence => {
                "check whether PLATFORM_KEY is the current key, or an older one restored with the database: `svcctl doctor \
                 platform` compares it with the store. If it is current, the hosts of these slots forged the signatures"
            }
            Self::HostTokensRejected => {
                "these hosts send tokens that were not issued with PLATFORM_KEY: do not recover any of them until \
                 `svcctl doctor platform` confirms that the platform's keys are current. If they are, the tokens are forged"
            }
            Self::RolloutHalted => {
                "`svcctl deploy status` shows what the verification found. Correct the cause, then run `svcctl deploy resume`, \
                 which verifies again; or run `svcctl deploy abort`, then `svc-update rollback` on the updated machines"
            }
        }
    }

    /// Returns the alarm for an error that concerns the whole account; `None` for every other error.
    pub fn from_provider_error(error: &ProviderError) -> Option<Self> {
        if error.kind() != ErrorKind::Account {
            return None;
        }
        Some(match error.code() {
            "resource_limit_exceeded" => Self::ProviderLimit,
            "resource_unavailable" | "placement_error" => Self::ProviderCapacity,
            _ => Self::ProviderUnauthorized,
        })
    }
}

impl std::str::FromStr for Alarm {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|alarm| alarm.as_str() == text).ok_or("is not an alarm")
    }
}

/// Raises an alarm that expires unless it is raised again. An error is only logged, so that it does not interrupt the
/// caller.
pub async fn raise_or_log(platform: &Platform, alarm: Alarm, detail: &Value) {
    let raise = async {
        let session = platform.db.session().await?;
        let listing_interval = listing_interval(db::servers::count_own(&session).await?.existing);
        let pass_interval = platform.config.timing.reconcile_interval.max(listing_interval);
        let lifetime = AlarmLifetime::For(alarm.ttl(pass_interval));
        match alarm {
            Alarm::DatabaseBehindStore | Alarm::UnverifiedFence | Alarm::HostTokensRejected => {
                alarms::raise_and_merge(&session, alarm.as_str(), detail, lifetime).await
            }
            _ => alarms::raise(&session, alarm.as_str(), detail, lifetime).await,
        }
    };
    match raise.await {
        Ok(row) if row.is_new => {
            tracing::error!(alarm = alarm.as_str(), %detail, next = alarm.advice(), "alarm raised");
        }
        Ok(_) => {}
        Err(error) => {
            tracing::warn!(alarm = alarm.as_str(), error = %format_chain(&error), "cannot store an alarm");
        }
    }
}

/// Raises the alarm for a provider error that concerns the account.
pub async fn raise_for_provider_error(platform: &Platform, error: &ProviderError) {
    if let Some(alarm) = Alarm::from_provider_error(error) {
        raise_or_log(platform, alarm, &json!({})).await;
    }
}

/// Clears the alarm about the project's limit after the provider has accepted a request for a server. An error is only
/// logged, because the alarm expires anyway.
pub async fn clear_provider_limit(platform: &Platform) {
    let clear = async {
        let session = platform.db.session().await?;
        alarms::clear(&session, Alarm::ProviderLimit.as_str()).await
    };
    if let Err(error) = clear.await {
        tracing::warn!(error = %format_chain(&error), "cannot clear an alarm");
    }
}

/// Whether a blocking alarm allows work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkPermission {
    Allowed,
    /// Until the cause is resolved or an operator releases the alarm.
    Blocked,
}

/// Decides whether a reconciler pass may act on `remaining` cases, such as missing servers, and raises or clears the
/// alarm. An alarm blocks work until no case remains or an operator releases it, so that the pass does not act on the
/// last few when their number falls below the limit.
pub async fn check_blocking(
    client: &impl GenericClient,
    alarm: Alarm,
    remaining: usize,
    is_over_limit: bool,
    detail: &Value,
) -> Result<WorkPermission, DbError> {
    if remaining == 0 {
        alarms::clear(client, alarm.as_str()).await?;
        return Ok(WorkPermission::Allowed);
    }
    if !is_over_limit && alarms::find_active(client, alarm.as_str()).await?.is_none() {
        return Ok(WorkPermission::Allowed);
    }
    let row = raise(client, alarm, detail).await?;
    Ok(if row.is_released { WorkPermission::Allowed } else { WorkPermission::Blocked })
}

/// Raises an alarm while its cause persists; clears it if `remaining` is zero.
pub async fn raise_or_clear(
    client: &impl GenericClient,
    alarm: Alarm,
    remaining: usize,
    detail: &Value,
) -> Result<(), DbError> {
    if remaining == 0 {
        return alarms::clear(client, alarm.as_str()).await;
    }
    raise(client, alarm, detail).await.map(drop)
}

async fn raise(client: &impl GenericClient, alarm: Alarm, detail: &Value) -> Result<RaiseOutcome, DbError> {
    let row = alarms::raise(client, alarm.as_str(), detail, AlarmLifetime::UntilCleared).await?;
    if row.is_new {
        tracing::error!(alarm = alarm.as_str(), %detail, next = alarm.advice(), "alarm raised");
    }
    Ok(row)
}

/// Releases an alarm; `None` if it is not active.
pub async fn release(client: &impl GenericClient, alarm: Alarm) -> Result<Option<AlarmRow>, DbError> {
    if alarm == Alarm::UnknownServers {
        db::unknown_servers::release(client).await?;
    }
    alarms::release(client, alarm.as_str(), RELEASE_TTL).await
}

/// Returns how many servers may be missing, including those lost in the last hour, before the alarm blocks work: 2% of
/// the live machines, but at least 4.
pub fn max_missing_servers(live: usize) -> usize {
    const MIN: usize = 4;
    (live / 50).max(MIN)
}

/// Converts the alarm to the format that the API returns.
pub fn to_wire_alarm(row: &AlarmRow, unknown: &UnknownServerCounts) -> wire::Alarm {
    let supported: Option<Alarm> = row.alarm.parse().ok();
    let released_until = match supported {
        Some(Alarm::UnknownServers) => unknown.released_until(),
        _ => row.released_until,
    };
    let next = supported.map(|alarm| next_step(alarm, released_until, unknown));
    wire::Alarm {
        alarm: row.alarm.clone(),
        since: row.since.into(),
        seen_at: row.seen_at.into(),
        detail: row.detail.as_object().cloned().unwrap_or_default().into_iter().collect(),
        released_until: released_until.map(Into::into),
        next: next
            .unwrap_or_else(|| "this release does not support the alarm: update the platform".to_owned()),
    }
}

/// Returns the recommended action for an active alarm, or what its release has allowed.
fn next_step(alarm: Alarm, released_until: Option<Timestamp>, unknown: &UnknownServerCounts) -> String {
    let format_time = |at: Timestamp| format!("{at:.0}");
    match (alarm, released_until) {
        (Alarm::UnknownServers, Some(last)) => format!(
            "released: each of these servers is deleted, with its disk, ORPHAN_GRACE_SECONDS after it was first seen, the \
             last one at {}. A server that appears later is also held until it is released",
            format_time(last)
        ),
        (Alarm::UnknownServers, None) => match unknown.last_grace_end {
            Some(last) => format!(
                "{}. Already released: {} of them; the last of these is deleted at {}",
                alarm.advice(),
                unknown.released,
                format_time(last)
            ),
            None => alarm.advice().to_owned(),
        },
        (Alarm::ServersMissing, Some(end)) => format!(
            "released until {}: machines whose servers the provider does not list are marked as failed; after that, the \
             alarm blocks this again",
            format_time(end)
        ),
        _ => alarm.advice().to_owned(),
    }
}

/// Returns the active alarms, oldest first.
pub async fn list_active(client: &impl GenericClient, timing: &Timing) -> Result<Vec<wire::Alarm>, DbError> {
    let unknown = db::unknown_servers::count(client, timing.orphan_grace).await?;
    Ok(db::alarms::list_active(client).await?.iter().map(|row| to_wire_alarm(row, &unknown)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_missing_servers_is_four_or_two_percent() {
        for (live, expected) in [(0, 4), (6, 4), (249, 4), (250, 5), (10_000, 200)] {
            assert_eq!(max_missing_servers(live), expected, "{live}");
        }
    }

    #[test]
    fn ttl_exceeds_pass_interval() {
        for (pass_seconds, expected) in [(15, 300), (100, 300), (396, 1188), (3600, 10_800)] {
            let ttl = Alarm::ProviderLimit.ttl(Duration::from_secs(pass_seconds));
            assert_eq!(ttl, Duration::from_secs(expected), "{pass_seconds}");
        }
    }

    #[test]
    fn alarm_round_trips_through_its_name() {
        for alarm in Alarm::ALL {
            assert_eq!(alarm.as_str().parse(), Ok(alarm));
        }
    }

    #[test]
    fn only_blocking_alarms_advise_release() {
        for alarm in Alarm::ALL {
            let advises_release =
                alarm.advice().contains(&format!("svcctl alarm release {}", alarm.as_str()));
            assert_eq!(advises_release, alarm.is_blocking(), "{alarm:?}");
        }
    }
}

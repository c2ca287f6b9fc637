//! What is wrong with the fleet or the provider as a whole, rather than with one machine: one item each, in `fleet`.
//!
//! An alarm of the fuses holds work back until its cause is gone or an operator releases it; the others inform. A release
//! of `servers_missing` holds for a time, one of `unknown_servers` for the servers that are known at that moment.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::config::Timing;
use super::context::Platform;
use super::db::alarms::{self, AlarmRow, Lasting, Raised};
use super::db::unknown_servers::UnknownServers;
use super::db::{self, DbError};
use crate::clock::rfc3339_ms;
use crate::http::problem::chain;
use crate::provider::{ErrorKind, ProviderError};

/// How long a released fuse lets work through. Unknown servers are released one by one instead.
pub const RELEASED_FOR: Duration = Duration::from_secs(3600);
/// Longer than the longest pause between two attempts that raise it again.
const INFORMED_FOR: Duration = Duration::from_secs(300);
/// How long an event is shown that nothing repeats.
const EVENT_SHOWN_FOR: Duration = Duration::from_secs(86_400);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// The provider does not show many servers of live machines: none of them fails.
    ServersMissing,
    /// The provider shows servers of this installation that no row knows: none is deleted before it is released.
    UnknownServers,
    ProviderUnauthorized,
    ProviderLimit,
    ProviderCapacity,
    /// Operations of a newer release wait for it.
    UnknownOperations,
    /// The store knows of a later holder of a slot than the database.
    DatabaseBehindStore,
    /// A slot's fence is signed, and no platform key in force verifies it.
    UnverifiedFence,
    /// Hosts send tokens that no platform key in force has made.
    HostTokensRefused,
}

impl Alarm {
    pub const ALL: [Self; 9] = [
        Self::ServersMissing,
        Self::UnknownServers,
        Self::ProviderUnauthorized,
        Self::ProviderLimit,
        Self::ProviderCapacity,
        Self::UnknownOperations,
        Self::DatabaseBehindStore,
        Self::UnverifiedFence,
        Self::HostTokensRefused,
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
            Self::HostTokensRefused => "host_tokens_refused",
        }
    }

    /// How long it stands when nothing raises it again.
    fn lasts(self) -> Duration {
        match self {
            Self::DatabaseBehindStore | Self::UnverifiedFence => EVENT_SHOWN_FOR,
            _ => INFORMED_FOR,
        }
    }

    /// Whether it holds work back that an operator can let through.
    pub fn is_fuse(self) -> bool {
        matches!(self, Self::ServersMissing | Self::UnknownServers)
    }

    /// How an alarm that holds nothing back ends.
    pub fn end(self) -> &'static str {
        match self {
            Self::DatabaseBehindStore | Self::UnverifiedFence => "a day after it was last raised",
            _ => "by itself a few minutes after its cause is gone",
        }
    }

    /// What a person does about it.
    pub fn advice(self) -> &'static str {
        match self {
            Self::ServersMissing => {
                "check project and token at the provider; the alarm ends when the servers are shown again. Where they \
                 are lost indeed: `svcctl alarm release servers_missing` lets their machines fail for an hour"
            }
            Self::UnknownServers => {
                "was the platform's database restored from an older copy? Then find out whose these servers are. Until they \
                 are released, none of them is deleted, nor any that was kept. `svcctl alarm release unknown_servers` lets \
                 those be deleted that are known now, with their disks, each ORPHAN_GRACE_SECONDS after it was first seen"
            }
            Self::ProviderUnauthorized => {
                "the provider does not accept PROVIDER_API_TOKEN: set a valid one with write access; operations resume"
            }
            Self::ProviderLimit => {
                "raise the project's limit at the provider, or delete what is not needed; operations resume"
            }
            Self::ProviderCapacity => {
                "the provider has no capacity for this type in this location; operations are retried until it has"
            }
            Self::UnknownOperations => "run a release that knows them on at least one platform process",
            Self::DatabaseBehindStore => {
                "the platform's database was restored from an older copy: outdated recoveries and deletions stop by themselves, \
                 and docs/operating/recovery.md says under \"The platform's database was restored from an older copy\" what to check"
            }
            Self::UnverifiedFence => {
                "is PLATFORM_KEY the key of now, or was an older one restored with the database? `svcctl doctor platform` \
                 compares it with the store. Where it is right, the hosts of these slots made the signatures up"
            }
            Self::HostTokensRefused => {
                "these hosts live, and send tokens that PLATFORM_KEY has not made: recover none of them before \
                 `svcctl doctor platform` says that the platform's keys are those of now. Where they are, the token was made up"
            }
        }
    }

    /// The alarm for a failure that is the account's or the provider's, not the machine's.
    pub fn of_provider(error: &ProviderError) -> Option<Self> {
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
        Self::ALL.into_iter().find(|alarm| alarm.as_str() == text).ok_or("is no alarm")
    }
}

/// Raises an alarm that ends by itself when nothing raises it again. A failure costs the alarm alone.
pub async fn inform(platform: &Platform, alarm: Alarm, detail: &Value) {
    let raised = async {
        let session = platform.db.session().await?;
        let lasting = Lasting::For(alarm.lasts());
        match alarm {
            Alarm::DatabaseBehindStore | Alarm::UnverifiedFence | Alarm::HostTokensRefused => {
                alarms::raise_case(&session, alarm.as_str(), detail, lasting).await
            }
            _ => alarms::raise(&session, alarm.as_str(), detail, lasting).await,
        }
    };
    match raised.await {
        Ok(row) if row.is_new => {
            tracing::error!(alarm = alarm.as_str(), %detail, next = alarm.advice(), "alarm raised");
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(alarm = alarm.as_str(), error = %chain(&error), "alarm not stored"),
    }
}

/// Raises the alarm of a provider error, where it is the account's.
pub async fn inform_of(platform: &Platform, error: &ProviderError) {
    if let Some(alarm) = Alarm::of_provider(error) {
        inform(platform, alarm, &json!({})).await;
    }
}

/// What a fuse lets through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fuse {
    Closed,
    /// Nothing, until the cause is gone or an operator releases it.
    Tripped,
}

/// Counts what a pass would destroy. Once tripped, a fuse stays so while anything is left to destroy: a list that fills
/// slowly, or a person who settles the cases one by one, must not let the last few through.
///
/// # Errors
/// [`DbError`].
pub async fn fuse(
    client: &impl GenericClient,
    alarm: Alarm,
    left: usize,
    is_over: bool,
    detail: &Value,
) -> Result<Fuse, DbError> {
    if left == 0 {
        alarms::clear(client, alarm.as_str()).await?;
        return Ok(Fuse::Closed);
    }
    if !is_over && alarms::get(client, alarm.as_str()).await?.is_none() {
        return Ok(Fuse::Closed);
    }
    let row = raise(client, alarm, detail).await?;
    Ok(if row.is_released { Fuse::Closed } else { Fuse::Tripped })
}

/// Keeps an alarm raised while anything is left of its cause.
///
/// # Errors
/// [`DbError`].
pub async fn raise_while(
    client: &impl GenericClient,
    alarm: Alarm,
    left: usize,
    detail: &Value,
) -> Result<(), DbError> {
    if left == 0 {
        return alarms::clear(client, alarm.as_str()).await;
    }
    raise(client, alarm, detail).await.map(drop)
}

async fn raise(client: &impl GenericClient, alarm: Alarm, detail: &Value) -> Result<Raised, DbError> {
    let row = alarms::raise(client, alarm.as_str(), detail, Lasting::UntilCleared).await?;
    if row.is_new {
        tracing::error!(alarm = alarm.as_str(), %detail, next = alarm.advice(), "alarm raised");
    }
    Ok(row)
}

/// Lets through what an alarm holds back; `None` where it does not stand.
///
/// # Errors
/// [`DbError`].
pub async fn release(client: &impl GenericClient, alarm: Alarm) -> Result<Option<AlarmRow>, DbError> {
    if alarm == Alarm::UnknownServers {
        db::unknown_servers::release(client).await?;
    }
    alarms::release(client, alarm.as_str(), RELEASED_FOR).await
}

/// How many machines may be lost at once before the fuse trips.
pub fn limit(live: usize) -> usize {
    const MIN: usize = 4;
    (live / 50).max(MIN)
}

/// As the fleet shows it.
pub fn record(row: &AlarmRow, unknown: &UnknownServers) -> Value {
    let known: Option<Alarm> = row.alarm.parse().ok();
    let released_until = match known {
        Some(Alarm::UnknownServers) => unknown.released_until(),
        _ => row.released_until,
    };
    json!({
        "alarm": row.alarm,
        "since": rfc3339_ms(row.since),
        "seenAt": rfc3339_ms(row.seen_at),
        "detail": row.detail,
        "releasedUntil": released_until.map(rfc3339_ms),
        "next": known.map_or_else(|| "an alarm of a newer release".to_owned(), |alarm| next(alarm, released_until, unknown)),
    })
}

/// What a person does about an alarm as it stands, or what its release does now.
fn next(alarm: Alarm, released_until: Option<Timestamp>, unknown: &UnknownServers) -> String {
    let until = |at: Timestamp| format!("{at:.0}");
    match (alarm, released_until) {
        (Alarm::UnknownServers, Some(last)) => format!(
            "released: each of these servers is deleted, with its disk, ORPHAN_GRACE_SECONDS after it was first seen, the \
             last at {}. A server that appears later is held back until it is released, too",
            until(last)
        ),
        (Alarm::UnknownServers, None) => match unknown.last_deletion {
            Some(last) => format!(
                "{}. {} of them were released before: the last of these is deleted at {}",
                alarm.advice(),
                unknown.released,
                until(last)
            ),
            None => alarm.advice().to_owned(),
        },
        (Alarm::ServersMissing, Some(end)) => format!(
            "released: machines whose servers the provider does not show fail until {}; after that, they are held back \
             again",
            until(end)
        ),
        _ => alarm.advice().to_owned(),
    }
}

/// The alarms that stand, the oldest first.
///
/// # Errors
/// [`DbError`].
pub async fn active(client: &impl GenericClient, timing: &Timing) -> Result<Vec<Value>, DbError> {
    let unknown = db::unknown_servers::count(client, timing.orphan_grace).await?;
    Ok(db::alarms::active(client).await?.iter().map(|row| record(row, &unknown)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_four_or_two_percent() {
        for (live, expected) in [(0, 4), (6, 4), (249, 4), (250, 5), (10_000, 200)] {
            assert_eq!(limit(live), expected, "{live}");
        }
    }

    #[test]
    fn names_read_back_and_each_alarm_has_advice() {
        for alarm in Alarm::ALL {
            assert_eq!(alarm.as_str().parse(), Ok(alarm));
            let names_release = alarm.advice().contains(&format!("svcctl alarm release {}", alarm.as_str()));
            assert_eq!(names_release, alarm.is_fuse(), "{alarm:?}");
        }
    }
}

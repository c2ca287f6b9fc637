//! What is wrong with the fleet or the provider as a whole, rather than with one machine: one item each, in `fleet`.
//!
//! An alarm of the fuses holds work back until its cause is gone or an operator releases it; the others inform.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use serde_json::{Value, json};

use super::context::Platform;
use super::db::alarms::{self, AlarmRow, Lasting};
use super::db::{self, DbError};
use crate::clock::rfc3339_ms;
use crate::http::problem::chain;
use crate::provider::{ErrorKind, ProviderError};

/// How long a released fuse lets work through.
pub const RELEASED_FOR: Duration = Duration::from_secs(3600);
/// Longer than the longest pause between two attempts that raise it again.
const INFORMED_FOR: Duration = Duration::from_secs(300);
/// How long an event is shown that nothing repeats.
const EVENT_SHOWN_FOR: Duration = Duration::from_secs(86_400);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// The provider does not show many servers of live machines: none of them fails.
    ServersMissing,
    /// The provider shows many servers of this installation that no row knows: none is deleted.
    UnknownServers,
    ProviderUnauthorized,
    ProviderLimit,
    ProviderCapacity,
    /// Operations of a newer release wait for it.
    UnknownOperations,
    /// The store knows of a later holder of a slot than the database.
    DatabaseBehindStore,
}

impl Alarm {
    pub const ALL: [Self; 7] = [
        Self::ServersMissing,
        Self::UnknownServers,
        Self::ProviderUnauthorized,
        Self::ProviderLimit,
        Self::ProviderCapacity,
        Self::UnknownOperations,
        Self::DatabaseBehindStore,
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
        }
    }

    /// How long it stands when nothing raises it again.
    fn lasts(self) -> Duration {
        if self == Self::DatabaseBehindStore { EVENT_SHOWN_FOR } else { INFORMED_FOR }
    }

    /// Whether it holds work back that an operator can let through.
    pub fn is_fuse(self) -> bool {
        matches!(self, Self::ServersMissing | Self::UnknownServers)
    }

    /// What a person does about it.
    pub fn advice(self) -> &'static str {
        match self {
            Self::ServersMissing => {
                "check project and token at the provider; the alarm ends when the servers are shown again. Where they \
                 are lost indeed: `svcctl alarm release servers_missing` lets their machines fail for an hour"
            }
            Self::UnknownServers => {
                "was the platform's database restored from an older copy? Then find out whose these servers are: until then \
                 none is deleted, nor any that was kept. `svcctl alarm release unknown_servers` lets them be deleted, with their disks, for an hour"
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
                "the platform's database was restored from an older copy: operations of the past stop by themselves, and the \
                 README says under \"A restored platform database\" what is to be looked at"
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
        alarms::raise(&session, alarm.as_str(), detail, Lasting::For(alarm.lasts())).await
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
    let row = alarms::raise(client, alarm.as_str(), detail, Lasting::UntilCleared).await?;
    if row.is_new {
        tracing::error!(alarm = alarm.as_str(), %detail, next = alarm.advice(), "alarm raised");
    }
    Ok(if row.is_released { Fuse::Closed } else { Fuse::Tripped })
}

/// Whether what the alarm is about is held back.
///
/// # Errors
/// [`DbError`].
pub async fn is_held(client: &impl GenericClient, alarm: Alarm) -> Result<bool, DbError> {
    let row = alarms::get(client, alarm.as_str()).await?;
    Ok(row.is_some_and(|row| row.released_until.is_none()))
}

/// How many of so many machines may be lost at once before it is no accident of theirs.
pub fn limit(live: usize) -> usize {
    const MIN: usize = 4;
    (live / 50).max(MIN)
}

/// As the fleet shows it.
pub fn record(row: &AlarmRow) -> Value {
    let known: Option<Alarm> = row.alarm.parse().ok();
    json!({
        "alarm": row.alarm,
        "since": rfc3339_ms(row.since),
        "seenAt": rfc3339_ms(row.seen_at),
        "detail": row.detail,
        "releasedUntil": row.released_until.map(rfc3339_ms),
        "next": known.map_or("an alarm of a newer release", Alarm::advice),
    })
}

/// The alarms that stand, the oldest first.
///
/// # Errors
/// [`DbError`].
pub async fn active(client: &impl GenericClient) -> Result<Vec<Value>, DbError> {
    Ok(db::alarms::active(client).await?.iter().map(record).collect())
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

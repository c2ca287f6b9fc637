//! Checks whether the provider's project has room for one more server.
//!
//! The provider's API reports a project's servers, but not its limit: the limit is `PROVIDER_SERVER_LIMIT`. In
//! addition, the project counts as full for a few minutes after the provider has rejected an order because of the
//! project's limit.
//!
//! A replaced machine keeps its server for a while, so the slot has one more server than usual. This extra server may
//! exceed the limit, so that a full project does not prevent a recovery. A second extra server may not: otherwise,
//! repeatedly replacing a slot's machine would accumulate servers without bound.

use deadpool_postgres::{GenericClient, Transaction};
use serde_json::json;

use crate::alarms::Alarm;
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::servers::{ListedServerCount, OwnServerCounts};
use crate::db::{self, DbError};
use svc_http::problem::{Code, Problem, format_chain};

/// Counts the servers in the project: those that the provider lists, if it responds, and those that are recorded.
///
/// # Errors
/// [`DbError`] if the recorded servers cannot be counted; an error from the provider is only logged.
pub async fn count_listed(platform: &Platform) -> Result<ListedServerCount, DbError> {
    let session = platform.db.session().await?;
    let recorded = db::servers::count_own(&session).await?.existing;
    drop(session);
    let listed = match platform.provider.count_servers().await {
        Ok(servers) => Some(servers),
        Err(error) => {
            tracing::warn!(error = %format_chain(&error), "cannot count the servers at the provider");
            None
        }
    };
    Ok(ListedServerCount { listed, recorded })
}

/// Like [`count_listed`], but returns `None` if no limit is set.
///
/// # Errors
/// Same as [`count_listed`].
pub async fn count_for_limit(platform: &Platform) -> Result<Option<ListedServerCount>, DbError> {
    match platform.config.provider.server_limit {
        Some(_) => count_listed(platform).await.map(Some),
        None => Ok(None),
    }
}

/// Counts the servers that exist or have been ordered.
async fn count_used(
    client: &impl GenericClient,
    server_count: Option<ListedServerCount>,
) -> Result<u64, DbError> {
    Ok(compute_used(server_count, db::servers::count_own(client).await?))
}

/// Computes the number of servers in use. Without a list, only the servers of the platform's machines count. A server
/// that was recorded after the list was requested may be missing from the list. It no longer counts as ordered, so it
/// is added. A server that the provider has created but the platform has not recorded yet counts twice, as listed and
/// as ordered.
fn compute_used(server_count: Option<ListedServerCount>, own: OwnServerCounts) -> u64 {
    let listed =
        server_count.and_then(|count| Some(count.listed? + own.existing.saturating_sub(count.recorded)));
    listed.unwrap_or_default().max(own.existing) + own.ordered
}

/// Ensures that there is room for one more server. A lock serializes orders, so that concurrent ones cannot exceed the
/// limit.
///
/// # Errors
/// `server_limit_reached` if there is no room; `database_unavailable` if the database is unreachable.
pub async fn ensure_room(
    platform: &Platform,
    tx: &Transaction<'_>,
    server_count: Option<ListedServerCount>,
) -> Result<(), Problem> {
    lock_orders(platform, tx).await?;
    check_room(platform, tx, server_count).await.map(drop)
}

/// Like [`ensure_room`], but for a machine's replacement, which may exceed the limit unless the slot has other servers.
///
/// # Errors
/// Same as [`ensure_room`].
pub async fn ensure_room_for_replacement(
    platform: &Platform,
    tx: &Transaction<'_>,
    server_count: Option<ListedServerCount>,
    replaced: &MachineRow,
) -> Result<(), Problem> {
    lock_orders(platform, tx).await?;
    check_room_for_replacement(platform, tx, server_count, replaced).await.map(drop)
}

async fn lock_orders(platform: &Platform, tx: &Transaction<'_>) -> Result<(), DbError> {
    match platform.config.provider.server_limit {
        Some(_) => db::lock(tx, "provider servers").await,
        None => Ok(()),
    }
}

/// Like [`ensure_room`], but without its lock, for a request that orders nothing. Returns the number of servers in use.
///
/// # Errors
/// Same as [`ensure_room`].
pub async fn check_room(
    platform: &Platform,
    client: &impl GenericClient,
    server_count: Option<ListedServerCount>,
) -> Result<u64, Problem> {
    let (used, shortage) = measure_room(platform, client, server_count).await?;
    shortage.map_or(Ok(used), Err)
}

/// Like [`ensure_room_for_replacement`], but without its lock, for a request that orders nothing. Returns the number of
/// servers in use.
///
/// # Errors
/// Same as [`ensure_room`].
pub async fn check_room_for_replacement(
    platform: &Platform,
    client: &impl GenericClient,
    server_count: Option<ListedServerCount>,
    replaced: &MachineRow,
) -> Result<u64, Problem> {
    let (used, shortage) = measure_room(platform, client, server_count).await?;
    let Some(shortage) = shortage else { return Ok(used) };
    let others = db::servers::list_others_in_slot(client, replaced).await?;
    if others.is_empty() {
        return Ok(used);
    }
    let others: Vec<_> = others.iter().map(ToString::to_string).collect();
    let detail = format!(
        "{} A replacement may exceed the limit by one server, but the slot still has the servers of other machines \
         ({}): delete one early with `svcctl discard MACHINE`.",
        shortage.detail,
        others.join(", ")
    );
    Err(Problem { detail, ..shortage }.with("otherMachines", json!(others)))
}

/// Returns the number of servers in use and, if there is no room for another one, the problem.
async fn measure_room(
    platform: &Platform,
    client: &impl GenericClient,
    server_count: Option<ListedServerCount>,
) -> Result<(u64, Option<Problem>), DbError> {
    let used = count_used(client, server_count).await?;
    if db::alarms::find_active(client, Alarm::ProviderLimit.as_str()).await?.is_some() {
        let detail = "The provider has refused to create a server because of the project's limit: raise the limit at the \
                      provider, or delete unused servers. The alarm provider_limit ends with the next accepted order, or a few minutes \
                      after the last refusal.";
        return Ok((used, Some(Problem::new(Code::ServerLimitReached, detail))));
    }
    let shortage = platform.config.provider.server_limit.filter(|limit| used >= *limit).map(|limit| {
        let detail = format!(
            "The provider's project has {used} servers, including ordered ones, and PROVIDER_SERVER_LIMIT is {limit}."
        );
        Problem::new(Code::ServerLimitReached, detail)
            .with("servers", json!(used))
            .with("serverLimit", json!(limit))
    });
    Ok((used, shortage))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_used_counts_servers_recorded_since_list() {
        let own = |existing, ordered| OwnServerCounts { existing, ordered };
        let count = |listed, recorded| Some(ListedServerCount { listed, recorded });
        for (server_count, own, servers) in [
            (None, own(2, 1), 3),
            (count(None, 2), own(2, 1), 3),
            // Three of the listed servers are not the platform's.
            (count(Some(5), 2), own(2, 1), 6),
            // An ordered server was created and recorded after the list was requested.
            (count(Some(5), 2), own(3, 0), 6),
            // One of the listed servers has been deleted since the list was requested.
            (count(Some(5), 2), own(1, 0), 5),
            // The list is incomplete.
            (count(Some(1), 3), own(3, 0), 3),
        ] {
            assert_eq!(compute_used(server_count, own), servers, "{server_count:?} {own:?}");
        }
    }
}

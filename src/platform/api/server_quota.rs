//! Whether the provider's project has room for one more server.
//!
//! The provider's API reports a project's servers, but not its limit: the limit is `PROVIDER_SERVER_LIMIT`, or known
//! for a while after the provider has refused an order because of it.

use deadpool_postgres::{GenericClient, Transaction};
use serde_json::json;

use crate::alarms::Alarm;
use crate::context::Platform;
use crate::db::{self, DbError};
use svc_http::problem::{Code, Problem, chain};

/// Servers that the provider listed; `None` if it could not be asked.
#[derive(Debug, Clone, Copy)]
pub struct ListedServers(Option<u64>);

/// Counts the servers in the project.
pub async fn count_listed(platform: &Platform) -> ListedServers {
    match platform.provider.count_servers().await {
        Ok(servers) => ListedServers(Some(servers)),
        Err(error) => {
            tracing::warn!(error = %chain(&error), "cannot count the servers at the provider");
            ListedServers(None)
        }
    }
}

/// [`count_listed`], if a limit is set.
pub async fn count_for_limit(platform: &Platform) -> ListedServers {
    match platform.config.provider.server_limit {
        Some(_) => count_listed(platform).await,
        None => ListedServers(None),
    }
}

/// The servers that exist or have been ordered. If the provider could not be asked, those of the platform's machines.
async fn count_used(client: &impl GenericClient, listed: ListedServers) -> Result<u64, DbError> {
    let own = db::servers::count_own(client).await?;
    Ok(listed.0.unwrap_or(own.existing) + own.ordered)
}

/// Ensures that one more server fits. Orders are counted one after another, so that two cannot take the last place.
///
/// # Errors
/// `server_limit_reached`, `database_unavailable`.
pub async fn ensure_room(
    platform: &Platform,
    tx: &Transaction<'_>,
    listed: ListedServers,
) -> Result<(), Problem> {
    if platform.config.provider.server_limit.is_some() {
        db::lock(tx, "provider servers").await?;
    }
    check_room(platform, tx, listed).await.map(drop)
}

/// [`ensure_room`] without its lock, for a request that orders nothing. Returns the number of used servers.
///
/// # Errors
/// As [`ensure_room`].
pub async fn check_room(
    platform: &Platform,
    client: &impl GenericClient,
    listed: ListedServers,
) -> Result<u64, Problem> {
    if db::alarms::get(client, Alarm::ProviderLimit.as_str()).await?.is_some() {
        let detail = "The provider has refused a server because of the project's limit: raise the limit at the \
                      provider, or delete unused servers. The alarm provider_limit ends with the next accepted order, or a few minutes \
                      after the last refusal.";
        return Err(Problem::new(Code::ServerLimitReached, detail));
    }
    let used = count_used(client, listed).await?;
    match platform.config.provider.server_limit {
        Some(limit) if used >= limit => {
            let detail = format!(
                "The provider's project has {used} servers, ordered ones included, and PROVIDER_SERVER_LIMIT is {limit}."
            );
            Err(Problem::new(Code::ServerLimitReached, detail)
                .with("servers", json!(used))
                .with("serverLimit", json!(limit)))
        }
        _ => Ok(used),
    }
}

//! `provider_budget`: the provider's rate limit as one token bucket that all processes share.

use std::time::Duration;

use deadpool_postgres::GenericClient;

use super::{DbError, execute, query_opt};
use svc_provider::{BudgetGrant, ObservedBudget};

/// Puts `unused` calls back into the bucket, updates it from the limit that the provider reported (`observed`), and
/// reserves up to `wanted` calls.
pub async fn reserve(
    client: &impl GenericClient,
    project: &str,
    wanted: u32,
    unused: u32,
    observed: Option<ObservedBudget>,
) -> Result<BudgetGrant, DbError> {
    let sql = "SELECT granted, wait_seconds FROM provider_reserve($1, $2, $3, $4, $5, $6, $7)";
    let (wanted, unused) = (i32::try_from(wanted).unwrap_or(i32::MAX), i32::try_from(unused).unwrap_or(0));
    let remaining = observed.map(|budget| budget.remaining);
    let capacity = observed.map(|budget| budget.capacity);
    let per_second = observed.and_then(|budget| budget.refill_per_second);
    let age = observed.map(|budget| budget.received_at.elapsed().as_secs_f64());
    let params: super::Params<'_> = &[&project, &wanted, &unused, &remaining, &capacity, &per_second, &age];
    let row = query_opt(client, sql, params).await?;
    let (granted, wait) = row.map_or((0, 0.0), |row| (row.get::<_, i32>(0), row.get::<_, f64>(1)));
    Ok(BudgetGrant {
        calls: u32::try_from(granted).unwrap_or(0),
        wait: Duration::try_from_secs_f64(wait).unwrap_or_default(),
    })
}

/// Suspends all calls for `wait`, because the provider has rejected a call.
pub async fn suspend_calls(
    client: &impl GenericClient,
    project: &str,
    wait: Duration,
) -> Result<(), DbError> {
    let sql = "UPDATE provider_budget SET tokens = 0, at = clock_timestamp(), \
               closed_until = greatest(closed_until, clock_timestamp() + make_interval(secs => $2)) \
               WHERE account = $1";
    execute(client, sql, &[&project, &wait.as_secs_f64()]).await.map(drop)
}

/// Estimates how many calls are left in the bucket of the project used last, even while calls are suspended; `None` if
/// the provider has not reported its limit yet.
pub async fn load_remaining(client: &impl GenericClient) -> Result<Option<f64>, DbError> {
    let sql = "SELECT least(capacity, tokens + greatest(extract(epoch FROM clock_timestamp() - at), 0) * per_second) \
               ::float8 FROM provider_budget WHERE learnt ORDER BY at DESC LIMIT 1";
    Ok(query_opt(client, sql, &[]).await?.map(|row| row.get(0)))
}

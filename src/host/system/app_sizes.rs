//! Per-app database sizes.

use std::collections::BTreeMap;

use tokio_postgres::Client;

/// Size queries block while an `ALTER TABLE` holds its lock, and a caller's timeout wouldn't cancel the blocked
/// statement.
const SESSION_TIMEOUTS: &str = "SET lock_timeout = '2s'; SET statement_timeout = '15s'";
const SIZES_QUERY: &str = "SELECT n.nspname::text, coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8, \
    coalesce(sum(greatest(c.reltuples, 0)) FILTER (WHERE c.relkind IN ('r', 'm')), 0)::int8 \
    FROM pg_namespace n LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relkind IN ('r', 'm', 'S') \
    WHERE starts_with(n.nspname, 'app_') GROUP BY n.nspname";

/// Database size of an app's schema.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AppSize {
    /// Size in bytes, including indexes and TOAST data.
    pub bytes: u64,
    /// PostgreSQL's latest row estimate; 0 before the first one.
    pub rows: u64,
}

/// Returns the size of each app's schema, by slug. Sets session timeouts on `client`, so don't use it for anything
/// else.
///
/// # Errors
/// If a query fails, for example because a table stays locked for more than two seconds.
pub async fn measure(client: &Client) -> Result<BTreeMap<String, AppSize>, tokio_postgres::Error> {
    client.batch_execute(SESSION_TIMEOUTS).await?;
    let mut sizes = BTreeMap::new();
    for row in client.query(SIZES_QUERY, &[]).await? {
        let (schema, bytes, rows): (&str, i64, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        // Slugs don't contain underscores, so the mapping is unique.
        let slug = schema.strip_prefix("app_").unwrap_or(schema).replace('_', "-");
        let non_negative = |number: i64| u64::try_from(number).unwrap_or(0);
        sizes.insert(slug, AppSize { bytes: non_negative(bytes), rows: non_negative(rows) });
    }
    Ok(sizes)
}

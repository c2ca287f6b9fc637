//! What the tables of each app take in the database.

use std::collections::BTreeMap;

use tokio_postgres::Client;

/// A size waits for the lock of an `ALTER TABLE`; a caller that gives up ends no statement that waits.
const LIMITS: &str = "SET lock_timeout = '2s'; SET statement_timeout = '15s'";
const SIZES: &str = "SELECT n.nspname::text, coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8, \
    coalesce(sum(greatest(c.reltuples, 0)) FILTER (WHERE c.relkind IN ('r', 'm')), 0)::int8 \
    FROM pg_namespace n LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relkind IN ('r', 'm', 'S') \
    WHERE starts_with(n.nspname, 'app_') GROUP BY n.nspname";

/// What an app's schema takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AppSize {
    /// With indexes and large values.
    pub bytes: u64,
    /// As PostgreSQL estimated them last; 0 before it did.
    pub rows: u64,
}

/// The size of each app's schema, by slug. Sets time limits of `client`'s session, which is for this alone.
///
/// # Errors
/// The database's, which includes a table that is locked for more than two seconds.
pub async fn measure(client: &Client) -> Result<BTreeMap<String, AppSize>, tokio_postgres::Error> {
    client.batch_execute(LIMITS).await?;
    let mut sizes = BTreeMap::new();
    for row in client.query(SIZES, &[]).await? {
        let (schema, bytes, rows): (&str, i64, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        // A slug has no underscore: a schema is one app's.
        let slug = schema.strip_prefix("app_").unwrap_or(schema).replace('_', "-");
        let natural = |number: i64| u64::try_from(number).unwrap_or(0);
        sizes.insert(slug, AppSize { bytes: natural(bytes), rows: natural(rows) });
    }
    Ok(sizes)
}

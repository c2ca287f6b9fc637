//! What the tables of each app take in the database.

use std::collections::BTreeMap;

use tokio_postgres::Client;

const SIZES: &str = "SELECT n.nspname::text, coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8 \
    FROM pg_namespace n LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relkind IN ('r', 'm', 'S') \
    WHERE starts_with(n.nspname, 'app_') GROUP BY n.nspname";

/// Bytes of each app's schema with indexes and large values, by slug.
///
/// # Errors
/// The database's.
pub async fn measure(client: &Client) -> Result<BTreeMap<String, u64>, tokio_postgres::Error> {
    let mut sizes = BTreeMap::new();
    for row in client.query(SIZES, &[]).await? {
        let (schema, bytes): (&str, i64) = (row.try_get(0)?, row.try_get(1)?);
        // A slug has no underscore: a schema is one app's.
        let slug = schema.strip_prefix("app_").unwrap_or(schema).replace('_', "-");
        sizes.insert(slug, u64::try_from(bytes).unwrap_or(0));
    }
    Ok(sizes)
}

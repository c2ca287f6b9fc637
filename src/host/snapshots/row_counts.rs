//! Table listing and row counts, shared by backup and restore so that their results are comparable.

use tokio_postgres::{Client, Error};

use svc_store::snapshot::TableCount;

/// Lists the ordinary tables whose rows a dump includes, sorted, as `schema.table` and quoted where needed.
///
/// # Errors
/// If a query fails.
pub async fn list_tables(client: &Client) -> Result<Vec<String>, Error> {
    let rows = client
        .query(
            "SELECT format('%I.%I', n.nspname, c.relname) \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE c.relkind = 'r' AND c.relpersistence <> 't' \
               AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' \
               AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass \
                               AND d.objid = c.oid AND d.deptype = 'e') \
             ORDER BY 1",
            &[],
        )
        .await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// Returns the first non-empty owner table, or `None` if all are empty.
///
/// # Errors
/// If a query fails.
pub async fn find_table_with_rows(client: &Client) -> Result<Option<String>, Error> {
    for name in list_tables(client).await?.into_iter().filter(|name| is_owner_table(name)) {
        let row = client.query_one(&format!("SELECT EXISTS (SELECT FROM ONLY {name})"), &[]).await?;
        if row.try_get(0)? {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Returns whether a table (`schema.table`) belongs to the owner. The `svc` schema belongs to the gateway.
pub fn is_owner_table(table: &str) -> bool {
    !table.starts_with("svc.")
}

/// Counts the rows of each table, excluding child tables.
///
/// # Errors
/// If a query fails.
pub async fn count_rows(client: &Client, tables: &[String]) -> Result<Vec<TableCount>, Error> {
    let mut counts = Vec::with_capacity(tables.len());
    for name in tables {
        let row = client.query_one(&format!("SELECT count(*) FROM ONLY {name}"), &[]).await?;
        let rows: i64 = row.try_get(0)?;
        counts.push(TableCount { name: name.clone(), rows: rows.unsigned_abs() });
    }
    Ok(counts)
}

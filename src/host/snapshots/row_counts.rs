//! The tables of a database and their rows, counted the same way when a snapshot is taken and after it is restored.

use tokio_postgres::{Client, Error};

use crate::store::snapshot::TableCount;

/// Every ordinary table whose rows a dump holds, as `schema.table` quoted where needed, in order.
///
/// # Errors
/// The database's.
pub async fn tables(client: &Client) -> Result<Vec<String>, Error> {
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

/// The first table that holds a row of the owner's; the gateway's own tables, in the schema `svc`, are not the owner's.
///
/// # Errors
/// The database's.
pub async fn first_with_rows(client: &Client) -> Result<Option<String>, Error> {
    for name in tables(client).await?.into_iter().filter(|name| is_owners(name)) {
        let row = client.query_one(&format!("SELECT EXISTS (SELECT FROM ONLY {name})"), &[]).await?;
        if row.try_get(0)? {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Whether a table, as `schema.table`, is none of the gateway's own.
pub fn is_owners(table: &str) -> bool {
    !table.starts_with("svc.")
}

/// Counts the rows of each of these tables; a parent's count does not hold its children's.
///
/// # Errors
/// The database's.
pub async fn count(client: &Client, tables: &[String]) -> Result<Vec<TableCount>, Error> {
    let mut counts = Vec::with_capacity(tables.len());
    for name in tables {
        let row = client.query_one(&format!("SELECT count(*) FROM ONLY {name}"), &[]).await?;
        let rows: i64 = row.try_get(0)?;
        counts.push(TableCount { name: name.clone(), rows: rows.unsigned_abs() });
    }
    Ok(counts)
}

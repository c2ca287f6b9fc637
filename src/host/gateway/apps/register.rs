//! Registers a manifest in a single transaction: creates its tables and stores the manifest.
//!
//! Registering the same manifest again only repairs the role's login and grants and recreates removed objects.

use std::time::Duration;

use secrecy::SecretString;
use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Transaction};

use super::ddl::{self, ExistingSchema, SchemaChange};
use super::manifest::{Manifest, Table};
use crate::database;
use crate::name::{Slug, SqlIdentifier};

/// The app's tables after a registration, and the manifest changes it couldn't apply.
#[derive(Debug)]
pub struct RegistrationResult {
    pub tables: Vec<Table>,
    pub unapplied_changes: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error("the schema {0} exists but does not belong to this app: choose another slug")]
    ForeignSchema(SqlIdentifier),
    #[error("{0} exists but is not a table: rename it, or choose another table name in svc.json")]
    NotATable(String),
    #[error("cannot register the app in the database")]
    Database(#[from] tokio_postgres::Error),
}

impl RegisterError {
    /// Whether a retry can succeed: the database was unreachable, overloaded or shutting down, or a lock wasn't
    /// acquired within `lock_timeout`. Otherwise, the database rejected the registration.
    pub fn is_transient(&self) -> bool {
        let Self::Database(error) = self else { return false };
        error.is_closed() || error.code().is_none_or(is_transient_state)
    }
}

/// Whether the SQLSTATE is in a transient class: connection exception (08), transaction rollback (40), insufficient
/// resources (53), object not in prerequisite state (55) or operator intervention (57).
fn is_transient_state(state: &SqlState) -> bool {
    matches!(state.code().get(..2), Some("08" | "40" | "53" | "55" | "57"))
}

/// Loads the manifests stored in the database.
///
/// # Errors
/// The query fails.
pub async fn load_manifests(client: &Client) -> Result<Vec<(String, Value)>, tokio_postgres::Error> {
    let rows = client.query("SELECT slug, manifest FROM svc.apps ORDER BY slug", &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Registers `manifest`, and lets the app's role log in with `password`.
///
/// # Errors
/// See [`RegisterError`]. On error, nothing has changed, unless the connection was lost during the commit.
pub async fn register(
    client: &mut Client,
    manifest: &Manifest,
    password: &SecretString,
    statement_timeout: Duration,
) -> Result<RegistrationResult, RegisterError> {
    let schema = manifest.slug.schema();
    let mut transaction = client.transaction().await?;
    database::lock_schemas(&transaction).await?;
    // While we wait for a table lock, the app's own statements on that table queue up behind us. Registration is
    // retried until it gets the lock, so keep each wait short. PostgreSQL only cancels an autovacuum holding the lock
    // after `deadlock_timeout` (1 s by default), so that must be shorter than `lock_timeout`.
    transaction
        .batch_execute("SET LOCAL deadlock_timeout = '50ms'; SET LOCAL lock_timeout = '200ms'")
        .await?;
    claim_schema(&transaction, &manifest.slug, &schema).await?;
    database::enable_login(&transaction, &schema, password, statement_timeout).await?;
    grant_schema_usage(&transaction, &schema).await?;
    let existing = inspect_schema(&transaction, &schema, manifest).await?;
    let mut plan = ddl::plan_registration(&schema, &manifest.tables, &existing);
    for change in std::mem::take(&mut plan.changes) {
        match change {
            SchemaChange::Required(sql) => transaction.batch_execute(&sql).await?,
            SchemaChange::CreateIndex { sql, violation_message, type_message } => {
                let skip_message =
                    try_create_index(&mut transaction, &sql, violation_message, type_message).await?;
                plan.unapplied_changes.extend(skip_message);
            }
        }
    }
    if database::outbox::is_watched(&transaction, &schema).await? {
        database::outbox::create_triggers(&transaction, &schema).await?;
    }
    store_manifest(&transaction, manifest, &plan.unapplied_changes).await?;
    transaction.commit().await?;
    Ok(RegistrationResult { tables: plan.tables, unapplied_changes: plan.unapplied_changes })
}

/// Creates the schema; an existing one must belong to this app.
async fn claim_schema(
    transaction: &Transaction<'_>,
    slug: &Slug,
    schema: &SqlIdentifier,
) -> Result<(), RegisterError> {
    let row = transaction
        .query_one(
            "SELECT to_regnamespace($1) IS NOT NULL,
                    EXISTS (SELECT 1 FROM svc.apps WHERE slug = $2 AND schema_name = $3)",
            &[&schema.quoted().to_string(), &slug.as_str(), &schema.as_str()],
        )
        .await?;
    let (exists, is_own): (bool, bool) = (row.get(0), row.get(1));
    if exists && !is_own {
        return Err(RegisterError::ForeignSchema(schema.clone()));
    }
    transaction.batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS {}", schema.quoted())).await?;
    Ok(())
}

async fn grant_schema_usage(
    transaction: &Transaction<'_>,
    schema: &SqlIdentifier,
) -> Result<(), tokio_postgres::Error> {
    let row = transaction
        .query_one(
            "SELECT format('REVOKE ALL ON SCHEMA %1$I FROM PUBLIC; GRANT USAGE ON SCHEMA %1$I TO %1$I;
                            GRANT CONNECT ON DATABASE %2$I TO %1$I', $1::text, current_database())",
            &[&schema.as_str()],
        )
        .await?;
    transaction.batch_execute(row.get(0)).await
}

/// Reads the schema's tables and indexes. Views and other relations belong to the owner and are ignored, unless one has
/// the name of a declared table, which is an error.
async fn inspect_schema(
    transaction: &Transaction<'_>,
    schema: &SqlIdentifier,
    manifest: &Manifest,
) -> Result<ExistingSchema, RegisterError> {
    let mut existing = ExistingSchema::default();
    let columns = transaction
        .query(
            "SELECT c.relname::text, c.relkind::text, a.attname::text, t.typname::text
               FROM pg_class c
               JOIN pg_namespace n ON n.oid = c.relnamespace
               LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
               LEFT JOIN pg_type t ON t.oid = a.atttypid
              WHERE n.nspname = $1 AND c.relkind NOT IN ('i', 'I', 'S', 't')",
            &[&schema.as_str()],
        )
        .await?;
    for row in &columns {
        let (table, kind): (String, String) = (row.get(0), row.get(1));
        if kind != "r" && kind != "p" {
            if manifest.tables.iter().any(|declared| declared.name.as_str() == table) {
                return Err(RegisterError::NotATable(format!("{schema}.{table}")));
            }
            continue;
        }
        let table_columns = existing.tables.entry(table).or_default();
        if let (Some(column), Some(kind)) = (row.get::<_, Option<String>>(2), row.get(3)) {
            table_columns.insert(column, kind);
        }
    }
    let indexes = transaction
        .query(
            "SELECT i.relname::text, t.relname::text, x.indisprimary
               FROM pg_index x
               JOIN pg_class i ON i.oid = x.indexrelid
               JOIN pg_class t ON t.oid = x.indrelid
               JOIN pg_namespace n ON n.oid = t.relnamespace
              WHERE n.nspname = $1",
            &[&schema.as_str()],
        )
        .await?;
    for row in &indexes {
        let (index, table, is_primary_key): (String, String, bool) = (row.get(0), row.get(1), row.get(2));
        if is_primary_key {
            existing.primary_keys.insert(table.clone());
        }
        existing.indexes.insert(index, table);
    }
    Ok(existing)
}

/// Creates an index. If PostgreSQL rejects it and there is a message for the reason, returns that message, and the
/// transaction can continue.
async fn try_create_index(
    transaction: &mut Transaction<'_>,
    sql: &str,
    violation_message: Option<String>,
    type_message: Option<String>,
) -> Result<Option<String>, tokio_postgres::Error> {
    let savepoint = transaction.transaction().await?;
    match savepoint.batch_execute(sql).await {
        Ok(()) => savepoint.commit().await.map(|()| None),
        Err(error) => {
            let skip_message = match error.code() {
                Some(state) if *state == SqlState::UNIQUE_VIOLATION => violation_message,
                Some(state) if is_type_rejection(state) => type_message,
                _ => None,
            };
            let Some(message) = skip_message else { return Err(error) };
            savepoint.rollback().await.map(|()| Some(message))
        }
    }
}

/// Whether PostgreSQL can't index a column: its type has no default operator class, its elements or fields aren't
/// comparable (`json[]`), a value is too long for an index (`tsvector`), or the table is partitioned by another column.
fn is_type_rejection(state: &SqlState) -> bool {
    let states = [
        SqlState::UNDEFINED_OBJECT,
        SqlState::UNDEFINED_FUNCTION,
        SqlState::PROGRAM_LIMIT_EXCEEDED,
        SqlState::FEATURE_NOT_SUPPORTED,
    ];
    states.contains(state)
}

async fn store_manifest(
    transaction: &Transaction<'_>,
    manifest: &Manifest,
    unapplied_changes: &[String],
) -> Result<(), tokio_postgres::Error> {
    let slug = &manifest.slug;
    transaction
        .execute(
            "INSERT INTO svc.apps (slug, schema_name, manifest, not_done) VALUES ($1, $2, $3, $4)
             ON CONFLICT (slug) DO UPDATE
                SET manifest = excluded.manifest, not_done = excluded.not_done, updated_at = now()
              WHERE (apps.manifest, apps.not_done) IS DISTINCT FROM (excluded.manifest, excluded.not_done)",
            &[
                &slug.as_str(),
                &slug.schema().as_str(),
                &manifest.to_value(),
                &serde_json::json!(unapplied_changes),
            ],
        )
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_timeout_and_shutdown_are_transient() {
        for state in [
            SqlState::LOCK_NOT_AVAILABLE,
            SqlState::T_R_DEADLOCK_DETECTED,
            SqlState::TOO_MANY_CONNECTIONS,
            SqlState::ADMIN_SHUTDOWN,
            SqlState::CONNECTION_FAILURE,
        ] {
            assert!(is_transient_state(&state), "{}", state.code());
        }
        for state in [SqlState::DUPLICATE_TABLE, SqlState::INSUFFICIENT_PRIVILEGE] {
            assert!(!is_transient_state(&state), "{}", state.code());
        }
    }
}

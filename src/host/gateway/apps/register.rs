//! Registration: a manifest's tables made in the database, in one transaction, and the manifest kept there.
//!
//! Registering what is registered already only repairs: the role's login and grants, and what somebody removed.

use std::time::Duration;

use secrecy::SecretString;
use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Transaction};

use super::ddl::{self, Change, Found};
use super::manifest::{Manifest, Table};
use super::name::{Name, Slug};
use crate::host::gateway::database;

/// What a registration came to.
#[derive(Debug)]
pub struct Registered {
    pub tables: Vec<Table>,
    pub not_done: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error("the schema {0} exists and belongs to no app")]
    ForeignSchema(Name),
    #[error("{0} is in the way: it is not a table")]
    NotATable(String),
    #[error("register in the database")]
    Database(#[from] tokio_postgres::Error),
}

impl RegisterError {
    /// Whether the database went away, rather than refused.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Database(error) if error.is_closed() || error.code().is_none())
    }
}

/// Every manifest that the database keeps.
///
/// # Errors
/// When the database is away.
pub async fn kept(client: &Client) -> Result<Vec<(String, Value)>, tokio_postgres::Error> {
    let rows = client.query("SELECT slug, manifest FROM svc.apps ORDER BY slug", &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Registers `manifest`; its role logs in with `password` afterwards.
///
/// # Errors
/// See [`RegisterError`]; then nothing has changed.
pub async fn register(
    client: &mut Client,
    manifest: &Manifest,
    password: &SecretString,
    statement_timeout: Duration,
) -> Result<Registered, RegisterError> {
    let schema = manifest.slug.schema();
    let mut transaction = client.transaction().await?;
    database::lock(&transaction).await?;
    claim(&transaction, &manifest.slug, &schema).await?;
    database::open_login(&transaction, &schema, password, statement_timeout).await?;
    grant(&transaction, &schema).await?;
    let found = look(&transaction, &schema).await?;
    let mut planned = ddl::plan(&schema, &manifest.tables, &found);
    for change in std::mem::take(&mut planned.changes) {
        match change {
            Change::Needed(sql) => transaction.batch_execute(&sql).await?,
            Change::IfRowsAllow { sql, otherwise } => {
                if !attempt(&mut transaction, &sql).await? {
                    planned.not_done.push(otherwise);
                }
            }
        }
    }
    if database::outbox::watched(&transaction, &schema).await? {
        database::outbox::watch(&transaction, &schema).await?;
    }
    keep(&transaction, manifest, &planned.not_done).await?;
    transaction.commit().await?;
    Ok(Registered { tables: planned.tables, not_done: planned.not_done })
}

/// A schema that is there must be this app's.
async fn claim(transaction: &Transaction<'_>, slug: &Slug, schema: &Name) -> Result<(), RegisterError> {
    let row = transaction
        .query_one(
            "SELECT to_regnamespace($1) IS NOT NULL,
                    EXISTS (SELECT 1 FROM svc.apps WHERE slug = $2 AND schema_name = $3)",
            &[&schema.quoted().to_string(), &slug.as_str(), &schema.as_str()],
        )
        .await?;
    let (there, ours): (bool, bool) = (row.get(0), row.get(1));
    if there && !ours {
        return Err(RegisterError::ForeignSchema(schema.clone()));
    }
    transaction.batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS {}", schema.quoted())).await?;
    Ok(())
}

async fn grant(transaction: &Transaction<'_>, schema: &Name) -> Result<(), tokio_postgres::Error> {
    let row = transaction
        .query_one(
            "SELECT format('REVOKE ALL ON SCHEMA %1$I FROM PUBLIC; GRANT USAGE ON SCHEMA %1$I TO %1$I;
                            GRANT CONNECT ON DATABASE %2$I TO %1$I', $1::text, current_database())",
            &[&schema.as_str()],
        )
        .await?;
    transaction.batch_execute(row.get(0)).await
}

async fn look(transaction: &Transaction<'_>, schema: &Name) -> Result<Found, RegisterError> {
    let mut found = Found::default();
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
            return Err(RegisterError::NotATable(format!("{schema}.{table}")));
        }
        let there = found.tables.entry(table).or_default();
        if let (Some(column), Some(kind)) = (row.get::<_, Option<String>>(2), row.get(3)) {
            there.insert(column, kind);
        }
    }
    let indexes = transaction
        .query("SELECT indexname::text FROM pg_indexes WHERE schemaname = $1", &[&schema.as_str()])
        .await?;
    found.indexes = indexes.iter().map(|row| row.get(0)).collect();
    Ok(found)
}

/// Runs a statement that the rows may forbid; whether they allowed it.
async fn attempt(transaction: &mut Transaction<'_>, sql: &str) -> Result<bool, tokio_postgres::Error> {
    let savepoint = transaction.transaction().await?;
    match savepoint.batch_execute(sql).await {
        Ok(()) => savepoint.commit().await.map(|()| true),
        Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
            savepoint.rollback().await.map(|()| false)
        }
        Err(error) => Err(error),
    }
}

async fn keep(
    transaction: &Transaction<'_>,
    manifest: &Manifest,
    not_done: &[String],
) -> Result<(), tokio_postgres::Error> {
    let slug = &manifest.slug;
    transaction
        .execute(
            "INSERT INTO svc.apps (slug, schema_name, manifest, not_done) VALUES ($1, $2, $3, $4)
             ON CONFLICT (slug) DO UPDATE
                SET manifest = excluded.manifest, not_done = excluded.not_done, updated_at = now()
              WHERE (apps.manifest, apps.not_done) IS DISTINCT FROM (excluded.manifest, excluded.not_done)",
            &[&slug.as_str(), &slug.schema().as_str(), &manifest.to_value(), &serde_json::json!(not_done)],
        )
        .await?;
    Ok(())
}

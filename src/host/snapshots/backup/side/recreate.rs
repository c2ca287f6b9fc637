//! Recreates tables missing from the owner's database as they were in the snapshot: columns, rows, indexes, triggers
//! and privileges.

use std::process::ExitStatus;

use tokio_postgres::Client;

use super::catalog;
use crate::snapshots::backup::dump_check;
use crate::snapshots::backup::dump_check::DumpCheckError;
use crate::snapshots::backup::settings::BackupSettings;
use crate::snapshots::row_counts;
use crate::snapshots::side_database::{CopiedTable, SIDE_DATABASE};
use crate::snapshots::staging;
use crate::system::postgres;
use crate::system::postgres::{quote_ident, quote_literal};
use crate::system::postgres_tools;
use svc_base::applet::Exit;
use svc_store::snapshot::TableCount;

/// Errors from recreating tables and views.
#[derive(Debug, thiserror::Error)]
pub enum RecreateError {
    #[error(transparent)]
    Tool(#[from] DumpCheckError),
    #[error("{tool} exited with {status}: {stderr_tail}")]
    Failed { tool: &'static str, status: ExitStatus, stderr_tail: String },
    #[error("cannot pipe the tables from pg_dump to pg_restore")]
    Pipe(#[source] std::io::Error),
    #[error("cannot inspect the missing tables or create their schemas")]
    Query(#[from] tokio_postgres::Error),
}

impl RecreateError {
    /// Returns `Refused` if `pg_dump` or `pg_restore` exits with an error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Failed { .. } => Exit::Refused,
            Self::Query(error) => postgres::to_exit(error),
            Self::Tool(_) | Self::Pipe(_) => Exit::Internal,
        }
    }
}

/// Builds the results for recreated tables, with their row counts in the side database.
pub async fn count_recreated(side: &Client, tables: &[&str]) -> Result<Vec<CopiedTable>, RecreateError> {
    let names: Vec<String> = tables.iter().map(|table| (*table).to_owned()).collect();
    let to_result = |count: TableCount| CopiedTable {
        name: count.name,
        was_recreated: true,
        inserted: count.rows,
        ..CopiedTable::default()
    };
    Ok(row_counts::count_rows(side, &names).await?.into_iter().map(to_result).collect())
}

/// Recreates tables and views with `pg_dump` and `pg_restore`, all or nothing. Missing schemas are created first and
/// kept even if recreating the relations fails.
pub async fn recreate_relations(
    settings: &BackupSettings,
    side: &Client,
    live: &Client,
    relations: &[&str],
) -> Result<(), RecreateError> {
    for relation in relations {
        let (schema, owner) = catalog::read_schema(side, relation).await?;
        create_schema(live, &schema, &owner).await?;
    }
    pipe_relations(settings, relations).await
}

async fn create_schema(live: &Client, schema: &str, owner: &str) -> Result<(), RecreateError> {
    let create =
        format!("CREATE SCHEMA IF NOT EXISTS {} AUTHORIZATION {}", quote_ident(schema), quote_ident(owner));
    let query = format!("SELECT FROM pg_namespace WHERE nspname = {}", quote_literal(schema));
    if live.query_opt(&query, &[]).await?.is_none() {
        live.batch_execute(&create).await?;
    }
    Ok(())
}

async fn pipe_relations(settings: &BackupSettings, relations: &[&str]) -> Result<(), RecreateError> {
    let start_error = |tool| move |source| DumpCheckError::Start { tool, source };
    let mut dump = settings.tools.dump_relations_command(&settings.server, SIDE_DATABASE, relations);
    let mut dump = dump.spawn().map_err(start_error("pg_dump"))?;
    let mut load = settings.tools.load_in_transaction_command(&settings.server, settings.server.database());
    let mut load = load.spawn().map_err(start_error("pg_restore"))?;
    let dump_stderr = tokio::spawn(postgres_tools::read_stderr_tail(dump.stderr.take()));
    let load_stderr = tokio::spawn(postgres_tools::read_stderr_tail(load.stderr.take()));
    let (from, to) = (dump.stdout.take(), load.stdin.take());
    let pipe = async {
        if let (Some(mut from), Some(mut to)) = (from, to) {
            tokio::io::copy(&mut from, &mut to).await?;
        }
        Ok(())
    };
    let pipe_result: std::io::Result<()> = pipe.await;
    for (tool, child, stderr_tail) in
        [("pg_dump", &mut dump, dump_stderr), ("pg_restore", &mut load, load_stderr)]
    {
        // If pg_restore failed, pg_dump reports only the broken pipe, so pg_restore's error takes precedence.
        if tool == "pg_dump" && pipe_result.is_err() {
            continue;
        }
        // pg_dump is done after the last byte, but pg_restore still has to build indexes.
        let timeout = if tool == "pg_dump" { dump_check::EXIT_TIMEOUT } else { staging::INDEX_BUILD_TIMEOUT };
        let status = dump_check::wait_for_exit(child, tool, timeout).await?;
        if !status.success() {
            let stderr_tail = stderr_tail.await.unwrap_or_default();
            return Err(RecreateError::Failed { tool, status, stderr_tail });
        }
    }
    pipe_result.map_err(RecreateError::Pipe)
}

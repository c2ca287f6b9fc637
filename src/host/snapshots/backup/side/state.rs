//! Tables that the owner's database does not have any more, made again as the snapshot has them: columns, rows, indexes,
//! triggers, rights.

use std::process::ExitStatus;

use tokio_postgres::Client;

use super::catalog;
use crate::applet::Exit;
use crate::host::snapshots::backup::Settings;
use crate::host::snapshots::backup::dump_check;
use crate::host::snapshots::backup::dump_check::ReadError;
use crate::host::snapshots::row_counts;
use crate::host::snapshots::side_database::{CopiedTable, DATABASE};
use crate::host::system::postgres;
use crate::host::system::postgres::{ident, literal};
use crate::store::snapshot::TableCount;

/// Why a table was not made again.
#[derive(Debug, thiserror::Error)]
pub enum MadeError {
    #[error(transparent)]
    Tool(#[from] ReadError),
    #[error("{tool} ended with {status}: {complaint}")]
    Ended { tool: &'static str, status: ExitStatus, complaint: String },
    #[error("pass the tables on")]
    Pipe(#[source] std::io::Error),
    #[error("look at the tables that are gone")]
    Query(#[from] tokio_postgres::Error),
}

impl MadeError {
    /// `Refused` where a tool of PostgreSQL says why not.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Ended { .. } => Exit::Refused,
            Self::Query(error) => postgres::exit(error),
            Self::Tool(_) | Self::Pipe(_) => Exit::Internal,
        }
    }
}

/// What is told of tables that are made again: the rows that they have in the side database.
///
/// # Errors
/// [`MadeError`].
pub async fn counted(side: &Client, tables: &[&str]) -> Result<Vec<CopiedTable>, MadeError> {
    let names: Vec<String> = tables.iter().map(|table| (*table).to_owned()).collect();
    let told = |count: TableCount| CopiedTable {
        name: count.name,
        created: true,
        inserted: count.rows,
        ..CopiedTable::default()
    };
    Ok(row_counts::count(side, &names).await?.into_iter().map(told).collect())
}

/// All of them or none, by `pg_dump` and `pg_restore`.
///
/// # Errors
/// [`MadeError`].
pub async fn make_again(
    settings: &Settings,
    side: &Client,
    live: &Client,
    tables: &[&str],
) -> Result<(), MadeError> {
    for table in tables {
        let (schema, owner) = catalog::schema(side, table).await?;
        make_schema(live, &schema, &owner).await?;
    }
    pass_on(settings, tables).await
}

async fn make_schema(live: &Client, schema: &str, owner: &str) -> Result<(), MadeError> {
    let make = format!("CREATE SCHEMA IF NOT EXISTS {} AUTHORIZATION {}", ident(schema), ident(owner));
    let there = format!("SELECT FROM pg_namespace WHERE nspname = {}", literal(schema));
    if live.query_opt(&there, &[]).await?.is_none() {
        live.batch_execute(&make).await?;
    }
    Ok(())
}

async fn pass_on(settings: &Settings, tables: &[&str]) -> Result<(), MadeError> {
    let start = |tool| move |source| ReadError::Start { tool, source };
    let mut dump = settings.tools.dump_tables(&settings.server, DATABASE, tables);
    let mut dump = dump.spawn().map_err(start("pg_dump"))?;
    let mut load = settings.tools.load_stdin(&settings.server, settings.server.database());
    let mut load = load.spawn().map_err(start("pg_restore"))?;
    let said = tokio::spawn(dump_check::tail(dump.stderr.take()));
    let complaint = tokio::spawn(dump_check::tail(load.stderr.take()));
    let (from, to) = (dump.stdout.take(), load.stdin.take());
    let passed = async {
        if let (Some(mut from), Some(mut to)) = (from, to) {
            tokio::io::copy(&mut from, &mut to).await?;
        }
        Ok(())
    };
    let passed: std::io::Result<()> = passed.await;
    for (tool, child, said) in [("pg_dump", &mut dump, said), ("pg_restore", &mut load, complaint)] {
        // A dump whose reader gave up says only that: the reader's word comes first.
        if tool == "pg_dump" && passed.is_err() {
            continue;
        }
        let status = dump_check::ended(child, tool).await?;
        if !status.success() {
            return Err(MadeError::Ended { tool, status, complaint: said.await.unwrap_or_default() });
        }
    }
    passed.map_err(MadeError::Pipe)
}

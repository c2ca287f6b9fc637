//! Tables copied back out of the side database: what is there is changed in one transaction, all or nothing.
//!
//! A table that is not there any more is made again first, whole, as the snapshot has it. Triggers fire and foreign keys
//! hold as for any other write, so whoever listens to the tables hears of it.

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Transaction};

use super::catalog::{self, PLAIN_SESSION};
use super::dependents::Dependents;
use super::plan::{self, Plan, PlanError};
use super::state;
use crate::applet::Exit;
use crate::failpoint::{self, Injected};
use crate::fsx::FileError;
use crate::host::snapshots::backup::Settings;
use crate::host::snapshots::row_counts;
use crate::host::snapshots::side_database::{CopiedTable, Copy, DATABASE, Mode, State};
use crate::host::system::postgres;
use crate::host::system::postgres::ConnectError;

const NAME: &str = "svc-db-backup";
/// The gateway's own tables are not the owner's to bring back.
const OURS: &str = "svc.";

/// What is remembered of copies, so that one that was cut off is not done twice over what was written since.
const DONE: &str = "
    CREATE SCHEMA IF NOT EXISTS svc;
    REVOKE ALL ON SCHEMA svc FROM PUBLIC;
    CREATE TABLE IF NOT EXISTS svc.side_copies (
        request_id text PRIMARY KEY,
        at timestamptz(3) NOT NULL DEFAULT now(),
        tables jsonb NOT NULL
    );
    DELETE FROM svc.side_copies WHERE at < now() - interval '30 days'";

/// Why tables were not copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("{table} is not a table of the side database; `svc-db-backup side show` lists them")]
    NoSuchTable { table: String },
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(
        "rows that are deleted from {table} would change rows of {other}, which refer to them\n  next: name {other}, too, or \
         take mode overwrite"
    )]
    PassesOn { table: String, other: String },
    #[error(
        "rows of {table} do not fit what is there now: {}\n  next: {}; nothing of it was copied",
        .broken.what,
        .broken.next
    )]
    Broken { table: String, broken: Broken },
    #[error(transparent)]
    Made(#[from] state::MadeError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{action}")]
    Query {
        action: String,
        #[source]
        source: tokio_postgres::Error,
    },
    #[error(transparent)]
    Injected(#[from] Injected),
}

impl CopyError {
    /// `Refused` where what is asked cannot be done so.
    pub fn exit(&self) -> Exit {
        match self {
            Self::NoSuchTable { .. } | Self::Plan(_) | Self::PassesOn { .. } | Self::Broken { .. } => {
                Exit::Refused
            }
            Self::Made(error) => error.exit(),
            Self::Connect(_) => Exit::Unavailable,
            Self::Query { source, .. } => postgres::exit(source),
            Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// A rule of the database that rows of the snapshot break.
#[derive(Debug)]
pub struct Broken {
    what: String,
    next: &'static str,
}

impl Broken {
    /// Of an error that is one; without the values, which are the owner's.
    fn of(error: &tokio_postgres::Error) -> Option<Self> {
        let rule = error.as_db_error()?.constraint().unwrap_or("a rule of the table");
        let (what, next) = match error.code()? {
            &SqlState::FOREIGN_KEY_VIOLATION => {
                ("one refers to a row that is not there", "name the table that it refers to, too")
            }
            &SqlState::UNIQUE_VIOLATION => {
                ("another row has what must be unique", "mode missing leaves such rows away")
            }
            code if code.code().starts_with("23") => {
                ("one breaks it", "change the table, or the rows by hand")
            }
            _ => return None,
        };
        Some(Self { what: format!("{what} ({rule})"), next })
    }
}

fn query(action: impl Into<String>) -> impl FnOnce(tokio_postgres::Error) -> CopyError {
    let action = action.into();
    move |source| CopyError::Query { action, source }
}

/// Copies them, for the request of `state`. What was done until an error is in `done`.
///
/// # Errors
/// [`CopyError`]; but for tables in `done` that were made again, nothing has changed.
pub async fn copy(
    settings: &Settings,
    wanted: &Copy,
    state: &mut State,
    done: &mut Vec<CopiedTable>,
) -> Result<(), CopyError> {
    let request_id = state.request_id.clone();
    let side = settings.server.connect(DATABASE, NAME).await?;
    let mut live = settings.server.connect(settings.server.database(), NAME).await?;
    for client in [&side, &live] {
        client.batch_execute(PLAIN_SESSION).await.map_err(query("begin"))?;
    }
    let there = row_counts::tables(&side).await.map_err(query("list the snapshot's tables"))?;
    let mut wanted_tables: Vec<&str> = wanted.tables.iter().map(String::as_str).collect();
    wanted_tables.sort_unstable();
    wanted_tables.dedup();
    for table in &wanted_tables {
        if !there.iter().any(|name| name == table) || table.starts_with(OURS) {
            return Err(CopyError::NoSuchTable { table: (*table).to_owned() });
        }
    }
    if let Some(before) = done_before(&live, &request_id).await? {
        *done = before;
        return Ok(());
    }
    let (mut gone, mut made, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    for table in wanted_tables {
        let is_there = catalog::is_table(&live, table).await.map_err(query("look for a table"))?;
        match is_there {
            false => gone.push(table),
            // Before this run was cut off: they came all together.
            true if state.making.iter().any(|name| name == table) => made.push(table),
            true => kept.push(table),
        }
    }
    done.extend(state::counted(&side, &made).await?);
    done.extend(state::counted(&side, &gone).await?);
    let dependents = Dependents::find(&side, &live, &gone, &made).await;
    let dependents = dependents.map_err(query("read what depended on the tables"))?;
    if wanted.dry_run {
        dependents.announce(done);
    } else if !gone.is_empty() || !made.is_empty() {
        make(settings, &side, &mut live, state, &gone, &dependents, done).await?;
    }
    if kept.is_empty() {
        return Ok(());
    }
    let copied = rows(&side, &mut live, &kept, wanted, &request_id, done).await?;
    done.extend(copied);
    Ok(())
}

/// Tables that are gone, and what depended on them. A run that is repeated adds what is lacking.
async fn make(
    settings: &Settings,
    side: &Client,
    live: &mut Client,
    state: &mut State,
    gone: &[&str],
    dependents: &Dependents,
    done: &mut Vec<CopiedTable>,
) -> Result<(), CopyError> {
    if !gone.is_empty() {
        state.making.extend(gone.iter().map(|table| (*table).to_owned()));
        state.write(&settings.layout)?;
        let relations: Vec<&str> = gone.iter().copied().chain(dependents.views()).collect();
        let end = state::make_again(settings, side, live, &relations).await;
        if end.is_err() {
            done.clear();
        }
        end?;
        failpoint::pass("side.made")?;
    }
    dependents.add(live, done).await.map_err(query("add what depended on the tables"))?;
    Ok(failpoint::pass("side.dependents")?)
}

/// What this request did before it was cut off.
async fn done_before(live: &Client, request_id: &str) -> Result<Option<Vec<CopiedTable>>, CopyError> {
    let known = catalog::is_table(live, "svc.side_copies").await.map_err(query("look for earlier copies"))?;
    if !known {
        return Ok(None);
    }
    let find = "SELECT tables::text FROM svc.side_copies WHERE request_id = $1";
    let row = live.query_opt(find, &[&request_id]).await.map_err(query("look for earlier copies"))?;
    let text: Option<String> = row.and_then(|row| row.try_get(0).ok());
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
}

/// The rows of tables that are there, in one transaction.
async fn rows(
    side: &Client,
    live: &mut Client,
    tables: &[&str],
    wanted: &Copy,
    request_id: &str,
    made: &[CopiedTable],
) -> Result<Vec<CopiedTable>, CopyError> {
    let transaction = live.transaction().await.map_err(query("begin"))?;
    transaction.batch_execute("SET LOCAL lock_timeout = '60s'").await.map_err(query("begin"))?;
    transaction.batch_execute(DONE).await.map_err(query("remember the copy"))?;
    let references = catalog::references(&transaction, tables).await.map_err(query("read foreign keys"))?;
    let edges: Vec<(String, String)> =
        references.iter().map(|one| (one.from.clone(), one.to.clone())).collect();
    let ordered = plan::parents_first(tables, &edges);

    let mut plans = Vec::with_capacity(ordered.len());
    for (number, table) in ordered.iter().enumerate() {
        let lock = format!("LOCK TABLE ONLY {table} IN SHARE ROW EXCLUSIVE MODE");
        transaction.batch_execute(&lock).await.map_err(query(format!("lock {table}")))?;
        let now = catalog::columns(&transaction, table).await.map_err(query(format!("look at {table}")))?;
        let then = catalog::columns(side, table).await.map_err(query(format!("look at {table}")))?;
        let plan = Plan::new(number, table, &now, &then, wanted.mode)?;
        fetch(side, &transaction, &plan).await?;
        plans.push(plan);
    }
    failpoint::pass("side.fetched")?;
    // The owner's triggers, defaults and checks find their tables and functions as they do in every other session.
    transaction.batch_execute("SET LOCAL search_path TO DEFAULT").await.map_err(query("begin"))?;
    let mut copied: Vec<CopiedTable> = plans
        .iter()
        .map(|plan| CopiedTable {
            name: plan.table.clone(),
            left_out: plan.left_out.clone(),
            ..CopiedTable::default()
        })
        .collect();
    if wanted.mode == Mode::Replace {
        // Children first: what refers to a row goes before it.
        for (plan, told) in plans.iter().zip(&mut copied).rev() {
            told.deleted = count(&transaction, plan, &plan.delete()).await?;
            let other = references
                .iter()
                .find(|one| one.to == plan.table && one.passes_on && !tables.contains(&one.from.as_str()));
            if let (1.., Some(other)) = (told.deleted, other) {
                return Err(CopyError::PassesOn { table: plan.table.clone(), other: other.from.clone() });
            }
        }
    }
    for (plan, told) in plans.iter().zip(&mut copied) {
        if let Some(update) = plan.update().filter(|_| wanted.mode != Mode::Missing) {
            told.updated = count(&transaction, plan, &update).await?;
        }
        let leave = wanted.mode == Mode::Missing;
        told.inserted = count(&transaction, plan, &plan.insert(leave)).await?;
        if let Some(missing) = plan.missing().filter(|_| leave) {
            let row = transaction.query_one(&missing, &[]).await.map_err(of(plan))?;
            told.skipped = row.try_get::<_, i64>(0).map_err(of(plan))?.unsigned_abs();
        }
        let sequences = catalog::sequences(&transaction, &plan.table).await.map_err(of(plan))?;
        for statement in sequences {
            transaction.batch_execute(&statement).await.map_err(of(plan))?;
        }
    }
    if wanted.dry_run {
        transaction.rollback().await.map_err(query("undo what was tried"))?;
        return Ok(copied);
    }
    let all: Vec<&CopiedTable> = made.iter().chain(&copied).collect();
    let all = serde_json::to_string(&all).expect("plain fields are JSON");
    let remember = "INSERT INTO svc.side_copies (request_id, tables) VALUES ($1, $2::text::jsonb)";
    transaction.execute(remember, &[&request_id, &all]).await.map_err(query("remember the copy"))?;
    failpoint::pass("side.copied")?;
    transaction.commit().await.map_err(query("commit the copy"))?;
    failpoint::pass("side.committed")?;
    Ok(copied)
}

fn of(plan: &Plan) -> impl FnOnce(tokio_postgres::Error) -> CopyError + use<> {
    let table = plan.table.clone();
    move |source| match Broken::of(&source) {
        Some(broken) => CopyError::Broken { table, broken },
        None => CopyError::Query { action: format!("copy the rows of {table}"), source },
    }
}

async fn count(transaction: &Transaction<'_>, plan: &Plan, statement: &str) -> Result<u64, CopyError> {
    transaction.execute(statement, &[]).await.map_err(of(plan))
}

/// The snapshot's rows into the temporary table, piece by piece.
async fn fetch(side: &Client, transaction: &Transaction<'_>, plan: &Plan) -> Result<(), CopyError> {
    transaction.batch_execute(&plan.create()).await.map_err(of(plan))?;
    let out = side.copy_out(&plan.copy_out()).await.map_err(of(plan))?;
    let sink = transaction.copy_in::<_, Bytes>(&plan.copy_in()).await.map_err(of(plan))?;
    futures_util::pin_mut!(out, sink);
    while let Some(piece) = out.next().await {
        sink.feed(piece.map_err(of(plan))?).await.map_err(of(plan))?;
    }
    sink.finish().await.map_err(of(plan))?;
    for statement in plan.index() {
        transaction.batch_execute(&statement).await.map_err(of(plan))?;
    }
    Ok(())
}

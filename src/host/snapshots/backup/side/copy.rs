//! Copies tables back from the side database. Existing tables are changed in one transaction, all or nothing.
//!
//! A missing table is first recreated, as in the snapshot; its dependents follow after the rows of existing tables.
//! Triggers fire and foreign keys apply as for any other write, so subscribers to the tables are notified.

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Transaction};

use super::catalog::{self, ForeignKey, SESSION_SETTINGS};
use super::dependents::Dependents;
use super::plan::{self, CopyPlan, PlanError};
use super::recreate::{self, RecreateError};
use crate::snapshots::backup::settings::BackupSettings;
use crate::snapshots::row_counts;
use crate::snapshots::side_database::{CopiedTable, CopyMode, SIDE_DATABASE, SideState, TableCopy};
use crate::system::postgres;
use crate::system::postgres::ConnectError;
use svc_base::applet::Exit;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::FileError;

const APPLICATION_NAME: &str = "svc-db-backup";
/// The gateway's own tables cannot be copied back.
const GATEWAY_SCHEMA_PREFIX: &str = "svc.";

/// The log of committed copies, so that an interrupted copy is not repeated over later writes.
const CREATE_COPY_LOG: &str = "
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
    #[error("{table} is not a table that can be copied back; `svc-db-backup side show` lists those tables")]
    NoSuchTable { table: String },
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(
        "deleting rows from {table} would change the rows in {other} that refer to them\n  next: also name {other}, or \
         use mode overwrite"
    )]
    Cascades { table: String, other: String },
    #[error(
        "rows of {table} conflict with the current data: {}; existing tables are unchanged\n  next: {}",
        .violation.description,
        .violation.next_step
    )]
    ConstraintViolation { table: String, violation: ConstraintViolation },
    #[error(transparent)]
    Recreate(#[from] recreate::RecreateError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot {action}")]
    Query {
        action: String,
        #[source]
        source: tokio_postgres::Error,
    },
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl CopyError {
    /// Returns `Refused` if the request cannot be served as made.
    pub fn exit(&self) -> Exit {
        match self {
            Self::NoSuchTable { .. }
            | Self::Plan(_)
            | Self::Cascades { .. }
            | Self::ConstraintViolation { .. } => Exit::Refused,
            Self::Recreate(error) => error.exit(),
            Self::Connect(_) => Exit::Unavailable,
            Self::Query { source, .. } => postgres::to_exit(source),
            Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// A constraint that rows of the snapshot violate.
#[derive(Debug)]
pub struct ConstraintViolation {
    description: String,
    next_step: &'static str,
}

impl ConstraintViolation {
    /// Returns the constraint violation that an error reports; `None` for other errors. Omits the values in the error,
    /// because they are the owner's data.
    fn parse(error: &tokio_postgres::Error, mode: CopyMode) -> Option<Self> {
        let constraint = error.as_db_error()?.constraint().unwrap_or("a constraint of the table");
        let (description, next_step) = match error.code()? {
            &SqlState::FOREIGN_KEY_VIOLATION => (
                "a row refers to a missing row",
                "also name both tables of the foreign key, or copy the rows by hand",
            ),
            &SqlState::UNIQUE_VIOLATION if mode == CopyMode::Overwrite => (
                "another row has the same unique value",
                "use mode missing, which skips such rows, or mode replace, which deletes newer rows",
            ),
            &SqlState::UNIQUE_VIOLATION => {
                ("another row has the same unique value", "change the table, or copy the rows by hand")
            }
            code if code.code().starts_with("23") => {
                ("a row violates a constraint", "change the table, or copy the rows by hand")
            }
            _ => return None,
        };
        Some(Self { description: format!("{description} ({constraint})"), next_step })
    }
}

fn query_error(action: impl Into<String>) -> impl FnOnce(tokio_postgres::Error) -> CopyError {
    let action = action.into();
    move |source| CopyError::Query { action, source }
}

/// Copies tables back as `request` specifies. `results` receives the results of recreated tables even if the copy
/// fails.
///
/// # Errors
/// [`CopyError`] if the request cannot be served as made, or a database, a tool or the state file fails. Unless the
/// error occurred during the commit or later, the rows of existing tables have not changed. Missing tables, or only
/// their schemas, may have been recreated.
pub async fn copy(
    settings: &BackupSettings,
    request: &TableCopy,
    state: &mut SideState,
    results: &mut Vec<CopiedTable>,
) -> Result<(), CopyError> {
    let request_id = state.request_id.clone();
    let side = settings.server.connect(SIDE_DATABASE, APPLICATION_NAME).await?;
    let mut live = settings.server.connect(settings.server.database(), APPLICATION_NAME).await?;
    for client in [&side, &live] {
        client.batch_execute(SESSION_SETTINGS).await.map_err(query_error("apply the session settings"))?;
    }
    let side_tables =
        row_counts::list_tables(&side).await.map_err(query_error("list the snapshot's tables"))?;
    let mut table_names: Vec<&str> = request.tables.iter().map(String::as_str).collect();
    table_names.sort_unstable();
    table_names.dedup();
    for table in &table_names {
        if !side_tables.iter().any(|name| name == table) || table.starts_with(GATEWAY_SCHEMA_PREFIX) {
            return Err(CopyError::NoSuchTable { table: (*table).to_owned() });
        }
    }
    let committed = read_committed_results(&live, &request_id).await?;
    let (mut missing_tables, mut recreated, mut existing) = (Vec::new(), Vec::new(), Vec::new());
    for table in table_names {
        let exists =
            catalog::is_table(&live, table).await.map_err(query_error("check whether a table exists"))?;
        match exists {
            // A committed copy is never repeated.
            false if committed.is_some() => {}
            false => missing_tables.push(table),
            // An earlier run of this request recreated the table before it was interrupted.
            true if state.recreating.iter().any(|name| name == table) => recreated.push(table),
            true => existing.push(table),
        }
    }
    let missing_results = recreate::count_recreated(&side, &missing_tables).await?;
    let dependents = Dependents::find(&side, &live, &missing_tables, &recreated).await;
    let dependents = dependents.map_err(query_error("read the dependents of the tables"))?;
    let is_committed = committed.is_some();
    match committed {
        Some(earlier) => *results = earlier,
        None => results.extend(recreate::count_recreated(&side, &recreated).await?),
    }
    if request.dry_run {
        results.extend(missing_results);
        dependents.record_planned(results);
    } else if !missing_results.is_empty() {
        state.recreating.extend(missing_tables.iter().map(|table| (*table).to_owned()));
        state.write(&settings.layout)?;
        dependents
            .defer_validation(&side)
            .await
            .map_err(query_error("prepare the snapshot's foreign keys"))?;
        recreate_tables(settings, &side, &live, &missing_tables, &dependents).await?;
        results.extend(missing_results);
        failpoint::trigger("side.recreated")?;
    }
    let copied = match is_committed || existing.is_empty() {
        true => Ok(Vec::new()),
        false => copy_rows(&side, &mut live, &existing, request, &request_id, results).await,
    };
    // The dependents come last, because their content and validity depend on the copied rows. They are added even if
    // the copy failed: no later request would look for the dependents of tables that exist.
    let recreates_tables = !missing_tables.is_empty() || !recreated.is_empty();
    let should_add_dependents = recreates_tables && !request.dry_run;
    let added = match should_add_dependents {
        true => dependents.recreate(settings, &side, &mut live, results).await,
        false => Ok(()),
    };
    results.extend(copied?);
    added.map_err(query_error("add the dependents of the tables"))?;
    if should_add_dependents {
        failpoint::trigger("side.dependents")?;
    }
    Ok(())
}

/// Recreates the tables without the views that were dropped with them, so that a view that the current database rejects
/// does not prevent their recreation. If that fails, retries with the views: a table whose policy or rule reads a view
/// can only be recreated together with that view.
async fn recreate_tables(
    settings: &BackupSettings,
    side: &Client,
    live: &Client,
    tables: &[&str],
    dependents: &Dependents,
) -> Result<(), RecreateError> {
    let Err(error) = recreate::recreate_relations(settings, side, live, tables).await else { return Ok(()) };
    let with_views: Vec<&str> = tables.iter().copied().chain(dependents.views()).collect();
    if with_views.len() == tables.len() {
        return Err(error);
    }
    recreate::recreate_relations(settings, side, live, &with_views).await.map_err(|_| error)
}

/// Returns the results if an earlier, interrupted run of this request committed its copy.
async fn read_committed_results(
    live: &Client,
    request_id: &str,
) -> Result<Option<Vec<CopiedTable>>, CopyError> {
    let has_log =
        catalog::is_table(live, "svc.side_copies").await.map_err(query_error("read the log of copies"))?;
    if !has_log {
        return Ok(None);
    }
    let query = "SELECT tables::text FROM svc.side_copies WHERE request_id = $1";
    let row = live.query_opt(query, &[&request_id]).await.map_err(query_error("read the log of copies"))?;
    let text: Option<String> = row.and_then(|row| row.try_get(0).ok());
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
}

/// Copies the rows of existing tables, in one transaction. `recreated` has the results of the recreated tables, for the
/// log.
async fn copy_rows(
    side: &Client,
    live: &mut Client,
    tables: &[&str],
    request: &TableCopy,
    request_id: &str,
    recreated: &[CopiedTable],
) -> Result<Vec<CopiedTable>, CopyError> {
    let mut transaction = live.transaction().await.map_err(query_error("begin the copy"))?;
    transaction
        .batch_execute("SET LOCAL lock_timeout = '60s'")
        .await
        .map_err(query_error("begin the copy"))?;
    transaction.batch_execute(CREATE_COPY_LOG).await.map_err(query_error("record the copy"))?;
    let foreign_keys =
        catalog::read_foreign_keys(&transaction, tables).await.map_err(query_error("read foreign keys"))?;
    let edges: Vec<(String, String)> =
        foreign_keys.iter().map(|key| (key.from.clone(), key.to.clone())).collect();
    let ordered = plan::sort_parents_first(tables, &edges);

    let mut plans = Vec::with_capacity(ordered.len());
    for (number, table) in ordered.iter().enumerate() {
        let lock = format!("LOCK TABLE ONLY {table} IN SHARE ROW EXCLUSIVE MODE");
        transaction.batch_execute(&lock).await.map_err(query_error(format!("lock {table}")))?;
        let current = catalog::read_columns(&transaction, table)
            .await
            .map_err(query_error(format!("inspect {table}")))?;
        let snapshot =
            catalog::read_columns(side, table).await.map_err(query_error(format!("inspect {table}")))?;
        let plan = CopyPlan::new(number, table, &current, &snapshot, request.mode)?;
        load_rows(side, &transaction, &plan).await?;
        plans.push(plan);
    }
    failpoint::trigger("side.fetched")?;
    // The owner's triggers, defaults and checks must resolve names as in any other session.
    transaction
        .batch_execute("SET LOCAL search_path TO DEFAULT")
        .await
        .map_err(query_error("reset the search path"))?;
    let savepoint = transaction.savepoint("changes").await.map_err(query_error("begin the copy"))?;
    let result = change_rows(&savepoint, &plans, &foreign_keys).await;
    let can_replace_all_rows =
        request.mode == CopyMode::Replace && !plans.iter().any(|plan| plan.has_added_columns);
    let copied = match result {
        // Even if the snapshot's rows satisfy a constraint, changing rows table by table can violate it temporarily: a
        // row that is yet to be updated refers to a deleted row, or two rows exchange their unique values.
        Err(CopyError::ConstraintViolation { .. }) if can_replace_all_rows => {
            savepoint.rollback().await.map_err(query_error("repeat the copy"))?;
            plans.iter_mut().for_each(CopyPlan::replace_all_rows);
            change_rows(&transaction, &plans, &foreign_keys).await?
        }
        result => {
            let copied = result?;
            savepoint.commit().await.map_err(query_error("complete the copy"))?;
            copied
        }
    };
    if request.dry_run {
        transaction.rollback().await.map_err(query_error("roll back the dry run"))?;
        return Ok(copied);
    }
    let logged: Vec<&CopiedTable> = recreated.iter().chain(&copied).collect();
    let logged = serde_json::to_string(&logged).expect("plain fields serialize to JSON");
    let insert_log = "INSERT INTO svc.side_copies (request_id, tables) VALUES ($1, $2::text::jsonb)";
    transaction.execute(insert_log, &[&request_id, &logged]).await.map_err(query_error("record the copy"))?;
    failpoint::trigger("side.copied")?;
    // These changes come last, because a rollback does not undo them.
    for plan in &plans {
        let sequence_updates = catalog::build_sequence_updates(&transaction, &plan.table).await;
        for statement in sequence_updates.map_err(copy_error(plan))? {
            transaction.batch_execute(&statement).await.map_err(copy_error(plan))?;
        }
    }
    transaction.commit().await.map_err(query_error("commit the copy"))?;
    failpoint::trigger("side.committed")?;
    Ok(copied)
}

/// Changes the rows of all tables. The plans must be sorted parents first.
async fn change_rows(
    transaction: &Transaction<'_>,
    plans: &[CopyPlan],
    foreign_keys: &[ForeignKey],
) -> Result<Vec<CopiedTable>, CopyError> {
    let mut copied: Vec<CopiedTable> = plans
        .iter()
        .map(|plan| CopiedTable {
            name: plan.table.clone(),
            left_out: plan.left_out.clone(),
            ..CopiedTable::default()
        })
        .collect();
    if plans.iter().all(|plan| plan.mode == CopyMode::Replace) {
        delete_rows(transaction, plans, foreign_keys, &mut copied).await?;
    }
    for (plan, result) in plans.iter().zip(&mut copied) {
        if let Some(update) = plan.build_update().filter(|_| plan.mode != CopyMode::Missing) {
            result.updated = execute(transaction, plan, &update).await?;
        }
        let skip_conflicts = plan.mode == CopyMode::Missing
            && !catalog::has_deferrable_unique(transaction, &plan.table).await.map_err(copy_error(plan))?;
        result.inserted = execute(transaction, plan, &plan.build_insert(skip_conflicts)).await?;
        if let Some(missing) = plan.build_count_missing().filter(|_| skip_conflicts) {
            result.skipped = query_count(transaction, plan, &missing).await?;
        }
    }
    // Otherwise, deferred constraints would be checked only by the commit: after the sequences were changed, and never
    // in a dry run.
    if let Some(plan) = plans.first() {
        let tables: Vec<&str> = plans.iter().map(|plan| plan.table.as_str()).collect();
        let check = transaction.batch_execute("SET CONSTRAINTS ALL IMMEDIATE").await;
        check.map_err(rows_error(tables.join(", "), plan.mode))?;
    }
    Ok(copied)
}

/// Deletes the rows that the snapshot lacks, and refuses deletions that may change rows of a table that is not copied.
async fn delete_rows(
    transaction: &Transaction<'_>,
    plans: &[CopyPlan],
    foreign_keys: &[ForeignKey],
    copied: &mut [CopiedTable],
) -> Result<(), CopyError> {
    let mut cascades = Vec::with_capacity(plans.len());
    for plan in plans {
        let keys = find_external_cascades(plan, plans, foreign_keys);
        let count = match keys.is_empty() {
            true => 0,
            false => query_count(transaction, plan, &plan.build_count()).await?,
        };
        cascades.push((keys, count));
    }
    // Children come first: referring rows are deleted before the rows that they refer to.
    for ((plan, result), (keys, count)) in plans.iter().zip(copied).zip(&mut cascades).rev() {
        for key in &*keys {
            // Until the copy ends, no row may start to refer to a deleted row.
            let lock = format!("LOCK TABLE ONLY {} IN SHARE MODE", key.from);
            transaction.batch_execute(&lock).await.map_err(copy_error(plan))?;
            let query = plan.build_has_referring_rows(key);
            let row = transaction.query_one(&query, &[]).await.map_err(copy_error(plan))?;
            if row.try_get::<_, bool>(0).map_err(copy_error(plan))? {
                return Err(cascade_error(key));
            }
        }
        result.deleted = execute(transaction, plan, &plan.build_delete()).await?;
        *count = count.saturating_sub(result.deleted);
    }
    // A row that the snapshot also has may have been moved to a newer parent, and been deleted with that parent.
    for (plan, (keys, count)) in plans.iter().zip(&cascades) {
        let Some(key) = keys.first() else { continue };
        if query_count(transaction, plan, &plan.build_count()).await? < *count {
            return Err(cascade_error(key));
        }
    }
    Ok(())
}

/// Returns the foreign keys by which deletions from the plan's table change rows of tables that are not copied.
fn find_external_cascades<'a>(
    plan: &CopyPlan,
    plans: &[CopyPlan],
    foreign_keys: &'a [ForeignKey],
) -> Vec<&'a ForeignKey> {
    let is_copied = |table: &str| plans.iter().any(|plan| plan.table == table);
    let is_external = |key: &&ForeignKey| key.to == plan.table && key.is_cascading && !is_copied(&key.from);
    foreign_keys.iter().filter(is_external).collect()
}

fn cascade_error(key: &ForeignKey) -> CopyError {
    CopyError::Cascades { table: key.to.clone(), other: key.from.clone() }
}

fn copy_error(plan: &CopyPlan) -> impl FnOnce(tokio_postgres::Error) -> CopyError + use<> {
    rows_error(plan.table.clone(), plan.mode)
}

/// Like [`copy_error`], for several tables, whose names are in `table`.
fn rows_error(table: String, mode: CopyMode) -> impl FnOnce(tokio_postgres::Error) -> CopyError {
    move |source| match ConstraintViolation::parse(&source, mode) {
        Some(violation) => CopyError::ConstraintViolation { table, violation },
        None => CopyError::Query { action: format!("copy the rows of {table}"), source },
    }
}

/// Executes a statement of the plan. Returns the number of rows that it changed.
async fn execute(transaction: &Transaction<'_>, plan: &CopyPlan, statement: &str) -> Result<u64, CopyError> {
    transaction.execute(statement, &[]).await.map_err(copy_error(plan))
}

/// Executes a query that counts rows.
async fn query_count(transaction: &Transaction<'_>, plan: &CopyPlan, query: &str) -> Result<u64, CopyError> {
    let row = transaction.query_one(query, &[]).await.map_err(copy_error(plan))?;
    Ok(row.try_get::<_, i64>(0).map_err(copy_error(plan))?.unsigned_abs())
}

/// Creates the plan's temporary table and streams the snapshot's rows into it.
async fn load_rows(side: &Client, transaction: &Transaction<'_>, plan: &CopyPlan) -> Result<(), CopyError> {
    transaction.batch_execute(&plan.build_create_temporary()).await.map_err(copy_error(plan))?;
    let out = side.copy_out(&plan.build_copy_out()).await.map_err(copy_error(plan))?;
    let sink = transaction.copy_in::<_, Bytes>(&plan.build_copy_in()).await.map_err(copy_error(plan))?;
    futures_util::pin_mut!(out, sink);
    while let Some(chunk) = out.next().await {
        sink.feed(chunk.map_err(copy_error(plan))?).await.map_err(copy_error(plan))?;
    }
    sink.finish().await.map_err(copy_error(plan))?;
    for statement in plan.build_index_and_analyze() {
        transaction.batch_execute(&statement).await.map_err(copy_error(plan))?;
    }
    Ok(())
}

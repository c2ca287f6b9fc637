//! Loads a snapshot into a new database alongside the existing one: roles, contents, and database-level privileges and
//! settings. Row counts then verify that nothing is missing.

use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use tokio_postgres::Client;

use super::RestoreContext;
use super::database::ScratchPurpose;
use super::database::{self, ScratchDatabase};
use super::download::Dump;
use super::error::{LoadError, query_error};
use super::{roles, settings, stream};
use crate::snapshots::row_counts;
use crate::system::backoff::Backoff;
use crate::system::postgres;
use crate::system::postgres::{ConnectError, quote_ident};
use crate::system::postgres_tools;
use svc_base::failpoint;
use svc_base::quantity::pluralize;
use svc_store::snapshot::{DatabaseFacts, DatabaseSetting, Sidecar};

/// Timeout for loading a dump file. No database on a supported server type takes longer.
const LOAD_TIMEOUT: Duration = Duration::from_secs(12 * 3600);

/// How often the loaded size is queried.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

/// Connects with retries, since the database container may still be starting.
///
/// # Errors
/// [`ConnectError`] after the timeout, or immediately if retrying is pointless.
pub async fn connect_with_retries(context: &RestoreContext, database: &str) -> Result<Client, ConnectError> {
    let mut backoff = Backoff::new(context.outage_timeout);
    loop {
        match context.server.connect(database, context.name).await {
            Ok(client) => return Ok(client),
            Err(error) => {
                let is_permanent = match &error {
                    ConnectError::Failed { source, .. } => !postgres::is_unavailable(source),
                    _ => false,
                };
                if is_permanent || backoff.pause().await.is_err() {
                    return Err(error);
                }
            }
        }
    }
}

/// Rejects dumps from a newer PostgreSQL than the server's.
///
/// # Errors
/// [`LoadError::NewerPostgres`] if the dump is from a newer PostgreSQL, [`LoadError::Connect`] if connecting fails, or
/// [`LoadError::Query`] if the query fails.
pub async fn check_postgres_version(context: &RestoreContext, sidecar: &Sidecar) -> Result<(), LoadError> {
    let client = connect_with_retries(context, postgres::MAINTENANCE_DATABASE).await?;
    let row = client.query_one("SELECT current_setting('server_version_num')::int4 / 10000", &[]).await;
    let server: i32 =
        row.and_then(|row| row.try_get(0)).map_err(query_error("query the server's version"))?;
    match sidecar.pg_major() {
        Some(snapshot) if i64::from(snapshot) > i64::from(server) => {
            Err(LoadError::NewerPostgres { key: sidecar.key.clone(), snapshot, server })
        }
        _ => Ok(()),
    }
}

/// Loads and verifies a snapshot. On failure, the scratch database is dropped.
pub async fn load_into_scratch(
    context: &RestoreContext,
    dump: &Dump,
    sidecar: &Sidecar,
    purpose: ScratchPurpose,
) -> Result<ScratchDatabase, LoadError> {
    let mut client = connect_with_retries(context, postgres::MAINTENANCE_DATABASE).await?;
    for skipped in roles::create(&mut client, sidecar, purpose).await? {
        tracing::warn!("not restored from the snapshot: {skipped}");
    }
    failpoint::trigger("restore.roles")?;
    let scratch = create_scratch(&client, purpose, None).await?;
    let load_and_verify = async {
        failpoint::trigger("restore.created")?;
        tokio::select! {
            result = load(context, dump, &scratch.name) => result?,
            never = report_progress(context, &client, &scratch.name, sidecar) => match never {},
        }
        failpoint::trigger("restore.loaded")?;
        let scratch_client = connect_with_retries(context, &scratch.name).await?;
        if let Some(facts) = &sidecar.database {
            apply_properties(&scratch_client, &scratch.name, facts).await?;
        }
        failpoint::trigger("restore.applied")?;
        context.progress.start_phase("comparing tables and rows with the sidecar");
        compare_with_sidecar(context, &scratch_client, sidecar).await?;
        failpoint::trigger("restore.counted")?;
        Ok(())
    };
    match load_and_verify.await {
        Ok(()) => Ok(scratch),
        Err(error) => {
            database::drop_scratch(&client, &scratch.name).await;
            Err(error)
        }
    }
}

/// Creates a scratch database owned by `owner`, or by the connection's role if `None`. Its name contains a fresh
/// number, so a `pg_restore` that outlived a killed run can't write to it.
pub async fn create_scratch(
    client: &Client,
    purpose: ScratchPurpose,
    owner: Option<&str>,
) -> Result<ScratchDatabase, LoadError> {
    let number = svc_base::clock::now_ms().as_millisecond();
    let name = format!("{}{number}", purpose.name_prefix());
    let owner = owner.map(|owner| format!(" OWNER {}", quote_ident(owner))).unwrap_or_default();
    client
        .batch_execute(&format!("CREATE DATABASE {} TEMPLATE template0{owner}", quote_ident(&name)))
        .await
        .map_err(query_error("create a database for the snapshot"))?;
    let oid = database::find_oid(client, &name).await.map_err(query_error("find the new database"))?;
    let oid =
        oid.ok_or_else(|| LoadError::Mismatch(format!("{name} disappeared right after it was created")))?;
    Ok(ScratchDatabase { name, oid, number })
}

async fn load(context: &RestoreContext, dump: &Dump, database: &str) -> Result<(), LoadError> {
    match dump {
        Dump::File(path) => load_file(context, path, database).await,
        Dump::InStore(snapshot) => stream::load(context, snapshot, database).await,
    }
}

async fn load_file(context: &RestoreContext, dump: &Path, database: &str) -> Result<(), LoadError> {
    let command = context.tools.load_command(&context.server, database, dump).map_err(LoadError::Tool)?;
    run_pg_restore(command).await
}

/// Runs `pg_restore` to completion.
///
/// # Errors
/// [`LoadError::Tool`] if the tool cannot be run, [`LoadError::TimedOut`] after `LOAD_TIMEOUT`, or
/// [`LoadError::Restore`] with the tool's stderr if it fails.
pub async fn run_pg_restore(mut command: tokio::process::Command) -> Result<(), LoadError> {
    let mut child = command.spawn().map_err(LoadError::Tool)?;
    let stderr = postgres_tools::read_stderr_tail(child.stderr.take());
    let result = tokio::time::timeout(LOAD_TIMEOUT, async { tokio::join!(child.wait(), stderr) }).await;
    let (status, stderr) = result.map_err(|_| LoadError::TimedOut { seconds: LOAD_TIMEOUT.as_secs() })?;
    let status = status.map_err(LoadError::Tool)?;
    if status.success() { Ok(()) } else { Err(LoadError::Restore { status, stderr }) }
}

/// Reports the database size while loading.
async fn report_progress(
    context: &RestoreContext,
    client: &Client,
    database: &str,
    sidecar: &Sidecar,
) -> Infallible {
    const LOAD_PHASE: &str = "loading the snapshot";
    let total = sidecar.database.as_ref().map(|facts| facts.size_bytes);
    context.progress.start_bytes_phase(LOAD_PHASE, total);
    loop {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        // A failed query is retried at the next interval.
        if let Ok(row) = client.query_one("SELECT pg_database_size($1::text::name)", &[&database]).await {
            let loaded_bytes: i64 = row.try_get(0).unwrap_or_default();
            context.progress.report_bytes(LOAD_PHASE, loaded_bytes.unsigned_abs(), total);
        }
    }
}

/// Applies database-level properties that the dump doesn't include: owner, privileges and settings.
async fn apply_properties(client: &Client, database: &str, facts: &DatabaseFacts) -> Result<(), LoadError> {
    let name = quote_ident(database);
    let run = async |statement: String| {
        client
            .batch_execute(&statement)
            .await
            .map_err(query_error("apply the database's privileges and settings"))
    };
    if let Some(owner) = &facts.owner {
        run(format!("ALTER DATABASE {name} OWNER TO {}", quote_ident(owner))).await?;
    }
    if let Some(grants) = &facts.grants {
        run(format!("REVOKE ALL ON DATABASE {name} FROM PUBLIC")).await?;
        for grant in grants.iter().filter(|grant| is_privilege(&grant.privilege)) {
            let grantee = grant.grantee.as_deref().map_or("PUBLIC".to_owned(), quote_ident);
            let option = if grant.grantable { " WITH GRANT OPTION" } else { "" };
            run(format!("GRANT {} ON DATABASE {name} TO {grantee}{option}", grant.privilege)).await?;
        }
    }
    for setting in &facts.settings {
        apply_setting(client, &name, setting).await?;
    }
    Ok(())
}

fn is_privilege(name: &str) -> bool {
    ["CREATE", "CONNECT", "TEMPORARY", "TEMP"].contains(&name)
}

/// Stores a setting without applying it to this session. Otherwise `default_transaction_read_only` or `role`, for
/// example, would break the next statement or the row counts.
async fn apply_setting(client: &Client, database: &str, setting: &DatabaseSetting) -> Result<(), LoadError> {
    let target = match &setting.role {
        Some(role) => format!("ALTER ROLE {} IN DATABASE {database}", quote_ident(role)),
        None => format!("ALTER DATABASE {database}"),
    };
    let assignment = settings::format_assignment(&setting.name, &setting.value);
    let action = format!("set {} for the database", setting.name);
    client.batch_execute(&format!("{target} SET {assignment}")).await.map_err(query_error(action))
}

/// Checks that the database's tables and row counts match the sidecar exactly.
pub async fn compare_with_sidecar(
    context: &RestoreContext,
    client: &Client,
    sidecar: &Sidecar,
) -> Result<(), LoadError> {
    client
        .batch_execute("SET search_path = pg_catalog; SET row_security = off; SET statement_timeout = 0")
        .await
        .map_err(query_error("count the rows"))?;
    let names = row_counts::list_tables(client).await.map_err(query_error("list the tables"))?;
    let total = sidecar.tables.iter().fold(0_u64, |sum, table| sum.saturating_add(table.rows));
    let (mut counted_tables, mut rows) = (Vec::with_capacity(names.len()), 0_u64);
    for name in &names {
        counted_tables.extend(
            row_counts::count_rows(client, std::slice::from_ref(name))
                .await
                .map_err(query_error("count the rows"))?,
        );
        rows = rows.saturating_add(counted_tables.last().map_or(0, |table| table.rows));
        context.progress.report_rows(rows, total);
    }
    let mut recorded = sidecar.tables.clone();
    counted_tables.sort();
    recorded.sort();
    match recorded
        .iter()
        .find(|table| !counted_tables.contains(table))
        .or_else(|| counted_tables.iter().find(|table| !recorded.contains(table)))
    {
        None => Ok(()),
        Some(table) => {
            let describe = |tables: &[svc_store::snapshot::TableCount]| {
                let rows = tables.iter().find(|other| other.name == table.name).map(|other| other.rows);
                rows.map_or("no table".to_owned(), |rows| pluralize(rows, "row"))
            };
            let (found, expected) = (describe(&counted_tables), describe(&recorded));
            let reason = format!("{}: {found} restored, {expected} recorded", table.name);
            Err(LoadError::Mismatch(reason))
        }
    }
}

//! The `operations` table and its log. An operation is created, claimed under a lease, advanced by the lease holder,
//! and ended.
//!
//! Invariant: [`advance`], [`suspend`] and [`renew`] take effect only while `owner` holds an unexpired lease, by the
//! database's clock.

use std::time::Duration;

use deadpool_postgres::{GenericClient, Transaction};
use jiff::Timestamp;
use serde_json::Value;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::operation_metrics;
use super::{DbError, execute, query, query_opt};
use svc_http::request_id;
use svc_machine::id::{MachineId, OperationId};
use svc_machine::operation::{OperationKind, OperationOptions};

#[derive(Debug, Clone)]
pub struct OperationRow {
    pub id: OperationId,
    pub machine: MachineId,
    pub kind: String,
    pub state: String,
    pub step: String,
    pub facts: Value,
    pub options: OperationOptions,
    /// `{code, detail, snapshotKey}` while the operation waits for an operator's decision; the key may be absent.
    pub question: Option<Value>,
    pub attempts: i32,
    pub error_code: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    /// The id of the request, or of the reconciler's pass, that created the operation.
    pub request_id: String,
}

pub(super) const COLUMNS: &str = "operation_id, machine_id, kind, state, step, facts, options, question, attempts, error_code, created_at, \
                       updated_at, ended_at, request_id";

impl OperationRow {
    pub(super) fn parse(row: &Row) -> Self {
        Self {
            id: OperationId(row.get("operation_id")),
            machine: MachineId(row.get("machine_id")),
            kind: row.get("kind"),
            state: row.get("state"),
            step: row.get("step"),
            facts: row.get("facts"),
            options: serde_json::from_value(row.get("options")).unwrap_or_default(),
            question: row.get("question"),
            attempts: row.get("attempts"),
            error_code: row.get("error_code"),
            created_at: row.get("created_at"),
            updated_at: row.get("updated_at"),
            ended_at: row.get("ended_at"),
            request_id: row.get("request_id"),
        }
    }

    pub fn has_ended(&self) -> bool {
        self.state != "running"
    }

    /// Returns the kind's name for messages, or the raw kind if a newer release created the operation.
    pub fn noun(&self) -> &str {
        self.kind.parse().map_or(self.kind.as_str(), |kind: OperationKind| kind.noun())
    }
}

/// Creates an operation for the current request.
pub async fn create(
    tx: &Transaction<'_>,
    machine: MachineId,
    kind: OperationKind,
    options: OperationOptions,
) -> Result<OperationId, DbError> {
    let id = OperationId::new();
    let sql = "INSERT INTO operations (operation_id, machine_id, kind, state, step, request_id, options) \
               VALUES ($1, $2, $3, 'running', $4, $5, $6)";
    let options = serde_json::to_value(options).unwrap_or_default();
    let first_step = kind.first_step().as_str();
    execute(tx, sql, &[&id.0, &machine.0, &kind.as_str(), &first_step, &request_id::current(), &options])
        .await?;
    log(tx, id, first_step, "filed", None).await?;
    Ok(id)
}

pub async fn get(client: &impl GenericClient, id: OperationId) -> Result<Option<OperationRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM operations WHERE operation_id = $1");
    Ok(query_opt(client, &sql, &[&id.0]).await?.as_ref().map(OperationRow::parse))
}

/// Lists a machine's operations, newest first.
pub async fn list_for_machine(
    client: &impl GenericClient,
    machine: MachineId,
) -> Result<Vec<OperationRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM operations WHERE machine_id = $1 ORDER BY operation_id DESC");
    Ok(query(client, &sql, &[&machine.0]).await?.iter().map(OperationRow::parse).collect())
}

/// Finds a machine's newest operation of a kind.
pub async fn find_newest(
    client: &impl GenericClient,
    machine: MachineId,
    kind: &str,
) -> Result<Option<OperationRow>, DbError> {
    Ok(list_for_machine(client, machine).await?.into_iter().find(|operation| operation.kind == kind))
}

/// Finds a machine's running operation.
pub async fn find_running(
    client: &impl GenericClient,
    machine: MachineId,
) -> Result<Option<OperationRow>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM operations WHERE machine_id = $1 AND state = 'running' ORDER BY operation_id LIMIT 1"
    );
    Ok(query_opt(client, &sql, &[&machine.0]).await?.as_ref().map(OperationRow::parse))
}

pub async fn log(
    client: &impl GenericClient,
    id: OperationId,
    step: &str,
    outcome: &str,
    detail: Option<&str>,
) -> Result<(), DbError> {
    let sql = "INSERT INTO operation_log (operation_id, step, outcome, detail) VALUES ($1, $2, $3, $4)";
    execute(client, sql, &[&id.0, &step, &outcome, &detail]).await.map(drop)
}

/// Ends a machine's running operations. The lease remains, to show which process may still be working.
pub async fn end_running(
    tx: &Transaction<'_>,
    machine: MachineId,
    state: &str,
    error_code: Option<&str>,
) -> Result<(), DbError> {
    let sql = "UPDATE operations SET state = $2, error_code = $3, ended_at = now(), updated_at = now(), \
               question = NULL \
               WHERE machine_id = $1 AND state = 'running' RETURNING operation_id, step, kind, created_at";
    for ended in query(tx, sql, &[&machine.0, &state, &error_code]).await? {
        operation_metrics::record_end(ended.get(2), state, ended.get(3));
        log(tx, OperationId(ended.get(0)), ended.get(1), state, error_code).await?;
    }
    Ok(())
}

/// Ends one operation, unless it has already ended.
pub async fn end(
    tx: &Transaction<'_>,
    id: OperationId,
    state: &str,
    error_code: Option<&str>,
) -> Result<(), DbError> {
    let sql = "UPDATE operations SET state = $2, error_code = $3, ended_at = now(), updated_at = now(), \
               question = NULL WHERE operation_id = $1 AND state = 'running' RETURNING step, kind, created_at";
    if let Some(ended) = query_opt(tx, sql, &[&id.0, &state, &error_code]).await? {
        operation_metrics::record_end(ended.get(1), state, ended.get(2));
        log(tx, id, ended.get(0), state, error_code).await?;
    }
    Ok(())
}

/// Counts the running operations by kind.
pub async fn count_running_by_kind(client: &impl GenericClient) -> Result<Vec<(String, i64)>, DbError> {
    let sql = "SELECT kind, count(*) FROM operations WHERE state = 'running' GROUP BY kind";
    Ok(query(client, sql, &[]).await?.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// The limits beyond which an operation counts as stalled.
pub struct StallLimits<'a> {
    progress_timeout_seconds: f64,
    max_age_seconds: f64,
    runnable: RunnableSteps<'a>,
}

impl<'a> StallLimits<'a> {
    /// - `progress_timeout`: maximum time without progress. Time during which a problem with the provider account
    ///   blocks the operation does not count.
    /// - `max_age`: maximum time since the operation was created, since an operator last continued it, or since a
    ///   problem with the provider account last stopped blocking it, whichever is latest.
    /// - `runnable`: operations that only other releases support never count as stalled.
    pub fn new(progress_timeout: Duration, max_age: Duration, runnable: RunnableSteps<'a>) -> Self {
        let (progress_timeout_seconds, max_age_seconds) =
            (progress_timeout.as_secs_f64(), max_age.as_secs_f64());
        Self { progress_timeout_seconds, max_age_seconds, runnable }
    }

    /// The parameters `$1` to `$5` of [`Self::CONDITION`].
    fn params(&self) -> [&(dyn ToSql + Sync); 5] {
        let RunnableSteps { kinds, steps } = &self.runnable;
        [&self.progress_timeout_seconds, &self.max_age_seconds, kinds, steps, &PROVIDER_ACCOUNT_BLOCKED]
    }

    /// Excludes operations that are waiting for an operator or are blocked by a problem with the provider account, and
    /// deletions and server removals, which are retried until an operator abandons them.
    const CONDITION: &'static str = "state = 'running' AND kind NOT IN ('delete', 'remove_server') \
         AND question IS NULL AND error_code IS DISTINCT FROM $5 AND kind = ANY($3) AND step = ANY($4) \
         AND (greatest(created_at, progress_at) <= clock_timestamp() - make_interval(secs => $1) \
              OR greatest(created_at, account_unblocked_at, (SELECT max(at) FROM operation_log \
                WHERE outcome = 'continued' AND operation_log.operation_id = operations.operation_id)) \
                <= clock_timestamp() - make_interval(secs => $2))";
}

/// Lists the oldest stalled operations, at most 100.
pub async fn list_stalled(
    client: &impl GenericClient,
    limits: &StallLimits<'_>,
) -> Result<Vec<OperationRow>, DbError> {
    let condition = StallLimits::CONDITION;
    let sql = format!("SELECT {COLUMNS} FROM operations WHERE {condition} ORDER BY created_at LIMIT 100");
    Ok(query(client, &sql, &limits.params()).await?.iter().map(OperationRow::parse).collect())
}

/// Returns whether the operation is still stalled: it may have progressed since it was listed. The row of a stalled
/// operation stays locked until the transaction ends.
pub async fn lock_stalled(
    tx: &Transaction<'_>,
    id: OperationId,
    limits: &StallLimits<'_>,
) -> Result<bool, DbError> {
    let condition = StallLimits::CONDITION;
    let sql = format!("SELECT 1 FROM operations WHERE operation_id = $6 AND {condition} FOR UPDATE");
    let [timeout, max_age, kinds, steps, blocked] = limits.params();
    Ok(query_opt(tx, &sql, &[timeout, max_age, kinds, steps, blocked, &id.0]).await?.is_some())
}

/// A long-running operation and its machine's handle.
pub struct LongRunningOperation {
    pub operation: OperationRow,
    pub handle: String,
    pub age_seconds: f64,
}

/// Lists at most `limit` running operations created more than `age` ago, oldest first, and counts all such operations.
pub async fn list_long_running(
    client: &impl GenericClient,
    age: Duration,
    limit: i64,
) -> Result<(Vec<LongRunningOperation>, i64), DbError> {
    let columns: Vec<String> = COLUMNS.split(", ").map(|column| format!("o.{}", column.trim())).collect();
    let sql = format!(
        "SELECT {}, m.handle, extract(epoch FROM clock_timestamp() - o.created_at)::float8 AS age, \
         count(*) OVER () AS total FROM operations o JOIN user_machines m USING (machine_id) \
         WHERE o.state = 'running' AND o.created_at <= now() - make_interval(secs => $1) \
         ORDER BY o.created_at LIMIT $2",
        columns.join(", ")
    );
    let rows = query(client, &sql, &[&age.as_secs_f64(), &limit]).await?;
    let total = rows.first().map_or(0, |row| row.get("total"));
    let parse = |row: &Row| LongRunningOperation {
        operation: OperationRow::parse(row),
        handle: row.get("handle"),
        age_seconds: row.get("age"),
    };
    Ok((rows.iter().map(parse).collect(), total))
}

/// Suspends an operation until an operator decides. Returns whether `owner` still held its lease.
pub async fn suspend(
    client: &impl GenericClient,
    id: OperationId,
    owner: Uuid,
    question: &Value,
    facts: &Value,
) -> Result<bool, DbError> {
    let sql = "UPDATE operations SET question = $3, facts = $4, error_code = NULL, due_at = 'infinity', \
               lease_owner = NULL, lease_until = NULL, updated_at = clock_timestamp() \
               WHERE operation_id = $1 AND lease_owner = $2 AND lease_until > clock_timestamp() \
               AND state = 'running'";
    Ok(execute(client, sql, &[&id.0, &owner, &question, &facts]).await? == 1)
}

/// Makes the operation's step due immediately, with the options that an operator's decision sets.
pub async fn resume(tx: &Transaction<'_>, id: OperationId, options: OperationOptions) -> Result<(), DbError> {
    let options = serde_json::to_value(options).unwrap_or_default();
    let sql = "UPDATE operations SET question = NULL, options = $2, due_at = clock_timestamp(), attempts = 0, \
               failing_since = NULL, error_code = NULL, progress_at = clock_timestamp(), \
               updated_at = clock_timestamp() WHERE operation_id = $1 AND state = 'running'";
    execute(tx, sql, &[&id.0, &options]).await.map(drop)
}

/// Finds when an operation on the machine last failed with this code.
pub async fn find_last_failure_time(
    client: &impl GenericClient,
    machine: MachineId,
    code: &str,
) -> Result<Option<Timestamp>, DbError> {
    let sql =
        "SELECT max(ended_at) FROM operations WHERE machine_id = $1 AND state = 'failed' AND error_code = $2";
    Ok(query_opt(client, sql, &[&machine.0, &code]).await?.and_then(|row| row.get(0)))
}

/// Adds a fact to the operation, or replaces it.
pub async fn set_fact(
    tx: &Transaction<'_>,
    id: OperationId,
    name: &str,
    value: &serde_json::Value,
) -> Result<(), DbError> {
    let sql = "UPDATE operations SET facts = facts || jsonb_build_object($2::text, $3::jsonb) WHERE operation_id = $1";
    execute(tx, sql, &[&id.0, &name, value]).await.map(drop)
}

/// Reads and locks the row until the transaction ends.
pub async fn lock(tx: &Transaction<'_>, id: OperationId) -> Result<Option<OperationRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM operations WHERE operation_id = $1 FOR UPDATE");
    Ok(query_opt(tx, &sql, &[&id.0]).await?.as_ref().map(OperationRow::parse))
}

/// Moves an operation directly to a later step and ends its lease, even if a process holds it.
pub async fn skip_to_step(tx: &Transaction<'_>, id: OperationId, step: &str) -> Result<(), DbError> {
    let sql = "UPDATE operations SET step = $2, facts = '{}', attempts = 0, due_at = clock_timestamp(), \
               lease_owner = NULL, lease_until = NULL, updated_at = clock_timestamp() \
               WHERE operation_id = $1 AND state = 'running'";
    execute(tx, sql, &[&id.0, &step]).await.map(drop)
}

/// Records progress on the machine's running operation.
pub async fn record_progress(client: &impl GenericClient, machine: MachineId) -> Result<(), DbError> {
    let sql =
        "UPDATE operations SET progress_at = clock_timestamp() WHERE machine_id = $1 AND state = 'running'";
    execute(client, sql, &[&machine.0]).await.map(drop)
}

/// Loads the operation's age, by the database's clock.
pub async fn load_age(client: &impl GenericClient, id: OperationId) -> Result<Duration, DbError> {
    let sql = "SELECT extract(epoch FROM clock_timestamp() - created_at)::float8 FROM operations \
               WHERE operation_id = $1";
    let seconds: f64 = query_opt(client, sql, &[&id.0]).await?.map_or(0.0, |row| row.get(0));
    Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default())
}

/// Loads the time since a step was first started, by the database's clock.
pub async fn load_step_age(
    client: &impl GenericClient,
    id: OperationId,
    step: &str,
) -> Result<Duration, DbError> {
    let sql = "SELECT coalesce(extract(epoch FROM clock_timestamp() - min(at)), 0)::float8 FROM operation_log \
               WHERE operation_id = $1 AND step = $2 AND outcome = 'begun'";
    let seconds: f64 = query_opt(client, sql, &[&id.0, &step]).await?.map_or(0.0, |row| row.get(0));
    Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default())
}

/// Like [`load_step_age`], but counts from when a problem with the provider account last stopped blocking the
/// operation, if that is later; zero while such a problem is blocking it.
pub async fn load_unblocked_step_age(
    client: &impl GenericClient,
    id: OperationId,
    step: &str,
) -> Result<Duration, DbError> {
    let sql = "SELECT (CASE WHEN error_code IS NOT DISTINCT FROM $3 THEN 0 ELSE coalesce(extract(epoch FROM \
               clock_timestamp() - greatest(account_unblocked_at, (SELECT min(at) FROM operation_log \
                 WHERE operation_id = $1 AND step = $2 AND outcome = 'begun'))), 0) END)::float8 \
               FROM operations WHERE operation_id = $1";
    let row = query_opt(client, sql, &[&id.0, &step, &PROVIDER_ACCOUNT_BLOCKED]).await?;
    let seconds: f64 = row.map_or(0.0, |row| row.get(0));
    Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default())
}

/// Loads the time since the first of the step's consecutive failures, by the database's clock; zero if the step is not
/// failing.
pub async fn load_failure_age(client: &impl GenericClient, id: OperationId) -> Result<Duration, DbError> {
    let sql = "SELECT coalesce(extract(epoch FROM clock_timestamp() - failing_since), 0)::float8 \
               FROM operations WHERE operation_id = $1";
    let seconds: f64 = query_opt(client, sql, &[&id.0]).await?.map_or(0.0, |row| row.get(0));
    Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default())
}

/// The error code for a running operation that is blocked by a problem with the provider account. Such an operation has
/// no deadline.
pub const PROVIDER_ACCOUNT_BLOCKED: &str = "provider_account";

/// The kinds and steps that this release can run. All other kinds and steps belong to other releases.
pub struct RunnableSteps<'a> {
    pub kinds: &'a [&'a str],
    pub steps: &'a [&'a str],
}

/// Claims a due operation that has no lease and that this release can run. Operations whose step has not started come
/// first, then the longest overdue, so that a new operation does not wait behind operations that are polling.
pub async fn claim(
    client: &impl GenericClient,
    owner: Uuid,
    lease: Duration,
    runnable: &RunnableSteps<'_>,
) -> Result<Option<OperationRow>, DbError> {
    let sql = format!(
        "UPDATE operations SET lease_owner = $1, lease_until = clock_timestamp() + make_interval(secs => $2) \
         WHERE operation_id = (SELECT operation_id FROM operations WHERE state = 'running' \
           AND question IS NULL AND kind = ANY($3) AND step = ANY($4) \
           AND due_at <= clock_timestamp() AND (lease_until IS NULL OR lease_until <= clock_timestamp()) \
           ORDER BY coalesce(facts ->> 'begun' = step, false), due_at LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING {COLUMNS}"
    );
    let params: super::Params<'_> = &[&owner, &lease.as_secs_f64(), &runnable.kinds, &runnable.steps];
    Ok(query_opt(client, &sql, params).await?.as_ref().map(OperationRow::parse))
}

/// Returns the time until the first operation that this release can run is due and has no lease: zero if there is one
/// already, `None` if no such operation is running.
pub async fn load_time_until_due(
    client: &impl GenericClient,
    runnable: &RunnableSteps<'_>,
) -> Result<Option<Duration>, DbError> {
    let sql = "SELECT extract(epoch FROM min(greatest(due_at, lease_until)) - clock_timestamp())::float8 \
               FROM operations WHERE state = 'running' AND question IS NULL AND due_at < 'infinity' \
               AND kind = ANY($1) AND step = ANY($2)";
    let row = query_opt(client, sql, &[&runnable.kinds, &runnable.steps]).await?;
    let seconds: Option<f64> = row.and_then(|row| row.get(0));
    Ok(seconds.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)))
}

/// Counts the unfinished operations that this release cannot run.
pub async fn count_unsupported(
    client: &impl GenericClient,
    runnable: &RunnableSteps<'_>,
) -> Result<i64, DbError> {
    let sql = "SELECT count(*) FROM operations WHERE state = 'running' \
               AND NOT (kind = ANY($1) AND step = ANY($2))";
    Ok(query_opt(client, sql, &[&runnable.kinds, &runnable.steps]).await?.map_or(0, |row| row.get(0)))
}

/// The columns that [`advance`] writes.
pub struct OperationUpdate<'a> {
    pub state: &'a str,
    pub step: &'a str,
    pub facts: &'a Value,
    pub attempts: i32,
    pub error_code: Option<&'a str>,
    pub due_in: Duration,
    /// `None` releases the lease.
    pub lease: Option<Duration>,
}

/// Advances an operation if `owner` still holds its lease. Returns whether it was advanced. A new step, a new fact and
/// the end of a problem with the provider account count as progress. Failures during such a problem do not count toward
/// `failing_since`.
pub async fn advance(
    client: &impl GenericClient,
    id: OperationId,
    owner: Uuid,
    update: &OperationUpdate<'_>,
) -> Result<bool, DbError> {
    let sql = "UPDATE operations SET state = $3, step = $4, \
               progress_at = CASE WHEN step = $4 AND facts = $5 AND error_code IS DISTINCT FROM $10 \
               THEN progress_at ELSE clock_timestamp() END, \
               account_unblocked_at = CASE WHEN error_code = $10 AND $7::text IS DISTINCT FROM $10 \
               THEN clock_timestamp() ELSE account_unblocked_at END, \
               failing_since = CASE WHEN $6 = 0 OR $7::text IS NOT DISTINCT FROM $10 THEN NULL \
               WHEN attempts = 0 OR failing_since IS NULL THEN clock_timestamp() ELSE failing_since END, \
               facts = $5, attempts = $6, error_code = $7, due_at = clock_timestamp() + make_interval(secs => $8), \
               lease_owner = CASE WHEN $9::float8 IS NULL THEN NULL ELSE lease_owner END, \
               lease_until = clock_timestamp() + make_interval(secs => $9), updated_at = clock_timestamp(), \
               ended_at = CASE WHEN $3 = 'running' THEN NULL ELSE clock_timestamp() END \
               WHERE operation_id = $1 AND lease_owner = $2 AND lease_until > clock_timestamp() \
               AND state = 'running'";
    let lease = update.lease.map(|lease| lease.as_secs_f64());
    let params: super::Params<'_> = &[
        &id.0,
        &owner,
        &update.state,
        &update.step,
        &update.facts,
        &update.attempts,
        &update.error_code,
        &update.due_in.as_secs_f64(),
        &lease,
        &PROVIDER_ACCOUNT_BLOCKED,
    ];
    Ok(execute(client, sql, params).await? == 1)
}

/// Renews a lease if `owner` still holds it. Returns whether it was renewed.
pub async fn renew(
    client: &impl GenericClient,
    id: OperationId,
    owner: Uuid,
    lease: Duration,
) -> Result<bool, DbError> {
    let sql = "UPDATE operations SET lease_until = clock_timestamp() + make_interval(secs => $3) \
               WHERE operation_id = $1 AND lease_owner = $2 AND lease_until > clock_timestamp() \
               AND state = 'running'";
    Ok(execute(client, sql, &[&id.0, &owner, &lease.as_secs_f64()]).await? == 1)
}

/// Releases a lease, even on an ended operation, so that other processes need not wait for it to expire.
pub async fn release(client: &impl GenericClient, id: OperationId, owner: Uuid) -> Result<(), DbError> {
    let sql = "UPDATE operations SET lease_owner = NULL, lease_until = NULL \
               WHERE operation_id = $1 AND lease_owner = $2";
    execute(client, sql, &[&id.0, &owner]).await.map(drop)
}

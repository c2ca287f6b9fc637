//! `rollouts` and their machines.
//!
//! Invariant: a machine's state in a rollout changes only in a transaction that has locked the rollout's row.

use std::time::Duration;

use deadpool_postgres::{GenericClient, Transaction};
use jiff::Timestamp;
use serde_json::Value;
use tokio_postgres::Row;

use super::{DbError, execute, query, query_opt};
use crate::rollout_plan::{Member, VerificationState};
use svc_http::request_id;
use svc_machine::id::{MachineId, RolloutId};
use svc_machine::name::{Handle, ImageVersion};
use svc_wire::rollout::{MemberState, RolloutState};

#[derive(Debug, Clone)]
pub struct RolloutRow {
    pub id: RolloutId,
    pub image_version: ImageVersion,
    pub state: RolloutState,
    /// The reason for the state.
    pub why: Option<String>,
    /// Number of machines in the first batch.
    pub canary: i32,
    pub batch_size: i32,
    pub max_failures: i32,
    pub request_id: String,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    /// Whether the release is verified on the first machines that receive it.
    pub should_verify: bool,
    /// The result of the last verification.
    pub verification: Option<Value>,
    /// When the verifying process's claim ends, which may be in the past.
    pub verifying_until: Option<Timestamp>,
    pub is_verifying: bool,
}

const COLUMNS: &str = "rollout_id, image_version, state, why, canary, batch_size, max_failures, request_id, \
                       created_at, updated_at, ended_at, verify, verification, verifying_until, \
                       coalesce(verifying_until > clock_timestamp(), false) AS is_verifying";

impl RolloutRow {
    fn parse(row: &Row) -> Result<Self, DbError> {
        let unreadable = |reason: String| DbError::Unreadable { what: "rollout", reason };
        let version: &str = row.get("image_version");
        let state: &str = row.get("state");
        Ok(Self {
            id: RolloutId(row.get("rollout_id")),
            image_version: version.parse().map_err(|_| unreadable(version.to_owned()))?,
            state: state.parse().map_err(|_| unreadable(state.to_owned()))?,
            why: row.get("why"),
            canary: row.get("canary"),
            batch_size: row.get("batch_size"),
            max_failures: row.get("max_failures"),
            request_id: row.get("request_id"),
            created_at: row.get("created_at"),
            updated_at: row.get("updated_at"),
            ended_at: row.get("ended_at"),
            should_verify: row.get("verify"),
            verification: row.get("verification"),
            verifying_until: row.get("verifying_until"),
            is_verifying: row.get("is_verifying"),
        })
    }

    pub fn verification_state(&self) -> VerificationState {
        let has_passed = self.verification.as_ref().is_some_and(|last| last["passed"] == true);
        match (self.should_verify, has_passed, self.is_verifying) {
            (false, ..) | (_, true, _) => VerificationState::Satisfied,
            (_, _, true) => VerificationState::Running,
            _ => VerificationState::Due,
        }
    }
}

/// A rollout to insert.
pub struct NewRollout<'a> {
    pub image_version: &'a ImageVersion,
    pub canary: i32,
    pub batch_size: i32,
    pub max_failures: i32,
    pub should_verify: bool,
    /// The machines with their batches.
    pub machines: &'a [(MachineId, i32)],
}

/// Inserts a running rollout and its machines.
///
/// # Errors
/// [`DbError`]; `Violated` with the constraint `rollouts_open` if another rollout is open.
pub async fn insert(tx: &Transaction<'_>, new: &NewRollout<'_>) -> Result<RolloutId, DbError> {
    let id = RolloutId::new();
    let sql = "INSERT INTO rollouts (rollout_id, image_version, state, canary, batch_size, max_failures, request_id, verify) \
               VALUES ($1, $2, 'running', $3, $4, $5, $6, $7)";
    let version = new.image_version.as_str();
    let request = request_id::current();
    let params: super::Params<'_> =
        &[&id.0, &version, &new.canary, &new.batch_size, &new.max_failures, &request, &new.should_verify];
    execute(tx, sql, params).await?;
    let (machines, batches): (Vec<uuid::Uuid>, Vec<i32>) =
        new.machines.iter().map(|(id, batch)| (id.0, *batch)).unzip();
    let sql = "INSERT INTO rollout_machines (rollout_id, machine_id, batch, state) \
               SELECT $1, machine, batch, 'waiting' FROM unnest($2::uuid[], $3::int4[]) AS members (machine, batch)";
    execute(tx, sql, &[&id.0, &machines, &batches]).await?;
    Ok(id)
}

pub async fn get(client: &impl GenericClient, id: RolloutId) -> Result<Option<RolloutRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM rollouts WHERE rollout_id = $1");
    query_opt(client, &sql, &[&id.0]).await?.as_ref().map(RolloutRow::parse).transpose()
}

/// Reads and locks the row until the transaction ends.
pub async fn lock(tx: &Transaction<'_>, id: RolloutId) -> Result<Option<RolloutRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM rollouts WHERE rollout_id = $1 FOR UPDATE");
    query_opt(tx, &sql, &[&id.0]).await?.as_ref().map(RolloutRow::parse).transpose()
}

/// Like [`lock`], but also returns `None` if another transaction holds the lock.
pub async fn try_lock(tx: &Transaction<'_>, id: RolloutId) -> Result<Option<RolloutRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM rollouts WHERE rollout_id = $1 FOR UPDATE SKIP LOCKED");
    query_opt(tx, &sql, &[&id.0]).await?.as_ref().map(RolloutRow::parse).transpose()
}

/// Finds the rollout that is running or paused; at most one exists.
pub async fn find_open(client: &impl GenericClient) -> Result<Option<RolloutRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM rollouts WHERE state IN ('running', 'paused')");
    query_opt(client, &sql, &[]).await?.as_ref().map(RolloutRow::parse).transpose()
}

/// Lists at most 20 rollouts that are open or still waiting for machines to update, oldest first.
pub async fn list_unfinished(client: &impl GenericClient) -> Result<Vec<RolloutRow>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM rollouts WHERE state IN ('running', 'paused') OR rollout_id IN \
         (SELECT rollout_id FROM rollout_machines WHERE state = 'asked') ORDER BY created_at LIMIT 20"
    );
    query(client, &sql, &[]).await?.iter().map(RolloutRow::parse).collect()
}

/// Lists the running machines that a rollout would update, in batch order: all machines, or only those with these
/// handles, except those in `except`.
///
/// Machines in test slots come first: a failing canary stops the rollout, and owners, who have root, could make a
/// canary fail. The other machines are in random order, so that the canary varies. All silent machines come last.
pub async fn list_eligible_machines(
    client: &impl GenericClient,
    handles: Option<&[Handle]>,
    except: &[Handle],
) -> Result<Vec<(MachineId, String)>, DbError> {
    let handles: Option<Vec<&str>> = handles.map(|handles| handles.iter().map(Handle::as_str).collect());
    let except: Vec<&str> = except.iter().map(Handle::as_str).collect();
    // A silent canary would fail even if the release works.
    let sql = "SELECT m.machine_id, m.handle FROM user_machines m LEFT JOIN slots s USING (idp_user_id, slot) \
               WHERE m.deleted_at IS NULL AND m.retired_at IS NULL AND m.status = 'running' \
               AND m.powered_off_at IS NULL AND ($1::text[] IS NULL OR m.handle = ANY ($1)) AND m.handle <> ALL ($2) \
               ORDER BY coalesce(m.heartbeat_at < clock_timestamp() - interval '2 minutes', true), \
               CASE WHEN s.is_test THEN m.machine_id END NULLS LAST, random()";
    let rows = query(client, sql, &[&handles, &except]).await?;
    Ok(rows.iter().map(|row| (MachineId(row.get(0)), row.get(1))).collect())
}

/// Timeouts for a host whose update was requested.
#[derive(Debug, Clone, Copy)]
pub struct UpdateTimeouts {
    /// Counts from the request, from the end of a pause, or from the host's last report of an update in progress,
    /// whichever is latest.
    pub progress: Duration,
    /// Counts from the request or, if later, the end of a pause, regardless of reports: the host may be running another
    /// update, or may never finish.
    pub total: Duration,
}

/// Records when machines last reported an update in progress, so that their progress timeout counts from that report,
/// even after a later report shows a different state.
pub async fn record_progress(tx: &Transaction<'_>, rollout: RolloutId) -> Result<(), DbError> {
    let sql = "UPDATE rollout_machines r SET updating_at = m.heartbeat_at FROM user_machines m \
               WHERE r.rollout_id = $1 AND r.state = 'asked' AND m.machine_id = r.machine_id AND m.updating \
               AND m.heartbeat_at > greatest(r.asked_at, r.updating_at)";
    execute(tx, sql, &[&rollout.0]).await.map(drop)
}

/// Loads the current state of a rollout's machines.
pub async fn list_members(
    client: &impl GenericClient,
    rollout: &RolloutRow,
    timeouts: UpdateTimeouts,
) -> Result<Vec<Member>, DbError> {
    // A failed update counts only if it differs from the last update before the request. No host becomes overdue
    // while its rollout is paused, because hosts receive no requests during that time.
    let sql = "SELECT r.machine_id, r.batch, r.state, \
               m.deleted_at IS NULL AND m.retired_at IS NULL AND m.status = 'running' AND m.powered_off_at IS NULL, \
               m.image_version = $2 AND NOT m.updating AND m.health ->> 'gateway' = 'ok' AND m.health ->> 'database' = 'ok', \
               CASE WHEN m.last_update IS DISTINCT FROM r.update_before AND m.last_update ->> 'version' = $2 \
                   AND m.last_update ->> 'outcome' <> 'updated' \
                   THEN concat_ws(': ', m.last_update ->> 'outcome', m.last_update ->> 'error') END, \
               coalesce($3 AND (greatest(r.asked_at, r.resumed_at, r.updating_at) <= clock_timestamp() - make_interval(secs => $4) \
                   OR greatest(r.asked_at, r.resumed_at) <= clock_timestamp() - make_interval(secs => $5)), false) \
               FROM rollout_machines r JOIN user_machines m USING (machine_id) WHERE r.rollout_id = $1 \
               ORDER BY r.batch, r.machine_id";
    let version = rollout.image_version.as_str();
    let can_be_overdue = rollout.state != RolloutState::Paused;
    let (progress, total) = (timeouts.progress.as_secs_f64(), timeouts.total.as_secs_f64());
    let rows = query(client, sql, &[&rollout.id.0, &version, &can_be_overdue, &progress, &total]).await?;
    rows.iter()
        .map(|row| {
            Ok(Member {
                machine: MachineId(row.get(0)),
                batch: row.get(1),
                state: parse_member_state(row.get(2))?,
                is_running: row.get(3),
                is_updated: row.get::<_, Option<bool>>(4).unwrap_or(false),
                failure: row.get(5),
                is_overdue: row.get(6),
            })
        })
        .collect()
}

fn parse_member_state(text: &str) -> Result<MemberState, DbError> {
    text.parse().map_err(|_| DbError::Unreadable { what: "rollout machine's state", reason: text.to_owned() })
}

pub async fn end_member(
    tx: &Transaction<'_>,
    rollout: RolloutId,
    machine: MachineId,
    state: MemberState,
    error: Option<&str>,
) -> Result<(), DbError> {
    let sql = "UPDATE rollout_machines SET state = $3, error = $4, ended_at = clock_timestamp() \
               WHERE rollout_id = $1 AND machine_id = $2 AND state IN ('waiting', 'asked')";
    execute(tx, sql, &[&rollout.0, &machine.0, &state.as_str(), &error]).await.map(drop)
}

pub async fn request_update(
    tx: &Transaction<'_>,
    rollout: RolloutId,
    machine: MachineId,
) -> Result<(), DbError> {
    let sql = "UPDATE rollout_machines r SET state = 'asked', asked_at = clock_timestamp(), update_before = m.last_update \
               FROM user_machines m WHERE r.rollout_id = $1 AND r.machine_id = $2 AND m.machine_id = r.machine_id \
               AND r.state = 'waiting'";
    execute(tx, sql, &[&rollout.0, &machine.0]).await.map(drop)
}

/// Restarts the timeouts of machines whose update was requested: hosts received no requests during the pause.
pub async fn restart_timeouts(tx: &Transaction<'_>, rollout: RolloutId) -> Result<(), DbError> {
    let sql = "UPDATE rollout_machines SET resumed_at = clock_timestamp() WHERE rollout_id = $1 AND state = 'asked'";
    execute(tx, sql, &[&rollout.0]).await.map(drop)
}

/// Claims the machines whose update was requested and whose hosts have not been notified, and marks them as notified.
pub async fn claim_unnotified(tx: &Transaction<'_>, rollout: RolloutId) -> Result<Vec<MachineId>, DbError> {
    let sql = "UPDATE rollout_machines SET nudged_at = clock_timestamp() WHERE rollout_id = $1 AND state = 'asked' \
               AND nudged_at IS NULL RETURNING machine_id";
    Ok(query(tx, sql, &[&rollout.0]).await?.iter().map(|row| MachineId(row.get(0))).collect())
}

/// Claims the verification for `ttl`, and returns the rollout with its claim.
pub async fn claim_verification(
    tx: &Transaction<'_>,
    rollout: RolloutId,
    ttl: Duration,
) -> Result<Option<RolloutRow>, DbError> {
    let sql = format!(
        "UPDATE rollouts SET verifying_until = clock_timestamp() + make_interval(secs => $2) WHERE rollout_id = $1 \
         RETURNING {COLUMNS}"
    );
    query_opt(tx, &sql, &[&rollout.0, &ttl.as_secs_f64()]).await?.as_ref().map(RolloutRow::parse).transpose()
}

/// Extends a claim to `ttl` from now. Returns `None` if another process now holds the claim, or an operator has reset
/// it.
pub async fn renew_verification(
    client: &impl GenericClient,
    claimed: &RolloutRow,
    ttl: Duration,
) -> Result<Option<RolloutRow>, DbError> {
    let sql = format!(
        "UPDATE rollouts SET verifying_until = clock_timestamp() + make_interval(secs => $3) \
         WHERE rollout_id = $1 AND verifying_until = $2 RETURNING {COLUMNS}"
    );
    query_opt(client, &sql, &[&claimed.id.0, &claimed.verifying_until, &ttl.as_secs_f64()])
        .await?
        .as_ref()
        .map(RolloutRow::parse)
        .transpose()
}

/// Records the result of a verification and ends its claim. Returns whether the claim was still held.
pub async fn record_verification(
    tx: &Transaction<'_>,
    claimed: &RolloutRow,
    verification: &Value,
) -> Result<bool, DbError> {
    let sql = "UPDATE rollouts SET verification = $3, verifying_until = NULL, updated_at = clock_timestamp() \
               WHERE rollout_id = $1 AND verifying_until = $2";
    Ok(execute(tx, sql, &[&claimed.id.0, &claimed.verifying_until, &verification]).await? > 0)
}

/// Deletes a verification's result and its claim, so that the verification is repeated, unless it has passed.
pub async fn reset_verification(tx: &Transaction<'_>, rollout: RolloutId) -> Result<(), DbError> {
    let sql = "UPDATE rollouts SET verification = NULL, verifying_until = NULL WHERE rollout_id = $1 \
               AND NOT coalesce((verification ->> 'passed')::boolean, false)";
    execute(tx, sql, &[&rollout.0]).await.map(drop)
}

/// Lists the first 100 machines, in batch order, that were updated to the release, whether or not they still run it.
pub async fn list_updated(
    client: &impl GenericClient,
    rollout: RolloutId,
) -> Result<Vec<MachineId>, DbError> {
    let sql = "SELECT machine_id FROM rollout_machines WHERE rollout_id = $1 AND state = 'updated' \
               ORDER BY batch, machine_id LIMIT 100";
    Ok(query(client, sql, &[&rollout.0]).await?.iter().map(|row| MachineId(row.get(0))).collect())
}

/// Lists at most 100 updated machines that are still running the release and serving: since its update, a machine may
/// have been rolled back, updated again, replaced, deleted or powered off, or have failed. With `only`, returns at most
/// that machine.
pub async fn list_running_release(
    client: &impl GenericClient,
    rollout: &RolloutRow,
    only: Option<MachineId>,
) -> Result<Vec<MachineId>, DbError> {
    let sql = "SELECT r.machine_id FROM rollout_machines r JOIN user_machines m USING (machine_id) \
               WHERE r.rollout_id = $1 AND r.state = 'updated' AND ($3::uuid IS NULL OR r.machine_id = $3) \
               AND m.image_version = $2 AND m.updating IS NOT TRUE AND m.status = 'running' AND m.deleted_at IS NULL \
               AND m.retired_at IS NULL AND m.powered_off_at IS NULL ORDER BY r.batch, r.machine_id LIMIT 100";
    let (version, only) = (rollout.image_version.as_str(), only.map(|machine| machine.0));
    let rows = query(client, sql, &[&rollout.id.0, &version, &only]).await?;
    Ok(rows.iter().map(|row| MachineId(row.get(0))).collect())
}

pub async fn set_state(
    tx: &Transaction<'_>,
    rollout: RolloutId,
    state: RolloutState,
    reason: Option<&str>,
) -> Result<(), DbError> {
    let sql = "UPDATE rollouts SET state = $2, why = $3, updated_at = clock_timestamp(), \
               ended_at = CASE WHEN $4 THEN clock_timestamp() END WHERE rollout_id = $1";
    execute(tx, sql, &[&rollout.0, &state.as_str(), &reason, &state.has_ended()]).await.map(drop)
}

/// The release that a machine should run, and the id of the request that started its rollout.
pub struct DesiredRelease {
    pub image_version: ImageVersion,
    pub request_id: String,
}

/// Finds the release that a running rollout has requested for a machine.
pub async fn find_desired_release(
    client: &impl GenericClient,
    machine: MachineId,
) -> Result<Option<DesiredRelease>, DbError> {
    let sql = "SELECT o.image_version, o.request_id FROM rollout_machines r JOIN rollouts o USING (rollout_id) \
               WHERE r.machine_id = $1 AND r.state = 'asked' AND o.state = 'running'";
    let Some(row) = query_opt(client, sql, &[&machine.0]).await? else { return Ok(None) };
    let version: &str = row.get(0);
    let parsed = version.parse();
    let image_version =
        parsed.map_err(|error| DbError::Unreadable { what: "rollout", reason: format!("{error}") })?;
    Ok(Some(DesiredRelease { image_version, request_id: row.get(1) }))
}

/// Lists the newest rollouts, newest first.
pub async fn list_newest(client: &impl GenericClient, limit: i64) -> Result<Vec<RolloutRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM rollouts ORDER BY created_at DESC, rollout_id DESC LIMIT $1");
    query(client, &sql, &[&limit]).await?.iter().map(RolloutRow::parse).collect()
}

/// Counts the machines by rollout and state.
pub async fn count_machines(
    client: &impl GenericClient,
    rollouts: &[RolloutRow],
) -> Result<Vec<(RolloutId, MemberState, u64)>, DbError> {
    let ids: Vec<uuid::Uuid> = rollouts.iter().map(|rollout| rollout.id.0).collect();
    let sql =
        "SELECT rollout_id, state, count(*) FROM rollout_machines WHERE rollout_id = ANY ($1) GROUP BY 1, 2";
    let rows = query(client, sql, &[&ids]).await?;
    let count = |row: &Row| {
        Ok((RolloutId(row.get(0)), parse_member_state(row.get(1))?, row.get::<_, i64>(2).unsigned_abs()))
    };
    rows.iter().map(count).collect()
}

/// A machine in a rollout.
pub struct RolloutMachineRow {
    pub machine: MachineId,
    pub handle: String,
    pub slot: String,
    pub batch: i32,
    pub state: MemberState,
    pub error: Option<String>,
    pub asked_at: Option<Timestamp>,
    pub ended_at: Option<Timestamp>,
    pub image_version: String,
}

/// Lists a rollout's machines, in batch order.
pub async fn list_machines(
    client: &impl GenericClient,
    rollout: RolloutId,
) -> Result<Vec<RolloutMachineRow>, DbError> {
    let sql = "SELECT r.machine_id, m.handle, m.slot, r.batch, r.state, r.error, r.asked_at, r.ended_at, m.image_version \
               FROM rollout_machines r JOIN user_machines m USING (machine_id) WHERE r.rollout_id = $1 \
               ORDER BY r.batch, r.machine_id";
    let rows = query(client, sql, &[&rollout.0]).await?;
    let parse = |row: &Row| {
        Ok(RolloutMachineRow {
            machine: MachineId(row.get(0)),
            handle: row.get(1),
            slot: row.get(2),
            batch: row.get(3),
            state: parse_member_state(row.get(4))?,
            error: row.get(5),
            asked_at: row.get(6),
            ended_at: row.get(7),
            image_version: row.get(8),
        })
    };
    rows.iter().map(parse).collect()
}

//! Reads and records the servers that the inventory compares with the provider's list, and reads the installation's id,
//! with which they are labeled.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::machine_row::MachineRow;
use super::{DbError, execute, query, query_opt};
use svc_machine::id::MachineId;

/// A machine's server that must exist or may hold data.
#[derive(Debug, Clone, Copy)]
pub struct TrackedServer {
    pub machine: MachineId,
    pub server: i64,
    /// Time since the host's last heartbeat, its registration or the machine's creation, whichever is latest.
    pub silent_for: Duration,
}

/// Reads the id of this installation, which all platform processes share.
pub async fn load_installation_id(client: &impl GenericClient) -> Result<Uuid, DbError> {
    let row = query_opt(client, "SELECT installation_id FROM installation", &[]).await?;
    let missing = || DbError::Unreadable { what: "installation", reason: "the table is empty".to_owned() };
    row.map(|row| row.get(0)).ok_or_else(missing)
}

/// Reads the database's clock.
pub async fn now(client: &impl GenericClient) -> Result<Timestamp, DbError> {
    let row = query_opt(client, "SELECT clock_timestamp()", &[]).await?;
    Ok(row.map_or(Timestamp::MIN, |row| row.get(0)))
}

/// Counts of the servers that belong to the platform's machines.
#[derive(Debug, Clone, Copy)]
pub struct OwnServerCounts {
    /// Recorded, and not recorded as deleted.
    pub existing: u64,
    /// Requested or about to be requested for a machine that has no server yet. A machine that has failed or left its
    /// slot may still receive the server requested for it.
    pub ordered: u64,
}

/// The provider's count of the project's servers, and the platform's own count from just before it.
#[derive(Debug, Clone, Copy)]
pub struct ListedServerCount {
    /// `None` if the provider did not respond.
    pub listed: Option<u64>,
    /// [`OwnServerCounts::existing`] before the provider's count was requested.
    pub recorded: u64,
}

pub async fn count_own(client: &impl GenericClient) -> Result<OwnServerCounts, DbError> {
    let sql = "SELECT count(*) FILTER (WHERE provider_server_id IS NOT NULL AND server_deleted_at IS NULL), \
               count(*) FILTER (WHERE provider_server_id IS NULL AND (create_ordered_at IS NOT NULL \
                   OR deleted_at IS NULL AND retired_at IS NULL AND status IN ('provisioning', 'recovering'))) \
               FROM user_machines WHERE server_deleted_at IS NULL";
    let counted = query_opt(client, sql, &[]).await?;
    let count = |column: usize| counted.as_ref().map_or(0, |row| row.get::<_, i64>(column).unsigned_abs());
    Ok(OwnServerCounts { existing: count(0), ordered: count(1) })
}

/// Lists at most 10 other machines in this machine's slot whose servers exist or were requested, oldest first.
pub async fn list_others_in_slot(
    client: &impl GenericClient,
    machine: &MachineRow,
) -> Result<Vec<MachineId>, DbError> {
    let sql = "SELECT machine_id FROM user_machines WHERE idp_user_id = $1 AND slot = $2 AND machine_id <> $3 \
               AND server_deleted_at IS NULL AND (provider_server_id IS NOT NULL OR create_ordered_at IS NOT NULL) \
               AND failure_cause IS DISTINCT FROM 'server_gone' ORDER BY epoch LIMIT 10";
    let rows = query(client, sql, &[&machine.user.as_str(), &machine.slot.as_str(), &machine.id.0]).await?;
    Ok(rows.iter().map(|row| MachineId(row.get(0))).collect())
}

/// SQL condition for machines that hold their slot and are marked as failed if their server disappears: machines that
/// are running, being resized or being reinstated, or can resume after a failed resize.
const EXPECTED: &str = "deleted_at IS NULL AND retired_at IS NULL AND provider_server_id IS NOT NULL \
    AND (status IN ('running', 'resizing') \
        OR status = 'failed' AND coalesce(failure_cause IN ('resize', 'reinstating'), false))";

pub async fn list_expected(client: &impl GenericClient) -> Result<Vec<TrackedServer>, DbError> {
    list_servers_where(client, EXPECTED).await
}

/// Lists the machines that [`list_expected`] does not return and whose servers may hold data and have not been recorded
/// as missing.
pub async fn list_holding_data(client: &impl GenericClient) -> Result<Vec<TrackedServer>, DbError> {
    let condition = format!(
        "provider_server_id IS NOT NULL AND server_deleted_at IS NULL AND server_missing_since IS NULL \
         AND (registered_at IS NOT NULL OR unsaved_since IS NOT NULL) AND NOT ({EXPECTED})"
    );
    list_servers_where(client, &condition).await
}

/// Lists the matching servers in random order, so that a pass that checks only some of them does not always skip the
/// same ones.
async fn list_servers_where(
    client: &impl GenericClient,
    condition: &str,
) -> Result<Vec<TrackedServer>, DbError> {
    let sql = format!(
        "SELECT machine_id, provider_server_id, \
             extract(epoch FROM now() - greatest(heartbeat_at, registered_at, created_at))::float8 \
         FROM user_machines WHERE {condition} ORDER BY random()"
    );
    let rows = query(client, &sql, &[]).await?;
    let parse = |row: &Row| TrackedServer {
        machine: MachineId(row.get(0)),
        server: row.get(1),
        silent_for: Duration::try_from_secs_f64(row.get::<_, f64>(2).max(0.0)).unwrap_or_default(),
    };
    Ok(rows.iter().map(parse).collect())
}

/// Counts the machines that failed within the last `period` because their servers had disappeared.
pub async fn count_recent_server_losses(
    client: &impl GenericClient,
    period: Duration,
) -> Result<usize, DbError> {
    let sql = "SELECT count(*) FROM operator_audit WHERE action = 'server.gone' \
               AND at > now() - make_interval(secs => $1)";
    let count: i64 = query_opt(client, sql, &[&period.as_secs_f64()]).await?.map_or(0, |row| row.get(0));
    Ok(usize::try_from(count).unwrap_or_default())
}

/// Records that the provider lists these servers, so that they no longer count as missing.
pub async fn record_seen(client: &impl GenericClient, servers: &[i64]) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET server_missing_since = NULL \
               WHERE server_missing_since IS NOT NULL AND provider_server_id = ANY($1)";
    execute(client, sql, &[&servers]).await.map(drop)
}

/// Restores the records of former machines' servers that were recorded as deleted but that the provider still lists.
/// Returns those machines and servers.
pub async fn record_late_servers(
    client: &impl GenericClient,
    listed: &HashMap<MachineId, i64>,
    listed_at: Timestamp,
) -> Result<Vec<(MachineId, i64)>, DbError> {
    // A server that was deleted after the list was requested must not be recorded again.
    let sql = "UPDATE user_machines m SET provider_server_id = listed.server, server_deleted_at = NULL \
               FROM unnest($1::uuid[], $2::bigint[]) AS listed (machine, server) \
               WHERE m.machine_id = listed.machine AND (m.deleted_at IS NOT NULL OR m.retired_at IS NOT NULL) \
               AND m.server_deleted_at < $3::timestamptz - interval '5 seconds' \
               RETURNING m.machine_id, m.provider_server_id";
    let (machines, servers): (Vec<Uuid>, Vec<i64>) =
        listed.iter().map(|(machine, server)| (machine.0, *server)).unzip();
    let rows = query(client, sql, &[&machines, &servers, &listed_at]).await?;
    Ok(rows.iter().map(|row| (MachineId(row.get(0)), row.get(1))).collect())
}

/// Records that the machine's server is missing, and returns how long it has been missing; zero if the machine no
/// longer has this server.
pub async fn record_missing(
    client: &impl GenericClient,
    tracked: &TrackedServer,
) -> Result<Duration, DbError> {
    let sql = "UPDATE user_machines SET server_missing_since = coalesce(server_missing_since, clock_timestamp()) \
               WHERE machine_id = $1 AND provider_server_id = $2 \
               RETURNING extract(epoch FROM clock_timestamp() - server_missing_since)::float8";
    let row = query_opt(client, sql, &[&tracked.machine.0, &tracked.server]).await?;
    let seconds: f64 = row.map_or(0.0, |row| row.get(0));
    Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default())
}

/// Returns which of these machines are in the database, including former ones.
pub async fn filter_known(
    client: &impl GenericClient,
    machines: &[MachineId],
) -> Result<HashSet<MachineId>, DbError> {
    let ids: Vec<Uuid> = machines.iter().map(|id| id.0).collect();
    let rows =
        query(client, "SELECT machine_id FROM user_machines WHERE machine_id = ANY($1)", &[&ids]).await?;
    Ok(rows.iter().map(|row| MachineId(row.get(0))).collect())
}

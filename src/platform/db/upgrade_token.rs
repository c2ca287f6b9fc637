//! Reads and writes the `user_machines` columns for a machine's `UPGRADE_TOKEN`. The rules are in
//! `crate::token_rotation`.

use std::time::Duration;

use deadpool_postgres::{GenericClient, Transaction};
use tokio_postgres::Row;

use super::machine_row::ACTIVE;
use super::{DbError, execute, query};
use crate::token_rotation::{PreviousToken, UpgradeToken};
use crate::tokens::Generation;
use svc_machine::id::MachineId;

/// Parses the columns for a machine's token.
///
/// # Errors
/// `Unreadable` if a stored value is invalid.
pub fn parse(row: &Row) -> Result<UpgradeToken, DbError> {
    let generation: i32 = row.get("upgrade_token_generation");
    let unreadable =
        |_| DbError::Unreadable { what: "upgrade_token_generation", reason: generation.to_string() };
    let previous = row.get::<_, Option<Vec<u8>>>("previous_token_hash").zip(row.get("previous_token_until"));
    Ok(UpgradeToken {
        hash: row.get("upgrade_token_hash"),
        generation: Generation(u32::try_from(generation).map_err(unreadable)?),
        rotated_at: row.get("upgrade_token_rotated_at"),
        requested_at: row.get("upgrade_token_requested_at"),
        previous: previous.map(|(hash, until)| PreviousToken { hash, until }),
    })
}

/// Records that a heartbeat has used a later generation for the first time. The previous token stays valid for
/// `overlap`. A pending request for a rotation is fulfilled if the host's last recorded heartbeat arrived after the
/// request ([`UpgradeToken::advance`] gives the reason). Returns `false`, and changes nothing, if this or a later
/// generation has already been recorded.
pub async fn advance(
    tx: &Transaction<'_>,
    id: MachineId,
    to: Generation,
    hash: &[u8],
    overlap: Duration,
) -> Result<bool, DbError> {
    let sql = "UPDATE user_machines SET previous_token_hash = upgrade_token_hash, \
               previous_token_until = clock_timestamp() + make_interval(secs => $4), \
               upgrade_token_generation = $2, upgrade_token_hash = $3, \
               upgrade_token_rotated_at = clock_timestamp(), \
               upgrade_token_requested_at = CASE WHEN heartbeat_at > upgrade_token_requested_at THEN NULL \
                 ELSE upgrade_token_requested_at END \
               WHERE machine_id = $1 AND upgrade_token_generation < $2";
    let out_of_range = |_| DbError::OutOfRange { what: "upgrade_token_generation", value: to.0 };
    let to = i32::try_from(to.0).map_err(out_of_range)?;
    Ok(execute(tx, sql, &[&id.0, &to, &hash, &overlap.as_secs_f64()]).await? == 1)
}

/// Records that an operator has requested the rotation of a machine's token. The time of a pending request is kept.
pub async fn request_rotation(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET upgrade_token_requested_at = clock_timestamp() \
               WHERE machine_id = $1 AND upgrade_token_requested_at IS NULL";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Requests a rotation for every registered machine that holds its slot, and returns how many requests are new.
pub async fn request_all_rotations(client: &impl GenericClient) -> Result<u64, DbError> {
    let sql = format!(
        "UPDATE user_machines SET upgrade_token_requested_at = clock_timestamp() WHERE {ACTIVE} \
         AND registered_at IS NOT NULL AND upgrade_token_requested_at IS NULL"
    );
    execute(client, &sql, &[]).await
}

/// A machine's token, for checking whether it was issued with the current platform key.
pub struct MachineToken {
    pub machine: MachineId,
    pub generation: Generation,
    pub hash: Vec<u8>,
    /// Whether the host has been silent for at least `max_heartbeat_gap`; a key rotation does not wait for such hosts.
    pub is_silent: bool,
}

/// Lists the tokens of machines that hold their slots and come after the machine `after`, in order.
pub async fn list_after(
    client: &impl GenericClient,
    after: MachineId,
    max_heartbeat_gap: Duration,
    limit: i64,
) -> Result<Vec<MachineToken>, DbError> {
    let sql = format!(
        "SELECT machine_id, upgrade_token_generation, upgrade_token_hash, \
         greatest(heartbeat_at, registered_at, created_at) <= now() - make_interval(secs => $2) \
         FROM user_machines WHERE {ACTIVE} AND machine_id > $1 ORDER BY machine_id LIMIT $3"
    );
    let rows = query(client, &sql, &[&after.0, &max_heartbeat_gap.as_secs_f64(), &limit]).await?;
    let parse = |row: &Row| MachineToken {
        machine: MachineId(row.get(0)),
        generation: Generation(row.get::<_, i32>(1).unsigned_abs()),
        hash: row.get(2),
        is_silent: row.get(3),
    };
    Ok(rows.iter().map(parse).collect())
}

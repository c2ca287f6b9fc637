//! Rows of `platform_keys` and `platform_processes`: the platform keys that each process uses, and a key rotation's
//! progress. The rules are in `crate::platform_key_rotation`.

use std::time::Duration;

use deadpool_postgres::{GenericClient, Transaction};
use tokio_postgres::Row;
use uuid::Uuid;

use super::{DbError, Params, execute, query, query_opt};
use crate::platform_key::{KeyId, KeyIds};

/// Minimum time for which the row of a process that ended without deleting it is kept.
const ENDED_PROCESS_RETENTION: Duration = Duration::from_secs(3600);

/// A process that writes to this database, with its platform keys.
#[derive(Debug, Clone)]
pub struct ProcessKeys {
    pub process: Uuid,
    pub ids: KeyIds,
    /// How long the process counts as running after its row was last renewed.
    pub ttl: Duration,
}

/// Another running process.
#[derive(Debug, Clone)]
pub struct OtherProcess {
    pub process: Uuid,
    /// The id of its current platform key.
    pub current: String,
}

/// The progress of the rotation to a new key.
#[derive(Debug, Clone, Default)]
pub struct RotationProgress {
    /// The last slot whose fence was processed.
    pub last_processed_slot: Option<(String, String)>,
    /// Whether every fence has been signed with the key.
    pub has_signed_fences: bool,
    /// Whether every stored secret uses the key.
    pub is_rotation_complete: bool,
}

impl ProcessKeys {
    /// Renews this process's row, and deletes the rows of processes that ended long ago. If the row was not renewed for
    /// half of `ttl`, `steady_since` is reset.
    pub async fn renew(&self, client: &impl GenericClient) -> Result<(), DbError> {
        let sql = "INSERT INTO platform_processes AS process (process_id, key_id, other_key_id) VALUES ($1, $2, $3) \
                   ON CONFLICT (process_id) DO UPDATE SET seen_at = clock_timestamp(), steady_since = \
                   CASE WHEN process.seen_at < clock_timestamp() - make_interval(secs => $4) \
                       THEN clock_timestamp() ELSE process.steady_since END";
        let previous = self.ids.previous.as_ref().map(KeyId::as_str);
        let max_gap = self.ttl.as_secs_f64() / 2.0;
        execute(client, sql, &[&self.process, &self.ids.current.as_str(), &previous, &max_gap]).await?;
        let sql =
            "DELETE FROM platform_processes WHERE seen_at < clock_timestamp() - make_interval(secs => $1)";
        execute(client, sql, &[&ENDED_PROCESS_RETENTION.max(self.ttl * 2).as_secs_f64()]).await.map(drop)
    }

    pub async fn delete(&self, client: &impl GenericClient) -> Result<(), DbError> {
        execute(client, "DELETE FROM platform_processes WHERE process_id = $1", &[&self.process])
            .await
            .map(drop)
    }

    /// Lists up to 100 running processes that cannot decrypt this process's secrets, or whose secrets this process
    /// cannot decrypt.
    pub async fn list_incompatible(&self, client: &impl GenericClient) -> Result<Vec<OtherProcess>, DbError> {
        let sql = "SELECT process_id, key_id FROM platform_processes WHERE process_id <> $1 \
                   AND seen_at > clock_timestamp() - make_interval(secs => $4) \
                   AND (($2 <> key_id AND $2 IS DISTINCT FROM other_key_id) \
                       OR (key_id <> $2 AND key_id IS DISTINCT FROM $3)) ORDER BY process_id LIMIT 100";
        let previous = self.ids.previous.as_ref().map(KeyId::as_str);
        let params: Params<'_> =
            &[&self.process, &self.ids.current.as_str(), &previous, &self.ttl.as_secs_f64()];
        Ok(query(client, sql, params).await?.iter().map(parse_other_process).collect())
    }

    /// Returns whether this process has renewed its row without a gap for at least `ttl`, and no process with a
    /// different current key was seen in that time.
    pub async fn is_settled(&self, client: &impl GenericClient) -> Result<bool, DbError> {
        let sql = "SELECT EXISTS (SELECT 1 FROM platform_processes WHERE process_id = $1 \
                       AND steady_since <= clock_timestamp() - make_interval(secs => $3)) \
                   AND NOT EXISTS (SELECT 1 FROM platform_processes WHERE key_id <> $2 \
                       AND seen_at > clock_timestamp() - make_interval(secs => $3))";
        let params: Params<'_> = &[&self.process, &self.ids.current.as_str(), &self.ttl.as_secs_f64()];
        Ok(query_opt(client, sql, params).await?.is_some_and(|row| row.get(0)))
    }
}

fn parse_other_process(row: &Row) -> OtherProcess {
    OtherProcess { process: row.get(0), current: row.get(1) }
}

/// Lists up to 100 running processes whose current key differs from `key`.
pub async fn list_with_other_key(
    client: &impl GenericClient,
    key: &KeyId,
    ttl: Duration,
) -> Result<Vec<OtherProcess>, DbError> {
    let sql = "SELECT process_id, key_id FROM platform_processes WHERE key_id <> $1 \
               AND seen_at > clock_timestamp() - make_interval(secs => $2) ORDER BY process_id LIMIT 100";
    Ok(query(client, sql, &[&key.as_str(), &ttl.as_secs_f64()])
        .await?
        .iter()
        .map(parse_other_process)
        .collect())
}

/// Counts the running processes, and those among them that have `key` as their current or previous key.
pub async fn count_with_key(
    client: &impl GenericClient,
    key: &KeyId,
    ttl: Duration,
) -> Result<(i64, i64), DbError> {
    let sql = "SELECT count(*), count(*) FILTER (WHERE $1 IN (key_id, other_key_id)) FROM platform_processes \
               WHERE seen_at > clock_timestamp() - make_interval(secs => $2)";
    let row = query_opt(client, sql, &[&key.as_str(), &ttl.as_secs_f64()]).await?;
    Ok(row.map_or((0, 0), |row| (row.get(0), row.get(1))))
}

/// Returns whether a release with these tables has migrated the database.
pub async fn has_tables(client: &impl GenericClient) -> Result<bool, DbError> {
    let row = query_opt(client, "SELECT to_regclass('platform_processes') IS NOT NULL", &[]).await?;
    Ok(row.is_some_and(|row| row.get(0)))
}

/// Returns whether any key has been recorded.
pub async fn has_any(client: &impl GenericClient) -> Result<bool, DbError> {
    let row = query_opt(client, "SELECT EXISTS (SELECT 1 FROM platform_keys)", &[]).await?;
    Ok(row.is_some_and(|row| row.get(0)))
}

/// Returns whether this key is recorded. Completing a rotation deletes the records of earlier keys.
pub async fn is_recorded(client: &impl GenericClient, key: &KeyId) -> Result<bool, DbError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM platform_keys WHERE key_id = $1)";
    Ok(query_opt(client, sql, &[&key.as_str()]).await?.is_some_and(|row| row.get(0)))
}

/// Records the first key for a database in which no stored secret uses a different key.
pub async fn insert_first(tx: &Transaction<'_>, key: &KeyId) -> Result<(), DbError> {
    let sql = "INSERT INTO platform_keys (key_id, fences_signed_at, sole_since) \
               VALUES ($1, clock_timestamp(), clock_timestamp())";
    execute(tx, sql, &[&key.as_str()]).await.map(drop)
}

/// Records that a process uses this key. Resets the rotation progress of every other key.
pub async fn record_use(tx: &Transaction<'_>, key: &KeyId) -> Result<(), DbError> {
    let sql = "INSERT INTO platform_keys (key_id) VALUES ($1) ON CONFLICT DO NOTHING";
    execute(tx, sql, &[&key.as_str()]).await?;
    let sql = "UPDATE platform_keys SET fences_user = NULL, fences_slot = NULL, fences_signed_at = NULL, \
               sole_since = NULL WHERE key_id <> $1";
    execute(tx, sql, &[&key.as_str()]).await.map(drop)
}

pub async fn load_progress(client: &impl GenericClient, key: &KeyId) -> Result<RotationProgress, DbError> {
    let sql = "SELECT fences_user, fences_slot, fences_signed_at IS NOT NULL, sole_since IS NOT NULL \
               FROM platform_keys WHERE key_id = $1";
    let row = query_opt(client, sql, &[&key.as_str()]).await?;
    Ok(row.map_or_else(RotationProgress::default, |row| RotationProgress {
        last_processed_slot: row.get::<_, Option<String>>(0).zip(row.get(1)),
        has_signed_fences: row.get(2),
        is_rotation_complete: row.get(3),
    }))
}

/// Records the last slot whose fence was processed, unless the recorded slot is no longer `before`.
pub async fn advance_fences(
    client: &impl GenericClient,
    key: &KeyId,
    before: Option<&(String, String)>,
    to: &(String, String),
) -> Result<(), DbError> {
    let sql = "UPDATE platform_keys SET fences_user = $4, fences_slot = $5 WHERE key_id = $1 \
               AND fences_signed_at IS NULL AND fences_user IS NOT DISTINCT FROM $2 \
               AND fences_slot IS NOT DISTINCT FROM $3";
    let (user, slot) = before.map(|(user, slot)| (user.as_str(), slot.as_str())).unzip();
    execute(client, sql, &[&key.as_str(), &user, &slot, &to.0, &to.1]).await.map(drop)
}

/// Records that every fence has been processed, unless the recorded slot is no longer `before`.
pub async fn finish_fences(
    client: &impl GenericClient,
    key: &KeyId,
    before: Option<&(String, String)>,
) -> Result<(), DbError> {
    let sql = "UPDATE platform_keys SET fences_signed_at = clock_timestamp() WHERE key_id = $1 \
               AND fences_signed_at IS NULL AND fences_user IS NOT DISTINCT FROM $2 \
               AND fences_slot IS NOT DISTINCT FROM $3";
    let (user, slot) = before.map(|(user, slot)| (user.as_str(), slot.as_str())).unzip();
    execute(client, sql, &[&key.as_str(), &user, &slot]).await.map(drop)
}

/// Lists at most `limit` slots that come after the slot `after`, in order.
pub async fn list_slots_after(
    client: &impl GenericClient,
    after: Option<&(String, String)>,
    limit: i64,
) -> Result<Vec<(String, String)>, DbError> {
    let sql = "SELECT DISTINCT idp_user_id, slot FROM user_machines WHERE (idp_user_id, slot) > ($1, $2) \
               ORDER BY idp_user_id, slot LIMIT $3";
    let (user, slot) = lower_bounds(after);
    let rows = query(client, sql, &[&user, &slot, &limit]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Counts the slots that come after the slot `after`.
pub async fn count_slots_after(
    client: &impl GenericClient,
    after: Option<&(String, String)>,
) -> Result<i64, DbError> {
    let sql = "SELECT count(*) FROM (SELECT DISTINCT idp_user_id, slot FROM user_machines \
               WHERE (idp_user_id, slot) > ($1, $2)) slots";
    let (user, slot) = lower_bounds(after);
    Ok(query_opt(client, sql, &[&user, &slot]).await?.map_or(0, |row| row.get(0)))
}

fn lower_bounds(after: Option<&(String, String)>) -> (&str, &str) {
    after.map_or(("", ""), |(user, slot)| (user.as_str(), slot.as_str()))
}

/// Records that every stored secret uses the current key. Deletes the rows of all keys except the current and the
/// previous one.
pub async fn record_rotation_complete(tx: &Transaction<'_>, ids: &KeyIds) -> Result<(), DbError> {
    let sql =
        "UPDATE platform_keys SET sole_since = clock_timestamp() WHERE key_id = $1 AND sole_since IS NULL";
    execute(tx, sql, &[&ids.current.as_str()]).await?;
    let previous = ids.previous.as_ref().map(KeyId::as_str);
    let sql = "DELETE FROM platform_keys WHERE key_id <> $1 AND key_id IS DISTINCT FROM $2";
    execute(tx, sql, &[&ids.current.as_str(), &previous]).await.map(drop)
}

//! Rows of `file_keys`: the sealed key of each slot's file backups.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::Timestamp;
use tokio_postgres::Row;

use super::{DbError, execute, query, query_opt};
use crate::platform_key::{KeyId, KeyIds};

/// A slot's sealed key. `user` and `slot` are the stored texts, to which the seal is bound.
pub struct SealedFilesKey {
    pub user: String,
    pub slot: String,
    pub sealed: Vec<u8>,
}

pub async fn find(
    client: &impl GenericClient,
    user: &str,
    slot: &str,
) -> Result<Option<SealedFilesKey>, DbError> {
    let sql = "SELECT idp_user_id, slot, sealed FROM file_keys WHERE idp_user_id = $1 AND slot = $2";
    Ok(query_opt(client, sql, &[&user, &slot]).await?.as_ref().map(parse))
}

/// Stores a key unless the slot has one.
pub async fn insert_if_absent(
    client: &impl GenericClient,
    key: &SealedFilesKey,
    sealed_with: &KeyId,
) -> Result<(), DbError> {
    // `pruned_at` equals `created_at` until the first prune.
    let sql = "INSERT INTO file_keys (idp_user_id, slot, sealed, key_id, created_at, pruned_at) \
               VALUES ($1, $2, $3, $4, statement_timestamp(), statement_timestamp()) ON CONFLICT DO NOTHING";
    execute(client, sql, &[&key.user, &key.slot, &key.sealed, &sealed_with.as_str()]).await.map(drop)
}

/// Lists keys that were sealed with this platform key, ordered by user and slot, starting after the given slot.
pub async fn list_sealed_with(
    client: &impl GenericClient,
    sealed_with: &KeyId,
    (user, slot): &(String, String),
    limit: i64,
) -> Result<Vec<SealedFilesKey>, DbError> {
    let sql = "SELECT idp_user_id, slot, sealed FROM file_keys \
               WHERE key_id = $1 AND (idp_user_id, slot) > ($2, $3) ORDER BY idp_user_id, slot LIMIT $4";
    let rows = query(client, sql, &[&sealed_with.as_str(), user, slot, &limit]).await?;
    Ok(rows.iter().map(parse).collect())
}

/// Counts the keys that were sealed with a platform key other than `current`, and lists the first of their slots.
pub async fn list_sealed_with_other(
    client: &impl GenericClient,
    current: &KeyId,
    limit: i64,
) -> Result<(u64, Vec<String>), DbError> {
    let sql = "SELECT idp_user_id || '/' || slot, count(*) OVER () FROM file_keys WHERE key_id <> $1 \
               ORDER BY idp_user_id, slot LIMIT $2";
    let rows = query(client, sql, &[&current.as_str(), &limit]).await?;
    let count: i64 = rows.first().map_or(0, |row| row.get(1));
    Ok((count.unsigned_abs(), rows.iter().map(|row| row.get(0)).collect()))
}

/// Finds a key that was sealed with neither of a process's platform keys, and returns its slot.
pub async fn find_sealed_with_neither(
    client: &impl GenericClient,
    ids: &KeyIds,
) -> Result<Option<String>, DbError> {
    let sql = "SELECT idp_user_id || '/' || slot FROM file_keys WHERE key_id <> $1 AND key_id <> $2 LIMIT 1";
    let previous = ids.previous.as_ref().unwrap_or(&ids.current);
    let row = query_opt(client, sql, &[&ids.current.as_str(), &previous.as_str()]).await?;
    Ok(row.map(|row| row.get(0)))
}

/// Replaces a key's sealed form.
pub async fn reseal(
    client: &impl GenericClient,
    key: &SealedFilesKey,
    sealed_with: &KeyId,
) -> Result<(), DbError> {
    let sql = "UPDATE file_keys SET sealed = $3, key_id = $4 WHERE idp_user_id = $1 AND slot = $2";
    execute(client, sql, &[&key.user, &key.slot, &key.sealed, &sealed_with.as_str()]).await.map(drop)
}

/// Claims the slot whose repository was pruned longest ago among those that are due. A slot is due if its last prune
/// began longer ago than `interval`, or if its claim expired longer ago than `retry_delay`: the process may have been
/// killed because the prune took too much memory, and an immediate retry would be killed, too. After an operator's
/// request, the slot is due as soon as its claim expires. Concurrent processes claim different slots. The claim lasts
/// for `ttl`, unless it is renewed or the prune ends earlier.
pub async fn claim_prune(
    client: &impl GenericClient,
    interval: Duration,
    retry_delay: Duration,
    ttl: Duration,
) -> Result<Option<(String, String)>, DbError> {
    let sql = "UPDATE file_keys SET pruned_at = clock_timestamp(), \
                   prune_claimed_until = clock_timestamp() + make_interval(secs => $2) \
               WHERE (idp_user_id, slot) = (\
                   SELECT idp_user_id, slot FROM file_keys \
                   WHERE CASE \
                       WHEN prune_claimed_until IS NULL \
                           THEN pruned_at <= clock_timestamp() - make_interval(secs => $1) \
                       WHEN pruned_at <= 'epoch' THEN prune_claimed_until <= clock_timestamp() \
                       ELSE prune_claimed_until <= clock_timestamp() - make_interval(secs => $3) END \
                   ORDER BY pruned_at LIMIT 1 FOR UPDATE SKIP LOCKED) \
               RETURNING idp_user_id, slot";
    let [interval, retry_delay, ttl] = [interval, retry_delay, ttl].map(|duration| duration.as_secs_f64());
    let claimed = query_opt(client, sql, &[&interval, &ttl, &retry_delay]).await?;
    Ok(claimed.map(|row| (row.get(0), row.get(1))))
}

/// The last prune of a slot's repository.
pub struct LastPrune {
    /// When it began or, if it failed, when it ended. `None` before the first prune, and while one is pending that was
    /// requested, or that a shutdown of the platform interrupted.
    pub at: Option<Timestamp>,
    /// The reason it failed, if it did.
    pub error: Option<String>,
}

/// Finds the last prune; `None` if the slot has no key.
pub async fn find_last_prune(
    client: &impl GenericClient,
    user: &str,
    slot: &str,
) -> Result<Option<LastPrune>, DbError> {
    // In a new row, `pruned_at` is the creation time; a request sets it to the epoch. A failure sets it back, possibly
    // by years, so that the retry is due sooner.
    let sql = "SELECT CASE WHEN pruned_at <= 'epoch' THEN NULL \
                   WHEN prune_error IS NOT NULL THEN prune_ended_at \
                   WHEN pruned_at > created_at THEN pruned_at END, prune_error FROM file_keys \
               WHERE idp_user_id = $1 AND slot = $2";
    let row = query_opt(client, sql, &[&user, &slot]).await?;
    Ok(row.map(|row| LastPrune { at: row.get(0), error: row.get(1) }))
}

/// Failed and overdue prunes.
#[derive(Debug, Clone, Default)]
pub struct PruningProblems {
    /// The number of slots with a key.
    pub slots: u64,
    /// The number of slots whose last prune failed.
    pub failed: u64,
    /// The first failures: each slot, as `USER/SLOT`, with its error.
    pub failures: Vec<(String, String)>,
    /// The number of slots whose last prune ended, or whose key was created, more than `max_age` ago.
    pub overdue: u64,
}

/// Counts failed and overdue prunes, and lists at most `limit` failures.
pub async fn find_pruning_problems(
    client: &impl GenericClient,
    max_age: Duration,
    limit: i64,
) -> Result<PruningProblems, DbError> {
    let sql = "SELECT count(*), count(prune_error), \
                      count(*) FILTER (WHERE prune_ended_at < clock_timestamp() - make_interval(secs => $1)) \
               FROM file_keys";
    let counts = query_opt(client, sql, &[&max_age.as_secs_f64()]).await?;
    let count = |column| counts.as_ref().map_or(0, |row| row.get::<_, i64>(column)).unsigned_abs();
    let sql = "SELECT idp_user_id || '/' || slot, prune_error FROM file_keys WHERE prune_error IS NOT NULL \
               ORDER BY idp_user_id, slot LIMIT $1";
    let failures = query(client, sql, &[&limit]).await?;
    Ok(PruningProblems {
        slots: count(0),
        failed: count(1),
        overdue: count(2),
        failures: failures.iter().map(|row| (row.get(0), row.get(1))).collect(),
    })
}

/// Counts the slots whose last prune failed.
pub async fn count_failed_prunes(client: &impl GenericClient) -> Result<u64, DbError> {
    let row = query_opt(client, "SELECT count(prune_error) FROM file_keys", &[]).await?;
    Ok(row.map_or(0, |row| row.get::<_, i64>(0)).unsigned_abs())
}

/// Returns whether the database's schema is new enough to record when a prune ends.
pub async fn has_prune_ended_at_column(client: &impl GenericClient) -> Result<bool, DbError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM pg_attribute \
               WHERE attrelid = to_regclass('file_keys') AND attname = 'prune_ended_at')";
    Ok(query_opt(client, sql, &[]).await?.is_some_and(|row| row.get(0)))
}

/// Requests a prune. If one is running, another follows it. Returns whether the slot has a key.
pub async fn request_prune(client: &impl GenericClient, user: &str, slot: &str) -> Result<bool, DbError> {
    let sql = "UPDATE file_keys SET pruned_at = 'epoch' WHERE idp_user_id = $1 AND slot = $2";
    Ok(execute(client, sql, &[&user, &slot]).await? == 1)
}

/// Extends the claim of a running prune until `ttl` from now.
pub async fn renew_prune_claim(
    client: &impl GenericClient,
    user: &str,
    slot: &str,
    ttl: Duration,
) -> Result<(), DbError> {
    let sql = "UPDATE file_keys SET prune_claimed_until = clock_timestamp() + make_interval(secs => $3) \
               WHERE idp_user_id = $1 AND slot = $2 AND prune_claimed_until IS NOT NULL";
    execute(client, sql, &[&user, &slot, &ttl.as_secs_f64()]).await.map(drop)
}

/// Ends the claim of an interrupted prune; the slot is due immediately.
pub async fn release_prune_claim(client: &impl GenericClient, user: &str, slot: &str) -> Result<(), DbError> {
    let sql = "UPDATE file_keys SET pruned_at = 'epoch', prune_claimed_until = NULL \
               WHERE idp_user_id = $1 AND slot = $2";
    execute(client, sql, &[&user, &slot]).await.map(drop)
}

/// Records the result of a prune, and ends its claim. The next one is due earlier by `advance`, which is zero except
/// after a failure. A request that arrived during the prune has set `pruned_at` to the epoch, so the next one is due
/// immediately.
pub async fn record_prune(
    client: &impl GenericClient,
    (user, slot): (&str, &str),
    error: Option<&str>,
    advance: Duration,
) -> Result<(), DbError> {
    let sql = "UPDATE file_keys SET prune_error = $3, pruned_at = pruned_at - make_interval(secs => $4), \
                   prune_ended_at = clock_timestamp(), prune_claimed_until = NULL \
               WHERE idp_user_id = $1 AND slot = $2";
    execute(client, sql, &[&user, &slot, &error, &advance.as_secs_f64()]).await.map(drop)
}

/// Records that a prune succeeded, but left work for a later one. Its claim expires now instead of being released, so
/// the slot is due again after the retry delay or, after an operator's request, immediately.
pub async fn record_unfinished_prune(
    client: &impl GenericClient,
    user: &str,
    slot: &str,
) -> Result<(), DbError> {
    let sql = "UPDATE file_keys SET prune_error = NULL, prune_ended_at = clock_timestamp(), \
                   prune_claimed_until = clock_timestamp() \
               WHERE idp_user_id = $1 AND slot = $2";
    execute(client, sql, &[&user, &slot]).await.map(drop)
}

fn parse(row: &Row) -> SealedFilesKey {
    SealedFilesKey { user: row.get(0), slot: row.get(1), sealed: row.get(2) }
}

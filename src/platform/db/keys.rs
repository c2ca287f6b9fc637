//! Rows of `signing_keys`: sealed private keys that all platform processes share.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use tokio_postgres::Row;

use super::machine_row::ACTIVE;
use super::{DbError, execute, query};
use svc_http::proof::{ProofKey, ProofKeys};

/// The purpose of keys that sign proofs.
pub const PROOF_PURPOSE: &str = "proof";

/// The purpose of keys that sign app tokens.
pub const APP_PURPOSE: &str = "app";

pub struct StoredKey {
    pub kid: String,
    /// The Ed25519 public key, in base64url.
    pub public_key: String,
    /// The sealed private key.
    pub sealed: Vec<u8>,
    pub age: Duration,
}

/// Lists the active keys for a purpose, oldest first.
pub async fn list_active(client: &impl GenericClient, purpose: &str) -> Result<Vec<StoredKey>, DbError> {
    let sql = "SELECT kid, public_key, sealed, \
               extract(epoch FROM clock_timestamp() - created_at)::float8 FROM signing_keys \
               WHERE purpose = $1 AND retired_at IS NULL ORDER BY created_at, kid";
    Ok(query(client, sql, &[&purpose]).await?.iter().map(parse).collect())
}

/// Lists the retired keys for a purpose, newest first.
pub async fn list_retired(
    client: &impl GenericClient,
    purpose: &str,
    limit: i64,
) -> Result<Vec<StoredKey>, DbError> {
    let sql = "SELECT kid, public_key, sealed, \
               extract(epoch FROM clock_timestamp() - created_at)::float8 FROM signing_keys \
               WHERE purpose = $1 AND retired_at IS NOT NULL ORDER BY created_at DESC, kid DESC LIMIT $2";
    Ok(query(client, sql, &[&purpose, &limit]).await?.iter().map(parse).collect())
}

/// Lists the keys that come after `kid`, ordered by their ids: keys for every purpose, including retired ones.
pub async fn list_after(
    client: &impl GenericClient,
    kid: &str,
    limit: i64,
) -> Result<Vec<StoredKey>, DbError> {
    let sql = "SELECT kid, public_key, sealed, \
               extract(epoch FROM clock_timestamp() - created_at)::float8 FROM signing_keys \
               WHERE kid > $1 ORDER BY kid LIMIT $2";
    Ok(query(client, sql, &[&kid, &limit]).await?.iter().map(parse).collect())
}

/// Replaces a key's sealed form.
pub async fn reseal(client: &impl GenericClient, kid: &str, sealed: &[u8]) -> Result<(), DbError> {
    execute(client, "UPDATE signing_keys SET sealed = $2 WHERE kid = $1", &[&kid, &sealed]).await.map(drop)
}

fn parse(row: &Row) -> StoredKey {
    StoredKey {
        kid: row.get(0),
        public_key: row.get(1),
        sealed: row.get(2),
        age: duration_from_secs(row.get(3)),
    }
}

fn duration_from_secs(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default()
}

/// Lists the public halves of all active keys, for a new host.
pub async fn list_public_keys(client: &impl GenericClient, purpose: &str) -> Result<ProofKeys, DbError> {
    list_public_keys_for_host(client, purpose, &[]).await
}

/// Lists the public halves of the keys that a host needs: all active keys and, if the host has acknowledged only
/// retired keys, those as well, because routers sign with a retired key until they have read the host's next
/// acknowledgement.
pub async fn list_public_keys_for_host(
    client: &impl GenericClient,
    purpose: &str,
    acknowledged: &[String],
) -> Result<ProofKeys, DbError> {
    let sql = "SELECT kid, public_key FROM signing_keys WHERE purpose = $1 AND (retired_at IS NULL \
               OR kid = ANY($2) AND NOT EXISTS (SELECT 1 FROM signing_keys active WHERE active.purpose = $1 \
                   AND active.retired_at IS NULL AND active.kid = ANY($2))) ORDER BY created_at, kid";
    let rows = query(client, sql, &[&purpose, &acknowledged]).await?;
    let keys = rows.iter().map(|row| ProofKey { kid: row.get(0), x: row.get(1) }).collect();
    Ok(ProofKeys { keys })
}

/// How far a key has been distributed to hosts.
#[derive(Debug, Clone)]
pub struct KeyDistribution {
    pub kid: String,
    pub age: Duration,
    /// For how long every host that the rotation waits for has acknowledged the key; `None` if some have not.
    pub acknowledged_for: Option<Duration>,
}

/// Lists each active key's distribution, oldest key first.
pub async fn list_distribution(
    client: &impl GenericClient,
    purpose: &str,
) -> Result<Vec<KeyDistribution>, DbError> {
    let sql = "SELECT kid, extract(epoch FROM clock_timestamp() - created_at)::float8, \
               extract(epoch FROM clock_timestamp() - acknowledged_at)::float8 FROM signing_keys \
               WHERE purpose = $1 AND retired_at IS NULL ORDER BY created_at, kid";
    let rows = query(client, sql, &[&purpose]).await?;
    Ok(rows
        .iter()
        .map(|row| KeyDistribution {
            kid: row.get(0),
            age: duration_from_secs(row.get(1)),
            acknowledged_for: row.get::<_, Option<f64>>(2).map(duration_from_secs),
        })
        .collect())
}

/// Counts of the hosts that have not acknowledged a key and whose machines are, or may become, routable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnacknowledgedHosts {
    /// Hosts that sent a heartbeat, registered or were created within the last `max_heartbeat_gap`; a rotation waits
    /// for them.
    pub reporting: i64,
    /// All other hosts; a rotation does not wait for them.
    pub silent: i64,
}

pub async fn count_unacknowledged(
    client: &impl GenericClient,
    kid: &str,
    max_heartbeat_gap: Duration,
) -> Result<UnacknowledgedHosts, DbError> {
    let sql = format!(
        "SELECT count(*) FILTER (WHERE reporting), count(*) FILTER (WHERE NOT reporting) FROM (SELECT \
         greatest(heartbeat_at, registered_at, created_at) > now() - make_interval(secs => $2) AS reporting \
         FROM user_machines WHERE {ACTIVE} \
         AND (status <> 'failed' OR failure_cause = 'resize') AND NOT ($1 = ANY(proof_kids))) hosts"
    );
    let rows = query(client, &sql, &[&kid, &max_heartbeat_gap.as_secs_f64()]).await?;
    let counts = |row: &Row| UnacknowledgedHosts { reporting: row.get(0), silent: row.get(1) };
    Ok(rows.first().map(counts).unwrap_or_default())
}

/// Records whether every host that the rotation waits for has acknowledged this key, and if so, the current time.
pub async fn record_acknowledged(
    client: &impl GenericClient,
    kid: &str,
    acknowledgement: Acknowledgement,
) -> Result<(), DbError> {
    let sql =
        "UPDATE signing_keys SET acknowledged_at = CASE WHEN $2 THEN clock_timestamp() END WHERE kid = $1";
    let is_complete = acknowledgement == Acknowledgement::Complete;
    execute(client, sql, &[&kid, &is_complete]).await.map(drop)
}

/// Whether every host that the rotation waits for has acknowledged a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acknowledgement {
    Complete,
    Incomplete,
}

/// Retires every key for the purpose except `kid`.
pub async fn retire_all_but(client: &impl GenericClient, purpose: &str, kid: &str) -> Result<u64, DbError> {
    let sql = "UPDATE signing_keys SET retired_at = clock_timestamp() \
               WHERE purpose = $1 AND kid <> $2 AND retired_at IS NULL";
    execute(client, sql, &[&purpose, &kid]).await
}

pub async fn insert(client: &impl GenericClient, purpose: &str, key: &StoredKey) -> Result<(), DbError> {
    let sql = "INSERT INTO signing_keys (kid, purpose, public_key, sealed) VALUES ($1, $2, $3, $4)";
    execute(client, sql, &[&key.kid, &purpose, &key.public_key, &key.sealed]).await.map(drop)
}

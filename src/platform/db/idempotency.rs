//! `idempotency_keys`: responses to mutating calls, returned again for the same key and body.

use deadpool_postgres::GenericClient;
use serde_json::Value;

use super::{DbError, execute, query_opt};

/// The response stored for a key.
pub struct StoredResponse {
    pub route: String,
    pub body_hash: Vec<u8>,
    pub status: u16,
    pub response: Value,
}

pub async fn find_response(
    client: &impl GenericClient,
    actor: &str,
    key: &str,
) -> Result<Option<StoredResponse>, DbError> {
    let sql = "SELECT route, body_hash, status, response FROM idempotency_keys WHERE actor = $1 AND key = $2";
    let row = query_opt(client, sql, &[&actor, &key]).await?;
    Ok(row.map(|row| StoredResponse {
        route: row.get(0),
        body_hash: row.get(1),
        status: u16::try_from(row.get::<_, i32>(2)).unwrap_or(200),
        response: row.get(3),
    }))
}

const INSERT: &str = "INSERT INTO idempotency_keys (actor, key, route, body_hash, status, response) \
                      VALUES ($1, $2, $3, $4, $5, $6)";

pub async fn store_response(
    client: &impl GenericClient,
    actor: &str,
    key: &str,
    stored: &StoredResponse,
) -> Result<(), DbError> {
    insert(client, INSERT, actor, key, stored).await
}

/// Like [`store_response`], but replaces the response that an earlier attempt at the same request stored.
pub async fn replace_response(
    client: &impl GenericClient,
    actor: &str,
    key: &str,
    stored: &StoredResponse,
) -> Result<(), DbError> {
    let sql = format!(
        "{INSERT} ON CONFLICT (actor, key) DO UPDATE \
         SET status = excluded.status, response = excluded.response, created_at = excluded.created_at"
    );
    insert(client, &sql, actor, key, stored).await
}

async fn insert(
    client: &impl GenericClient,
    sql: &str,
    actor: &str,
    key: &str,
    stored: &StoredResponse,
) -> Result<(), DbError> {
    let status = i32::from(stored.status);
    execute(client, sql, &[&actor, &key, &stored.route, &stored.body_hash, &status, &stored.response])
        .await
        .map(drop)
}

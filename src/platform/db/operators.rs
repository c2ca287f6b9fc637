//! `operators`: names, scopes and token hashes. All times are read from the database's clock.

use std::time::Duration;

use deadpool_postgres::{GenericClient, Transaction};
use jiff::Timestamp;
use tokio_postgres::Row;

use super::{DbError, execute, query, query_opt};
use crate::operators::Scopes;
use svc_machine::id::OperatorTokenId;
use svc_machine::name::OperatorName;

/// A stored token, for verification.
pub struct TokenRow {
    pub name: OperatorName,
    pub scopes: Scopes,
    pub token_hash: Vec<u8>,
    pub state: TokenState,
    /// Whether to record this use, because none has been recorded within `record_interval`.
    pub should_record_use: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenState {
    Valid,
    Expired,
    Revoked,
}

/// Finds an operator by its current or previous token.
pub async fn find_by_token(
    client: &impl GenericClient,
    id: OperatorTokenId,
    record_interval: Duration,
) -> Result<Option<TokenRow>, DbError> {
    // The current and the previous token have separate columns. UNION ALL lets each half use its own index.
    let sql = "SELECT name, scopes, token_hash, revoked_at IS NOT NULL, expires_at <= clock_timestamp(), \
                 coalesce(last_used_at < clock_timestamp() - make_interval(secs => $2), true) \
               FROM operators WHERE token_id = $1 \
               UNION ALL \
               SELECT name, scopes, previous_token_hash, revoked_at IS NOT NULL, previous_expires_at <= clock_timestamp(), \
                 coalesce(previous_used_at < clock_timestamp() - make_interval(secs => $2), true) \
               FROM operators WHERE previous_token_id = $1";
    let row = query_opt(client, sql, &[&id.0, &record_interval.as_secs_f64()]).await?;
    let parse = |row: Row| {
        let scopes: Vec<String> = row.get(1);
        Ok(TokenRow {
            name: parse_name(&row.get::<_, String>(0))?,
            scopes: Scopes::from_stored(scopes.iter().map(String::as_str)),
            token_hash: row.get(2),
            state: match (row.get(3), row.get(4)) {
                (true, _) => TokenState::Revoked,
                (false, true) => TokenState::Expired,
                (false, false) => TokenState::Valid,
            },
            should_record_use: row.get(5),
        })
    };
    row.map(parse).transpose()
}

/// Records that a token was used, unless a use was recorded within `record_interval`.
pub async fn record_use(
    client: &impl GenericClient,
    id: OperatorTokenId,
    record_interval: Duration,
) -> Result<(), DbError> {
    let due_condition =
        |column: &str| format!("coalesce({column} < clock_timestamp() - make_interval(secs => $2), true)");
    for (token, used) in [("token_id", "last_used_at"), ("previous_token_id", "previous_used_at")] {
        let sql = format!(
            "UPDATE operators SET {used} = clock_timestamp() WHERE {token} = $1 AND {}",
            due_condition(used)
        );
        execute(client, &sql, &[&id.0, &record_interval.as_secs_f64()]).await?;
    }
    Ok(())
}

/// An operator, without token hashes, for the API.
#[derive(Debug, Clone)]
pub struct OperatorRow {
    pub name: OperatorName,
    pub scopes: Scopes,
    pub token_id: OperatorTokenId,
    pub expires_at: Timestamp,
    pub last_used_at: Option<Timestamp>,
    pub previous_expires_at: Option<Timestamp>,
    pub previous_used_at: Option<Timestamp>,
    pub created_at: Timestamp,
    pub created_by: String,
    pub rotated_at: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
    /// Whether the current token has expired.
    pub is_expired: bool,
}

const COLUMNS: &str = "name, scopes, token_id, expires_at, last_used_at, previous_expires_at, previous_used_at, created_at, \
                       created_by, rotated_at, revoked_at, expires_at <= clock_timestamp()";

impl OperatorRow {
    fn parse(row: &Row) -> Result<Self, DbError> {
        let scopes: Vec<String> = row.get(1);
        Ok(Self {
            name: parse_name(&row.get::<_, String>(0))?,
            scopes: Scopes::from_stored(scopes.iter().map(String::as_str)),
            token_id: OperatorTokenId(row.get(2)),
            expires_at: row.get(3),
            last_used_at: row.get(4),
            previous_expires_at: row.get(5),
            previous_used_at: row.get(6),
            created_at: row.get(7),
            created_by: row.get(8),
            rotated_at: row.get(9),
            revoked_at: row.get(10),
            is_expired: row.get(11),
        })
    }
}

fn parse_name(name: &str) -> Result<OperatorName, DbError> {
    name.parse().map_err(|error: svc_machine::name::NameError| DbError::Unreadable {
        what: "operator's name",
        reason: error.to_string(),
    })
}

/// A newly issued token.
pub struct NewToken<'a> {
    pub id: OperatorTokenId,
    pub hash: &'a [u8],
    pub ttl: Duration,
}

/// Adds an operator; `None` if the name is taken.
pub async fn insert(
    tx: &Transaction<'_>,
    name: &OperatorName,
    scopes: &Scopes,
    token: &NewToken<'_>,
    created_by: &str,
) -> Result<Option<OperatorRow>, DbError> {
    let sql = format!(
        "INSERT INTO operators (name, scopes, token_id, token_hash, expires_at, created_by) \
         VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5), $6) \
         ON CONFLICT (name) DO NOTHING RETURNING {COLUMNS}"
    );
    let (ttl, scopes) = (token.ttl.as_secs_f64(), scopes.names());
    let params: super::Params<'_> = &[&name.as_str(), &scopes, &token.id.0, &token.hash, &ttl, &created_by];
    query_opt(tx, &sql, params).await?.as_ref().map(OperatorRow::parse).transpose()
}

/// Reads and locks the row until the transaction ends.
pub async fn lock(tx: &Transaction<'_>, name: &OperatorName) -> Result<Option<OperatorRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM operators WHERE name = $1 FOR UPDATE");
    query_opt(tx, &sql, &[&name.as_str()]).await?.as_ref().map(OperatorRow::parse).transpose()
}

/// Replaces an operator's token. The replaced token stays valid for `overlap` or until it expires, whichever is
/// earlier; an even older token becomes invalid immediately.
pub async fn rotate(
    tx: &Transaction<'_>,
    name: &OperatorName,
    token: &NewToken<'_>,
    overlap: Duration,
) -> Result<OperatorRow, DbError> {
    let sql = format!(
        "UPDATE operators SET previous_token_id = token_id, previous_token_hash = token_hash, \
           previous_expires_at = least(expires_at, clock_timestamp() + make_interval(secs => $5)), \
           previous_used_at = last_used_at, last_used_at = NULL, token_id = $2, token_hash = $3, \
           expires_at = clock_timestamp() + make_interval(secs => $4), rotated_at = clock_timestamp() \
         WHERE name = $1 RETURNING {COLUMNS}"
    );
    let (ttl, overlap) = (token.ttl.as_secs_f64(), overlap.as_secs_f64());
    update(tx, &sql, &[&name.as_str(), &token.id.0, &token.hash, &ttl, &overlap]).await
}

/// Revokes all of an operator's tokens. The time of an earlier revocation is kept.
pub async fn revoke(tx: &Transaction<'_>, name: &OperatorName) -> Result<OperatorRow, DbError> {
    let sql = format!(
        "UPDATE operators SET revoked_at = coalesce(revoked_at, clock_timestamp()) WHERE name = $1 RETURNING {COLUMNS}"
    );
    update(tx, &sql, &[&name.as_str()]).await
}

async fn update(tx: &Transaction<'_>, sql: &str, params: super::Params<'_>) -> Result<OperatorRow, DbError> {
    let row = query_opt(tx, sql, params).await?;
    let missing =
        || DbError::Unreadable { what: "operator", reason: "the locked row does not exist".to_owned() };
    OperatorRow::parse(&row.ok_or_else(missing)?)
}

/// Counts the operators, including those whose tokens have expired or been revoked.
pub async fn count(client: &impl GenericClient) -> Result<i64, DbError> {
    Ok(query_opt(client, "SELECT count(*) FROM operators", &[]).await?.map_or(0, |row| row.get(0)))
}

/// Lists at most `limit` operators, ordered by name.
pub async fn list(client: &impl GenericClient, limit: i64) -> Result<Vec<OperatorRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM operators ORDER BY name LIMIT $1");
    query(client, &sql, &[&limit]).await?.iter().map(OperatorRow::parse).collect()
}

pub async fn get(client: &impl GenericClient, name: &OperatorName) -> Result<Option<OperatorRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM operators WHERE name = $1");
    query_opt(client, &sql, &[&name.as_str()]).await?.as_ref().map(OperatorRow::parse).transpose()
}

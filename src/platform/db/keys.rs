//! Rows of `signing_keys`: sealed private keys that all platform processes share.

use deadpool_postgres::GenericClient;

use super::{DbError, execute, rows};

/// The purpose of keys that sign proofs.
pub const PROOF: &str = "proof";

/// The purpose of keys that sign app tokens.
pub const APP: &str = "app";

pub struct StoredKey {
    pub kid: String,
    /// Base64url of the Ed25519 public key.
    pub public_key: String,
    pub sealed: Vec<u8>,
}

/// Keys of a purpose that are not retired, the oldest first.
///
/// # Errors
/// [`DbError`].
pub async fn active(client: &impl GenericClient, purpose: &str) -> Result<Vec<StoredKey>, DbError> {
    let sql = "SELECT kid, public_key, sealed FROM signing_keys \
               WHERE purpose = $1 AND retired_at IS NULL ORDER BY created_at, kid";
    let found = rows(client, sql, &[&purpose]).await?;
    Ok(found
        .iter()
        .map(|row| StoredKey { kid: row.get(0), public_key: row.get(1), sealed: row.get(2) })
        .collect())
}

/// # Errors
/// [`DbError`].
pub async fn insert(client: &impl GenericClient, purpose: &str, key: &StoredKey) -> Result<(), DbError> {
    let sql = "INSERT INTO signing_keys (kid, purpose, public_key, sealed) VALUES ($1, $2, $3, $4)";
    execute(client, sql, &[&key.kid, &purpose, &key.public_key, &key.sealed]).await.map(drop)
}

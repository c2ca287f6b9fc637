//! `operator_audit`: who changed what, written in the transaction of the change.

use deadpool_postgres::Transaction;
use serde_json::Value;
use uuid::Uuid;

use super::{DbError, execute};

/// One mutating call.
pub struct Entry<'a> {
    pub actor: &'a str,
    pub action: &'a str,
    pub target: &'a str,
    pub before: Option<&'a Value>,
    pub after: Option<&'a Value>,
    pub request_id: &'a str,
}

/// # Errors
/// [`DbError`].
pub async fn write(tx: &Transaction<'_>, entry: &Entry<'_>) -> Result<(), DbError> {
    let sql = "INSERT INTO operator_audit (audit_id, actor, action, target, before, after, request_id) \
               VALUES ($1, $2, $3, $4, $5, $6, $7)";
    let id = Uuid::now_v7();
    let Entry { actor, action, target, before, after, request_id } = entry;
    execute(tx, sql, &[&id, actor, action, target, before, after, request_id]).await.map(drop)
}

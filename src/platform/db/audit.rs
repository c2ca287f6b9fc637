//! `operator_audit`: changes by operators, hosts and the platform itself, each recorded in the transaction that makes
//! the change; and operators' reads of owners' data and keys.

use deadpool_postgres::{GenericClient, Transaction};
use jiff::Timestamp;
use serde_json::Value;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{DbError, execute, query};
use svc_machine::id::AuditId;

/// An entry to insert.
pub struct AuditEntry<'a> {
    pub actor: &'a str,
    pub action: &'a str,
    pub target: &'a str,
    pub before: Option<&'a Value>,
    pub after: Option<&'a Value>,
    pub request_id: &'a str,
}

pub async fn write(tx: &Transaction<'_>, entry: &AuditEntry<'_>) -> Result<(), DbError> {
    let sql = "INSERT INTO operator_audit (audit_id, actor, action, target, before, after, request_id) \
               VALUES ($1, $2, $3, $4, $5, $6, $7)";
    let id = Uuid::now_v7();
    let AuditEntry { actor, action, target, before, after, request_id } = entry;
    execute(tx, sql, &[&id, actor, action, target, before, after, request_id]).await.map(drop)
}

/// Selects audit entries; a field that is `None` matches every entry.
#[derive(Debug, Default)]
pub struct AuditFilter {
    pub actor: Option<String>,
    pub action: Option<String>,
    pub target: Option<String>,
    pub since: Option<Timestamp>,
    pub until: Option<Timestamp>,
    /// Only entries that are older than this one.
    pub before: Option<AuditId>,
}

/// A stored entry.
#[derive(Debug)]
pub struct AuditRow {
    pub id: AuditId,
    pub at: Timestamp,
    pub actor: String,
    pub action: String,
    pub target: String,
    pub before: Option<Value>,
    pub after: Option<Value>,
    pub request_id: String,
}

/// Lists the matching entries, newest first.
pub async fn list(
    client: &impl GenericClient,
    filter: &AuditFilter,
    limit: i64,
) -> Result<Vec<AuditRow>, DbError> {
    let before = filter.before.map(|id| id.0);
    // Unset filters are omitted from the SQL: the planner cannot use an index for an optional condition.
    let mut sql =
        "SELECT audit_id, at, actor, action, target, before, after, request_id FROM operator_audit \
                   WHERE true"
            .to_owned();
    let mut params: Vec<&(dyn ToSql + Sync)> = Vec::new();
    let filters: [(&str, Option<&(dyn ToSql + Sync)>); 6] = [
        ("actor = $", filter.actor.as_ref().map(|value| value as _)),
        ("action = $", filter.action.as_ref().map(|value| value as _)),
        ("target = $", filter.target.as_ref().map(|value| value as _)),
        ("at >= $", filter.since.as_ref().map(|value| value as _)),
        ("at < $", filter.until.as_ref().map(|value| value as _)),
        (
            "(at, audit_id) < (SELECT at, audit_id FROM operator_audit WHERE audit_id = $)",
            before.as_ref().map(|value| value as _),
        ),
    ];
    for (condition, value) in filters {
        if let Some(value) = value {
            params.push(value);
            sql += &format!(" AND {}", condition.replace('$', &format!("${}", params.len())));
        }
    }
    params.push(&limit);
    sql += &format!(" ORDER BY at DESC, audit_id DESC LIMIT ${}", params.len());
    let rows = query(client, &sql, &params).await?;
    let parse = |row: &tokio_postgres::Row| AuditRow {
        id: AuditId(row.get(0)),
        at: row.get(1),
        actor: row.get(2),
        action: row.get(3),
        target: row.get(4),
        before: row.get(5),
        after: row.get(6),
        request_id: row.get(7),
    };
    Ok(rows.iter().map(parse).collect())
}

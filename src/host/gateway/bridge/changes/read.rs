//! What the outbox holds, as far as it is settled: rows of transactions below the oldest that still runs.

use tokio_postgres::Client;

use crate::host::gateway::database::DatabaseError;

/// Transactions that are read at once.
const BATCH: i64 = 20;
/// A transaction of more statements and rows is told as "look at these tables again".
const MOST_TOLD: i64 = 2000;

/// How far the outbox is settled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Head {
    /// No transaction up to this one still runs.
    pub settled: i64,
    /// The last one up to there that changed something.
    pub newest: i64,
}

/// # Errors
/// The database's.
pub async fn head(client: &Client) -> Result<Head, DatabaseError> {
    let row = client
        .query_one(
            "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint - 1,
                    coalesce((SELECT xid::text::bigint FROM svc.changes
                               WHERE xid < pg_snapshot_xmin(pg_current_snapshot())
                               ORDER BY xid DESC LIMIT 1), 0)",
            &[],
        )
        .await?;
    Ok(Head { settled: row.try_get(0)?, newest: row.try_get(1)? })
}

/// The lowest position from which nothing of these schemas is missing; `None` where one is not watched yet.
///
/// # Errors
/// The database's.
pub async fn floor(client: &Client, schemas: &[String]) -> Result<Option<i64>, DatabaseError> {
    let row = client
        .query_one(
            "SELECT (SELECT floor FROM svc.feed), count(w.floor), max(w.floor)
               FROM svc.watched w WHERE w.schema_name = ANY ($1)",
            &[&schemas],
        )
        .await?;
    let (feed, watched): (Option<i64>, i64) = (row.try_get(0)?, row.try_get(1)?);
    let apps: Option<i64> = row.try_get(2)?;
    let all = i64::try_from(schemas.len()).unwrap_or(i64::MAX) == watched;
    Ok(feed.filter(|_| all).map(|feed| feed.max(apps.unwrap_or(0))))
}

/// One transaction's changes.
#[derive(Debug)]
pub struct Change {
    pub position: i64,
    /// A JSON object on one line.
    pub json: String,
}

/// The changes after `position` in these schemas, oldest first, and whether there may be more.
///
/// # Errors
/// The database's.
pub async fn after(
    client: &Client,
    position: i64,
    schemas: &[String],
) -> Result<(Vec<Change>, bool), DatabaseError> {
    let rows = client
        .query(
            "SELECT x.xid::text::bigint,
                    json_build_object('at', to_char(x.at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'),
                      'changes', CASE WHEN x.told <= $3 THEN
                        (SELECT json_agg(json_build_object('app', a.slug, 'table', c.table_name,
                                                           'action', c.action, 'ids', to_json(c.ids)) ORDER BY c.n)
                           FROM svc.changes c JOIN svc.apps a USING (schema_name)
                          WHERE c.xid = x.xid AND c.schema_name = ANY ($2))
                      ELSE
                        (SELECT json_agg(json_build_object('app', a.slug, 'table', c.table_name,
                                                           'action', c.action, 'ids', null))
                           FROM (SELECT DISTINCT schema_name, table_name, action FROM svc.changes
                                  WHERE xid = x.xid AND schema_name = ANY ($2)) c
                           JOIN svc.apps a USING (schema_name))
                      END)::text
               FROM (SELECT xid, min(at) AS at, count(*) + coalesce(sum(cardinality(ids)), 0) AS told
                       FROM svc.changes
                      WHERE xid > $1::text::xid8 AND xid < pg_snapshot_xmin(pg_current_snapshot())
                        AND schema_name = ANY ($2)
                      GROUP BY xid ORDER BY xid LIMIT $4) AS x
              ORDER BY x.xid",
            &[&position.to_string(), &schemas, &MOST_TOLD, &BATCH],
        )
        .await?;
    let changes = rows
        .iter()
        .map(|row| Ok(Change { position: row.try_get(0)?, json: row.try_get(1)? }))
        .collect::<Result<Vec<_>, tokio_postgres::Error>>()?;
    let more = i64::try_from(changes.len()).unwrap_or(BATCH) >= BATCH;
    Ok((changes, more))
}

//! Reads the settled part of the outbox: the rows of transactions with a lower id than the oldest running transaction.

use tokio_postgres::Client;

use super::shared_read::ChangeBatch;
use crate::database::DatabaseError;

/// Maximum number of transactions read per query.
const BATCH_SIZE: i64 = 20;
/// A transaction whose statements and row ids together exceed this number is reported without row ids.
const MAX_LISTED_ENTRIES: i64 = 2000;

/// The position up to which the outbox is settled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FeedHead {
    /// No transaction up to this one is still running.
    pub settled: i64,
    /// The newest settled transaction in the outbox; 0 if there is none.
    pub newest: i64,
}

/// Fetches the current head.
pub async fn fetch_head(client: &Client) -> Result<FeedHead, DatabaseError> {
    let row = client
        .query_one(
            "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint - 1,
                    coalesce((SELECT xid::text::bigint FROM svc.changes
                               WHERE xid < pg_snapshot_xmin(pg_current_snapshot())
                               ORDER BY xid DESC LIMIT 1), 0)",
            &[],
        )
        .await?;
    Ok(FeedHead { settled: row.try_get(0)?, newest: row.try_get(1)? })
}

/// Fetches the lowest position after which the events for all of these schemas are complete; `None` if there is no feed
/// yet, or if one of the schemas is not watched.
pub async fn fetch_floor(client: &Client, schemas: &[String]) -> Result<Option<i64>, DatabaseError> {
    let row = client
        .query_one(
            "SELECT (SELECT floor FROM svc.feed), count(w.floor), max(w.floor)
               FROM svc.watched w WHERE w.schema_name = ANY ($1)",
            &[&schemas],
        )
        .await?;
    let (feed_floor, watched_count): (Option<i64>, i64) = (row.try_get(0)?, row.try_get(1)?);
    let max_app_floor: Option<i64> = row.try_get(2)?;
    let is_every_schema_watched = i64::try_from(schemas.len()).unwrap_or(i64::MAX) == watched_count;
    Ok(feed_floor.filter(|_| is_every_schema_watched).map(|floor| floor.max(max_app_floor.unwrap_or(0))))
}

/// The changes of one transaction.
#[derive(Debug)]
pub struct ChangeEvent {
    pub position: i64,
    /// A JSON object on one line.
    pub json: String,
}

/// Fetches the changes that the next settled transactions after `position` made in these schemas, and the feed's floor.
pub async fn fetch_after(
    client: &Client,
    position: i64,
    schemas: &[String],
) -> Result<ChangeBatch, DatabaseError> {
    let rows = client
        .query(
            "SELECT f.floor, x.xid::text::bigint,
                    json_build_object('at', to_char(x.at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'),
                      'changes', CASE WHEN x.size <= $3 THEN
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
               FROM svc.feed f
               LEFT JOIN (SELECT xid, min(at) AS at, count(*) + coalesce(sum(cardinality(ids)), 0) AS size
                            FROM svc.changes
                           WHERE xid > $1::text::xid8 AND xid < pg_snapshot_xmin(pg_current_snapshot())
                             AND schema_name = ANY ($2)
                           GROUP BY xid ORDER BY xid LIMIT $4) AS x ON true
              ORDER BY x.xid",
            &[&position.to_string(), &schemas, &MAX_LISTED_ENTRIES, &BATCH_SIZE],
        )
        .await?;
    // Without a floor, no event is known to be available.
    let floor = rows.first().map_or(Ok(i64::MAX), |row| row.try_get(0))?;
    let mut events = Vec::with_capacity(rows.len());
    for row in &rows {
        // If there are no events, the only row contains just the floor.
        if let Some(position) = row.try_get::<_, Option<i64>>(1)? {
            events.push(ChangeEvent { position, json: row.try_get(2)? });
        }
    }
    let has_more = i64::try_from(events.len()).unwrap_or(BATCH_SIZE) >= BATCH_SIZE;
    Ok(ChangeBatch { events, has_more, floor })
}

//! The change outbox: a table that triggers fill with one row for each statement that changed an app's table, in any
//! session.
//!
//! Triggers slow down each write, so an app's tables get them when a client first listens, and lose them after a long
//! time without listeners. NOTIFY serializes commits, so the triggers use it only for sessions of roles other than the
//! app's, and for TRUNCATE: after its own writes, the bridge wakes the change streams itself.
//!
//! Invariant: after a position at or above the floors of both the feed and the app, the outbox is complete for the app.

use tokio_postgres::{Client, GenericClient, Transaction};

use super::connect::DatabaseError;
use super::schema_lock;
use crate::name::SqlIdentifier;
use svc_machine::epoch::Epoch;

/// The notification channel for changes made outside the bridge.
pub const NOTIFY_CHANNEL: &str = "svc_changes";

/// Creates the outbox's tables and trigger functions.
///
/// An event's position is its transaction id. If a statement changes more than 1000 rows, NULL is stored instead of
/// their ids, and clients must reload the table.
///
/// The functions run with the gateway's privileges in the writer's session, so they set their own `search_path`: with
/// the writer's, the writer could substitute its own operators. `at` is the time of the write, not the start of its
/// transaction, because the cleanup deletes by age. The functions set `at`, so that the default in existing tables
/// needs no change.
pub const SCHEMA_SQL: &str = "
    CREATE TABLE IF NOT EXISTS svc.watched (
        schema_name text PRIMARY KEY,
        listened_at timestamptz(3) NOT NULL DEFAULT now(),
        floor bigint
    );
    CREATE TABLE IF NOT EXISTS svc.feed (
        one boolean PRIMARY KEY DEFAULT true CHECK (one),
        epoch bigint NOT NULL,
        database_oid oid NOT NULL,
        floor bigint NOT NULL
    );
    CREATE TABLE IF NOT EXISTS svc.changes (
        xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
        n bigint GENERATED ALWAYS AS IDENTITY (CACHE 32),
        at timestamptz(3) NOT NULL DEFAULT now(),
        schema_name text NOT NULL,
        table_name text NOT NULL,
        action text NOT NULL,
        ids uuid[],
        PRIMARY KEY (xid, n)
    );
    CREATE OR REPLACE FUNCTION svc.note_change() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
        SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        INSERT INTO svc.changes (at, schema_name, table_name, action, ids)
            SELECT clock_timestamp(), tg_table_schema, tg_table_name, lower(tg_op),
                   CASE WHEN count(*) <= 1000 THEN array_agg(r.id) END
              FROM svc_rows r HAVING count(*) > 0;
        IF session_user <> tg_table_schema THEN
            NOTIFY svc_changes;
        END IF;
        RETURN NULL;
    END $$;
    CREATE OR REPLACE FUNCTION svc.note_truncate() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
        SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        INSERT INTO svc.changes (at, schema_name, table_name, action)
            VALUES (clock_timestamp(), tg_table_schema, tg_table_name, 'truncate');
        NOTIFY svc_changes;
        RETURN NULL;
    END $$;
    REVOKE ALL ON FUNCTION svc.note_change(), svc.note_truncate() FROM PUBLIC;
";

/// Selects the statements that create a schema's missing triggers. A table without the built-in `id` is not an app's. A
/// statement fires only the triggers of the table that it names, so a partitioned table and each of its partitions need
/// their own.
const CREATE_TRIGGER_STATEMENTS: &str = "
    SELECT format('CREATE TRIGGER %I AFTER %s ON %I.%I %s FOR EACH STATEMENT EXECUTE FUNCTION svc.%I()',
                  k.name, k.event, n.nspname, c.relname, k.referencing, k.function)
      FROM pg_class c
      JOIN pg_namespace n ON n.oid = c.relnamespace
      JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'id' AND a.atttypid = 'uuid'::regtype
      CROSS JOIN (VALUES
        ('svc_changes_insert', 'INSERT', 'REFERENCING NEW TABLE AS svc_rows', 'note_change'),
        ('svc_changes_update', 'UPDATE', 'REFERENCING NEW TABLE AS svc_rows', 'note_change'),
        ('svc_changes_delete', 'DELETE', 'REFERENCING OLD TABLE AS svc_rows', 'note_change'),
        ('svc_changes_truncate', 'TRUNCATE', '', 'note_truncate')) AS k (name, event, referencing, function)
     WHERE n.nspname = $1 AND c.relkind IN ('r', 'p')
       AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = k.name)
     ORDER BY c.relname, k.name";

/// Selects the statements that drop a schema's triggers.
const DROP_TRIGGER_STATEMENTS: &str = "
    SELECT format('DROP TRIGGER %I ON %I.%I', t.tgname, n.nspname, c.relname)
      FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = $1 AND starts_with(t.tgname, 'svc_changes_')";

/// Adopts the feed for this machine's epoch and database. After a restore, the outbox contains the events of another
/// epoch or database; these are deleted.
///
/// # Errors
/// The database is unreachable or rejects a statement.
pub async fn adopt_feed(transaction: &Transaction<'_>, epoch: Epoch) -> Result<(), tokio_postgres::Error> {
    // After a restore onto another server, the restored floors are transaction ids of the old server, which may be far
    // ahead. They are replaced even in a feed that was already adopted, because earlier versions left them in place.
    let lower_floors = "UPDATE svc.watched SET floor = pg_current_xact_id()::text::bigint
                         WHERE floor > pg_current_xact_id()::text::bigint";
    transaction.execute(lower_floors, &[]).await?;
    let epoch = i64::from(epoch.0);
    let row = transaction
        .query_one(
            "SELECT EXISTS (SELECT FROM svc.feed JOIN pg_database d ON d.oid = database_oid
                             WHERE epoch = $1 AND d.datname = current_database())",
            &[&epoch],
        )
        .await?;
    if row.get(0) {
        return Ok(());
    }
    transaction.batch_execute("TRUNCATE svc.changes").await?;
    transaction
        .execute(
            "INSERT INTO svc.feed (epoch, database_oid, floor)
                  SELECT $1, d.oid, pg_current_xact_id()::text::bigint FROM pg_database d
                   WHERE d.datname = current_database()
             ON CONFLICT (one) DO UPDATE
                SET epoch = excluded.epoch, database_oid = excluded.database_oid, floor = excluded.floor",
            &[&epoch],
        )
        .await?;
    // A missing floor is set when the app's next listener connects.
    let set_floors =
        "UPDATE svc.watched SET floor = pg_current_xact_id()::text::bigint WHERE floor IS NOT NULL";
    transaction.execute(set_floors, &[]).await?;
    Ok(())
}

/// Whether the tables in `schema` are watched.
///
/// # Errors
/// The database is unreachable or rejects a statement.
pub async fn is_watched(
    client: &impl GenericClient,
    schema: &SqlIdentifier,
) -> Result<bool, tokio_postgres::Error> {
    let sql = "SELECT EXISTS (SELECT FROM svc.watched WHERE schema_name = $1)";
    Ok(client.query_one(sql, &[&schema.as_str()]).await?.get(0))
}

/// Creates the missing triggers on all tables in `schema`.
///
/// # Errors
/// The database is unreachable or rejects a statement.
pub async fn create_triggers(
    client: &impl GenericClient,
    schema: &SqlIdentifier,
) -> Result<(), tokio_postgres::Error> {
    for row in client.query(CREATE_TRIGGER_STATEMENTS, &[&schema.as_str()]).await? {
        client.batch_execute(row.get(0)).await?;
    }
    Ok(())
}

/// Drops a schema's triggers.
///
/// # Errors
/// The database is unreachable or rejects a statement.
async fn drop_triggers(client: &impl GenericClient, schema: &str) -> Result<(), tokio_postgres::Error> {
    for row in client.query(DROP_TRIGGER_STATEMENTS, &[&schema]).await? {
        client.batch_execute(row.get(0)).await?;
    }
    Ok(())
}

/// Starts watching an app. All changes committed after this function has returned are recorded.
///
/// # Errors
/// The database is unreachable or rejects a statement, or another transaction, such as a long write, holds a required
/// lock for more than two seconds.
pub async fn start_watching(client: &mut Client, schema: &SqlIdentifier) -> Result<(), DatabaseError> {
    let transaction = client.transaction().await?;
    schema_lock::lock_schemas(&transaction).await?;
    create_triggers(&transaction, schema).await?;
    let upsert = "INSERT INTO svc.watched (schema_name) VALUES ($1)
                ON CONFLICT (schema_name) DO UPDATE SET listened_at = now()";
    transaction.execute(upsert, &[&schema.as_str()]).await?;
    transaction.commit().await?;
    // Creating the triggers waited for all transactions that had written without firing them, so the outbox is complete
    // from here on.
    let set_floor = "UPDATE svc.watched SET floor = pg_snapshot_xmin(pg_current_snapshot())::text::bigint - 1
                  WHERE schema_name = $1 AND floor IS NULL";
    client.execute(set_floor, &[&schema.as_str()]).await?;
    Ok(())
}

/// The outbox's retention limits.
#[derive(Debug, Clone, Copy)]
pub struct OutboxRetention {
    pub max_age_seconds: f64,
    pub max_rows: i64,
    /// Days without a listener after which an app is no longer watched.
    pub unwatch_after_days: i32,
}

/// Deletes events beyond the retention limits, and stops watching schemas that have had no listener for too long.
///
/// # Errors
/// The database is unreachable or rejects a statement, or a required lock is not available within two seconds.
pub async fn clean_up(
    client: &mut Client,
    retention: OutboxRetention,
    schemas_with_listeners: &[String],
) -> Result<(), DatabaseError> {
    // A transaction may write long after it got its id, so old events can have higher ids than recent ones. Only the
    // events below the first recent one are deleted by age. An event from the far future is not recent: the clock was
    // ahead when it was written.
    client
        .execute(
            "WITH cutoff AS (
                SELECT greatest(
                    (SELECT xid FROM svc.changes
                      WHERE xid < least(pg_snapshot_xmin(pg_current_snapshot()),
                                        (SELECT xid FROM svc.changes
                                          WHERE at >= now() - make_interval(secs => $1)
                                            AND at < now() + interval '1 day'
                                          ORDER BY xid LIMIT 1)) ORDER BY xid DESC LIMIT 1),
                    (SELECT xid FROM svc.changes
                      WHERE xid < pg_snapshot_xmin(pg_current_snapshot()) ORDER BY xid DESC OFFSET $2 LIMIT 1)
                ) AS xid),
             deleted AS (DELETE FROM svc.changes c USING cutoff WHERE c.xid <= cutoff.xid)
             UPDATE svc.feed SET floor = greatest(floor, cutoff.xid::text::bigint)
               FROM cutoff WHERE cutoff.xid IS NOT NULL",
            &[&retention.max_age_seconds, &retention.max_rows],
        )
        .await?;
    client
        .execute(
            "UPDATE svc.watched SET listened_at = now()
              WHERE schema_name = ANY ($1) AND listened_at < now() - interval '1 hour'",
            &[&schemas_with_listeners],
        )
        .await?;
    let unwatched = client
        .query(
            "SELECT schema_name FROM svc.watched
              WHERE listened_at < now() - make_interval(days => $1) AND schema_name <> ALL ($2)",
            &[&retention.unwatch_after_days, &schemas_with_listeners],
        )
        .await?;
    for row in &unwatched {
        let schema: &str = row.get(0);
        let transaction = client.transaction().await?;
        schema_lock::lock_schemas(&transaction).await?;
        // A listener may have connected since the query. While the lock is held, none can start watching.
        let delete = "DELETE FROM svc.watched
                       WHERE schema_name = $1 AND listened_at < now() - make_interval(days => $2)";
        if transaction.execute(delete, &[&schema, &retention.unwatch_after_days]).await? > 0 {
            drop_triggers(&transaction, schema).await?;
        }
        transaction.commit().await?;
    }
    Ok(())
}

//! What the database must be before any app may use it: our own schema, and nothing for PUBLIC to misuse.
//!
//! Every statement can be run again: it is, at each start and after each restore.

use tokio_postgres::Client;

use super::connect::DatabaseError;
use super::outbox;
use crate::machine::epoch::Epoch;

/// Left for the owner's tools, backups and the gateway itself.
const HEADROOM: usize = 16;
/// More connections than this serve no machine of our sizes better.
const MOST: usize = 64;

const OURS: &str = "
    CREATE SCHEMA IF NOT EXISTS svc;
    REVOKE ALL ON SCHEMA svc FROM PUBLIC;
    CREATE TABLE IF NOT EXISTS svc.apps (
        slug text PRIMARY KEY,
        schema_name text NOT NULL UNIQUE,
        manifest jsonb NOT NULL,
        not_done jsonb NOT NULL DEFAULT '[]',
        registered_at timestamptz(3) NOT NULL DEFAULT now(),
        updated_at timestamptz(3) NOT NULL DEFAULT now()
    );
    REVOKE CREATE ON SCHEMA public FROM PUBLIC;
";

/// Statements that take from PUBLIC what no app may have: temporary tables, new schemas, large objects, and other
/// databases as a way round.
const REVOCATIONS: &str = "
    SELECT format('REVOKE CREATE, TEMPORARY ON DATABASE %I FROM PUBLIC', current_database())
     WHERE has_database_privilege('public', current_database(), 'CREATE, TEMPORARY')
    UNION ALL
    SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC', datname)
      FROM pg_database
     WHERE datname IN ('postgres', 'template1') AND datname <> current_database()
       AND has_database_privilege('public', datname, 'CONNECT, TEMPORARY')
    UNION ALL
    SELECT format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', oid::regprocedure)
      FROM pg_proc
     WHERE pronamespace = 'pg_catalog'::regnamespace
       AND (proname LIKE 'lo\\_%' OR proname IN ('loread', 'lowrite'))
       AND has_function_privilege('public', oid, 'EXECUTE')
";

/// Makes the database ready for apps, and the outbox this machine's.
///
/// # Errors
/// When the database is away or refuses.
pub async fn prepare(client: &mut Client, epoch: Epoch) -> Result<(), DatabaseError> {
    let transaction = client.transaction().await?;
    lock(&transaction).await?;
    transaction.batch_execute(OURS).await?;
    transaction.batch_execute(outbox::OBJECTS).await?;
    outbox::adopt(&transaction, epoch).await?;
    for row in transaction.query(REVOCATIONS, &[]).await? {
        transaction.batch_execute(row.get(0)).await?;
    }
    transaction.commit().await?;
    Ok(())
}

/// One gateway at a time changes schemas and roles.
pub async fn lock(transaction: &tokio_postgres::Transaction<'_>) -> Result<(), tokio_postgres::Error> {
    transaction.batch_execute("SELECT pg_advisory_xact_lock(hashtext('svc-gateway'))").await
}

/// How many connections all apps together may hold.
///
/// # Errors
/// When the database is away.
pub async fn connection_budget(client: &Client) -> Result<usize, DatabaseError> {
    let row = client
        .query_one(
            "SELECT current_setting('max_connections')::int
                    - current_setting('superuser_reserved_connections')::int
                    - coalesce(current_setting('reserved_connections', true), '0')::int",
            &[],
        )
        .await?;
    let free = usize::try_from(row.get::<_, i32>(0)).unwrap_or(0);
    Ok(free.saturating_sub(HEADROOM).clamp(1, MOST))
}

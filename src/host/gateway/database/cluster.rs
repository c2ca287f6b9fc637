//! Prepares the database for apps: creates the `svc` schema, and revokes privileges from PUBLIC.
//!
//! Every statement is idempotent, because all run at each start and after each restore.

use tokio_postgres::Client;

use super::connect::DatabaseError;
use super::outbox;
use super::schema_lock::lock_schemas;
use svc_machine::epoch::Epoch;

/// Connections reserved for the owner's tools, backups and the gateway itself.
const RESERVED_CONNECTIONS: usize = 16;
/// Maximum number of connections for all apps together; more connections do not help on any machine size.
const MAX_CONNECTIONS: usize = 64;

const SCHEMA_SQL: &str = "
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

/// Selects the statements that revoke from PUBLIC the privileges that no app may have: temporary tables, new schemas,
/// large objects, and access to the databases `postgres` and `template1`.
const REVOKE_STATEMENTS: &str = "
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

/// Prepares the database for apps, and the outbox for this machine.
///
/// # Errors
/// The database is unreachable or rejects a statement, or another transaction holds a required lock for too long.
pub async fn prepare(client: &mut Client, epoch: Epoch) -> Result<(), DatabaseError> {
    let transaction = client.transaction().await?;
    lock_schemas(&transaction).await?;
    transaction.batch_execute(SCHEMA_SQL).await?;
    transaction.batch_execute(outbox::SCHEMA_SQL).await?;
    outbox::adopt_feed(&transaction, epoch).await?;
    for row in transaction.query(REVOKE_STATEMENTS, &[]).await? {
        transaction.batch_execute(row.get(0)).await?;
    }
    transaction.commit().await?;
    Ok(())
}

/// Returns the maximum number of connections for all apps together.
///
/// # Errors
/// The database is unreachable or rejects the query.
pub async fn fetch_connection_budget(client: &Client) -> Result<usize, DatabaseError> {
    let row = client
        .query_one(
            "SELECT current_setting('max_connections')::int
                    - current_setting('superuser_reserved_connections')::int
                    - coalesce(current_setting('reserved_connections', true), '0')::int",
            &[],
        )
        .await?;
    let available = usize::try_from(row.get::<_, i32>(0)).unwrap_or(0);
    Ok(available.saturating_sub(RESERVED_CONNECTIONS).clamp(1, MAX_CONNECTIONS))
}

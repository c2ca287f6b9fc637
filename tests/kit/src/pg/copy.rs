//! Copies the platform's tables within their own database, which is equivalent to a dump and restore. The signing
//! keys, the installation's record and the schema history are excluded.

use anyhow::Result;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

pub struct DatabaseCopy {
    /// The SQL that empties the tables.
    empty_sql: String,
}

impl DatabaseCopy {
    /// Prepares a copy of this connection's database. Triggers are disabled on the connection from then on.
    ///
    /// # Errors
    /// Fails on a database error.
    pub async fn new(client: &Client) -> Result<Self> {
        client.batch_execute("SET session_replication_role = replica").await?;
        let build_sql = "SELECT string_agg('DELETE FROM ' || quote_ident(tablename), '; ') FROM pg_tables \
                     WHERE schemaname = 'public' AND tablename \
                     NOT IN ('signing_keys', 'installation', 'refinery_schema_history')";
        Ok(Self { empty_sql: client.query_one(build_sql, &[]).await?.get(0) })
    }

    /// Empties the tables.
    ///
    /// # Errors
    /// Fails on a database error.
    pub async fn empty_tables(&self, client: &Client) -> Result<()> {
        execute_with_retry(client, &self.empty_sql).await
    }

    /// Saves the tables and sequences, replacing any earlier copy.
    ///
    /// # Errors
    /// Fails on a database error.
    pub async fn save(&self, client: &Client) -> Result<()> {
        execute_with_retry(client, SAVE_SQL).await
    }

    /// Restores the copy; returns `false` if there is none.
    ///
    /// # Errors
    /// Fails on a database error.
    pub async fn restore(&self, client: &Client) -> Result<bool> {
        let schema = client.query_opt("SELECT 1 FROM pg_namespace WHERE nspname = 'saved'", &[]).await?;
        if schema.is_none() {
            return Ok(false);
        }
        self.empty_tables(client).await?;
        execute_with_retry(client, RESTORE_SQL).await?;
        Ok(true)
    }

    /// Discards the copy, if there is one.
    ///
    /// # Errors
    /// Fails on a database error.
    pub async fn discard(&self, client: &Client) -> Result<()> {
        Ok(client.batch_execute("DROP SCHEMA IF EXISTS saved CASCADE").await?)
    }
}

/// Saves a consistent snapshot of the tables. `ROLLBACK` ends the transaction that a deadlock has aborted in an earlier
/// attempt.
const SAVE_SQL: &str = "ROLLBACK; BEGIN ISOLATION LEVEL REPEATABLE READ; DROP SCHEMA IF EXISTS saved CASCADE; CREATE SCHEMA saved; DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public'
        AND tablename NOT IN ('signing_keys', 'installation', 'refinery_schema_history') LOOP
        EXECUTE format('CREATE TABLE saved.%I AS TABLE public.%I', name, name);
    END LOOP;
    CREATE TABLE saved.sequences AS SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'public';
    END $$; COMMIT";

const RESTORE_SQL: &str = "DO $$ DECLARE name text; columns text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'saved' AND tablename <> 'sequences' LOOP
        SELECT string_agg(quote_ident(column_name), ', ') INTO columns FROM information_schema.columns
            WHERE table_schema = 'public' AND table_name = name AND is_generated = 'NEVER';
        EXECUTE format('INSERT INTO public.%I (%s) OVERRIDING SYSTEM VALUE SELECT %s FROM saved.%I',
            name, columns, columns, name);
    END LOOP;
    PERFORM setval(quote_ident(sequencename), coalesce(last_value, 1)) FROM saved.sequences;
    END $$";

/// Executes SQL, and retries if it deadlocks with the platform.
///
/// # Errors
/// Fails on any other database error, or if every attempt deadlocks.
pub async fn execute_with_retry(client: &Client, sql: &str) -> Result<()> {
    for _ in 0..20 {
        match client.batch_execute(sql).await {
            Err(error) if error.code() == Some(&SqlState::T_R_DEADLOCK_DETECTED) => {}
            result => return Ok(result?),
        }
    }
    anyhow::bail!("deadlocks persist: {sql}")
}

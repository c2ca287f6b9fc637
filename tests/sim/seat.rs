//! A place where runs take turns: one real database, its connections, and the platform's keys in it.

use std::sync::Arc;

use anyhow::Result;
use kit::pg::{TestDatabase, test_database_from};
use svc::platform::config::PlatformConfig;
use svc::platform::db::Db;
use svc::platform::keys::{self, Seal, SigningSet};
use tokio::sync::{OnceCell, watch};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use super::process;
use super::violation::Broken;

pub struct Seat {
    database: TestDatabase,
    /// The test's own connection, which no fault concerns.
    pub client: Client,
    pub db: Db,
    pub keys: watch::Receiver<Arc<SigningSet>>,
    pub installation: Uuid,
    empty: String,
    times: Times,
}

impl Seat {
    pub async fn new(broken: Option<Broken>) -> Result<Self> {
        svc::http::tls::install_provider();
        let database = test_database_from("platform", |url| async move {
            svc::platform::db::migrate::run(&url.parse()?).await
        });
        let database = database.await?;
        let client = database.connect().await?;
        static CHEAP: OnceCell<()> = OnceCell::const_new();
        CHEAP.get_or_try_init(|| cheap_password(&client, database.server().password())).await?;
        if let Some(Broken::Sql(sql)) = broken {
            client.batch_execute(sql).await?;
        }
        let config: PlatformConfig = process::config(&database.url());
        let db = Db::new(&config.database, 16)?;
        let (_, keys) = watch::channel(Arc::new(
            keys::load(&db, &Seal::new(&config.key), config.timing.keys.overlap).await?,
        ));
        // Rows of a few runs go sooner than files do; and what the test does here concerns no trigger.
        client.batch_execute("SET session_replication_role = replica").await?;
        let empty = "SELECT string_agg('DELETE FROM ' || quote_ident(tablename), '; ') FROM pg_tables \
                     WHERE schemaname = 'public' AND tablename \
                     NOT IN ('signing_keys', 'installation', 'refinery_schema_history')";
        let empty = client.query_one(empty, &[]).await?.get(0);
        let sql = "SELECT installation_id FROM installation";
        let installation = client.query_one(sql, &[]).await?.get(0);
        let times = Times::of(&client).await?;
        Ok(Self { database, client, db, keys, installation, empty, times })
    }

    pub fn url(&self) -> String {
        self.database.url()
    }

    /// As new, but for the keys.
    pub async fn clear(&self) -> Result<()> {
        self.client.batch_execute("DROP SCHEMA IF EXISTS saved CASCADE").await?;
        insist(&self.client, &self.empty).await
    }

    /// Copies every table and sequence, as a dump of the database would.
    pub async fn save(&self) -> Result<()> {
        insist(&self.client, SAVE).await
    }

    /// Brings the copy back; `false` without one.
    pub async fn restore(&self) -> Result<bool> {
        let found = self.client.query_opt("SELECT 1 FROM pg_namespace WHERE nspname = 'saved'", &[]).await?;
        if found.is_none() {
            return Ok(false);
        }
        insist(&self.client, &self.empty).await?;
        insist(&self.client, RESTORE).await?;
        Ok(true)
    }

    pub async fn pass_time(&self, seconds: u32, leases: bool) -> Result<()> {
        self.times.pass(&self.client, seconds, leases).await
    }

    pub async fn cut(&self) -> Result<()> {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                   WHERE datname = current_database() AND pid <> pg_backend_pid()";
        self.client.query(sql, &[]).await?;
        Ok(())
    }
}

/// Thousands of connections are made, and each would hash the password thousands of times in a dev build.
async fn cheap_password(client: &Client, password: &str) -> Result<()> {
    let sql = format!("SET scram_iterations = 1; ALTER ROLE postgres PASSWORD '{password}'");
    Ok(client.batch_execute(&sql).await?)
}

/// The tables that [`Seat::clear`] empties, and the sequences, all as of one instant.
const SAVE: &str = "ROLLBACK; BEGIN ISOLATION LEVEL REPEATABLE READ; DROP SCHEMA IF EXISTS saved CASCADE; CREATE SCHEMA saved; DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public'
        AND tablename NOT IN ('signing_keys', 'installation', 'refinery_schema_history') LOOP
        EXECUTE format('CREATE TABLE saved.%I AS TABLE public.%I', name, name);
    END LOOP;
    CREATE TABLE saved.sequences AS SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'public';
    END $$; COMMIT";

const RESTORE: &str = "DO $$ DECLARE name text; columns text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'saved' AND tablename <> 'sequences' LOOP
        SELECT string_agg(quote_ident(column_name), ', ') INTO columns FROM information_schema.columns
            WHERE table_schema = 'public' AND table_name = name AND is_generated = 'NEVER';
        EXECUTE format('INSERT INTO public.%I (%s) OVERRIDING SYSTEM VALUE SELECT %s FROM saved.%I',
            name, columns, columns, name);
    END LOOP;
    PERFORM setval(quote_ident(sequencename), coalesce(last_value, 1)) FROM saved.sequences;
    END $$";

/// What the platform is doing, or has left, may be in the way for a moment.
async fn insist(client: &Client, sql: &str) -> Result<()> {
    for _ in 0..20 {
        match client.batch_execute(sql).await {
            Err(error) if error.code() == Some(&SqlState::T_R_DEADLOCK_DETECTED) => {}
            ended => return Ok(ended?),
        }
    }
    anyhow::bail!("the database's locks are never free for: {sql}")
}

/// Moves all times that anything is decided by into the past, so that nobody has to wait for them.
pub struct Times(Vec<String>);

impl Times {
    /// Of every time in the tables that work is driven by, but for those that only tell what was.
    pub async fn of(client: &Client) -> Result<Self> {
        let sql = "SELECT table_name::text, column_name::text FROM information_schema.columns \
                   WHERE table_schema = 'public' AND data_type LIKE 'timestamp%' \
                   AND table_name IN ('user_machines', 'operations', 'operation_log', 'task_turns') \
                   AND column_name NOT IN ('retired_at', 'deleted_at', 'updated_at', 'ended_at', 'lease_until') \
                   AND (table_name, column_name) <> ('user_machines', 'created_at')";
        let mut statements = Vec::new();
        for table in ["user_machines", "operations", "operation_log", "task_turns"] {
            let rows = client.query(sql, &[]).await?;
            let columns = rows.iter().filter(|row| row.get::<_, &str>(0) == table);
            let set: Vec<String> = columns
                .map(|row| {
                    let column: &str = row.get(1);
                    format!("{column} = {column} - interval '$N seconds'")
                })
                .collect();
            statements.push(format!("UPDATE {table} SET {}", set.join(", ")));
        }
        Ok(Self(statements))
    }

    /// With the leases, whoever is at work has slept through them.
    pub async fn pass(&self, client: &Client, seconds: u32, leases: bool) -> Result<()> {
        for sql in &self.0 {
            insist(client, &sql.replace("$N", &seconds.to_string())).await?;
        }
        if leases {
            let sql = format!(
                "UPDATE operations SET lease_until = lease_until - interval '{seconds} seconds' \
                 WHERE lease_until IS NOT NULL"
            );
            insist(client, &sql).await?;
        }
        Ok(())
    }
}

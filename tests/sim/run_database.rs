//! A database shared by consecutive runs, with its connections and the platform's keys.

use std::sync::Arc;

use anyhow::Result;
use kit::pg::copy::{DatabaseCopy, execute_with_retry};
use kit::pg::{TestDatabase, test_database_from};
use svc::platform::config::PlatformConfig;
use svc::platform::db::Db;
use svc::platform::keys::{self, Seal};
use svc::router::signing_set::SigningSet;
use tokio::sync::watch;
use tokio_postgres::Client;
use uuid::Uuid;

use super::process;
use super::violation::BrokenRule;

pub struct RunDatabase {
    database: TestDatabase,
    /// The test's own connection, unaffected by faults.
    pub client: Client,
    pub db: Db,
    pub keys: watch::Receiver<Arc<SigningSet>>,
    pub installation: Uuid,
    copy: DatabaseCopy,
    times: StoredTimes,
}

impl RunDatabase {
    pub async fn new(broken_rule: Option<BrokenRule>) -> Result<Self> {
        svc::http::tls::install_provider();
        let database = test_database_from("platform", |url| async move {
            svc::platform::db::migrate::run(&url.parse()?).await
        });
        let database = database.await?;
        let client = database.connect().await?;
        if let Some(BrokenRule::Sql(sql)) = broken_rule {
            client.batch_execute(sql).await?;
        }
        let config: PlatformConfig = process::build_config(&database.url());
        let db = Db::new(&config.database, 16)?;
        let (_, keys) = watch::channel(Arc::new(
            keys::load(&db, &Seal::from_keys(&config.keys), config.timing.keys.overlap).await?,
        ));
        // `DatabaseCopy` empties tables with `DELETE`, which is faster than `TRUNCATE` for the rows of a few runs.
        let copy = DatabaseCopy::new(&client).await?;
        let sql = "SELECT installation_id FROM installation";
        let installation = client.query_one(sql, &[]).await?.get(0);
        let times = StoredTimes::read(&client).await?;
        Ok(Self { database, client, db, keys, installation, copy, times })
    }

    pub fn url(&self) -> String {
        self.database.url()
    }

    /// Discards the copy and empties the tables, except for the signing keys and the installation's record.
    pub async fn clear(&self) -> Result<()> {
        self.copy.discard(&self.client).await?;
        self.copy.empty_tables(&self.client).await
    }

    pub async fn save(&self) -> Result<()> {
        self.copy.save(&self.client).await
    }

    /// Restores the copy. Returns `false` if there is no copy.
    pub async fn restore(&self) -> Result<bool> {
        self.copy.restore(&self.client).await
    }

    pub async fn advance_time(&self, seconds: u32, expire_leases: bool) -> Result<()> {
        self.times.advance(&self.client, seconds, expire_leases).await
    }

    pub async fn cut_connections(&self) -> Result<()> {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                   WHERE datname = current_database() AND pid <> pg_backend_pid()";
        self.client.query(sql, &[]).await?;
        Ok(())
    }
}

/// The statements that move the stored times that affect decisions into the past, so that no test has to wait.
pub struct StoredTimes(Vec<String>);

impl StoredTimes {
    /// Finds the time columns of the tables that control work. Leaves out the times at which a machine was created,
    /// retired or deleted, a row was updated, or an operation ended. Also leaves out leases, which
    /// [`StoredTimes::advance`] moves separately.
    pub async fn read(client: &Client) -> Result<Self> {
        let sql = "SELECT table_name::text, column_name::text FROM information_schema.columns \
                   WHERE table_schema = 'public' AND data_type LIKE 'timestamp%' \
                   AND table_name IN ('user_machines', 'operations', 'operation_log', 'task_turns') \
                   AND column_name NOT IN ('retired_at', 'deleted_at', 'updated_at', 'ended_at', 'lease_until') \
                   AND (table_name, column_name) <> ('user_machines', 'created_at')";
        let mut statements = Vec::new();
        for table in ["user_machines", "operations", "operation_log", "task_turns"] {
            let rows = client.query(sql, &[]).await?;
            let columns = rows.iter().filter(|row| row.get::<_, &str>(0) == table);
            let assignments: Vec<String> = columns
                .map(|row| {
                    let column: &str = row.get(1);
                    format!("{column} = {column} - interval '$N seconds'")
                })
                .collect();
            statements.push(format!("UPDATE {table} SET {}", assignments.join(", ")));
        }
        Ok(Self(statements))
    }

    /// Moves the stored times `seconds` into the past. With `expire_leases`, also moves the leases, so that those with
    /// less than `seconds` left expire.
    pub async fn advance(&self, client: &Client, seconds: u32, expire_leases: bool) -> Result<()> {
        for sql in &self.0 {
            execute_with_retry(client, &sql.replace("$N", &seconds.to_string())).await?;
        }
        if expire_leases {
            let sql = format!(
                "UPDATE operations SET lease_until = lease_until - interval '{seconds} seconds' \
                 WHERE lease_until IS NOT NULL"
            );
            execute_with_retry(client, &sql).await?;
        }
        Ok(())
    }
}

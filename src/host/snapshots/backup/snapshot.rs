//! A PostgreSQL transaction snapshot shared by the dump, the row counts and the rest of the sidecar, so they all
//! describe the same database state.
//!
//! [`Snapshot`] owns the exporting transaction. Like `pg_dump`, it locks the tables against DDL, so exactly the listed
//! tables are dumped and counted.

use jiff::Timestamp;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error};

use crate::snapshots::roles;
use crate::snapshots::row_counts;
use crate::system::postgres;
use crate::system::postgres::{ConnectError, PostgresServer};
use svc_base::applet::Exit;
use svc_base::clock;
use svc_store::snapshot::{DatabaseFacts, DatabaseGrant, DatabaseSetting, TableCount};

const MAX_ATTEMPTS: u32 = 3;
/// Maximum number of tables locked per statement.
const MAX_TABLES_PER_LOCK: usize = 200;
/// Maximum wait for a table lock, in seconds.
const LOCK_TIMEOUT_SECONDS: u32 = 60;

/// An open snapshot. Dropping it closes the connection, which ends the transaction.
pub struct Snapshot {
    client: Client,
    /// Snapshot id for `pg_dump --snapshot`.
    pub id: String,
    /// Taken just before the snapshot, which therefore includes everything committed by then.
    pub taken_at: Timestamp,
    pub pg_version: String,
    /// Database size on disk.
    pub database_bytes: u64,
    tables: Vec<String>,
}

/// Errors from opening a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A long-running operation, such as a migration, holds an exclusive lock on a table.
    #[error("a table has been locked by another session for more than {LOCK_TIMEOUT_SECONDS} s")]
    Locked(#[source] Error),
    #[error("cannot take a snapshot of the database")]
    Query(#[from] Error),
}

impl SnapshotError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Connect(_) => Exit::Unavailable,
            Self::Locked(_) => Exit::TryAgain,
            Self::Query(error) => postgres::to_exit(error),
        }
    }
}

impl Snapshot {
    /// Opens a snapshot. If a table or its schema is dropped before we can lock it, retries in a new transaction, up to
    /// [`MAX_ATTEMPTS`] attempts in total.
    pub async fn open(server: &PostgresServer) -> Result<Self, SnapshotError> {
        let mut attempt = 1;
        loop {
            let client = server.connect(server.database(), "svc-db-backup").await?;
            match Self::export(client).await {
                Err(error) if error.code().is_some_and(is_dropped) && attempt < MAX_ATTEMPTS => {
                    attempt += 1;
                }
                Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => {
                    return Err(SnapshotError::Locked(error));
                }
                result => return Ok(result?),
            }
        }
    }

    async fn export(client: Client) -> Result<Self, Error> {
        client
            .batch_execute(&format!(
                "SET statement_timeout = 0; SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'; \
                 SET idle_in_transaction_session_timeout = 0; SET idle_session_timeout = 0; \
                 SET search_path = pg_catalog; SET row_security = off"
            ))
            .await?;
        let taken_at = clock::now_ms();
        client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let row = client
            .query_one(
                "SELECT pg_export_snapshot(), current_setting('server_version'), \
                 pg_database_size(current_database())",
                &[],
            )
            .await?;
        let size: i64 = row.try_get(2)?;
        let tables = row_counts::list_tables(&client).await?;
        for chunk in tables.chunks(MAX_TABLES_PER_LOCK) {
            client
                .batch_execute(&format!("LOCK TABLE ONLY {} IN ACCESS SHARE MODE", chunk.join(", ONLY ")))
                .await?;
        }
        Ok(Self {
            id: row.try_get(0)?,
            taken_at,
            pg_version: row.try_get(1)?,
            database_bytes: size.unsigned_abs(),
            tables,
            client,
        })
    }

    /// Counts the rows in each table.
    ///
    /// # Errors
    /// If a query fails.
    pub async fn count_rows(&self) -> Result<Vec<TableCount>, Error> {
        row_counts::count_rows(&self.client, &self.tables).await
    }

    /// Lists the roles with objects, privileges or settings in this database, excluding built-in roles.
    ///
    /// # Errors
    /// If a query fails.
    pub async fn read_referenced_roles(&self) -> Result<Vec<String>, Error> {
        let rows = self
            .client
            .query(
                "SELECT DISTINCT r.rolname::text FROM pg_shdepend s \
                 JOIN pg_database d ON d.datname = current_database() \
                 JOIN pg_roles r ON r.oid = s.refobjid AND s.refclassid = 'pg_authid'::regclass \
                 WHERE (s.dbid = d.oid OR (s.classid = 'pg_database'::regclass AND s.objid = d.oid)) \
                   AND r.rolname !~ '^pg_' \
                 UNION SELECT r.rolname::text FROM pg_db_role_setting g \
                 JOIN pg_database d ON d.oid = g.setdatabase AND d.datname = current_database() \
                 JOIN pg_roles r ON r.oid = g.setrole \
                 ORDER BY 1",
                &[],
            )
            .await?;
        rows.iter().map(|row| row.try_get(0)).collect()
    }

    /// Reads database-level metadata that isn't part of a dump.
    ///
    /// # Errors
    /// If a query fails.
    pub async fn read_facts(&self) -> Result<DatabaseFacts, Error> {
        let row = self
            .client
            .query_one(
                "SELECT r.rolname::text, d.datacl IS NOT NULL FROM pg_database d \
                 JOIN pg_roles r ON r.oid = d.datdba WHERE d.datname = current_database()",
                &[],
            )
            .await?;
        let has_grants: bool = row.try_get(1)?;
        Ok(DatabaseFacts {
            owner: row.try_get(0)?,
            size_bytes: self.database_bytes,
            grants: if has_grants { Some(self.read_grants().await?) } else { None },
            settings: self.read_settings().await?,
            roles: Some(roles::read_roles(&self.client).await?),
        })
    }

    async fn read_grants(&self) -> Result<Vec<DatabaseGrant>, Error> {
        let rows = self
            .client
            .query(
                "SELECT r.rolname::text, a.privilege_type, a.is_grantable \
                 FROM pg_database d, aclexplode(d.datacl) a LEFT JOIN pg_roles r ON r.oid = a.grantee \
                 WHERE d.datname = current_database() AND (a.grantee = 0 OR r.oid IS NOT NULL) ORDER BY 1, 2",
                &[],
            )
            .await?;
        let grant = |row: &tokio_postgres::Row| {
            Ok(DatabaseGrant {
                grantee: row.try_get(0)?,
                privilege: row.try_get(1)?,
                grantable: row.try_get(2)?,
            })
        };
        rows.iter().map(grant).collect()
    }

    /// Reads the database settings, except the restore id, which identifies one particular restored copy.
    async fn read_settings(&self) -> Result<Vec<DatabaseSetting>, Error> {
        let rows = self
            .client
            .query(
                "SELECT r.rolname::text, split_part(c, '=', 1), substr(c, strpos(c, '=') + 1) \
                 FROM pg_db_role_setting g JOIN pg_database d ON d.oid = g.setdatabase \
                 CROSS JOIN unnest(g.setconfig) c LEFT JOIN pg_roles r ON r.oid = g.setrole \
                 WHERE d.datname = current_database() AND (g.setrole = 0 OR r.oid IS NOT NULL) \
                   AND c NOT LIKE 'svc.restore\\_id=%' ORDER BY 1, 2",
                &[],
            )
            .await?;
        let setting = |row: &tokio_postgres::Row| {
            Ok(DatabaseSetting { role: row.try_get(0)?, name: row.try_get(1)?, value: row.try_get(2)? })
        };
        rows.iter().map(setting).collect()
    }
}

/// Returns whether the error means that a listed table or its schema was dropped.
fn is_dropped(code: &SqlState) -> bool {
    [SqlState::UNDEFINED_TABLE, SqlState::INVALID_SCHEMA_NAME].contains(code)
}

//! The platform's database: connection pools and statement timeouts. Each submodule covers one topic.
//!
//! This module makes no decisions about machines. Invariants: every statement has a timeout, and errors distinguish an
//! unavailable database from a rejected statement.

pub mod alarms;
pub mod audit;
pub mod budget;
pub mod exercises;
pub mod files_keys;
pub mod fleet;
pub mod former_machines;
pub mod idempotency;
pub mod kept_servers;
pub mod keys;
pub mod leases;
pub mod machine_changes;
pub mod machine_row;
pub mod machine_server;
pub mod machines;
pub mod migrate;
pub mod operation_log;
pub mod operation_metrics;
pub mod operations;
pub mod operators;
pub mod platform_keys;
pub mod retention;
pub mod rollouts;
pub mod servers;
pub mod slot_operations;
pub mod slots;
pub mod tasks;
pub mod unknown_servers;
pub mod upgrade_token;

use std::pin::Pin;
use std::time::Duration;

use deadpool_postgres::{
    GenericClient, Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime, Transaction,
};
use tokio::task::JoinHandle;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Config, IsolationLevel, NoTls, Row};

use svc_base::error_chain::format_chain;
use svc_http::resolve;

/// Client-side timeout, applied separately to preparing and running a statement. The server-side timeout is shorter.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(6);
const SERVER_STATEMENT_TIMEOUT_MS: u32 = 5000;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A statement's parameters.
pub type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

/// A classified database error.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    #[error("database unavailable: {what}")]
    Unavailable {
        what: &'static str,
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// A unique or foreign key constraint was violated.
    #[error("constraint {constraint} is violated")]
    Violated { constraint: String },
    /// A conflict with another transaction, or a row that changed after it was read. The whole transaction can be
    /// retried.
    #[error("the transaction conflicted with another one")]
    Contended,
    #[error("a statement failed")]
    Failed(#[source] tokio_postgres::Error),
    /// A stored value is invalid.
    #[error("invalid stored {what}: {reason}")]
    Unreadable { what: &'static str, reason: String },
    /// A value is too large for its column.
    #[error("{what} {value} is out of range for the database")]
    OutOfRange { what: &'static str, value: u32 },
}

impl DbError {
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Contended)
    }

    pub fn violates(&self, name: &str) -> bool {
        matches!(self, Self::Violated { constraint } if constraint == name)
    }
}

impl From<tokio_postgres::Error> for DbError {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(db_error) = error.as_db_error() else {
            if error.is_closed()
                || std::error::Error::source(&error)
                    .is_some_and(<dyn std::error::Error>::is::<std::io::Error>)
            {
                return Self::Unavailable { what: "connection lost", source: Some(Box::new(error)) };
            }
            return Self::Failed(error);
        };
        let code = db_error.code();
        if *code == SqlState::UNIQUE_VIOLATION || *code == SqlState::FOREIGN_KEY_VIOLATION {
            return Self::Violated { constraint: db_error.constraint().unwrap_or_default().to_owned() };
        }
        if *code == SqlState::T_R_SERIALIZATION_FAILURE || *code == SqlState::T_R_DEADLOCK_DETECTED {
            return Self::Contended;
        }
        // Classes 08, 53 and 57: connection errors, insufficient resources, operator intervention (including timeouts).
        if ["08", "53", "57"].iter().any(|class| code.code().starts_with(class)) {
            return Self::Unavailable { what: "not serving", source: Some(Box::new(error)) };
        }
        Self::Failed(error)
    }
}

/// Why a database connection could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Resolve(#[from] resolve::ResolveError),
    #[error(transparent)]
    Database(#[from] tokio_postgres::Error),
}

/// Checks that a connection string names a host and has no unsupported settings.
pub fn check_supported(config: &Config) -> Result<(), &'static str> {
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        return Err("must name a host");
    }
    let is_socket = |host: &Host| matches!(host, Host::Unix(_));
    if config.get_hosts().iter().any(is_socket) && !config.get_hosts().iter().all(is_socket) {
        return Err("must not name both sockets and hosts");
    }
    if config.get_ssl_mode() == SslMode::Require {
        return Err(
            "must not set sslmode=require, which is not supported: connect over a socket or a private network",
        );
    }
    Ok(())
}

/// A connection pool. Each kind of work has its own, so that none has to wait for another.
#[derive(Clone)]
pub struct Db {
    pool: Pool,
}

impl Db {
    /// Creates a pool of up to `max_connections` connections, opened on demand.
    ///
    /// # Errors
    /// If deadpool rejects the settings.
    pub fn new(config: &Config, max_connections: usize) -> anyhow::Result<Self> {
        let settings = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_connect(config_with_timeouts(config), ResolvingConnector, settings);
        let pool = Pool::builder(manager)
            .max_size(max_connections)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(CONNECT_TIMEOUT))
            .create_timeout(Some(CONNECT_TIMEOUT))
            .recycle_timeout(Some(CONNECT_TIMEOUT))
            .build()?;
        Ok(Self { pool })
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns a connection from the pool.
    ///
    /// # Errors
    /// `Unavailable` if no connection becomes available within `CONNECT_TIMEOUT`, or if a new one cannot be opened.
    pub async fn session(&self) -> Result<Object, DbError> {
        self.pool.get().await.map_err(|error| DbError::Unavailable {
            what: "no connection available",
            source: Some(Box::new(error)),
        })
    }
}

/// Begins a transaction, which is rolled back if dropped without [`commit`].
pub async fn begin(session: &mut Object) -> Result<Transaction<'_>, DbError> {
    with_timeout(session.transaction()).await
}

/// Begins a read-only transaction in which all statements see the same snapshot.
pub async fn begin_snapshot(session: &mut Object) -> Result<Transaction<'_>, DbError> {
    let transaction = session.build_transaction().isolation_level(IsolationLevel::RepeatableRead);
    with_timeout(transaction.read_only(true).start()).await
}

/// Commits a transaction.
///
/// # Errors
/// [`DbError`]. After `Unavailable`, the transaction may or may not have been committed.
pub async fn commit(tx: Transaction<'_>) -> Result<(), DbError> {
    with_timeout(tx.commit()).await
}

pub async fn query(client: &impl GenericClient, sql: &str, params: Params<'_>) -> Result<Vec<Row>, DbError> {
    let statement = with_timeout(client.prepare_cached(sql)).await?;
    with_timeout(client.query(&statement, params)).await
}

pub async fn query_opt(
    client: &impl GenericClient,
    sql: &str,
    params: Params<'_>,
) -> Result<Option<Row>, DbError> {
    let statement = with_timeout(client.prepare_cached(sql)).await?;
    with_timeout(client.query_opt(&statement, params)).await
}

pub async fn execute(client: &impl GenericClient, sql: &str, params: Params<'_>) -> Result<u64, DbError> {
    let statement = with_timeout(client.prepare_cached(sql)).await?;
    with_timeout(client.execute(&statement, params)).await
}

/// Acquires the advisory lock named `subject` until the end of the transaction. Waits for other holders until the
/// statement times out.
pub async fn lock(tx: &Transaction<'_>, subject: &str) -> Result<(), DbError> {
    query(tx, "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", &[&subject]).await.map(drop)
}

async fn with_timeout<T>(work: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T, DbError> {
    match tokio::time::timeout(STATEMENT_TIMEOUT, work).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(DbError::Unavailable { what: "statement timed out", source: None }),
    }
}

fn config_with_timeouts(config: &Config) -> Config {
    let mut config = config.clone();
    let options = config.get_options().unwrap_or_default();
    let options = format!(
        "{options} -c statement_timeout={SERVER_STATEMENT_TIMEOUT_MS} -c idle_in_transaction_session_timeout=30000"
    );
    config
        .options(options.trim())
        .application_name("svc-platform")
        .connect_timeout(CONNECT_TIMEOUT)
        .keepalives_idle(Duration::from_secs(15))
        .tcp_user_timeout(Duration::from_secs(15));
    config
}

/// Resolves host names before connecting: a static glibc binary must not call getaddrinfo.
struct ResolvingConnector;

/// A connection and its driver task.
type Connected = (Client, JoinHandle<()>);
type DriverResult = Result<Connected, tokio_postgres::Error>;

impl deadpool_postgres::Connect for ResolvingConnector {
    fn connect(&self, config: &Config) -> Pin<Box<dyn Future<Output = DriverResult> + Send + '_>> {
        let config = config.clone();
        Box::pin(async move {
            match connect(&config).await {
                Ok(connected) => Ok(connected),
                Err(ConnectError::Database(error)) => Err(error),
                Err(ConnectError::Resolve(error)) => {
                    tracing::warn!(%error, "cannot resolve the database's host name");
                    // The driver's error cannot be constructed here, but connecting without a host returns one.
                    open(&Config::new()).await
                }
            }
        })
    }
}

/// Opens a connection and spawns its driver task.
///
/// # Errors
/// If the host name cannot be resolved, or the connection fails.
pub async fn connect(config: &Config) -> Result<Connected, ConnectError> {
    Ok(open(&svc_router::database::resolve_hosts(config).await?).await?)
}

/// Opens a connection to hosts that are already resolved.
async fn open(config: &Config) -> DriverResult {
    let (client, connection) = config.connect(NoTls).await?;
    let connection_task = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::warn!(error = %format_chain(&error), "a database connection ended with an error");
        }
    });
    Ok((client, connection_task))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connect_error_names_unresolvable_host() {
        // DNS does not allow empty labels, so no query is sent.
        let error = connect(&"host=a..b user=u".parse().unwrap()).await.err().unwrap();
        assert!(error.to_string().starts_with("cannot resolve a..b: "), "{error}");
    }
}

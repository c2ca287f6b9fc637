//! Connects to PostgreSQL with a timeout, and resolves host names without libc.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, Notify};
use tokio_postgres::config::Host;
use tokio_postgres::{AsyncMessage, Client, NoTls, SimpleQueryMessage};

use crate::config::Config;
use svc_base::error_chain::format_chain;
use svc_http::resolve;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(2);

/// An error while connecting to the database or querying it.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    #[error("cannot connect to the database")]
    Connect(#[source] tokio_postgres::Error),
    #[error("cannot connect to the database: {0}")]
    Resolve(#[from] resolve::ResolveError),
    #[error("the database did not respond in time")]
    Timeout,
    #[error("cannot query the database")]
    Query(#[from] tokio_postgres::Error),
}

/// The administrator's access to the database.
pub struct Database {
    config: tokio_postgres::Config,
    /// The connection for short, pipelined statements, such as those from health checks and the change feed.
    shared: Mutex<Option<Arc<Client>>>,
    /// Notified when a role's login is rejected: the supervisor then sets up the login again.
    pub login_rejected: Notify,
}

impl Database {
    pub fn new(config: &Config) -> Self {
        let mut postgres = config.postgres.clone();
        postgres.application_name("svc-gateway").connect_timeout(CONNECT_TIMEOUT);
        Self { config: postgres, shared: Mutex::new(None), login_rejected: Notify::new() }
    }

    /// The administrator's configuration, from which the roles' configurations are derived.
    pub fn config(&self) -> &tokio_postgres::Config {
        &self.config
    }

    /// Opens a connection for the caller; it closes when the client is dropped.
    ///
    /// # Errors
    /// The database's host name cannot be resolved, or the database cannot be reached, rejects the login, or does not
    /// respond in time.
    pub async fn connect(&self) -> Result<Client, DatabaseError> {
        connect(&self.config).await
    }

    /// Opens a connection that notifies `wakeup` for each notification on `channel`, and when the connection is closed.
    /// The caller must keep the client: dropping it closes the connection.
    ///
    /// # Errors
    /// The connection cannot be opened, or the database rejects the `LISTEN` statement or does not respond in time.
    pub async fn listen(&self, channel: &'static str, wakeup: Arc<Notify>) -> Result<Client, DatabaseError> {
        let config = resolve_hosts(&self.config).await?;
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, config.connect(NoTls));
        let (client, mut connection) =
            connecting.await.map_err(|_| DatabaseError::Timeout)?.map_err(DatabaseError::Connect)?;
        tokio::spawn(async move {
            while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
                if matches!(message, AsyncMessage::Notification(_)) {
                    wakeup.notify_one();
                }
            }
            wakeup.notify_one();
        });
        let sql = format!("LISTEN {channel}");
        let listening = tokio::time::timeout(STATEMENT_TIMEOUT, client.batch_execute(&sql));
        listening.await.map_err(|_| DatabaseError::Timeout)??;
        Ok(client)
    }

    /// Queries the database server's address and port; `None` if the connection uses a Unix socket.
    ///
    /// # Errors
    /// The connection cannot be opened, or the database rejects the query or does not respond in time.
    pub async fn fetch_server_address(&self) -> Result<Option<SocketAddr>, DatabaseError> {
        let query = tokio::time::timeout(STATEMENT_TIMEOUT, async {
            let client = self.shared_client().await?;
            let messages = client.simple_query("SELECT host(inet_server_addr()), inet_server_port()").await?;
            Ok(messages.iter().find_map(|message| match message {
                SimpleQueryMessage::Row(row) => {
                    Some(SocketAddr::new(row.get(0)?.parse().ok()?, row.get(1)?.parse().ok()?))
                }
                _ => None,
            }))
        });
        query.await.unwrap_or(Err(DatabaseError::Timeout))
    }

    /// Returns the connection shared by all short statements, and opens it if necessary.
    ///
    /// # Errors
    /// The connection cannot be opened.
    pub async fn shared_client(&self) -> Result<Arc<Client>, DatabaseError> {
        let mut shared = self.shared.lock().await;
        if let Some(client) = shared.as_ref().filter(|client| !client.is_closed()) {
            return Ok(client.clone());
        }
        let client = Arc::new(self.connect().await?);
        *shared = Some(client.clone());
        Ok(client)
    }
}

/// Connects within [`CONNECT_TIMEOUT`] after resolving the hosts' names without libc.
pub async fn connect(config: &tokio_postgres::Config) -> Result<Client, DatabaseError> {
    let config = resolve_hosts(config).await?;
    let connecting = tokio::time::timeout(CONNECT_TIMEOUT, config.connect(NoTls));
    let (client, connection) =
        connecting.await.map_err(|_| DatabaseError::Timeout)?.map_err(DatabaseError::Connect)?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(error = %format_chain(&error), "database connection ended");
        }
    });
    Ok(client)
}

/// Fills in the hosts' addresses. A configuration with a Unix socket or with explicit addresses is left unchanged.
async fn resolve_hosts(config: &tokio_postgres::Config) -> Result<tokio_postgres::Config, DatabaseError> {
    let mut config = config.clone();
    let names: Vec<String> = config
        .get_hosts()
        .iter()
        .filter_map(|host| if let Host::Tcp(name) = host { Some(name.clone()) } else { None })
        .collect();
    if names.len() == config.get_hosts().len() && config.get_hostaddrs().is_empty() {
        for name in names {
            config.hostaddr(resolve::lookup_addresses(&name).await?[0]);
        }
    }
    Ok(config)
}

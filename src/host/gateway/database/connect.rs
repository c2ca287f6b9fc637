//! Connecting: within a deadline, and without the libc resolver.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, Notify};
use tokio_postgres::config::Host;
use tokio_postgres::{AsyncMessage, Client, NoTls, SimpleQueryMessage};

use crate::host::gateway::config::Config;
use crate::http::resolve;

const CONNECT: Duration = Duration::from_secs(5);
const PING: Duration = Duration::from_secs(2);

/// The database could not be reached or did not answer.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    #[error("connect to the database")]
    Connect(#[source] tokio_postgres::Error),
    #[error("connect to the database: {0}")]
    Resolve(#[from] resolve::ResolveError),
    #[error("the database did not answer in time")]
    Deadline,
    #[error("query the database")]
    Query(#[from] tokio_postgres::Error),
}

/// How the database is reached as its administrator.
pub struct Database {
    config: tokio_postgres::Config,
    /// For health questions and the feed of changes: short statements, several under way at once.
    shared: Mutex<Option<Arc<Client>>>,
    /// Told when a role's login was refused: the supervisor sets it up again.
    pub login_refused: Notify,
}

impl Database {
    pub fn new(config: &Config) -> Self {
        let mut postgres = config.postgres.clone();
        postgres.application_name("svc-gateway").connect_timeout(CONNECT);
        Self { config: postgres, shared: Mutex::new(None), login_refused: Notify::new() }
    }

    /// The administrator's configuration, as a base for a role's.
    pub fn config(&self) -> &tokio_postgres::Config {
        &self.config
    }

    /// A connection of the caller's own; it ends with the client.
    ///
    /// # Errors
    /// See [`DatabaseError`].
    pub async fn connect(&self) -> Result<Client, DatabaseError> {
        connect(&self.config).await
    }

    /// A connection that tells `woken` of each notification on `channel`, until it is closed; the client has to be kept.
    ///
    /// # Errors
    /// See [`DatabaseError`].
    pub async fn listen(&self, channel: &'static str, woken: Arc<Notify>) -> Result<Client, DatabaseError> {
        let config = resolved(&self.config).await?;
        let connecting = tokio::time::timeout(CONNECT, config.connect(NoTls));
        let (client, mut connection) =
            connecting.await.map_err(|_| DatabaseError::Deadline)?.map_err(DatabaseError::Connect)?;
        tokio::spawn(async move {
            while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
                if matches!(message, AsyncMessage::Notification(_)) {
                    woken.notify_one();
                }
            }
            woken.notify_one();
        });
        client.batch_execute(&format!("LISTEN {channel}")).await?;
        Ok(client)
    }

    /// Where the server is that answers, by its own word; `None` behind a unix socket.
    ///
    /// # Errors
    /// See [`DatabaseError`].
    pub async fn server(&self) -> Result<Option<SocketAddr>, DatabaseError> {
        let asked = tokio::time::timeout(PING, async {
            let client = self.shared().await?;
            let told = client.simple_query("SELECT host(inet_server_addr()), inet_server_port()").await?;
            Ok(told.iter().find_map(|message| match message {
                SimpleQueryMessage::Row(row) => {
                    Some(SocketAddr::new(row.get(0)?.parse().ok()?, row.get(1)?.parse().ok()?))
                }
                _ => None,
            }))
        });
        asked.await.unwrap_or(Err(DatabaseError::Deadline))
    }

    /// The connection that everything short shares.
    ///
    /// # Errors
    /// See [`DatabaseError`].
    pub async fn shared(&self) -> Result<Arc<Client>, DatabaseError> {
        let mut shared = self.shared.lock().await;
        if let Some(client) = shared.as_ref().filter(|client| !client.is_closed()) {
            return Ok(client.clone());
        }
        let client = Arc::new(self.connect().await?);
        *shared = Some(client.clone());
        Ok(client)
    }
}

/// Connects, with names resolved in Rust.
pub async fn connect(config: &tokio_postgres::Config) -> Result<Client, DatabaseError> {
    let config = resolved(config).await?;
    let connecting = tokio::time::timeout(CONNECT, config.connect(NoTls));
    let (client, connection) =
        connecting.await.map_err(|_| DatabaseError::Deadline)?.map_err(DatabaseError::Connect)?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "database connection ended");
        }
    });
    Ok(client)
}

/// Fills in the hosts' addresses. A configuration with a socket among them has no names that need it.
async fn resolved(config: &tokio_postgres::Config) -> Result<tokio_postgres::Config, DatabaseError> {
    let mut config = config.clone();
    let names: Vec<String> = config
        .get_hosts()
        .iter()
        .filter_map(|host| if let Host::Tcp(name) = host { Some(name.clone()) } else { None })
        .collect();
    if names.len() == config.get_hosts().len() && config.get_hostaddrs().is_empty() {
        for name in names {
            config.hostaddr(resolve::addresses(&name).await?[0]);
        }
    }
    Ok(config)
}

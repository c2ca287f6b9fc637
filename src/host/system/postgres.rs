//! Connections to the machine's own PostgreSQL: the owner's database, and `postgres` for managing databases.

use std::time::Duration;

use tokio_postgres::config::Host;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config, NoTls};

use svc_base::applet::Exit;
use svc_base::error_chain::format_chain;
use svc_http::resolve::{self, ResolveError};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The database from which databases are created, renamed and dropped.
pub const MAINTENANCE_DATABASE: &str = "postgres";

/// The server that `DATABASE_URL` names.
#[derive(Clone)]
pub struct PostgresServer {
    config: Config,
    database: String,
}

/// The reason a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    #[error("cannot connect to the database {database}")]
    Failed {
        database: String,
        #[source]
        source: tokio_postgres::Error,
    },
    #[error("cannot connect to the database {database}: timed out")]
    Timeout { database: String },
}

impl PostgresServer {
    /// `config` names the owner's database. As in libpq, the default is the user's name.
    pub fn new(config: Config) -> Self {
        let database =
            config.get_dbname().or_else(|| config.get_user()).unwrap_or(MAINTENANCE_DATABASE).to_owned();
        Self { config, database }
    }

    /// Returns the name of the owner's database.
    pub fn database(&self) -> &str {
        &self.database
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the same server with the given role.
    pub fn as_role(&self, role: &str, password: &str) -> Self {
        let mut config = self.config.clone();
        config.user(role).password(password);
        Self { config, database: self.database.clone() }
    }

    /// # Errors
    /// [`ConnectError`] if a host name cannot be resolved, which takes at most 5 s for each name, or if the connection
    /// then fails or is not established within 10 s.
    pub async fn connect(&self, database: &str, application: &str) -> Result<Client, ConnectError> {
        let mut config = self.config.clone();
        config.dbname(database).application_name(application).connect_timeout(CONNECT_TIMEOUT);
        self.add_addresses(&mut config).await?;
        let connect_error = |source| ConnectError::Failed { database: database.to_owned(), source };
        let timeout_error = |_| ConnectError::Timeout { database: database.to_owned() };
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, config.connect(NoTls)).await;
        let (client, connection) = connected.map_err(timeout_error)?.map_err(connect_error)?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = %format_chain(&error), "the database connection ended");
            }
        });
        Ok(client)
    }

    /// Resolves host names here, because tokio-postgres would call getaddrinfo for a name without an address, and a
    /// static glibc binary must not call it.
    async fn add_addresses(&self, config: &mut Config) -> Result<(), ResolveError> {
        let is_name =
            |host: &Host| matches!(host, Host::Tcp(name) if name.parse::<std::net::IpAddr>().is_err());
        if !self.config.get_hostaddrs().is_empty() || !self.config.get_hosts().iter().any(is_name) {
            return Ok(());
        }
        for host in self.config.get_hosts() {
            if let Host::Tcp(name) = host {
                let found = resolve::lookup_addresses(name).await?;
                config.hostaddr(found[0]);
            }
        }
        Ok(())
    }
}

/// Returns whether the error means that the database is unavailable or out of resources, rather than that the statement
/// is wrong.
pub fn is_unavailable(error: &tokio_postgres::Error) -> bool {
    match error.code() {
        None => true,
        Some(code) => {
            let class = &code.code()[..2];
            ["08", "53"].contains(&class)
                || [&SqlState::ADMIN_SHUTDOWN, &SqlState::CRASH_SHUTDOWN, &SqlState::CANNOT_CONNECT_NOW]
                    .contains(&code)
        }
    }
}

/// Returns the exit code for a failed statement.
pub fn to_exit(error: &tokio_postgres::Error) -> Exit {
    if is_unavailable(error) { Exit::Unavailable } else { Exit::Internal }
}

/// Quotes `name` as an identifier in a statement.
pub fn quote_ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Quotes `text` as a literal in a statement, for commands that take no parameters.
pub fn quote_literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') {
        format!(" E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}

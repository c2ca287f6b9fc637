//! Connections to the machine's own PostgreSQL: the owner's database, and `postgres` for managing databases.

use std::time::Duration;

use tokio_postgres::config::Host;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config, NoTls};

use svc_base::applet::Exit;
use svc_base::error_chain::format_chain;
use svc_http::resolve::{self, ResolveError};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Database to connect to for creating, renaming and dropping other databases.
pub const MAINTENANCE_DATABASE: &str = "postgres";

/// The server in `DATABASE_URL`.
#[derive(Clone)]
pub struct PostgresServer {
    config: Config,
    database: String,
}

/// Errors from connecting to a database.
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
    /// `config` names the owner's database, which defaults to the user name as in libpq.
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

    /// Returns the same server, to connect to as another role.
    pub fn as_role(&self, role: &str, password: &str) -> Self {
        let mut config = self.config.clone();
        config.user(role).password(password);
        Self { config, database: self.database.clone() }
    }

    /// # Errors
    /// [`ConnectError`] if a host name can't be resolved (at most 5 s per name), or if the connection then fails or
    /// isn't established within 10 s.
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
                tracing::debug!(error = %format_chain(&error), "database connection error");
            }
        });
        Ok(client)
    }

    /// Resolves host names up front. For names without an address, tokio-postgres calls getaddrinfo, which a static
    /// glibc binary must not do.
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

/// Returns whether the database is unavailable or out of resources, as opposed to the statement being wrong.
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

/// Quotes `name` as an SQL identifier.
pub fn quote_ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Quotes `text` as an SQL literal, for commands that don't take parameters.
pub fn quote_literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') {
        format!(" E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}

//! Loads an archive's dump into a new database as an unprivileged role.
//!
//! `pg_restore` runs as the gateway user and sends SQL written by the archive's author, so it connects with a role
//! created for this import. The role isn't a superuser or a member of any role. It owns the new database and has only
//! PUBLIC privileges in others. This program sets owners and creates extensions, and inspects the catalog before the
//! superuser reads a row (`catalog.rs`).

use std::path::Path;
use std::time::Duration;

use postgres_protocol::password::scram_sha_256;
use ring::rand::{SecureRandom, SystemRandom};
use secrecy::{ExposeSecret, SecretString};
use tokio::io::AsyncReadExt;
use tokio_postgres::Client;

use super::catalog;
use super::toc::{self, Selection, TocError};
use crate::snapshots::staging;
use crate::snapshots::staging::{LoadError, RestoreContext, ScratchDatabase, ScratchPurpose};
use crate::system::postgres;
use crate::system::postgres::{ConnectError, quote_ident, quote_literal};
use crate::system::postgres_tools;
use crate::system::postgres_tools::PgTools;
use svc_base::applet::Exit;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::{self, FileError};
use svc_base::quantity::pluralize;
use svc_base::untrusted_text;
use svc_http::problem::format_chain;
use svc_store::snapshot::Sidecar;

const ROLE_PREFIX: &str = "svc_import_";
/// Connection limit of the role: enough for `pg_restore` itself and each of its jobs.
const MAX_SESSIONS: usize = 4;
const LISTING_TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum size of a listing, which has a line per table, index and constraint.
const MAX_LISTING_BYTES: u64 = 32 << 20;

/// Errors from loading an archive's database.
#[derive(Debug, thiserror::Error)]
pub enum UntrustedLoadError {
    #[error("the archive's database is refused")]
    Contents(#[from] TocError),
    #[error(
        "the archive's database is refused: loading it created a forbidden object ({object}); an archive may \
         contain only tables, sequences, indexes, constraints, types, domains and some extensions\n  next: drop \
         it before the export, and recreate it after the import"
    )]
    Forbidden { object: String },
    #[error("cannot read the archive's dump: {reason}")]
    Unreadable { reason: String },
    #[error(
        "PostgreSQL's client tools exist only in the database's container\n  next: install a release that contains them"
    )]
    NoTools,
    #[error("cannot run pg_restore")]
    Tool(#[source] std::io::Error),
    #[error("the system's random number generator failed")]
    Random,
    #[error("cannot {action}")]
    Query {
        action: &'static str,
        #[source]
        source: tokio_postgres::Error,
    },
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl UntrustedLoadError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Contents(_) | Self::Forbidden { .. } | Self::Unreadable { .. } => Exit::Refused,
            Self::NoTools => Exit::Config,
            Self::Tool(_) | Self::Random | Self::File(_) | Self::Injected(_) => Exit::Internal,
            Self::Query { source, .. } => postgres::to_exit(source),
            Self::Connect(_) => Exit::Unavailable,
            Self::Load(error) => error.exit(),
        }
    }
}

fn query_error(action: &'static str) -> impl FnOnce(tokio_postgres::Error) -> UntrustedLoadError {
    move |source| UntrustedLoadError::Query { action, source }
}

/// Loads a dump and checks the created objects. Drops the database on error.
pub async fn load(
    context: &RestoreContext,
    dump: &Path,
    sidecar: &Sidecar,
) -> Result<ScratchDatabase, UntrustedLoadError> {
    if context.tools == PgTools::Container {
        return Err(UntrustedLoadError::NoTools);
    }
    let selection = toc::select_entries(&list_contents(&context.tools, dump).await?)?;
    let list = dump.with_extension("list");
    fsx::write_atomic(&list, selection.list.as_bytes(), 0o600)?;
    let admin = staging::connect_with_retries(context, postgres::MAINTENANCE_DATABASE).await?;
    drop_roles(&admin).await?;
    let role = ImportRole::create(&admin).await?;
    let scratch = staging::create_scratch(&admin, ScratchPurpose::Restore, Some(&role.name)).await?;
    let load = async {
        role.load(context, &admin, &scratch, DumpFiles { dump, list: &list }, (&selection, sidecar)).await?;
        drop_roles(&admin).await
    };
    let result = load.await;
    if let Err(error) = fsx::remove_if_exists(&list) {
        tracing::warn!(error = %format_chain(&error), "could not remove the entry list");
    }
    if let Err(error) = result {
        clean_up(context, &scratch).await;
        return Err(error);
    }
    warn_about_omissions(sidecar);
    Ok(scratch)
}

/// Drops the database and role of a failed load. Opens a new connection, since the load may have failed by losing its
/// own.
pub async fn clean_up(context: &RestoreContext, scratch: &ScratchDatabase) {
    match staging::connect_with_retries(context, postgres::MAINTENANCE_DATABASE).await {
        Ok(admin) => {
            staging::drop_scratch(&admin, &scratch.name).await;
            if let Err(error) = drop_roles(&admin).await {
                tracing::warn!(error = %format_chain(&error), "could not drop the import role");
            }
        }
        Err(error) => {
            let error = format_chain(&error);
            tracing::warn!(%error, database = scratch.name, "could not drop the scratch database");
        }
    }
}

/// Lists a dump's contents in a process that has no database connection.
async fn list_contents(tools: &PgTools, dump: &Path) -> Result<String, UntrustedLoadError> {
    let mut child = tools.list_command(dump).spawn().map_err(UntrustedLoadError::Tool)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let mut listing = Vec::new();
    let reading = async {
        let listing = async {
            match stdout {
                Some(stdout) => stdout.take(MAX_LISTING_BYTES + 1).read_to_end(&mut listing).await,
                None => Ok(0),
            }
        };
        let (read, stderr) = tokio::join!(listing, postgres_tools::read_stderr_tail(stderr));
        read?;
        Ok((child.wait().await?, stderr))
    };
    let result = tokio::time::timeout(LISTING_TIMEOUT, reading).await;
    let unreadable =
        |reason: &str| UntrustedLoadError::Unreadable { reason: untrusted_text::truncate_printable(reason) };
    let result = result.map_err(|_| unreadable("the listing timed out"))?;
    let (status, stderr) = result.map_err(UntrustedLoadError::Tool)?;
    if listing.len() as u64 > MAX_LISTING_BYTES {
        return Err(unreadable("it has too many entries"));
    }
    if !status.success() {
        return Err(unreadable(&stderr));
    }
    Ok(String::from_utf8_lossy(&listing).into_owned())
}

/// Drops the roles of this and earlier imports, whose databases have been dropped or now have another owner.
async fn drop_roles(admin: &Client) -> Result<(), UntrustedLoadError> {
    let drop_error = || query_error("drop an import role");
    let leftover_roles =
        format!("SELECT rolname::text FROM pg_roles WHERE rolname ~ '^{ROLE_PREFIX}[0-9]+$'");
    for row in admin.query(&leftover_roles, &[]).await.map_err(drop_error())? {
        let name: String = row.try_get(0).map_err(drop_error())?;
        end_sessions(admin, &name).await?;
        admin.batch_execute(&format!("DROP ROLE {}", quote_ident(&name))).await.map_err(drop_error())?;
    }
    Ok(())
}

/// Terminates the role's sessions and blocks new ones.
async fn end_sessions(admin: &Client, role: &str) -> Result<(), UntrustedLoadError> {
    let end_error = || query_error("end the import role's sessions");
    admin.batch_execute(&format!("ALTER ROLE {} NOLOGIN", quote_ident(role))).await.map_err(end_error())?;
    let sessions = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity WHERE usename = $1";
    admin.query_one(sessions, &[&role]).await.map_err(end_error())?;
    Ok(())
}

/// A dump and its `pg_restore -L` list.
struct DumpFiles<'a> {
    dump: &'a Path,
    list: &'a Path,
}

/// A role created for a single import.
struct ImportRole {
    name: String,
    password: SecretString,
}

impl ImportRole {
    async fn create(admin: &Client) -> Result<Self, UntrustedLoadError> {
        let mut bytes = [0; 32];
        SystemRandom::new().fill(&mut bytes).map_err(|_| UntrustedLoadError::Random)?;
        let password = SecretString::from(hex::encode(bytes));
        let name = format!("{ROLE_PREFIX}{}", svc_base::clock::now_ms().as_millisecond());
        let verifier = scram_sha_256(password.expose_secret().as_bytes());
        let quoted = quote_ident(&name);
        // Statements contain the owner's rows, so keep them out of the server log.
        let sql = format!(
            "BEGIN;
             CREATE ROLE {quoted} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT NOREPLICATION NOBYPASSRLS
                CONNECTION LIMIT {MAX_SESSIONS} PASSWORD {};
             ALTER ROLE {quoted} SET log_min_messages = 'fatal';
             ALTER ROLE {quoted} SET log_error_verbosity = 'terse';
             COMMIT",
            quote_literal(&verifier)
        );
        admin.batch_execute(&sql).await.map_err(query_error("create the import role"))?;
        Ok(Self { name, password })
    }

    /// Loads the dump as this role, inspects the created objects, and takes ownership of them.
    async fn load(
        &self,
        context: &RestoreContext,
        admin: &Client,
        scratch: &ScratchDatabase,
        files: DumpFiles<'_>,
        (selection, sidecar): (&Selection, &Sidecar),
    ) -> Result<(), UntrustedLoadError> {
        create_extensions(context, scratch, selection).await?;
        let server = context.server.as_role(&self.name, self.password.expose_secret());
        let command = context.tools.load_listed_command(&server, &scratch.name, files.dump, files.list);
        staging::run_pg_restore(command).await?;
        end_sessions(admin, &self.name).await?;
        reset_database(admin, &scratch.name).await?;
        failpoint::trigger("import.settings_reset")?;
        let client = staging::connect_with_retries(context, &scratch.name).await?;
        let forbidden =
            catalog::find_forbidden_object(&client).await.map_err(query_error("inspect the new database"))?;
        if let Some(object) = forbidden {
            let object = untrusted_text::truncate_printable(&object);
            return Err(UntrustedLoadError::Forbidden { object });
        }
        let role = quote_ident(&self.name);
        let take_ownership = format!("REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}");
        client
            .batch_execute(&take_ownership)
            .await
            .map_err(query_error("take ownership of the imported objects"))?;
        staging::compare_with_sidecar(context, &client, sidecar).await?;
        Ok(())
    }
}

async fn create_extensions(
    context: &RestoreContext,
    scratch: &ScratchDatabase,
    selection: &Selection,
) -> Result<(), UntrustedLoadError> {
    let client = staging::connect_with_retries(context, &scratch.name).await?;
    for name in &selection.extensions {
        let create = format!("CREATE EXTENSION {} WITH SCHEMA public", quote_ident(name));
        client
            .batch_execute(&create)
            .await
            .map_err(query_error("create an extension required by the archive"))?;
    }
    Ok(())
}

/// Resets settings that a database owner can change for all sessions of the database, including the superuser's.
async fn reset_database(admin: &Client, database: &str) -> Result<(), UntrustedLoadError> {
    let database = quote_ident(database);
    let sql = format!(
        "ALTER DATABASE {database} RESET ALL;
         ALTER DATABASE {database} WITH ALLOW_CONNECTIONS true CONNECTION LIMIT -1 IS_TEMPLATE false"
    );
    admin.batch_execute(&sql).await.map_err(query_error("reset the new database's settings"))
}

/// Warns about roles and settings that aren't imported: the gateway creates the roles of installed apps, and archives
/// must not grant privileges.
fn warn_about_omissions(sidecar: &Sidecar) {
    let other_roles = sidecar.roles.iter().filter(|role| !role.starts_with("app_")).count();
    if other_roles > 0 {
        tracing::warn!("not imported: {} without an app", pluralize(other_roles as u64, "role"));
    }
    let settings = sidecar.database.as_ref().map_or(0, |facts| facts.settings.len());
    if settings > 0 {
        tracing::warn!("not imported: {}", pluralize(settings as u64, "database setting"));
    }
}

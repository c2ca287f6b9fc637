//! Keeps the registry up to date: copies bundled apps, reads directories, registers manifests and enables role logins.
//! It's all done by a single task, so registrations never run concurrently. Failures are retried for as long as the
//! gateway runs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use sd_notify::NotifyState;
use secrecy::{ExposeSecret, SecretString};
use tokio::time::Instant;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::bundled;
use super::directory::{self, AppDirectory};
use super::directory_watcher::DirectoryWatcher;
use super::manifest::Manifest;
use super::register::{self, RegisterError};
use super::registry::{App, AppError, AppsSnapshot, Registry};
use crate::database::{self, ConnectionBudget, Database, DatabaseError, Pool};
use crate::name::Slug;
use crate::writers::Writers;
use svc_host::agents::kernel::Kernel;
use svc_host::snapshots::database_identity;
use svc_host::snapshots::database_identity::IdentityError;
use svc_host::system::layout::Layout;
use svc_host::system::systemd;
use svc_http::problem::format_chain;
use svc_machine::epoch::Epoch;

const RESCAN_INTERVAL: Duration = Duration::from_secs(30);
/// Minimum time between loading all apps and reloading them after a rejected login. If reloading doesn't fix the login,
/// each request would otherwise trigger another reload.
const MIN_RELOAD_INTERVAL: Duration = Duration::from_secs(3);
const RETRY_DELAYS: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(200))
    .with_max_delay(Duration::from_secs(5))
    .without_max_times();

/// Supervisor dependencies and settings.
pub struct SupervisorContext {
    pub layout: Layout,
    pub registry: Arc<Registry>,
    pub database: Arc<Database>,
    pub writers: Arc<Writers>,
    pub kernel: Arc<Kernel>,
    pub epoch: Epoch,
    /// Statement timeout for app roles.
    pub statement_timeout: Duration,
}

/// Keeps the registry up to date until `stop` is cancelled.
pub async fn supervise(context: SupervisorContext, stop: CancellationToken) {
    let (layout, database) = (context.layout.clone(), context.database.clone());
    let mut supervisor = Supervisor {
        context,
        passwords: HashMap::new(),
        pools: HashMap::new(),
        budget: None,
        snapshot: AppsSnapshot::default(),
        should_load: true,
        next_reload_at: Instant::now(),
        last_slugs: HashMap::new(),
        rejected: HashMap::new(),
    };
    install_bundled(layout.clone()).await;
    let mut watcher = DirectoryWatcher::new();
    let mut retry_delays = RETRY_DELAYS.build();
    loop {
        watcher.update_watches(&layout.apps());
        let wait = match supervisor.run_round().await {
            Ok(()) => {
                retry_delays = RETRY_DELAYS.build();
                RESCAN_INTERVAL
            }
            Err(error) => {
                tracing::warn!(error = %format_chain(&error), "cannot set up apps; retrying");
                retry_delays.next().unwrap_or(RESCAN_INTERVAL)
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
            () = watcher.wait_for_change(), if wait == RESCAN_INTERVAL => {}
            () = wait_for_rejected_login(&database, supervisor.next_reload_at) => {
                supervisor.should_load = true;
            }
        }
        supervisor.pools.values().for_each(|pool| pool.close_idle());
    }
}

/// Waits until `earliest`, then for a rejected login, which may already have happened.
async fn wait_for_rejected_login(database: &Database, earliest: Instant) {
    tokio::time::sleep_until(earliest).await;
    database.login_rejected.notified().await;
}

/// Copies the bundled apps. Skipped without write access, in which case a unit running as the owner's user installs
/// them.
async fn install_bundled(layout: Layout) {
    let installed = tokio::task::spawn_blocking(move || {
        bundled::can_install(&layout).then(|| bundled::install(&layout)).transpose()
    });
    match installed.await {
        Ok(Ok(skipped)) => skipped.iter().flatten().for_each(bundled::log_skipped),
        Ok(Err(error)) => tracing::warn!(error = %format_chain(&error), "cannot copy bundled apps"),
        Err(error) => tracing::warn!(%error, "cannot copy bundled apps"),
    }
}

struct Supervisor {
    context: SupervisorContext,
    passwords: HashMap<Slug, SecretString>,
    pools: HashMap<Slug, Arc<Pool>>,
    budget: Option<Arc<ConnectionBudget>>,
    snapshot: AppsSnapshot,
    /// Whether the next round loads all apps from the database. Until then, previously loaded apps remain in use.
    should_load: bool,
    /// Earliest time at which a rejected login may trigger another load.
    next_reload_at: Instant,
    /// Slug from each directory's last valid manifest, by directory name.
    last_slugs: HashMap<String, Slug>,
    /// Manifests rejected by the database.
    rejected: HashMap<Slug, Manifest>,
}

#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error("database error")]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("cannot read the apps directory")]
    Directory(#[source] std::io::Error),
    #[error("cannot register the app {slug}")]
    Register { slug: String, source: RegisterError },
    #[error("the system's random number generator failed; cannot generate a password")]
    RandomUnavailable,
}

impl From<tokio_postgres::Error> for RoundError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Database(error.into())
    }
}

/// Sets the round's error, and logs any error it replaces.
fn replace_error(result: &mut Result<(), RoundError>, error: RoundError) {
    if let Err(replaced) = std::mem::replace(result, Err(error)) {
        tracing::warn!(error = %format_chain(&replaced), "cannot set up an app; retrying");
    }
}

impl Supervisor {
    /// Reads the directories first, so that pages are served while the database is unreachable, then updates the
    /// database. If the directories can't be read, stored apps are still loaded, since they don't need a directory.
    async fn run_round(&mut self) -> Result<(), RoundError> {
        let (manifests, directories_error) = match self.read_directories().await {
            Ok(manifests) => (manifests, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        if !self.snapshot.is_loaded {
            self.publish();
        }
        let mut result = self.update_database(manifests).await;
        self.publish();
        if let Some(error) = directories_error {
            replace_error(&mut result, error);
        }
        result
    }

    async fn update_database(&mut self, manifests: Vec<Manifest>) -> Result<(), RoundError> {
        let mut new_manifests: Vec<Manifest> =
            manifests.into_iter().filter(|m| !self.is_registered(m)).collect();
        if self.context.writers.is_quiesced() {
            // Creating tables is a write, so wait until the writers have resumed.
            new_manifests.clear();
        }
        if !self.should_load && new_manifests.is_empty() {
            return Ok(());
        }
        if self.should_load {
            // Set even if connecting fails; otherwise, each rejected login would start a round immediately.
            self.next_reload_at = Instant::now() + MIN_RELOAD_INTERVAL;
        }
        let mut client = self.context.database.connect().await?;
        if self.should_load {
            let loaded = self.load_apps(&mut client).await;
            self.next_reload_at = Instant::now() + MIN_RELOAD_INTERVAL;
            loaded?;
        }
        let mut updated = Ok(());
        for manifest in new_manifests {
            // `load_apps` may already have registered this manifest from the database.
            if !self.is_registered(&manifest) {
                match self.register(&mut client, manifest.clone()).await {
                    Ok(rejection) => {
                        let slug = manifest.slug.to_string();
                        self.snapshot.directory_errors.extend(rejection.map(|error| (slug, error)));
                        self.note_outcome(manifest);
                    }
                    // If one of this app's tables is locked, other apps can still be registered. Without a connection,
                    // they'd all fail.
                    Err(error) => {
                        replace_error(&mut updated, error);
                        if client.is_closed() {
                            break;
                        }
                    }
                }
            }
        }
        updated
    }

    /// Records in `activity.log` whether an app was registered. Rejected manifests are recorded only once, even though
    /// every scan retries them.
    fn note_outcome(&mut self, manifest: Manifest) {
        let (slug, version) = (manifest.slug.clone(), manifest.version.clone());
        let outcome = if self.is_registered(&manifest) {
            self.rejected.remove(&slug);
            "is registered"
        } else if self.rejected.get(&slug) == Some(&manifest) {
            return;
        } else {
            self.rejected.insert(slug.clone(), manifest);
            "could not be registered"
        };
        self.context.kernel.note(&format!("the app {slug} {version} {outcome}"));
    }

    /// Updates the snapshot's directories and their errors, and returns the valid manifests.
    async fn read_directories(&mut self) -> Result<Vec<Manifest>, RoundError> {
        let home = self.context.layout.home();
        let scanned = tokio::task::spawn_blocking(move || directory::scan(&home)).await;
        let dirs = scanned.map_err(|error| RoundError::Directory(std::io::Error::other(error)))?;
        let dirs = dirs.map_err(RoundError::Directory)?;
        self.snapshot.directories.clear();
        self.snapshot.directory_errors.clear();
        self.snapshot.is_scanned = true;
        let mut manifests = Vec::new();
        self.last_slugs.retain(|name, _| dirs.iter().any(|dir| dir.name == *name));
        for AppDirectory { name, path, manifest } in dirs {
            match manifest {
                Ok(manifest) => {
                    self.last_slugs.insert(name, manifest.slug.clone());
                    self.snapshot.directories.insert(manifest.slug.to_string(), (path, manifest.clone()));
                    manifests.push(manifest);
                }
                Err(message) => {
                    let slug = self.last_slugs.get(&name).cloned().or_else(|| name.parse().ok());
                    let slug = slug.map(|slug| slug.to_string());
                    self.snapshot.directory_errors.insert(name, AppError { slug, message });
                }
            }
        }
        Ok(manifests)
    }

    fn is_registered(&self, manifest: &Manifest) -> bool {
        self.snapshot.apps.get(manifest.slug.as_str()).is_some_and(|app| app.manifest == *manifest)
    }

    fn publish(&self) {
        self.context.registry.publish(self.snapshot.clone());
    }

    /// Prepares the database and registers every app stored in it, with or without a directory. If one can't be
    /// registered, for example because a table is locked, the others still are, and the next round reloads them all. A
    /// previously loaded app is removed only if its stored manifest is missing, invalid or rejected, or if the database
    /// isn't this machine's.
    async fn load_apps(&mut self, client: &mut Client) -> Result<(), RoundError> {
        let identity = database_identity::check_or_adopt(&self.context.layout, client).await;
        if identity.as_ref().is_err_and(IdentityError::is_mismatch) {
            // Apps must not use another machine's database.
            self.snapshot.is_loaded = false;
            self.snapshot.apps.clear();
        }
        identity?;
        database::prepare(client, self.context.epoch).await?;
        if self.budget.is_none() {
            let connections = database::fetch_connection_budget(client).await?;
            self.budget = Some(ConnectionBudget::new(connections));
        }
        let stored = register::load_manifests(client).await?;
        let slugs: BTreeSet<String> = stored.iter().map(|(slug, _)| slug.clone()).collect();
        self.snapshot.apps.retain(|slug, _| slugs.contains(slug));
        self.snapshot.stored_errors.clear();
        let mut loaded = Ok(());
        for (slug, value) in stored {
            match Manifest::from_value(&value).map(|stored| self.restore_declared_order(stored)) {
                Ok(manifest) => match self.register(client, manifest).await {
                    Ok(None) => {}
                    Ok(Some(error)) => {
                        self.snapshot.apps.remove(&slug);
                        self.snapshot.stored_errors.insert(slug, error);
                    }
                    Err(error) => {
                        replace_error(&mut loaded, error);
                        if client.is_closed() {
                            break;
                        }
                    }
                },
                Err(error) => {
                    tracing::error!(%slug, %error, "invalid manifest in the database");
                    let message = format!("the manifest stored in the database is invalid: {error}");
                    self.snapshot.apps.remove(&slug);
                    self.snapshot.stored_errors.insert(slug.clone(), AppError { slug: Some(slug), message });
                }
            }
        }
        loaded?;
        self.snapshot.is_loaded = true;
        self.should_load = false;
        systemd::notify(&[NotifyState::Status(&format!("{} apps registered", self.snapshot.apps.len()))]);
        Ok(())
    }

    /// Returns the directory's manifest if it differs from the stored one only in the order of tables and columns,
    /// which the database doesn't preserve. Without this, the app would be registered again, with the directory's
    /// manifest.
    fn restore_declared_order(&self, stored: Manifest) -> Manifest {
        let dir = self.snapshot.directories.get(stored.slug.as_str());
        let declared = dir.map(|(_, manifest)| manifest).filter(|m| m.equals_ignoring_order(&stored));
        declared.cloned().unwrap_or(stored)
    }

    /// Registers an app. Returns the error if the database rejected it.
    ///
    /// # Errors
    /// A transient database error, or a failure to generate a password. The round must be retried.
    async fn register(
        &mut self,
        client: &mut Client,
        manifest: Manifest,
    ) -> Result<Option<AppError>, RoundError> {
        let slug = manifest.slug.clone();
        let password = self.get_or_generate_password(&slug)?;
        let timeout = self.context.statement_timeout;
        match register::register(client, &manifest, &password, timeout).await {
            Ok(result) => {
                for change in &result.unapplied_changes {
                    tracing::warn!(app = %slug, "manifest only partially applied: {change}");
                }
                tracing::info!(app = %slug, tables = result.tables.len(), "app registered");
                let tables: BTreeMap<_, _> =
                    result.tables.into_iter().map(|table| (table.name.to_string(), table)).collect();
                let pool = self.get_or_create_pool(&slug, &password);
                let schema = slug.schema();
                let app = App { manifest, schema, tables, pool, unapplied_changes: result.unapplied_changes };
                self.snapshot.apps.insert(slug.to_string(), Arc::new(app));
                self.snapshot.stored_errors.remove(slug.as_str());
                Ok(None)
            }
            Err(source) if source.is_transient() => {
                Err(RoundError::Register { slug: slug.to_string(), source })
            }
            Err(error) => {
                tracing::error!(app = %slug, error = %format_chain(&error), "app rejected by the database");
                Ok(Some(AppError { slug: Some(slug.to_string()), message: format_chain(&error) }))
            }
        }
    }

    fn get_or_generate_password(&mut self, slug: &Slug) -> Result<SecretString, RoundError> {
        if let Some(password) = self.passwords.get(slug) {
            return Ok(password.clone());
        }
        let password = database::generate_password().map_err(|_| RoundError::RandomUnavailable)?;
        self.passwords.insert(slug.clone(), password.clone());
        Ok(password)
    }

    fn get_or_create_pool(&mut self, slug: &Slug, password: &SecretString) -> Arc<Pool> {
        let budget = self.budget.get_or_insert_with(|| ConnectionBudget::new(1)).clone();
        let database = self.context.database.clone();
        let new_pool = || {
            let mut config = database.config().clone();
            if config.get_dbname().is_none()
                && let Some(user) = config.get_user().map(str::to_owned)
            {
                config.dbname(user);
            }
            config.user(slug.schema().as_str()).password(password.expose_secret());
            config.application_name(format!("svc-app {slug}"));
            Pool::new(database, config, budget)
        };
        self.pools.entry(slug.clone()).or_insert_with(new_pool).clone()
    }
}

//! Keeps the registry true: bundled apps copied, folders read, manifests registered, logins open. One task does it all,
//! so that no two registrations meet; it never gives up while the gateway runs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use secrecy::{ExposeSecret, SecretString};
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::bundled;
use super::folder::{self, AppFolder};
use super::manifest::Manifest;
use super::name::Slug;
use super::register::{self, RegisterError};
use super::registry::{App, Known, Trouble};
use super::watch::Watch;
use crate::host::gateway::database::{self, Budget, DatabaseError, Pool};
use crate::host::gateway::state::Gateway;
use crate::host::snapshots::database_identity;
use crate::host::snapshots::database_identity::IdentityError;
use crate::host::system::systemd;
use crate::http::problem::chain;

const RESCAN: Duration = Duration::from_secs(30);
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LONGEST_RETRY: Duration = Duration::from_secs(5);

/// Supervises until `stop`.
pub async fn supervise(gateway: Arc<Gateway>, stop: CancellationToken) {
    let mut supervisor = Supervisor {
        gateway: gateway.clone(),
        passwords: HashMap::new(),
        pools: HashMap::new(),
        budget: None,
        known: Known::default(),
        unreadable: BTreeMap::new(),
    };
    install_bundled(&gateway).await;
    let mut watch = Watch::new();
    let mut retry = FIRST_RETRY;
    loop {
        watch.follow(&gateway.config.layout.apps());
        let wait = match supervisor.round().await {
            Ok(()) => {
                retry = FIRST_RETRY;
                RESCAN
            }
            Err(error) => {
                tracing::warn!(error = %chain(&error), "apps are not set up yet; trying again");
                let wait = retry;
                retry = (retry * 2).min(LONGEST_RETRY);
                wait
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
            () = watch.changed(), if wait == RESCAN => {}
            () = gateway.database.login_refused.notified() => supervisor.known.loaded = false,
        }
        supervisor.pools.values().for_each(|pool| pool.close_idle());
    }
}

/// Where a unit of the owner's user does it, the gateway may not write there, and need not.
async fn install_bundled(gateway: &Gateway) {
    let layout = gateway.config.layout.clone();
    let installed = tokio::task::spawn_blocking(move || {
        bundled::may_install(&layout).then(|| bundled::install(&layout)).transpose()
    });
    match installed.await {
        Ok(Ok(kept)) => kept.iter().flatten().for_each(bundled::tell),
        Ok(Err(error)) => tracing::warn!(error = %chain(&error), "bundled apps not copied"),
        Err(error) => tracing::warn!(%error, "bundled apps not copied"),
    }
}

struct Supervisor {
    gateway: Arc<Gateway>,
    passwords: HashMap<Slug, SecretString>,
    pools: HashMap<Slug, Arc<Pool>>,
    budget: Option<Arc<Budget>>,
    known: Known,
    /// Kept manifests that this version cannot read.
    unreadable: BTreeMap<String, Trouble>,
}

#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error("the database is away")]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("read the apps folder")]
    Folder(#[source] std::io::Error),
    #[error("register {slug}")]
    Register { slug: String, source: RegisterError },
    #[error("no randomness for a password")]
    Random,
}

impl From<tokio_postgres::Error> for RoundError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Database(error.into())
    }
}

impl Supervisor {
    /// Folders first, so that pages are served while the database is away; then what the database has to learn.
    async fn round(&mut self) -> Result<(), RoundError> {
        let folders = self.read_folders().await?;
        if !self.known.loaded {
            self.publish();
        }
        let told = self.tell_database(folders).await;
        self.publish();
        told
    }

    async fn tell_database(&mut self, folders: Vec<Manifest>) -> Result<(), RoundError> {
        let mut news: Vec<Manifest> = folders.into_iter().filter(|m| !self.is_registered(m)).collect();
        if self.gateway.writers.is_quiesced() {
            // A new table is a change, too: the next scan after the resume registers it.
            news.clear();
        }
        if self.known.loaded && news.is_empty() {
            return Ok(());
        }
        let mut client = self.gateway.database.connect().await?;
        if !self.known.loaded {
            self.load(&mut client).await?;
        }
        for manifest in news {
            // The load may just have registered the same from the database.
            if !self.is_registered(&manifest) {
                self.register(&mut client, manifest).await?;
            }
        }
        Ok(())
    }

    async fn read_folders(&mut self) -> Result<Vec<Manifest>, RoundError> {
        let home = self.gateway.config.layout.home();
        let scanned = tokio::task::spawn_blocking(move || folder::scan(&home)).await;
        let folders = scanned.map_err(|error| RoundError::Folder(std::io::Error::other(error)))?;
        let folders = folders.map_err(RoundError::Folder)?;
        self.known.folders.clear();
        self.known.troubles.clear();
        self.known.scanned = true;
        let mut manifests = Vec::new();
        for AppFolder { name, path, manifest } in folders {
            match manifest {
                Ok(manifest) => {
                    self.known.folders.insert(manifest.slug.to_string(), (path, manifest.clone()));
                    manifests.push(manifest);
                }
                Err(why) => {
                    let slug = name.parse::<Slug>().ok().map(|slug| slug.to_string());
                    self.known.troubles.insert(name, Trouble { slug, why });
                }
            }
        }
        Ok(manifests)
    }

    fn is_registered(&self, manifest: &Manifest) -> bool {
        self.known.apps.get(manifest.slug.as_str()).is_some_and(|app| app.manifest == *manifest)
    }

    fn publish(&self) {
        let mut known = self.known.clone();
        known.troubles.extend(self.unreadable.clone());
        self.gateway.apps.publish(known);
    }

    /// Makes the database ready and takes up every app that it keeps, folder or not.
    async fn load(&mut self, client: &mut Client) -> Result<(), RoundError> {
        database_identity::verify(&self.gateway.config.layout, client).await?;
        database::prepare(client, self.gateway.config.epoch()).await?;
        if self.budget.is_none() {
            let connections = database::connection_budget(client).await?;
            self.budget = Some(Budget::new(connections));
        }
        self.known.apps.clear();
        self.unreadable.clear();
        for (slug, value) in register::kept(client).await? {
            match Manifest::from_value(&value) {
                Ok(manifest) => self.register(client, manifest).await?,
                Err(error) => {
                    tracing::error!(%slug, %error, "the kept manifest is not readable");
                    let why = format!("the registered manifest is not readable: {error}");
                    self.unreadable.insert(slug.clone(), Trouble { slug: Some(slug), why });
                }
            }
        }
        self.known.loaded = true;
        systemd::notify(&[NotifyState::Status(&format!("{} apps registered", self.known.apps.len()))]);
        Ok(())
    }

    /// Registers one app. A refusal is that app's trouble; only a database that went away stops the round.
    async fn register(&mut self, client: &mut Client, manifest: Manifest) -> Result<(), RoundError> {
        let slug = manifest.slug.clone();
        let password = self.password(&slug)?;
        let timeout = self.gateway.config.statement_timeout;
        match register::register(client, &manifest, &password, timeout).await {
            Ok(done) => {
                done.not_done.iter().for_each(|what| tracing::warn!(app = %slug, "not done: {what}"));
                tracing::info!(app = %slug, tables = done.tables.len(), "registered");
                let tables: BTreeMap<_, _> =
                    done.tables.into_iter().map(|table| (table.name.to_string(), table)).collect();
                let pool = self.pool(&slug, &password);
                let schema = slug.schema();
                let app = App { manifest, schema, tables, pool, not_done: done.not_done };
                self.known.apps.insert(slug.to_string(), Arc::new(app));
                Ok(())
            }
            Err(source) if source.is_transient() => {
                Err(RoundError::Register { slug: slug.to_string(), source })
            }
            Err(error) => {
                tracing::error!(app = %slug, error = %chain(&error), "not registered");
                let trouble = Trouble { slug: Some(slug.to_string()), why: chain(&error) };
                self.known.troubles.insert(slug.to_string(), trouble);
                Ok(())
            }
        }
    }

    fn password(&mut self, slug: &Slug) -> Result<SecretString, RoundError> {
        if let Some(password) = self.passwords.get(slug) {
            return Ok(password.clone());
        }
        let made = database::fresh_password().map_err(|_| RoundError::Random)?;
        self.passwords.insert(slug.clone(), made.clone());
        Ok(made)
    }

    fn pool(&mut self, slug: &Slug, password: &SecretString) -> Arc<Pool> {
        let budget = self.budget.get_or_insert_with(|| Budget::new(1)).clone();
        let database = self.gateway.database.clone();
        let make = || {
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
        self.pools.entry(slug.clone()).or_insert_with(make).clone()
    }
}

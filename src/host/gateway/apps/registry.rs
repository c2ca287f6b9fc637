//! The app registry, used by the bridge, the pages and `/api/apps`.
//!
//! Readers get an immutable snapshot; only the supervisor publishes a new one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use super::manifest::{Manifest, Table};
use crate::database::Pool;
use crate::name::SqlIdentifier;

/// An app registered in the database.
#[derive(Debug)]
pub struct App {
    pub manifest: Manifest,
    pub schema: SqlIdentifier,
    /// The tables as they exist in the database, by name.
    pub tables: BTreeMap<String, Table>,
    pub pool: Arc<Pool>,
    /// Parts of the manifest that the last registration could not apply.
    pub unapplied_changes: Vec<String>,
}

/// The reason that an app's current manifest is not registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppError {
    pub slug: Option<String>,
    pub message: String,
}

/// The state of all apps at one time.
#[derive(Debug, Default, Clone)]
pub struct AppsSnapshot {
    /// Whether the apps folder has been scanned since the gateway started.
    pub is_scanned: bool,
    /// Whether the registered apps have been loaded from the database since the gateway started.
    pub is_loaded: bool,
    pub apps: BTreeMap<String, Arc<App>>,
    /// Folders with a valid manifest, by slug, with their paths relative to the home directory. Pages are served from
    /// these.
    pub folders: BTreeMap<String, (PathBuf, Manifest)>,
    /// Errors by folder name, or by slug for a stored manifest that is invalid and for a rejected registration.
    pub errors: BTreeMap<String, AppError>,
}

impl AppsSnapshot {
    /// Whether the app has a folder. An app with an error counts as installed, because the manifest in its folder may
    /// be invalid. The owner removes an app by removing its folder; its tables stay in the database.
    pub fn is_installed(&self, slug: &str) -> bool {
        self.folders.contains_key(slug)
            || self.errors.values().any(|error| error.slug.as_deref() == Some(slug))
    }
}

#[derive(Debug, Default)]
pub struct Registry {
    snapshot: RwLock<Arc<AppsSnapshot>>,
}

impl Registry {
    pub fn snapshot(&self) -> Arc<AppsSnapshot> {
        self.snapshot.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn publish(&self, snapshot: AppsSnapshot) {
        *self.snapshot.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(snapshot);
    }
}

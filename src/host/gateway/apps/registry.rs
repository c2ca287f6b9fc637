//! App registry, shared by the bridge, the pages and `/api/apps`.
//!
//! Readers get an immutable snapshot; only the supervisor publishes new ones.

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
    /// Tables in the database, by name.
    pub tables: BTreeMap<String, Table>,
    pub pool: Arc<Pool>,
    /// Manifest changes not applied by the last registration.
    pub unapplied_changes: Vec<String>,
}

/// Error that keeps an app's current manifest from being registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppError {
    pub slug: Option<String>,
    pub message: String,
}

/// State of all apps at a point in time.
#[derive(Debug, Default, Clone)]
pub struct AppsSnapshot {
    /// Whether the apps directory has been scanned since the gateway started.
    pub is_scanned: bool,
    /// Whether the registered apps have been loaded from the database since the gateway started.
    pub is_loaded: bool,
    pub apps: BTreeMap<String, Arc<App>>,
    /// App directories with a valid manifest, by slug, with paths relative to the home directory. Pages are served from
    /// here.
    pub directories: BTreeMap<String, (PathBuf, Manifest)>,
    /// Errors in app directories: invalid manifests by directory name, rejected registrations by slug.
    pub directory_errors: BTreeMap<String, AppError>,
    /// Errors in stored manifests that are invalid or were rejected, by slug. The apps may not have a directory.
    pub stored_errors: BTreeMap<String, AppError>,
}

impl AppsSnapshot {
    /// Whether the app has a directory, even one with an invalid manifest. Owners uninstall an app by deleting its
    /// directory; its tables stay in the database.
    pub fn is_installed(&self, slug: &str) -> bool {
        self.directories.contains_key(slug) || self.has_directory_error(slug)
    }

    /// Returns the directory errors with their keys, then the stored-manifest errors. A directory error takes
    /// precedence over the app's stored error, because the directory holds the current manifest.
    pub fn errors(&self) -> impl Iterator<Item = (Option<&str>, &AppError)> {
        let directory_errors = self.directory_errors.iter().map(|(key, error)| (Some(key.as_str()), error));
        let stored_errors =
            self.stored_errors.iter().filter(move |(slug, _)| !self.has_directory_error(slug));
        directory_errors.chain(stored_errors.map(|(_, error)| (None, error)))
    }

    fn has_directory_error(&self, slug: &str) -> bool {
        self.directory_errors.values().any(|error| error.slug.as_deref() == Some(slug))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_error_is_listed_only_without_directory_error() {
        let error = |message: &str| AppError { slug: Some("notes".to_owned()), message: message.to_owned() };
        let messages = |snapshot: &AppsSnapshot| -> Vec<String> {
            snapshot.errors().map(|(_, error)| error.message.clone()).collect()
        };
        let mut snapshot = AppsSnapshot::default();
        snapshot.stored_errors.insert("notes".to_owned(), error("rejected"));
        assert_eq!(messages(&snapshot), ["rejected"]);
        assert!(!snapshot.is_installed("notes"));
        snapshot.directory_errors.insert("my-notes".to_owned(), error("invalid"));
        assert_eq!(messages(&snapshot), ["invalid"]);
        assert!(snapshot.is_installed("notes"));
    }
}

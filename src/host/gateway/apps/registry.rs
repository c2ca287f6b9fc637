//! The apps that the gateway knows: what the bridge works from, and what `/api/apps` tells.
//!
//! Readers take a snapshot that never changes under them; only the supervisor publishes a new one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use super::manifest::{Manifest, Table};
use super::name::Name;
use crate::host::gateway::database::Pool;

/// An app registered in the database.
#[derive(Debug)]
pub struct App {
    pub manifest: Manifest,
    pub schema: Name,
    /// As they are in the database, by name.
    pub tables: BTreeMap<String, Table>,
    pub pool: Arc<Pool>,
    /// What the last registration asked for and did not get.
    pub not_done: Vec<String>,
}

/// A folder whose app could not be registered (or not yet), and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    pub slug: Option<String>,
    pub why: String,
}

#[derive(Debug, Default, Clone)]
pub struct Known {
    /// Whether the apps folder has been read since the start.
    pub scanned: bool,
    /// Whether the database told its apps since the start.
    pub loaded: bool,
    pub apps: BTreeMap<String, Arc<App>>,
    /// Folders that hold a good manifest, by slug, with their paths relative to the home: what is served of an app.
    pub folders: BTreeMap<String, (PathBuf, Manifest)>,
    /// By the folder's name.
    pub troubles: BTreeMap<String, Trouble>,
}

impl Known {
    /// Whether the app has a folder, which the owner removes with the app. Its tables stay in the database.
    pub fn is_installed(&self, slug: &str) -> bool {
        self.folders.contains_key(slug)
            || self.troubles.values().any(|trouble| trouble.slug.as_deref() == Some(slug))
    }
}

#[derive(Debug, Default)]
pub struct Registry {
    known: RwLock<Arc<Known>>,
}

impl Registry {
    pub fn known(&self) -> Arc<Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn publish(&self, known: Known) {
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(known);
    }
}

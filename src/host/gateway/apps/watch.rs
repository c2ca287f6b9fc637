//! Changes of the apps folder, gathered until they pause.
//!
//! Only the apps folder and its direct children are watched: a `svc.json` is never deeper, and an app's
//! `node_modules` would cost a watch for each folder.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;

const QUIET: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(2);

/// A watch of the apps folder. Where the system gives none, the rescans alone find changes.
pub struct Watch {
    watcher: Option<RecommendedWatcher>,
    watched: BTreeSet<PathBuf>,
    changed: Arc<Notify>,
}

impl Watch {
    pub fn new() -> Self {
        let changed = Arc::new(Notify::new());
        let told = changed.clone();
        let made = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if event.map_or(true, |event| !event.kind.is_access()) {
                told.notify_one();
            }
        });
        let watcher =
            made.map_err(|error| tracing::warn!(%error, "no file watch; apps are rescanned only")).ok();
        Self { watcher, watched: BTreeSet::new(), changed }
    }

    /// Watches the apps folder and its direct children as they are now.
    pub fn follow(&mut self, apps: &Path) {
        let Some(watcher) = &mut self.watcher else { return };
        let mut wanted = BTreeSet::from([apps.to_owned()]);
        if let Ok(entries) = std::fs::read_dir(apps) {
            wanted.extend(entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir()));
        }
        for gone in self.watched.difference(&wanted) {
            // A folder that is gone took its watch along.
            let _ = watcher.unwatch(gone);
        }
        let held = wanted.into_iter().filter(|path| {
            self.watched.contains(path) || watcher.watch(path, RecursiveMode::NonRecursive).is_ok()
        });
        self.watched = held.collect();
    }

    /// Returns once something changed and then stayed quiet for a moment.
    pub async fn changed(&self) {
        self.changed.notified().await;
        let gathered = async { while tokio::time::timeout(QUIET, self.changed.notified()).await.is_ok() {} };
        // A folder that never rests is looked at anyway.
        let _ = tokio::time::timeout(LONGEST, gathered).await;
    }
}

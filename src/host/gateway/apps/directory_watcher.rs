//! Watches the apps directory and debounces changes.
//!
//! Only the apps directory and its direct children are watched: an `svc.json` is never deeper, and an app's
//! `node_modules` would need a watch per directory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;

const DEBOUNCE_INTERVAL: Duration = Duration::from_millis(250);
const MAX_DEBOUNCE_DELAY: Duration = Duration::from_secs(2);

/// Watches the apps directory. If file watching is unavailable, only periodic rescans pick up changes.
pub struct DirectoryWatcher {
    watcher: Option<RecommendedWatcher>,
    watched: BTreeSet<PathBuf>,
    changed: Arc<Notify>,
}

impl DirectoryWatcher {
    pub fn new() -> Self {
        let changed = Arc::new(Notify::new());
        let notifier = changed.clone();
        let created = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if event.map_or(true, |event| !event.kind.is_access()) {
                notifier.notify_one();
            }
        });
        let watcher = created.inspect_err(|error| {
            tracing::warn!(%error, "cannot watch files; falling back to periodic rescans");
        });
        Self { watcher: watcher.ok(), watched: BTreeSet::new(), changed }
    }

    /// Updates the watches to match the current apps directory and its direct children. Existing watches are added
    /// again, because a directory may have been deleted and recreated since, which drops its watch.
    pub fn update_watches(&mut self, apps: &Path) {
        let Some(watcher) = &mut self.watcher else { return };
        let mut wanted = BTreeSet::from([apps.to_owned()]);
        if let Ok(entries) = std::fs::read_dir(apps) {
            wanted.extend(entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir()));
        }
        for removed in self.watched.difference(&wanted) {
            // A deleted directory's watch is already gone.
            let _ = watcher.unwatch(removed);
        }
        let active =
            wanted.into_iter().filter(|path| watcher.watch(path, RecursiveMode::NonRecursive).is_ok());
        self.watched = active.collect();
    }

    /// Waits for a change, then for [`DEBOUNCE_INTERVAL`] without further changes, but at most for
    /// [`MAX_DEBOUNCE_DELAY`].
    pub async fn wait_for_change(&self) {
        self.changed.notified().await;
        let settled =
            async { while tokio::time::timeout(DEBOUNCE_INTERVAL, self.changed.notified()).await.is_ok() {} };
        let _ = tokio::time::timeout(MAX_DEBOUNCE_DELAY, settled).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn update_watches_rewatches_recreated_directory() {
        let apps = tempfile::tempdir().unwrap();
        let dir = apps.path().join("notes");
        std::fs::create_dir(&dir).unwrap();
        let mut watcher = DirectoryWatcher::new();
        watcher.update_watches(apps.path());
        std::fs::remove_dir(&dir).unwrap();
        std::fs::create_dir(&dir).unwrap();
        watcher.wait_for_change().await;
        watcher.update_watches(apps.path());
        std::fs::write(dir.join("svc.json"), "{}").unwrap();
        let changed = tokio::time::timeout(Duration::from_secs(10), watcher.wait_for_change()).await;
        assert!(changed.is_ok(), "the new file was not detected");
    }
}

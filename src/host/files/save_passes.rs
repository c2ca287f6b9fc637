//! Runs extra passes after a slow save to catch files moved during it: a pass misses a file moved from a directory it
//! hasn't visited yet to one it has.
//!
//! The watcher reports such moves. If it can't (it doesn't respond, has lost events, or can't watch all directories),
//! everything is saved once more. Extra passes only read what has changed, so they're usually faster.
//!
//! Limitation: the number of passes is bounded so that saves finish even if the watcher never reports moves or the home
//! directory never stops changing. A file moved during the last pass may be missing until a later save.

use std::path::Path;
use std::time::Duration;

use svc_files::FilesError;
use svc_files::save::{ChangeSet, SaveResult, Saver};

use super::changes::{self, ChangesError};
use crate::audit::file_changes::ChangesReply;

/// After a pass that took at least this long, query the watcher for files moved during it.
const RECHECK_THRESHOLD: Duration = Duration::from_secs(1);
/// Maximum number of passes after the first.
const MAX_EXTRA_PASSES: usize = 2;

/// Changes a pass may have missed.
enum MissedChanges {
    None,
    Reported(ChangeSet),
    /// The watcher cannot report them.
    Unknown,
}

impl MissedChanges {
    fn from_reply(reply: &Result<ChangesReply, ChangesError>) -> Self {
        match reply {
            Ok(ChangesReply { paths: Some(paths), .. }) if paths.subtrees.is_empty() => Self::None,
            Ok(ChangesReply { paths: Some(paths), .. }) => {
                Self::Reported(changes::watched_changes(Some(paths)))
            }
            Ok(ChangesReply { paths: None, .. }) | Err(_) => Self::Unknown,
        }
    }
}

/// All passes of one save, as a single result.
pub struct SavePasses {
    pub result: SaveResult,
    /// Whether a pass visited the whole home directory.
    pub is_full: bool,
    /// Token of the last watcher reply whose changes the passes contain.
    pub token: Option<String>,
    /// [`RECHECK_THRESHOLD`], except in tests.
    recheck_threshold: Duration,
}

impl SavePasses {
    /// `token` comes from the watcher reply before the first pass.
    pub fn new(result: SaveResult, is_full: bool, token: Option<String>) -> Self {
        Self { result, is_full, token, recheck_threshold: RECHECK_THRESHOLD }
    }

    /// Runs extra passes for changes that the previous ones may have missed.
    ///
    /// # Errors
    /// See [`Saver::save`].
    pub async fn repeat(&mut self, saver: &mut Saver, sockets: &Path) -> Result<(), FilesError> {
        // The first pass measured the excluded files, or the measurement was postponed.
        saver.options_mut().should_measure_excluded = false;
        let mut has_rerun_full_save = false;
        for _ in 0..MAX_EXTRA_PASSES {
            if self.result.duration < self.recheck_threshold {
                break;
            }
            let reply = changes::request_changes(sockets, self.token.clone()).await;
            let parent = (self.result.id, self.result.snapshot.clone());
            match MissedChanges::from_reply(&reply) {
                MissedChanges::None => break,
                MissedChanges::Reported(mut changed) => {
                    changed.merge(self.result.retry.clone());
                    let pass = saver.save_changes(parent, changed).await?;
                    self.add(pass, false);
                }
                // The watcher may be unable to report moves for a long time.
                MissedChanges::Unknown if has_rerun_full_save => break,
                MissedChanges::Unknown => {
                    let pass = saver.save(Some(parent)).await?;
                    self.add(pass, true);
                    has_rerun_full_save = true;
                }
            }
            if let Ok(reply) = reply {
                self.token = Some(reply.token);
            }
        }
        Ok(())
    }

    fn add(&mut self, pass: SaveResult, is_full: bool) {
        let earlier = std::mem::replace(&mut self.result, pass);
        let result = &mut self.result;
        result.is_unchanged &= earlier.is_unchanged;
        result.uploaded_bytes += earlier.uploaded_bytes;
        result.throttled += earlier.throttled;
        let files_read = earlier.counts.files_read + result.counts.files_read;
        if is_full {
            result.counts.excluded_sizes = earlier.counts.excluded_sizes;
        } else {
            // The pass only counted what it visited, including entries the earlier one couldn't read.
            let pass = std::mem::replace(&mut result.counts, earlier.counts);
            (result.counts.unreadable, result.counts.unstable) = (pass.unreadable, pass.unstable);
            result.counts.first_unreadable = pass.first_unreadable;
        }
        result.counts.files_read = files_read;
        self.is_full |= is_full;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use object_store::memory::InMemory;
    use svc_files::save::SaveOptions;
    use svc_files::{Cache, Repository, RepositoryKey, SnapshotOrigin};
    use svc_machine::epoch::Epoch;
    use svc_machine::id::MachineId;
    use svc_store::Bucket;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixListener;

    use super::*;
    use crate::audit::file_changes::{ChangedPaths, ChangesRequest, SOCKET};

    /// A home directory with one saved file, and a fake watcher.
    struct Fixture {
        dir: tempfile::TempDir,
        saver: Saver,
        first: SaveResult,
        /// Tokens received by the watcher.
        requests: Arc<Mutex<Vec<Option<String>>>>,
    }

    impl Fixture {
        /// The watcher sends these paths with tokens 1, 2 and so on, then stops responding.
        async fn new(replies: Vec<Option<ChangedPaths>>) -> Self {
            let dir = tempfile::tempdir().unwrap();
            std::fs::create_dir_all(dir.path().join("user/home")).unwrap();
            std::fs::write(dir.path().join("user/home/early"), "1").unwrap();
            let bucket = Bucket::new(Arc::new(InMemory::new()));
            let (root, cache) = ("files".into(), Cache::new(dir.path().join("cache")));
            let key = RepositoryKey::generate().unwrap();
            let repository = Repository::open_or_create(bucket, root, &key, cache).await.unwrap();
            let origin = SnapshotOrigin { machine: MachineId::new(), epoch: Epoch(1) };
            let mut saver = Saver::new(repository, SaveOptions::new(dir.path().join("user"), origin));
            let first = saver.save(None).await.unwrap();
            let requests = Arc::default();
            let listener = UnixListener::bind(dir.path().join(SOCKET)).unwrap();
            tokio::spawn(serve(listener, replies, Arc::clone(&requests)));
            Self { dir, saver, first, requests }
        }

        /// Runs extra passes after an incremental save with token 0.
        async fn repeat(&mut self) -> SavePasses {
            let passes = SavePasses::new(self.first.clone(), false, Some("0".to_owned()));
            let mut passes = SavePasses { recheck_threshold: Duration::ZERO, ..passes };
            passes.repeat(&mut self.saver, self.dir.path()).await.unwrap();
            passes
        }

        fn requests(&self) -> Vec<String> {
            self.requests.lock().unwrap().iter().flatten().cloned().collect()
        }
    }

    async fn serve(
        listener: UnixListener,
        replies: Vec<Option<ChangedPaths>>,
        requests: Arc<Mutex<Vec<Option<String>>>>,
    ) {
        for (index, paths) in replies.into_iter().enumerate() {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut line = String::new();
            BufReader::new(&mut stream).read_line(&mut line).await.unwrap();
            let request: ChangesRequest = serde_json::from_str(&line).unwrap();
            requests.lock().unwrap().push(request.saved);
            let reply = ChangesReply { token: (index + 1).to_string(), has_new: true, paths };
            stream.write_all(&reply.encode()).await.unwrap();
        }
    }

    fn moved(name: &str) -> Option<ChangedPaths> {
        Some(ChangedPaths { directories: Vec::new(), subtrees: vec![name.into()] })
    }

    #[tokio::test]
    async fn repeat_saves_everything_once_if_moves_are_unknown() {
        let nothing = Some(ChangedPaths::default());
        for (replies, token) in [(vec![], "0"), (vec![None, None], "1"), (vec![None, nothing], "1")] {
            let mut fixture = Fixture::new(replies.clone()).await;
            std::fs::write(fixture.dir.path().join("user/home/late"), "2").unwrap();
            let passes = fixture.repeat().await;
            assert_eq!((passes.result.counts.files, passes.is_full), (2, true), "{replies:?}");
            assert_eq!(passes.result.counts.files_read, 2, "{replies:?}");
            assert!(passes.result.uploaded_bytes > fixture.first.uploaded_bytes, "{replies:?}");
            assert_eq!(passes.token.as_deref(), Some(token), "{replies:?}");
            assert_eq!(fixture.requests(), ["0", "1"][..replies.len()], "{replies:?}");
        }
    }

    #[tokio::test]
    async fn repeat_saves_reported_moves_only() {
        let mut fixture = Fixture::new(vec![moved("late"), moved("later")]).await;
        std::fs::write(fixture.dir.path().join("user/home/late"), "2").unwrap();
        let passes = fixture.repeat().await;
        assert_ne!(passes.result.id, fixture.first.id);
        assert_eq!((passes.result.counts.files, passes.is_full), (1, false), "the first pass's count");
        assert_eq!((passes.result.counts.files_read, passes.token.as_deref()), (2, Some("2")));
        assert_eq!(fixture.requests(), ["0", "1"]);
    }

    #[tokio::test]
    async fn repeat_counts_unreadable_entries_of_last_pass() {
        let mut fixture = Fixture::new(vec![moved("late"), moved("early")]).await;
        let late = std::fs::File::create(fixture.dir.path().join("user/home/late")).unwrap();
        if late.set_len(2 << 40).is_err() {
            eprintln!("skipped: the file system does not support large sparse files");
            return;
        }
        let SavePasses { result, is_full, .. } = fixture.repeat().await;
        assert_eq!((result.counts.unreadable, is_full), (1, false), "a file of more than 1 TiB is not saved");
        assert!(result.counts.first_unreadable.unwrap().contains("late"));
    }

    #[tokio::test]
    async fn repeat_without_changes_keeps_result_of_first_pass() {
        for replies in [vec![Some(ChangedPaths::default())], vec![moved("early"), moved("early")]] {
            let mut fixture = Fixture::new(replies).await;
            let SavePasses { result, .. } = fixture.repeat().await;
            assert_eq!(
                (result.id, result.is_unchanged),
                (fixture.first.id, false),
                "the first pass stored a snapshot"
            );
            assert_eq!(result.uploaded_bytes, fixture.first.uploaded_bytes);
        }
    }
}

//! The proof keys that this host accepts: those of provisioning, until the sync agent's file replaces them.
//!
//! The file is looked at no more than once a second. A broken file keeps the keys that were good.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::http::proof::ProofKeys;

const LOOK_EACH: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Keyring {
    file: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    keys: Arc<ProofKeys>,
    /// Counts the changes, so that what was verified by older keys can be told apart.
    generation: u64,
    seen: Option<Mark>,
    looked: Option<Instant>,
}

/// What changes when a file is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    inode: u64,
    seconds: i64,
    nanoseconds: i64,
    size: u64,
}

impl Mark {
    fn of(path: &Path) -> Option<Self> {
        let meta = std::fs::metadata(path).ok()?;
        Some(Self {
            inode: meta.ino(),
            seconds: meta.mtime(),
            nanoseconds: meta.mtime_nsec(),
            size: meta.size(),
        })
    }
}

impl Keyring {
    pub fn new(first: ProofKeys, file: PathBuf) -> Self {
        let state = State { keys: Arc::new(first), generation: 0, seen: None, looked: None };
        Self { file, state: Mutex::new(state) }
    }

    /// The keys of now, and their generation.
    pub fn current(&self) -> (Arc<ProofKeys>, u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.looked.is_none_or(|at| at.elapsed() >= LOOK_EACH) {
            state.looked = Some(Instant::now());
            state.look(&self.file);
        }
        (state.keys.clone(), state.generation)
    }
}

impl State {
    fn look(&mut self, file: &Path) {
        let mark = Mark::of(file);
        if mark == self.seen {
            return;
        }
        self.seen = mark;
        if mark.is_none() {
            return;
        }
        match read(file) {
            Ok(keys) if keys != *self.keys => {
                tracing::info!(kids = ?kids(&keys), "proof keys replaced");
                self.keys = Arc::new(keys);
                self.generation += 1;
            }
            Ok(_) => {}
            Err(why) => {
                tracing::warn!(file = %file.display(), %why, "proof keys not usable; the last good ones stay");
            }
        }
    }
}

fn read(file: &Path) -> Result<ProofKeys, String> {
    let text = std::fs::read(file).map_err(|error| error.to_string())?;
    let keys: ProofKeys = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if keys.keys.is_empty() { Err("it holds no key".to_owned()) } else { Ok(keys) }
}

fn kids(keys: &ProofKeys) -> Vec<&str> {
    keys.keys.iter().map(|key| key.kid.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::proof::ProofKey;

    fn keys(kid: &str) -> ProofKeys {
        ProofKeys { keys: vec![ProofKey { kid: kid.into(), x: String::new() }] }
    }

    fn look(ring: &Keyring) -> String {
        ring.state.lock().unwrap().looked = None;
        kids(&ring.current().0).join(",")
    }

    #[test]
    fn the_file_replaces_the_first_keys_and_a_broken_one_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("proof-keys.json");
        let ring = Keyring::new(keys("first"), file.clone());
        assert_eq!(look(&ring), "first");
        crate::fsx::write_atomic(&file, &serde_json::to_vec(&keys("second")).unwrap(), 0o600).unwrap();
        assert_eq!(look(&ring), "second");
        let generation = ring.current().1;
        for broken in [&b"{"[..], br#"{"keys":[]}"#] {
            crate::fsx::write_atomic(&file, broken, 0o600).unwrap();
            assert_eq!(look(&ring), "second");
        }
        assert_eq!(ring.current().1, generation);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(look(&ring), "second");
    }
}

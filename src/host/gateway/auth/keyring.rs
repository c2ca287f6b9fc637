//! Proof keys accepted by this host: the provisioned ones, until the sync agent's file replaces them.
//!
//! The file is checked at most once a second. An invalid file leaves the current keys in place; an unreadable one is
//! retried at the next check.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use svc_base::error_chain::format_chain;
use svc_base::fsx;
use svc_host::system::activity;
use svc_host::system::layout::Layout;
use svc_http::proof::ProofKeys;

const CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Keyring {
    layout: Layout,
    state: Mutex<KeyringState>,
}

#[derive(Debug)]
struct KeyringState {
    keys: Arc<ProofKeys>,
    /// Incremented when the keys change, so that caches drop proofs verified with older keys.
    generation: u64,
    /// File stamp as of the last read. `None` if the file didn't exist.
    last_stamp: Option<FileStamp>,
    /// Whether the last attempt to read the file failed.
    is_unreadable: bool,
    checked_at: Option<Instant>,
}

/// Metadata that changes when the file is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    inode: u64,
    mtime_seconds: i64,
    mtime_nanoseconds: i64,
    size: u64,
}

impl FileStamp {
    fn read(path: &Path) -> Option<Self> {
        let meta = std::fs::metadata(path).ok()?;
        Some(Self {
            inode: meta.ino(),
            mtime_seconds: meta.mtime(),
            mtime_nanoseconds: meta.mtime_nsec(),
            size: meta.size(),
        })
    }
}

impl Keyring {
    /// Accepts the `provisioned` keys until the file [`Layout::proof_keys`] replaces them.
    pub fn new(provisioned: ProofKeys, layout: Layout) -> Self {
        let state = KeyringState {
            keys: Arc::new(provisioned),
            generation: 0,
            last_stamp: None,
            is_unreadable: false,
            checked_at: None,
        };
        Self { layout, state: Mutex::new(state) }
    }

    /// Returns the current keys and their generation. Reloads the file first, at most once per [`CHECK_INTERVAL`], and
    /// records key changes in `activity.log`.
    pub fn current(&self) -> (Arc<ProofKeys>, u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.checked_at.is_none_or(|at| at.elapsed() >= CHECK_INTERVAL) {
            // Keys found by the first check were accepted before the gateway started, so don't record them.
            let is_first_check = state.checked_at.replace(Instant::now()).is_none();
            let before = state.generation;
            state.reload_if_changed(&self.layout.proof_keys());
            if state.generation != before && !is_first_check {
                let kids = kids(&state.keys).join(", ");
                activity::note(&self.layout, &format!("the platform's proof keys are now {kids}"));
            }
        }
        (state.keys.clone(), state.generation)
    }
}

impl KeyringState {
    fn reload_if_changed(&mut self, file: &Path) {
        let stamp = FileStamp::read(file);
        if stamp == self.last_stamp {
            return;
        }
        let text = match fsx::read_if_exists(file) {
            Ok(text) => text,
            Err(error) => {
                // May be transient: keep the old stamp so that the next check retries.
                if !std::mem::replace(&mut self.is_unreadable, true) {
                    tracing::warn!(error = %format_chain(&error), "cannot read proof keys; retrying");
                }
                return;
            }
        };
        self.is_unreadable = false;
        self.last_stamp = stamp;
        let Some(text) = text else { return };
        match parse_keys(&text) {
            Ok(keys) if keys != *self.keys => {
                tracing::info!(kids = ?kids(&keys), "proof keys replaced");
                self.keys = Arc::new(keys);
                self.generation += 1;
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "invalid proof keys; keeping the current ones");
            }
        }
    }
}

fn parse_keys(text: &[u8]) -> Result<ProofKeys, String> {
    let keys: ProofKeys = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if keys.keys.is_empty() { Err("the file contains no keys".to_owned()) } else { Ok(keys) }
}

fn kids(keys: &ProofKeys) -> Vec<&str> {
    keys.keys.iter().map(|key| key.kid.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_http::proof::ProofKey;

    fn keys(kid: &str) -> ProofKeys {
        ProofKeys { keys: vec![ProofKey { kid: kid.into(), x: String::new() }] }
    }

    fn current_kids(keyring: &Keyring) -> String {
        keyring.state.lock().unwrap().checked_at = Instant::now().checked_sub(CHECK_INTERVAL);
        kids(&keyring.current().0).join(",")
    }

    #[test]
    fn valid_file_replaces_keys_and_invalid_file_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let file = layout.proof_keys();
        std::fs::create_dir_all(layout.logs()).unwrap();
        let keyring = Keyring::new(keys("first"), layout.clone());
        assert_eq!(current_kids(&keyring), "first");
        svc_base::fsx::write_atomic(&file, &serde_json::to_vec(&keys("second")).unwrap(), 0o600).unwrap();
        assert_eq!(current_kids(&keyring), "second");
        let generation = keyring.current().1;
        for broken in [&b"{"[..], br#"{"keys":[]}"#] {
            svc_base::fsx::write_atomic(&file, broken, 0o600).unwrap();
            assert_eq!(current_kids(&keyring), "second");
        }
        assert_eq!(keyring.current().1, generation);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(current_kids(&keyring), "second");
        let noted = std::fs::read_to_string(layout.logs().join("activity.log")).unwrap();
        assert_eq!(noted.lines().count(), 1, "{noted}");
        assert!(noted.ends_with("the platform's proof keys are now second\n"), "{noted}");
    }

    #[test]
    fn unreadable_file_is_retried() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        // Directories have metadata but can't be read as files.
        std::fs::create_dir_all(layout.proof_keys()).unwrap();
        let file = layout.proof_keys();
        let keyring = Keyring::new(keys("first"), layout);
        assert_eq!(current_kids(&keyring), "first");
        // Without a stamp, the next check reads the file even if it hasn't changed.
        assert_eq!(keyring.state.lock().unwrap().last_stamp, None);
        std::fs::remove_dir(&file).unwrap();
        svc_base::fsx::write_atomic(&file, &serde_json::to_vec(&keys("second")).unwrap(), 0o600).unwrap();
        assert_eq!(current_kids(&keyring), "second");
        assert!(!keyring.state.lock().unwrap().is_unreadable);
    }
}

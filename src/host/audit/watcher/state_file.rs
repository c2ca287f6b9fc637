//! Persists running tool calls and dispatches across watcher restarts.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::call_windows::CallWindow;
use super::dispatches::Dispatches;

#[derive(Default, Serialize, Deserialize)]
pub struct WatcherState {
    pub windows: Vec<CallWindow>,
    pub dispatches: Dispatches,
}

/// Replaces the file without syncing it to disk.
///
/// # Errors
/// If the file can't be written.
pub fn save_state(file: &Path, state: &WatcherState) -> std::io::Result<()> {
    let new = file.with_extension("new");
    std::fs::write(&new, serde_json::to_vec(state)?)?;
    std::fs::rename(new, file)
}

/// Loads the state. A missing or invalid file is treated as empty.
pub fn load_state(file: &Path) -> WatcherState {
    let text = std::fs::read(file).unwrap_or_default();
    let parse_older_format =
        || serde_json::from_slice(&text).map(|windows| WatcherState { windows, ..WatcherState::default() });
    serde_json::from_slice(&text).or_else(|_| parse_older_format()).unwrap_or_default()
}

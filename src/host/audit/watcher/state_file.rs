//! The state file, from which running tool calls and dispatches are restored when the watcher restarts.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::call_windows::CallWindow;
use super::dispatches::Dispatches;

/// The saved state.
#[derive(Default, Serialize, Deserialize)]
pub struct WatcherState {
    pub windows: Vec<CallWindow>,
    pub dispatches: Dispatches,
}

/// Loads the state; a missing or invalid file counts as empty.
pub fn load_state(file: &Path) -> WatcherState {
    let text = std::fs::read(file).unwrap_or_default();
    let parse_older_format =
        || serde_json::from_slice(&text).map(|windows| WatcherState { windows, ..WatcherState::default() });
    serde_json::from_slice(&text).or_else(|_| parse_older_format()).unwrap_or_default()
}

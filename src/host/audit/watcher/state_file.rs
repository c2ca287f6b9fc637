//! The state file: running tool calls and dispatches, restored when the watcher restarts.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::dispatches::Dispatches;
use super::windows::Window;

/// The saved state.
#[derive(Default, Serialize, Deserialize)]
pub struct WatcherState {
    pub windows: Vec<Window>,
    pub dispatches: Dispatches,
}

pub fn load_state(state: &Path) -> WatcherState {
    let text = std::fs::read(state).unwrap_or_default();
    let of_older_release =
        || serde_json::from_slice(&text).map(|windows| WatcherState { windows, ..WatcherState::default() });
    serde_json::from_slice(&text).or_else(|_| of_older_release()).unwrap_or_default()
}

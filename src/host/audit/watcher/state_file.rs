//! Which tool calls and dispatches run, on disk: a watcher that begins anew goes on with them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::dispatches::Dispatches;
use super::windows::Window;

/// What a next life begins with.
#[derive(Default, Serialize, Deserialize)]
pub struct Kept {
    pub windows: Vec<Window>,
    pub dispatches: Dispatches,
}

pub fn restored(state: &Path) -> Kept {
    let text = std::fs::read(state).unwrap_or_default();
    let of_older_release =
        || serde_json::from_slice(&text).map(|windows| Kept { windows, ..Kept::default() });
    serde_json::from_slice(&text).or_else(|_| of_older_release()).unwrap_or_default()
}

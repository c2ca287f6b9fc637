//! The stages of a backup run.

use serde::Serialize;

/// A stage of a backup run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    Gate,
    Snapshot,
    Dump,
    Upload,
    /// Records still use its former name.
    #[serde(rename = "sideRecord")]
    Sidecar,
    Pointer,
    Done,
}

impl Stage {
    /// Returns the stage's name in records.
    pub fn name(self) -> String {
        let name = serde_json::to_value(self).ok();
        name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
    }
}

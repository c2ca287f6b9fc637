//! The ids of the keys that this machine trusts for releases. The updater writes them as root; the heartbeat reports
//! them.

use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::fsx::{self, FileError};

/// `{"sequence":1,"ids":["614c4b637b092e93"]}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustedKeyIds {
    pub sequence: u32,
    pub ids: Vec<String>,
}

impl TrustedKeyIds {
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields are JSON");
        if fsx::read_if_exists(&layout.trusted_keys())?.as_ref() == Some(&text) {
            return Ok(());
        }
        fsx::write_atomic(&layout.trusted_keys(), &text, 0o644)
    }

    /// The ids that the updater wrote last; `None` before its first run.
    pub fn read(layout: &Layout) -> Option<Self> {
        let text = fsx::read_if_exists(&layout.trusted_keys()).ok().flatten()?;
        serde_json::from_slice(&text).ok()
    }
}

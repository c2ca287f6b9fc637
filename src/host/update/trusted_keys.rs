//! `trusted-keys.json`: the ids of the keys that this machine trusts to sign releases. The updater writes them as root;
//! the heartbeat reports them.

use crate::system::layout::Layout;
use svc_base::fsx::{self, FileError};
use svc_wire::heartbeat::TrustedKeyIds;

/// Writes the ids if they have changed: `{"sequence":1,"ids":["614c4b637b092e93"]}`.
pub fn write(ids: &TrustedKeyIds, layout: &Layout) -> Result<(), FileError> {
    let text = serde_json::to_vec(ids).expect("plain fields serialize to JSON");
    if fsx::read_if_exists(&layout.trusted_keys())?.as_ref() == Some(&text) {
        return Ok(());
    }
    fsx::write_atomic(&layout.trusted_keys(), &text, 0o644)
}

/// Reads the ids that the updater last wrote; `None` before its first run, or if the file cannot be read or parsed.
pub fn read(layout: &Layout) -> Option<TrustedKeyIds> {
    let text = fsx::read_if_exists(&layout.trusted_keys()).ok().flatten()?;
    serde_json::from_slice(&text).ok()
}

//! The keys trusted to sign releases: those in `update.env`, which only root can change.
//!
//! A signed manifest may contain a newer key set. The set is adopted once the manifest's release is healthy, so a
//! release that is rolled back does not change the trusted keys. Invariant: `update.env` holds one complete set, the
//! old or the new one, with its sequence number.

use super::error::UpdateError;
use super::trusted_keys;
use crate::system::activity;
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::config::{ConfigError, Env, set_env_lines};
use svc_base::failpoint;
use svc_base::fsx::{self, FileError};
use svc_store::bundle::KeySet;
use svc_wire::heartbeat::TrustedKeyIds;

/// The fail points in adopting a key set.
pub const KEY_FAILPOINTS: &[&str] = &["update.keys_adopting", "update.keys_written", "update.keys_reported"];

/// Reads the trusted key set. Environment variables are ignored, because they would survive a rotation.
pub fn read(layout: &Layout) -> Result<KeySet, ConfigError> {
    let mut env = Env::default().with_file(&layout.update_env());
    let keys = env.optional(&vars::SVC_BUNDLE_PUBLIC_KEYS).unwrap_or_default();
    let sequence = env.or_default(&vars::SVC_BUNDLE_KEYS_SEQUENCE);
    env.finish(Some(KeySet { sequence, keys }))
}

/// Adopts the key set from a release that passed its health check. Idempotent; ignores a set that is not newer.
///
/// # Errors
/// [`UpdateError`] if the trusted keys cannot be read or written. The set may already have been adopted; a repeated
/// call completes the adoption.
pub fn adopt(layout: &Layout, offered: &KeySet) -> Result<(), UpdateError> {
    failpoint::trigger("update.keys_adopting")?;
    let trusted = read(layout)?;
    if offered.sequence > trusted.sequence {
        write(layout, offered)?;
        tracing::info!(sequence = offered.sequence, keys = ?offered.keys, "adopted a new set of release keys");
        let ids = offered.keys.ids().join(", ");
        activity::note(layout, &format!("releases signed with these keys are now trusted: {ids}"));
    }
    failpoint::trigger("update.keys_written")?;
    report_key_ids(layout)?;
    failpoint::trigger("update.keys_reported")?;
    Ok(())
}

fn write(layout: &Layout, set: &KeySet) -> Result<(), FileError> {
    let path = layout.update_env();
    fsx::remove_leftover_temps(&path)?;
    let text = fsx::read_if_exists(&path)?.unwrap_or_default();
    let pairs = [
        (vars::SVC_BUNDLE_PUBLIC_KEYS.name, set.keys.to_string()),
        (vars::SVC_BUNDLE_KEYS_SEQUENCE.name, set.sequence.to_string()),
    ];
    let pairs = pairs.each_ref().map(|(name, value)| (*name, value.as_str()));
    let text = set_env_lines(&String::from_utf8_lossy(&text), &pairs);
    fsx::write_atomic(&path, text.as_bytes(), 0o600)
}

/// Writes the trusted key ids for the sync agent, which cannot read `update.env`.
pub fn report_key_ids(layout: &Layout) -> Result<(), UpdateError> {
    let KeySet { sequence, keys } = read(layout)?;
    Ok(trusted_keys::write(&TrustedKeyIds { sequence, ids: keys.ids() }, layout)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const OLD: &str = "SYI72Ti3RJxzEy9+gM7OSAARF8/NglUPYX3o0A/AaLQ=";
    const NEW: &str = "eORXKO6/E/hnhpWscq+rlYmslv94xGDwuVdmREQ7pMk=";

    fn set(sequence: u32, keys: &str) -> KeySet {
        KeySet { sequence, keys: keys.parse().unwrap() }
    }

    #[test]
    fn adopt_replaces_only_key_variables() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let before = format!("A=1\n SVC_BUNDLE_PUBLIC_KEYS={OLD}\nSVC_BUNDLE_SHA256=\"x\"");
        fsx::write_atomic(&layout.update_env(), before.as_bytes(), 0o600).unwrap();
        std::fs::create_dir_all(layout.logs()).unwrap();
        assert_eq!(read(&layout).unwrap(), set(0, OLD));
        let both = set(1, &format!("{OLD},{NEW}"));
        for _ in 0..2 {
            adopt(&layout, &both).unwrap();
            assert_eq!(read(&layout).unwrap(), both);
        }
        let text = std::fs::read_to_string(layout.update_env()).unwrap();
        assert_eq!(text.lines().collect::<Vec<_>>()[..2], ["A=1", "SVC_BUNDLE_SHA256=\"x\""]);
        assert_eq!(text.matches("SVC_BUNDLE_PUBLIC_KEYS").count(), 1, "{text}");
        let noted = std::fs::read_to_string(layout.logs().join("activity.log")).unwrap();
        let ids = both.keys.ids().join(", ");
        assert!(
            noted.ends_with(&format!("releases signed with these keys are now trusted: {ids}\n")),
            "{noted}"
        );
        assert_eq!(noted.lines().count(), 1, "only a change is noted: {noted}");
        let mode = std::fs::metadata(layout.update_env()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let reported = trusted_keys::read(&layout).unwrap();
        assert_eq!((reported.sequence, reported.ids), (1, both.keys.ids()));
    }

    #[test]
    fn adopt_ignores_key_set_that_is_not_newer() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        adopt(&layout, &set(2, NEW)).unwrap();
        for offered in [set(1, OLD), set(2, OLD)] {
            adopt(&layout, &offered).unwrap();
            assert_eq!(read(&layout).unwrap(), set(2, NEW));
        }
    }
}

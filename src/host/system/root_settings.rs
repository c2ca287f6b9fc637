//! What root takes from env files that another user can write: by a list, so that a new setting is root's own until
//! somebody has thought about it.
//!
//! Root's own settings are those of its process and of `update.env`, which outrank every other file.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::layout::Layout;
use crate::config::{Env, env_line};
use crate::fsx::{self, FileError};

/// Why root may use a value that another user of the machine has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harmless {
    /// Parsed as an identifier of this machine, its owner or a snapshot; no path is made of it unchecked.
    Identifier,
    /// Parsed as a number or one of a few words, within limits.
    Choice,
    /// A credential that the user has itself. Root sends it to root's own address of the platform, or to an address of
    /// this list, and never in place of a credential of root's.
    Credential,
    /// An address to which root sends nothing but what this list has.
    Address,
    /// Judged by the doctor, and used by services that are not root.
    Judged,
}

/// The settings that root takes from files of others.
pub const FROM_OTHERS: [(&str, Harmless); 28] = [
    ("SVC_MACHINE_ID", Harmless::Identifier),
    ("SVC_USER_ID", Harmless::Identifier),
    ("SVC_HANDLE", Harmless::Identifier),
    ("SVC_SLOT", Harmless::Identifier),
    ("SVC_EPOCH", Harmless::Identifier),
    ("SVC_IMAGE_VERSION", Harmless::Identifier),
    ("SVC_RESTORE_SNAPSHOT", Harmless::Identifier),
    ("SVC_RESTORE_MODE", Harmless::Choice),
    ("BACKUP_COMPRESSION", Harmless::Choice),
    ("BACKUP_RETRY_SECONDS", Harmless::Choice),
    ("VERIFY_WITHIN_DAYS", Harmless::Choice),
    ("RESTORE_STORE_DEADLINE_SECONDS", Harmless::Choice),
    ("UPGRADE_TOKEN", Harmless::Credential),
    ("REGISTRATION_TOKEN", Harmless::Credential),
    ("DATABASE_URL", Harmless::Credential),
    ("AWS_ACCESS_KEY_ID", Harmless::Credential),
    ("AWS_SECRET_ACCESS_KEY", Harmless::Credential),
    ("AWS_SESSION_TOKEN", Harmless::Credential),
    ("AWS_CREDENTIAL_EXPIRATION", Harmless::Choice),
    ("AWS_REGION", Harmless::Address),
    ("OBJECT_STORE_URL", Harmless::Address),
    ("OBJECT_STORE_ENDPOINT", Harmless::Address),
    ("OBJECT_STORE_BUCKET", Harmless::Address),
    ("S3_BUCKET", Harmless::Address),
    ("GATEWAY_LISTEN", Harmless::Address),
    // Until root has one of its own: see `keep_platform_url`.
    (PLATFORM_URL, Harmless::Address),
    ("SVC_PROOF_KEYS", Harmless::Judged),
    ("ADMIN_TOKEN", Harmless::Credential),
];

const PLATFORM_URL: &str = "PLATFORM_INTERNAL_URL";

/// Whether root takes this setting from a file of another user. A store that is a directory is none: root would write
/// its files wherever the other user wants.
pub fn is_taken(name: &str, value: &str) -> bool {
    let is_directory =
        name == "OBJECT_STORE_URL" && value.trim_start().to_ascii_lowercase().starts_with("file");
    !is_directory && FROM_OTHERS.iter().any(|(taken, _)| *taken == name)
}

/// Adds the files, as root reads them.
pub fn with_files_of_others(env: Env, files: &[PathBuf]) -> Env {
    files.iter().fold(env, |env, file| {
        if is_of_another_user(file) { env.with_file_where(file, is_taken) } else { env.with_file(file) }
    })
}

fn is_of_another_user(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|meta| meta.uid() != 0)
}

/// Writes the platform's address where root alone can change it, on a machine whose user-data did not. From then on root
/// does not take that of `host.env`.
///
/// # Errors
/// [`FileError`].
pub fn keep_platform_url(layout: &Layout) -> Result<(), FileError> {
    let file = layout.update_env();
    if !geteuid().is_root() || Env::default().with_file(&file).is_set(PLATFORM_URL) {
        return Ok(());
    }
    let Some(url) = Env::default().with_file(&layout.host_env()).text(PLATFORM_URL) else { return Ok(()) };
    let before = fsx::read_if_there(&file)?.unwrap_or_default();
    let mut text = String::from_utf8_lossy(&before).into_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(&env_line(PLATFORM_URL, &url));
    fsx::write_atomic(&file, text.as_bytes(), 0o600)?;
    tracing::info!("the platform's address is kept in update.env, which root alone can change");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use super::*;
    use crate::host::system::config;

    /// Needs root, to give a file to another user.
    fn machine(others: &str, own: &str) -> Option<(tempfile::TempDir, Layout)> {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        fsx::write_atomic(&layout.host_env(), others.as_bytes(), 0o600).unwrap();
        fsx::write_atomic(&layout.update_env(), own.as_bytes(), 0o600).unwrap();
        if chown(layout.host_env(), Some(940), Some(940)).is_err() {
            eprintln!("skipped: only root can give a file to another user");
            return None;
        }
        Some((dir, layout))
    }

    fn text(layout: &Layout, name: &str) -> Option<String> {
        config::environment(layout).text(name)
    }

    #[test]
    fn root_takes_only_listed_settings_of_others() {
        let own = [
            "SVC_PG_BIN_DIR",
            "SVC_BUNDLE_PUBLIC_KEYS",
            "SVC_BUNDLE_KEYS_SEQUENCE",
            "SVC_UPDATE_HEALTH_SECONDS",
            "SVC_NEW",
        ];
        let all = FROM_OTHERS.iter().map(|(name, _)| *name).chain(own);
        let others: String = all.map(|name| env_line(name, "planted")).collect();
        let Some((_dir, layout)) = machine(&others, "SVC_UPDATE_SNAPSHOT_SECONDS=7\n") else { return };
        for name in own {
            assert_ne!(text(&layout, name).as_deref(), Some("planted"), "{name}");
        }
        for (name, _) in FROM_OTHERS {
            assert!(text(&layout, name).is_some(), "{name}");
        }
        assert_eq!(text(&layout, "SVC_UPDATE_SNAPSHOT_SECONDS").as_deref(), Some("7"));
    }

    #[test]
    fn root_writes_to_no_directory_that_another_user_names() {
        for url in ["file:///etc", "FILE:///etc", " file:///etc"] {
            let Some((_dir, layout)) = machine(&env_line("OBJECT_STORE_URL", url), "") else { return };
            assert_eq!(text(&layout, "OBJECT_STORE_URL"), None, "{url}");
        }
    }

    #[test]
    fn kept_platform_url_outranks_that_of_others() {
        let Some((_dir, layout)) = machine("PLATFORM_INTERNAL_URL=https://one.example\n", "A_KEY=1") else {
            return;
        };
        keep_platform_url(&layout).unwrap();
        fsx::write_atomic(&layout.host_env(), b"PLATFORM_INTERNAL_URL=https://thief.example\n", 0o600)
            .unwrap();
        chown(layout.host_env(), Some(940), Some(940)).unwrap();
        keep_platform_url(&layout).unwrap();
        assert_eq!(text(&layout, PLATFORM_URL).as_deref(), Some("https://one.example"));
        assert_eq!(text(&layout, "A_KEY").as_deref(), Some("1"));
    }
}

//! Settings that root accepts from env files writable by other users. This is an allowlist: root ignores new settings
//! in such a file until they have been reviewed and added here.
//!
//! Root's own settings come from its process environment and `update.env`, and take precedence over every other file.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::layout::Layout;
use super::vars;
use svc_base::config::{Env, format_env_line};
use svc_base::fsx::{self, FileError};
use svc_base::variable::Variable;
use svc_store::vars as store;

/// Justifies accepting a value set by another user on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptReason {
    /// Parsed as an identifier (of this machine, its owner, a release, ...); never used unchecked in a path.
    Identifier,
    /// Parsed as a bounded number, time or enum value.
    BoundedValue,
    /// A credential the other user already has. Root only sends it to the platform URL from its own settings or to an
    /// address on this list, and never in place of its own credential.
    Credential,
    /// An address; root only sends it values on this list.
    Address,
    /// Only checked by root's doctor. Services that use it don't run as root.
    CheckedOnly,
}

/// Settings that root accepts from other users' files.
pub const ALLOWED_FROM_OTHERS: [(&Variable, AcceptReason); 31] = [
    (&vars::SVC_MACHINE_ID, AcceptReason::Identifier),
    (&vars::SVC_USER_ID, AcceptReason::Identifier),
    (&vars::SVC_HANDLE, AcceptReason::Identifier),
    (&vars::SVC_SLOT, AcceptReason::Identifier),
    (&vars::SVC_EPOCH, AcceptReason::Identifier),
    (&vars::SVC_IMAGE_VERSION, AcceptReason::Identifier),
    (&vars::SVC_RESTORE_SNAPSHOT, AcceptReason::Identifier),
    (&vars::SVC_RESTORE_MODE, AcceptReason::BoundedValue),
    (&vars::SVC_RESTORE_FILES, AcceptReason::BoundedValue),
    (&vars::SVC_EXPECT_FILES, AcceptReason::BoundedValue),
    (&vars::BACKUP_COMPRESSION, AcceptReason::BoundedValue),
    (&vars::BACKUP_RETRY_SECONDS, AcceptReason::BoundedValue),
    (&vars::VERIFY_WITHIN_DAYS, AcceptReason::BoundedValue),
    (&vars::RESTORE_STORE_DEADLINE_SECONDS, AcceptReason::BoundedValue),
    (&vars::UPGRADE_TOKEN, AcceptReason::Credential),
    (&vars::REGISTRATION_TOKEN, AcceptReason::Credential),
    (&vars::DATABASE_URL, AcceptReason::Credential),
    (&store::AWS_ACCESS_KEY_ID, AcceptReason::Credential),
    (&store::AWS_SECRET_ACCESS_KEY, AcceptReason::Credential),
    (&store::AWS_SESSION_TOKEN, AcceptReason::Credential),
    (&store::AWS_CREDENTIAL_EXPIRATION, AcceptReason::BoundedValue),
    (&store::AWS_REGION, AcceptReason::Address),
    (&store::OBJECT_STORE_URL, AcceptReason::Address),
    (&store::OBJECT_STORE_ENDPOINT, AcceptReason::Address),
    (&store::OBJECT_STORE_BUCKET, AcceptReason::Address),
    (&store::S3_BUCKET, AcceptReason::Address),
    (&vars::GATEWAY_LISTEN, AcceptReason::Address),
    // Accepted only until root has its own value: see `copy_platform_url`.
    (&vars::PLATFORM_INTERNAL_URL, AcceptReason::Address),
    (&vars::SVC_PROOF_KEYS, AcceptReason::CheckedOnly),
    (&vars::SVC_HOST_NAME, AcceptReason::CheckedOnly),
    (&vars::ADMIN_TOKEN, AcceptReason::Credential),
];

/// Returns whether root accepts this setting from another user's file. Directory stores are rejected, since they would
/// let the user make root write files anywhere.
pub fn is_accepted(name: &str, value: &str) -> bool {
    let is_directory =
        name == store::OBJECT_STORE_URL.name && value.trim_start().to_ascii_lowercase().starts_with("file");
    !is_directory && ALLOWED_FROM_OTHERS.iter().any(|(accepted, _)| accepted.name == name)
}

/// Adds the settings from `files`. Files owned by other users only contribute accepted settings.
pub fn with_untrusted_files(env: Env, files: &[PathBuf]) -> Env {
    files.iter().fold(env, |env, file| {
        if is_owned_by_other_user(file) {
            env.with_file_where(file, is_accepted)
        } else {
            env.with_file(file)
        }
    })
}

fn is_owned_by_other_user(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|meta| meta.uid() != 0)
}

/// Copies the platform URL to `update.env`, which only root can modify, unless user-data already wrote it there. From
/// then on, root ignores the URL in `host.env`.
pub fn copy_platform_url(layout: &Layout) -> Result<(), FileError> {
    let file = layout.update_env();
    if !geteuid().is_root() || Env::default().with_file(&file).is_set(&vars::PLATFORM_INTERNAL_URL) {
        return Ok(());
    }
    let Some(url) = Env::default().with_file(&layout.host_env()).text(&vars::PLATFORM_INTERNAL_URL) else {
        return Ok(());
    };
    let existing = fsx::read_if_exists(&file)?.unwrap_or_default();
    let mut text = String::from_utf8_lossy(&existing).into_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(&format_env_line(vars::PLATFORM_INTERNAL_URL.name, &url));
    fsx::write_atomic(&file, text.as_bytes(), 0o600)?;
    tracing::info!("copied the platform URL to update.env, which only root can modify");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use svc_base::variable::DefaultValue;

    use super::*;
    use crate::system::config;

    /// Returns `None` unless running as root: only root can chown a file to another user.
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

    fn text(layout: &Layout, variable: &Variable) -> Option<String> {
        config::environment(layout).text(variable)
    }

    const fn undeclared(name: &'static str) -> Variable {
        Variable {
            name,
            format: "text",
            default: DefaultValue::Unset,
            meaning: "",
            source: None,
            readers: None,
        }
    }

    const SVC_NEW: Variable = undeclared("SVC_NEW");
    const A_KEY: Variable = undeclared("A_KEY");

    #[test]
    fn root_reads_only_listed_settings_from_others() {
        let own = [
            &vars::SVC_PG_BIN_DIR,
            &vars::SVC_BUNDLE_PUBLIC_KEYS,
            &vars::SVC_BUNDLE_KEYS_SEQUENCE,
            &vars::SVC_UPDATE_HEALTH_SECONDS,
            &SVC_NEW,
        ];
        let all = ALLOWED_FROM_OTHERS.iter().map(|(variable, _)| *variable).chain(own);
        let others: String = all.map(|variable| format_env_line(variable.name, "planted")).collect();
        let Some((_dir, layout)) = machine(&others, "SVC_UPDATE_SNAPSHOT_SECONDS=7\n") else { return };
        for variable in own {
            assert_ne!(text(&layout, variable).as_deref(), Some("planted"), "{}", variable.name);
        }
        for (variable, _) in ALLOWED_FROM_OTHERS {
            assert!(text(&layout, variable).is_some(), "{}", variable.name);
        }
        assert_eq!(text(&layout, &vars::SVC_UPDATE_SNAPSHOT_SECONDS).as_deref(), Some("7"));
    }

    #[test]
    fn root_rejects_store_directory_from_another_user() {
        for url in ["file:///etc", "FILE:///etc", " file:///etc"] {
            let Some((_dir, layout)) = machine(&format_env_line(store::OBJECT_STORE_URL.name, url), "")
            else {
                return;
            };
            assert_eq!(text(&layout, &store::OBJECT_STORE_URL), None, "{url}");
        }
    }

    #[test]
    fn copied_platform_url_takes_precedence() {
        let Some((_dir, layout)) = machine("PLATFORM_INTERNAL_URL=https://one.example\n", "A_KEY=1") else {
            return;
        };
        copy_platform_url(&layout).unwrap();
        fsx::write_atomic(&layout.host_env(), b"PLATFORM_INTERNAL_URL=https://thief.example\n", 0o600)
            .unwrap();
        chown(layout.host_env(), Some(940), Some(940)).unwrap();
        copy_platform_url(&layout).unwrap();
        assert_eq!(text(&layout, &vars::PLATFORM_INTERNAL_URL).as_deref(), Some("https://one.example"));
        assert_eq!(text(&layout, &A_KEY).as_deref(), Some("1"));
    }
}

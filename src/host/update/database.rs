//! Generates the local database password, once. It's only ever stored on this machine.
//!
//! An existing `DATABASE_URL` is left alone. `postgres.env`, which the container reads, is written before `host.env`;
//! if a run is interrupted between the two, the next one reuses the password in `postgres.env`.

use std::path::Path;

use ring::rand::{SecureRandom, SystemRandom};
use secrecy::{ExposeSecret, SecretString};

use crate::system::config;
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::config::{format_env_line, parse_env_file};
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::{self, FileError};

#[derive(Debug, thiserror::Error)]
pub enum PasswordError {
    #[error("the system's random number generator failed")]
    Random,
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

/// Writes a new password to `postgres.env`, or reuses the existing one, and appends the matching `DATABASE_URL` to
/// `host.env`. Does nothing if `DATABASE_URL` is already set.
pub fn ensure_password(layout: &Layout) -> Result<(), PasswordError> {
    if config::environment(layout).is_set(&vars::DATABASE_URL) {
        return Ok(());
    }
    let password = match read_password(&layout.postgres_env())? {
        Some(password) => password,
        None => create_password(&layout.postgres_env())?,
    };
    failpoint::trigger("update.password_created")?;
    let url = format!("postgres://postgres:{}@127.0.0.1:5432/svc", password.expose_secret());
    let existing = fsx::read_if_exists(&layout.host_env())?.unwrap_or_default();
    let mut text = String::from_utf8_lossy(&existing).into_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(&format_env_line(vars::DATABASE_URL.name, &url));
    fsx::write_atomic(&layout.host_env(), text.as_bytes(), 0o600)?;
    failpoint::trigger("update.password_recorded")?;
    Ok(())
}

fn read_password(path: &Path) -> Result<Option<SecretString>, FileError> {
    let text = fsx::read_if_exists(path)?.unwrap_or_default();
    let pairs = parse_env_file(&String::from_utf8_lossy(&text)).unwrap_or_default();
    let found =
        pairs.into_iter().find(|(name, value)| *name == vars::POSTGRES_PASSWORD.name && !value.is_empty());
    Ok(found.map(|(_, value)| value.into()))
}

fn create_password(path: &Path) -> Result<SecretString, PasswordError> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| PasswordError::Random)?;
    let password = SecretString::from(hex::encode(bytes));
    // Not quoted: podman would retain the quotes.
    let line = format!("{}={}\n", vars::POSTGRES_PASSWORD.name, password.expose_secret());
    fsx::write_atomic(path, line.as_bytes(), 0o600)?;
    Ok(password)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn ensure_password_writes_both_files_once() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        fsx::write_atomic(&layout.host_env(), b"SVC_SLOT=\"primary\"", 0o600).unwrap();
        ensure_password(&layout).unwrap();
        let (host, postgres) = (
            fs::read_to_string(layout.host_env()).unwrap(),
            fs::read_to_string(layout.postgres_env()).unwrap(),
        );
        let password = postgres.trim().strip_prefix("POSTGRES_PASSWORD=").unwrap();
        assert_eq!(password.len(), 64);
        assert!(host.starts_with("SVC_SLOT=\"primary\"\nDATABASE_URL=\"postgres://postgres:"), "{host}");
        assert!(host.contains(&format!(":{password}@127.0.0.1:5432/svc")));
        for path in [layout.host_env(), layout.postgres_env()] {
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        ensure_password(&layout).unwrap();
        assert_eq!(fs::read_to_string(layout.host_env()).unwrap(), host);
        // Interrupted between the two files: the password is reused.
        fs::write(layout.host_env(), "SVC_SLOT=\"primary\"\n").unwrap();
        ensure_password(&layout).unwrap();
        assert_eq!(fs::read_to_string(layout.host_env()).unwrap(), host);
    }

    #[test]
    fn ensure_password_keeps_existing_database_url() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        fsx::write_atomic(&layout.host_env(), b"DATABASE_URL=postgres://x@y/z\n", 0o600).unwrap();
        ensure_password(&layout).unwrap();
        assert!(!layout.postgres_env().exists());
    }
}

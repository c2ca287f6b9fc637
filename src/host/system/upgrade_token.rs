//! This machine's `UPGRADE_TOKEN`: either the one in `host.env` or a newer one from a heartbeat response.
//!
//! Only the sync agent writes the file with the newer token. It persists the next token before using it in a heartbeat,
//! and retains the previous one as a fallback in case the platform rejects the stored one. Every call rereads the file,
//! so a long backup notices a rotation. Root reads it too, although another user can write it: root never follows
//! symlinks, and only accepts a regular file containing a token in this machine's format.
//!
//! Invariant: a crash while storing a token leaves either the complete old file or the complete new one.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};

use super::vars::UPGRADE_TOKEN;
use crate::system::layout::Layout;
use svc_base::config::set_env_lines;
use svc_base::error_chain::format_chain;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::{self, FileError};
use svc_machine::id::MachineId;

/// Fail points while storing a token.
pub const FAILPOINTS: &[&str] = &["token.before_store", "token.stored"];
const FORMAT_VERSION: u32 = 1;
const MAX_FILE_BYTES: u64 = 4096;
/// Maximum length of a token after the machine id: its generation and 64 hex digits.
const MAX_TOKEN_SUFFIX_BYTES: usize = 80;

/// Token source for a machine.
#[derive(Debug, Clone)]
pub struct UpgradeToken {
    /// Token from `host.env`.
    initial: SecretString,
    /// File with newer tokens; `None` if the token doesn't rotate.
    stored: Option<TokenFile>,
}

#[derive(Debug, Clone)]
struct TokenFile {
    path: PathBuf,
    machine: MachineId,
}

/// Tokens to use for a call.
#[derive(Debug, Clone)]
pub struct Tokens {
    pub current: SecretString,
    /// Fallback if the platform rejects the current token.
    pub previous: Option<SecretString>,
}

/// Errors from storing a token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("platform issued a token that is malformed or for another machine")]
    ForeignToken,
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StoredToken {
    version: u32,
    token: String,
    #[serde(rename = "before")]
    previous: Option<String>,
}

impl UpgradeToken {
    /// Creates a source with a non-rotating token.
    pub fn fixed(token: SecretString) -> Self {
        Self { initial: token, stored: None }
    }

    /// Creates a source that starts with the token from `host.env` and switches to newer tokens for this machine.
    pub fn rotating(initial: SecretString, layout: &Layout, machine: MachineId) -> Self {
        Self { initial, stored: Some(TokenFile { path: layout.upgrade_token(), machine }) }
    }

    /// Returns the current token.
    pub fn current(&self) -> SecretString {
        self.tokens().current
    }

    /// Returns the stored tokens. Falls back to the token in `host.env` if nothing is stored, the file can't be read,
    /// or the token in `host.env` is newer.
    pub fn tokens(&self) -> Tokens {
        let initial = || Tokens { current: self.initial.clone(), previous: None };
        let Some(token_file) = &self.stored else { return initial() };
        match token_file.read() {
            Ok(Some(tokens)) if is_current(&tokens, &self.initial) => tokens,
            Ok(_) => initial(),
            Err(error) => {
                tracing::error!(error = %format_chain(&error), "cannot read stored token; using the one in host.env");
                initial()
            }
        }
    }

    /// Stores the token for later calls, with `previous` as the fallback if the platform rejects it. No-op for a
    /// non-rotating token.
    ///
    /// # Errors
    /// `ForeignToken` if the token doesn't belong to this machine, in which case nothing is stored. `File` if it can't
    /// be written or synced.
    pub fn store(&self, next: &SecretString, previous: &SecretString) -> Result<(), TokenError> {
        let Some(token_file) = &self.stored else { return Ok(()) };
        if !belongs_to(next.expose_secret(), token_file.machine) {
            return Err(TokenError::ForeignToken);
        }
        let stored = StoredToken {
            version: FORMAT_VERSION,
            token: next.expose_secret().to_owned(),
            previous: Some(previous.expose_secret().to_owned()),
        };
        let text = serde_json::to_vec(&stored).expect("plain fields serialize to JSON");
        failpoint::trigger("token.before_store")?;
        fsx::write_atomic(&token_file.path, &text, 0o600)?;
        failpoint::trigger("token.stored")?;
        Ok(())
    }

    /// Makes the stored token durable. Must be called before the token is used: an agent killed while storing it may
    /// have left a file that would be reverted by a power failure.
    pub fn make_durable(&self) -> Result<(), FileError> {
        let Some(token_file) = &self.stored else { return Ok(()) };
        fsx::remove_leftover_temps(&token_file.path)?;
        let Some(file) = token_file.open()? else { return Ok(()) };
        file.sync_all().map_err(FileError::wrap("sync", &token_file.path))?;
        fsx::sync_dir(token_file.path.parent().unwrap_or(Path::new("/")))
    }
}

impl TokenFile {
    fn open(&self) -> Result<Option<File>, FileError> {
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        match OpenOptions::new().read(true).custom_flags(flags.bits()).open(&self.path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(FileError::wrap("open", &self.path)(error)),
        }
    }

    fn read(&self) -> Result<Option<Tokens>, FileError> {
        let Some(file) = self.open()? else { return Ok(None) };
        let meta = file.metadata().map_err(FileError::wrap("read", &self.path))?;
        if !meta.is_file() {
            return Ok(None);
        }
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut text).map_err(FileError::wrap("read", &self.path))?;
        let stored = serde_json::from_slice::<StoredToken>(&text).ok();
        let stored = stored
            .filter(|stored| stored.version == FORMAT_VERSION && belongs_to(&stored.token, self.machine));
        Ok(stored.map(|stored| Tokens {
            current: stored.token.into(),
            previous: stored.previous.filter(|token| belongs_to(token, self.machine)).map(Into::into),
        }))
    }
}

/// Returns whether `token` has this machine's token format. Anything else must never be sent to the platform.
fn belongs_to(token: &str, machine: MachineId) -> bool {
    let rest = token.strip_prefix(&format!("svcu_{}_", machine.0.simple()));
    rest.is_some_and(|rest| {
        rest.len() <= MAX_TOKEN_SUFFIX_BYTES
            && rest.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'_')
    })
}

/// Returns whether the stored token is at least as new as the one in `host.env`, which may have been replaced by an
/// operator or an update. Also true if the stored token replaced the one in `host.env`, even with a lower generation: a
/// platform restored to an earlier state may only accept an earlier token.
fn is_current(stored: &Tokens, initial: &SecretString) -> bool {
    let initial = initial.expose_secret();
    let replaces_initial = stored.previous.as_ref().is_some_and(|token| token.expose_secret() == initial);
    replaces_initial || generation(stored.current.expose_secret()) >= generation(initial)
}

fn generation(token: &str) -> u32 {
    let mut parts = token.splitn(4, '_').skip(2);
    match (parts.next(), parts.next()) {
        (Some(generation), Some(_)) => generation.parse().unwrap_or(1),
        _ => 1,
    }
}

/// Writes the current token to `host.env`, as root, before switching to another release: older releases only read it
/// there. The token stays valid throughout the update, because the sync agent doesn't store new ones meanwhile.
///
/// # Errors
/// [`FileError`] if a file can't be read or written. `host.env` is unchanged unless only its directory sync failed.
pub fn write_to_host_env(layout: &Layout, token: &UpgradeToken) -> Result<(), FileError> {
    let current = token.current();
    if current.expose_secret() == token.initial.expose_secret() {
        return Ok(());
    }
    let path = layout.host_env();
    let Some(text) = fsx::read_if_exists(&path)? else { return Ok(()) };
    let meta = std::fs::metadata(&path).map_err(FileError::wrap("read", &path))?;
    let text =
        set_env_lines(&String::from_utf8_lossy(&text), &[(UPGRADE_TOKEN.name, current.expose_secret())]);
    let temp = path.with_extension("env.next");
    fsx::write_atomic(&temp, text.as_bytes(), 0o600)?;
    std::os::unix::fs::chown(&temp, Some(meta.uid()), Some(meta.gid()))
        .map_err(FileError::wrap("change the owner of", &temp))?;
    std::fs::rename(&temp, &path).map_err(FileError::wrap("replace", &path))?;
    fsx::sync_dir(path.parent().unwrap_or(Path::new("/")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_base::config::{format_env_line, parse_env_file};

    fn token(machine: MachineId, generation: u32) -> SecretString {
        let prefix = if generation == 1 { String::new() } else { format!("{generation}_") };
        format!("svcu_{}_{prefix}{}", machine.0.simple(), "a".repeat(64)).into()
    }

    fn current_text(token: &UpgradeToken) -> String {
        token.current().expose_secret().to_owned()
    }

    #[test]
    fn store_updates_every_source_and_keeps_previous_token() {
        let dir = tempfile::tempdir().unwrap();
        let (layout, machine) = (Layout::new(dir.path()), MachineId::new());
        let initial = token(machine, 1);
        let (writer, reader) = (
            UpgradeToken::rotating(initial.clone(), &layout, machine),
            UpgradeToken::rotating(initial.clone(), &layout, machine),
        );
        assert_eq!(current_text(&writer), initial.expose_secret());
        writer.store(&token(machine, 2), &initial).unwrap();
        assert_eq!(current_text(&reader), token(machine, 2).expose_secret());
        assert_eq!(reader.tokens().previous.unwrap().expose_secret(), initial.expose_secret());
        reader.make_durable().unwrap();
        let meta = std::fs::metadata(layout.upgrade_token()).unwrap();
        assert_eq!(meta.mode() & 0o777, 0o600);
        let replaced = UpgradeToken::rotating(token(machine, 3), &layout, machine);
        assert_eq!(current_text(&replaced), token(machine, 3).expose_secret(), "host.env has a newer token");
        // The platform rejected the token in `host.env`.
        replaced.store(&token(machine, 2), &token(machine, 3)).unwrap();
        assert_eq!(current_text(&replaced), token(machine, 2).expose_secret());
        assert_eq!(replaced.tokens().previous.unwrap().expose_secret(), token(machine, 3).expose_secret());
    }

    #[test]
    fn store_accepts_only_tokens_for_this_machine() {
        let dir = tempfile::tempdir().unwrap();
        let (layout, machine) = (Layout::new(dir.path()), MachineId::new());
        let initial = token(machine, 1);
        let source = UpgradeToken::rotating(initial.clone(), &layout, machine);
        let foreign = token(MachineId::new(), 2);
        assert!(matches!(source.store(&foreign, &initial), Err(TokenError::ForeignToken)));
        let secret = dir.path().join("secret");
        std::fs::create_dir_all(layout.upgrade_token().parent().unwrap()).unwrap();
        let text = |token: &str| serde_json::json!({"version": 1, "token": token}).to_string();
        std::fs::write(&secret, text(token(machine, 2).expose_secret())).unwrap();
        std::os::unix::fs::symlink(&secret, layout.upgrade_token()).unwrap();
        assert_eq!(current_text(&source), initial.expose_secret(), "symlinks are not followed");
        for content in [text("root:x:0:0"), text(foreign.expose_secret()), "{".to_owned()] {
            std::fs::remove_file(layout.upgrade_token()).unwrap();
            std::fs::write(layout.upgrade_token(), content).unwrap();
            assert_eq!(current_text(&source), initial.expose_secret());
        }
        std::fs::remove_file(layout.upgrade_token()).unwrap();
        nix::unistd::mkfifo(&layout.upgrade_token(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(current_text(&source), initial.expose_secret(), "FIFOs do not block");
    }

    #[test]
    fn write_to_host_env_replaces_only_token() {
        let dir = tempfile::tempdir().unwrap();
        let (layout, machine) = (Layout::new(dir.path()), MachineId::new());
        let initial = token(machine, 1);
        let text = format!("A=1\n{}B=\"2\"\n", format_env_line(UPGRADE_TOKEN.name, initial.expose_secret()));
        fsx::write_atomic(&layout.host_env(), text.as_bytes(), 0o600).unwrap();
        let source = UpgradeToken::rotating(initial.clone(), &layout, machine);
        write_to_host_env(&layout, &source).unwrap();
        assert_eq!(std::fs::read_to_string(layout.host_env()).unwrap(), text, "the token has not rotated");
        source.store(&token(machine, 2), &initial).unwrap();
        write_to_host_env(&layout, &source).unwrap();
        let text = std::fs::read_to_string(layout.host_env()).unwrap();
        let pairs = parse_env_file(&text).unwrap();
        let value = |name: &str| {
            let mut values = pairs.iter().filter(|(key, _)| key == name);
            (values.next().map(|(_, value)| value.clone()), values.count())
        };
        assert_eq!(value(UPGRADE_TOKEN.name), (Some(token(machine, 2).expose_secret().to_owned()), 0));
        assert_eq!((value("A").0.as_deref(), value("B").0.as_deref()), (Some("1"), Some("2")));
        assert_eq!(std::fs::metadata(layout.host_env()).unwrap().mode() & 0o777, 0o600);
    }
}

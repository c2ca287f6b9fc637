//! The `UPGRADE_TOKEN` of this machine: that of `host.env`, or a later one that a heartbeat's answer handed out.
//!
//! The sync agent alone writes the file. It stores the next token durably before it sends a heartbeat with it, and keeps the
//! one before: a platform that refuses the stored token may still accept that. Every call reads the file again, so a long
//! backup notices a rotation. Root reads it, too, although another user can write it: only as a regular file, without
//! links, and only what has the form of this machine's token.
//!
//! The invariant: the file has the latest token that was stored, or the one before it, never neither.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};

use crate::chain::chain;
use crate::config::with_env_lines;
use crate::failpoint::{self, Injected};
use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;
use crate::machine::id::MachineId;

/// Places where a test may stop the process, in the order they are reached.
pub const POINTS: &[&str] = &["token.before_store", "token.stored"];
const FORMAT: u32 = 1;
const MAX_BYTES: u64 = 4096;
const VARIABLE: &str = "UPGRADE_TOKEN";

/// The tokens of a machine as an applet finds them.
#[derive(Debug, Clone)]
pub struct UpgradeToken {
    /// Of `host.env`.
    first: SecretString,
    stored: Option<Place>,
}

#[derive(Debug, Clone)]
struct Place {
    file: PathBuf,
    machine: MachineId,
}

/// What a call is made with.
#[derive(Debug, Clone)]
pub struct Tokens {
    pub current: SecretString,
    /// To try where the platform refuses the current one.
    pub before: Option<SecretString>,
}

/// Why a token was not stored.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("the platform handed out a token that is not one of this machine")]
    NotOurs,
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] Injected),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    version: u32,
    token: String,
    before: Option<String>,
}

impl UpgradeToken {
    /// A token that does not rotate.
    pub fn fixed(token: SecretString) -> Self {
        Self { first: token, stored: None }
    }

    /// The token of `host.env`, and later ones of this machine.
    pub fn rotating(first: SecretString, layout: &Layout, machine: MachineId) -> Self {
        Self { first, stored: Some(Place { file: layout.upgrade_token(), machine }) }
    }

    /// The token for a call that is made now.
    pub fn current(&self) -> SecretString {
        self.tokens().current
    }

    pub fn tokens(&self) -> Tokens {
        let first = || Tokens { current: self.first.clone(), before: None };
        let Some(place) = &self.stored else { return first() };
        match place.read() {
            Ok(Some(tokens)) if is_later(&tokens.current, &self.first) => tokens,
            Ok(_) => first(),
            Err(error) => {
                tracing::error!(error = %chain(&error), "the stored token cannot be read: that of host.env is used");
                first()
            }
        }
    }

    /// Keeps the token to use from now on. `accepted` is the one that the platform has just accepted.
    ///
    /// # Errors
    /// [`TokenError`]; what was stored before stays.
    pub fn store(&self, next: &SecretString, accepted: &SecretString) -> Result<(), TokenError> {
        let Some(place) = &self.stored else { return Ok(()) };
        if !is_of(next.expose_secret(), place.machine) {
            return Err(TokenError::NotOurs);
        }
        let stored = Stored {
            version: FORMAT,
            token: next.expose_secret().to_owned(),
            before: Some(accepted.expose_secret().to_owned()),
        };
        let text = serde_json::to_vec(&stored).expect("plain fields are JSON");
        failpoint::pass("token.before_store")?;
        fsx::write_atomic(&place.file, &text, 0o600)?;
        failpoint::pass("token.stored")?;
        Ok(())
    }

    /// Makes durable what is stored: an agent that was killed may have left it so that a power cut takes it back, and
    /// nothing may be sent with it before.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn make_durable(&self) -> Result<(), FileError> {
        let Some(place) = &self.stored else { return Ok(()) };
        fsx::remove_torn(&place.file)?;
        let Some(file) = place.open()? else { return Ok(()) };
        file.sync_all().map_err(FileError::at("sync", &place.file))?;
        fsx::sync_dir(place.file.parent().unwrap_or(Path::new("/")))
    }
}

impl Place {
    fn open(&self) -> Result<Option<File>, FileError> {
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        match OpenOptions::new().read(true).custom_flags(flags.bits()).open(&self.file) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(FileError::at("open", &self.file)(error)),
        }
    }

    fn read(&self) -> Result<Option<Tokens>, FileError> {
        let Some(file) = self.open()? else { return Ok(None) };
        let meta = file.metadata().map_err(FileError::at("read", &self.file))?;
        if !meta.is_file() {
            return Ok(None);
        }
        let mut text = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut text).map_err(FileError::at("read", &self.file))?;
        let stored = serde_json::from_slice::<Stored>(&text).ok();
        let stored = stored.filter(|stored| stored.version == FORMAT && is_of(&stored.token, self.machine));
        Ok(stored.map(|stored| Tokens {
            current: stored.token.into(),
            before: stored.before.filter(|token| is_of(token, self.machine)).map(Into::into),
        }))
    }
}

/// Whether a text has the form of this machine's token: nothing else of a file is ever sent.
fn is_of(token: &str, machine: MachineId) -> bool {
    let rest = token.strip_prefix(&format!("svcu_{}_", machine.0.simple()));
    rest.is_some_and(|rest| {
        rest.len() <= 80 && rest.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'_')
    })
}

/// Whether the stored token is not of an earlier generation than that of `host.env`, which an operator may have replaced.
fn is_later(stored: &SecretString, first: &SecretString) -> bool {
    generation(stored.expose_secret()) >= generation(first.expose_secret())
}

fn generation(token: &str) -> u32 {
    let mut parts = token.splitn(4, '_').skip(2);
    match (parts.next(), parts.next()) {
        (Some(generation), Some(_)) => generation.parse().unwrap_or(1),
        _ => 1,
    }
}

/// Writes the current token into `host.env`, as root, before another release is switched to: one that is older reads it
/// nowhere else. No rotation begins while an update is under way.
///
/// # Errors
/// [`FileError`]; `host.env` is as it was.
pub fn write_to_host_env(layout: &Layout, token: &UpgradeToken) -> Result<(), FileError> {
    let current = token.current();
    if current.expose_secret() == token.first.expose_secret() {
        return Ok(());
    }
    let path = layout.host_env();
    let Some(text) = fsx::read_if_there(&path)? else { return Ok(()) };
    let meta = std::fs::metadata(&path).map_err(FileError::at("read", &path))?;
    let text = with_env_lines(&String::from_utf8_lossy(&text), &[(VARIABLE, current.expose_secret())]);
    let temp = path.with_extension("env.next");
    fsx::write_atomic(&temp, text.as_bytes(), 0o600)?;
    std::os::unix::fs::chown(&temp, Some(meta.uid()), Some(meta.gid()))
        .map_err(FileError::at("give away", &temp))?;
    std::fs::rename(&temp, &path).map_err(FileError::at("replace", &path))?;
    fsx::sync_dir(path.parent().unwrap_or(Path::new("/")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{env_line, parse_env_file};

    fn token(machine: MachineId, generation: u32) -> SecretString {
        let counted = if generation == 1 { String::new() } else { format!("{generation}_") };
        format!("svcu_{}_{counted}{}", machine.0.simple(), "a".repeat(64)).into()
    }

    fn shown(token: &UpgradeToken) -> String {
        token.current().expose_secret().to_owned()
    }

    #[test]
    fn stored_token_is_used_by_every_holder_and_the_one_before_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (layout, machine) = (Layout::new(dir.path()), MachineId::new());
        let first = token(machine, 1);
        let (one, other) = (
            UpgradeToken::rotating(first.clone(), &layout, machine),
            UpgradeToken::rotating(first.clone(), &layout, machine),
        );
        assert_eq!(shown(&one), first.expose_secret());
        one.store(&token(machine, 2), &first).unwrap();
        assert_eq!(shown(&other), token(machine, 2).expose_secret());
        assert_eq!(other.tokens().before.unwrap().expose_secret(), first.expose_secret());
        other.make_durable().unwrap();
        let meta = std::fs::metadata(layout.upgrade_token()).unwrap();
        assert_eq!(meta.mode() & 0o777, 0o600);
        let replaced = UpgradeToken::rotating(token(machine, 3), &layout, machine);
        assert_eq!(shown(&replaced), token(machine, 3).expose_secret(), "host.env has a later one");
    }

    #[test]
    fn nothing_but_this_machines_token_is_sent_or_stored() {
        let dir = tempfile::tempdir().unwrap();
        let (layout, machine) = (Layout::new(dir.path()), MachineId::new());
        let first = token(machine, 1);
        let held = UpgradeToken::rotating(first.clone(), &layout, machine);
        let others = token(MachineId::new(), 2);
        assert!(matches!(held.store(&others, &first), Err(TokenError::NotOurs)));
        let secret = dir.path().join("secret");
        std::fs::create_dir_all(layout.upgrade_token().parent().unwrap()).unwrap();
        let text = |token: &str| serde_json::json!({"version": 1, "token": token}).to_string();
        std::fs::write(&secret, text(token(machine, 2).expose_secret())).unwrap();
        std::os::unix::fs::symlink(&secret, layout.upgrade_token()).unwrap();
        assert_eq!(shown(&held), first.expose_secret(), "a link is not followed");
        for content in [text("root:x:0:0"), text(others.expose_secret()), "{".to_owned()] {
            std::fs::remove_file(layout.upgrade_token()).unwrap();
            std::fs::write(layout.upgrade_token(), content).unwrap();
            assert_eq!(shown(&held), first.expose_secret());
        }
        std::fs::remove_file(layout.upgrade_token()).unwrap();
        nix::unistd::mkfifo(&layout.upgrade_token(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(shown(&held), first.expose_secret(), "a FIFO does not block");
    }

    #[test]
    fn older_release_finds_the_token_in_host_env() {
        let dir = tempfile::tempdir().unwrap();
        let (layout, machine) = (Layout::new(dir.path()), MachineId::new());
        let first = token(machine, 1);
        let text = format!("A=1\n{}B=\"2\"\n", env_line(VARIABLE, first.expose_secret()));
        fsx::write_atomic(&layout.host_env(), text.as_bytes(), 0o600).unwrap();
        let held = UpgradeToken::rotating(first.clone(), &layout, machine);
        write_to_host_env(&layout, &held).unwrap();
        assert_eq!(std::fs::read_to_string(layout.host_env()).unwrap(), text, "nothing has rotated");
        held.store(&token(machine, 2), &first).unwrap();
        write_to_host_env(&layout, &held).unwrap();
        let text = std::fs::read_to_string(layout.host_env()).unwrap();
        let pairs = parse_env_file(&text).unwrap();
        let value = |name: &str| {
            let mut values = pairs.iter().filter(|(known, _)| known == name);
            (values.next().map(|(_, value)| value.clone()), values.count())
        };
        assert_eq!(value(VARIABLE), (Some(token(machine, 2).expose_secret().to_owned()), 0));
        assert_eq!((value("A").0.as_deref(), value("B").0.as_deref()), (Some("1"), Some("2")));
        assert_eq!(std::fs::metadata(layout.host_env()).unwrap().mode() & 0o777, 0o600);
    }
}

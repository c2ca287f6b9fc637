//! Installs the hook in the agents' settings files.
//!
//! Files are replaced atomically, preserving mode and owner. Invalid files are left alone.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::settings::{self, HookSpec, SettingsError};
use svc_base::fsx::{self, FileError};

/// Matches all tools that may change files: `COMMAND_TOOLS` and `WRITER_TOOLS` from the protocol.
const TOOL_MATCHER: &str = "Write|Edit|MultiEdit|NotebookEdit|Bash|apply_patch";

const fn for_tools(event: &'static str) -> HookSpec {
    HookSpec { event, matcher: Some(TOOL_MATCHER) }
}

const fn without_matcher(event: &'static str) -> HookSpec {
    HookSpec { event, matcher: None }
}

/// An agent program and its settings file, relative to the home directory.
struct Program {
    actor: &'static str,
    file: &'static str,
    hooks: &'static [HookSpec],
}

const PROGRAMS: [Program; 2] = [
    Program {
        actor: "claude-code",
        file: ".claude/settings.json",
        hooks: &[
            for_tools("PreToolUse"),
            for_tools("PostToolUse"),
            for_tools("PostToolUseFailure"),
            without_matcher("Stop"),
            without_matcher("SubagentStop"),
            without_matcher("SessionEnd"),
        ],
    },
    Program {
        actor: "codex",
        file: ".codex/hooks.json",
        hooks: &[
            for_tools("PreToolUse"),
            for_tools("PostToolUse"),
            without_matcher("Stop"),
            without_matcher("SubagentStop"),
            without_matcher("Interrupt"),
            without_matcher("SessionEnd"),
        ],
    },
];

#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error("{} is not valid JSON and was left unchanged: fix it, then run this command again", .path.display())]
    InvalidJson {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{} was left unchanged", .path.display())]
    Settings {
        path: PathBuf,
        #[source]
        source: SettingsError,
    },
    #[error(transparent)]
    File(#[from] FileError),
}

/// Adds `svc-hook` from the `bin` directory to the settings of all programs. A failure for one program doesn't affect
/// the others.
///
/// # Errors
/// Returns the first failure.
pub fn install(home: &Path, bin: &Path) -> Result<(), InstallError> {
    let hook = bin.join("svc-hook");
    change_all(home, |program, settings| {
        // `exec` replaces the shell, so the hook's parent is the agent process, which identifies the call.
        let command = format!("exec {} {}", hook.display(), program.actor);
        settings::install(settings, program.hooks, &command)
    })
}

/// Removes the hook from all programs.
///
/// # Errors
/// See [`install`].
pub fn uninstall(home: &Path) -> Result<(), InstallError> {
    change_all(home, |_, settings| settings::uninstall(settings))
}

fn change_all(
    home: &Path,
    change: impl Fn(&Program, &mut Value) -> Result<bool, SettingsError>,
) -> Result<(), InstallError> {
    let mut result = Ok(());
    for program in PROGRAMS {
        let changed = change_file(&home.join(program.file), |settings| change(&program, settings));
        result = result.and(changed);
    }
    result
}

fn change_file(
    path: &Path,
    change: impl FnOnce(&mut Value) -> Result<bool, SettingsError>,
) -> Result<(), InstallError> {
    // The owner may have replaced the file with a symlink.
    let target = fsx::resolve_link(path);
    let text = fsx::read_if_exists(&target)?.unwrap_or_default();
    let is_empty = text.iter().all(u8::is_ascii_whitespace);
    let mut settings = if is_empty {
        json!({})
    } else {
        serde_json::from_slice(&text)
            .map_err(|source| InstallError::InvalidJson { path: path.to_owned(), source })?
    };
    let is_changed =
        change(&mut settings).map_err(|source| InstallError::Settings { path: path.to_owned(), source })?;
    if !is_changed {
        return Ok(());
    }
    let mut text = serde_json::to_vec_pretty(&settings).expect("a JSON value serializes");
    text.push(b'\n');
    replace_file(&target, &text)?;
    println!("{}: changed", path.display());
    Ok(())
}

fn replace_file(path: &Path, text: &[u8]) -> Result<(), FileError> {
    let before = fs::metadata(path).ok();
    let mode = before.as_ref().map_or(0o600, |before| before.permissions().mode() & 0o7777);
    fsx::write_atomic(path, text, mode)?;
    let Some(before) = before else { return Ok(()) };
    let replaced = fs::metadata(path).map_err(FileError::wrap("stat", path))?;
    if (replaced.uid(), replaced.gid()) != (before.uid(), before.gid()) {
        std::os::unix::fs::chown(path, Some(before.uid()), Some(before.gid()))
            .map_err(FileError::wrap("restore the owner of", path))?;
    }
    // Restore the bits cleared by the umask.
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(FileError::wrap("set the mode of", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn install_is_idempotent_and_uninstall_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let (home, bin) = (dir.path(), Path::new("/opt/svc/bin"));
        let claude = home.join(".claude/settings.json");
        install(home, bin).unwrap();
        let first = fs::read(&claude).unwrap();
        assert_eq!(read(&claude)["hooks"]["PostToolUseFailure"][0]["matcher"], TOOL_MATCHER);
        let command = &read(&home.join(".codex/hooks.json"))["hooks"]["PreToolUse"][0]["hooks"][0]["command"];
        assert_eq!(command, "exec /opt/svc/bin/svc-hook codex");
        install(home, bin).unwrap();
        assert_eq!(fs::read(&claude).unwrap(), first);
        install(home, Path::new("/opt/svc/releases/2/bin")).unwrap();
        assert_eq!(read(&claude)["hooks"]["PreToolUse"].as_array().map(Vec::len), Some(1));
        uninstall(home).unwrap();
        assert_eq!(read(&claude), json!({}));
    }

    #[test]
    fn install_keeps_mode_and_link_and_skips_broken_files() {
        let dir = tempfile::tempdir().unwrap();
        let (home, bin) = (dir.path(), Path::new("/opt/svc/bin"));
        fs::create_dir_all(home.join(".claude")).unwrap();
        fs::create_dir_all(home.join(".codex")).unwrap();
        let (real, broken) = (home.join("dotfiles.json"), home.join(".codex/hooks.json"));
        fs::write(&real, r#"{"z": 1, "model": "opus", "a": [1, 2]}"#).unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o666)).unwrap();
        std::os::unix::fs::symlink("../dotfiles.json", home.join(".claude/settings.json")).unwrap();
        fs::write(&broken, "{ // mine\n}").unwrap();
        let error = install(home, bin).unwrap_err();
        assert!(error.to_string().contains("hooks.json is not valid JSON"), "{error}");
        assert_eq!(fs::read_to_string(&broken).unwrap(), "{ // mine\n}");
        assert!(home.join(".claude/settings.json").is_symlink());
        assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o666);
        let settings = read(&real);
        let names: Vec<_> = settings.as_object().unwrap().keys().collect();
        assert_eq!(names, ["z", "model", "a", "hooks"]);
        fs::write(&broken, r#"{"hooks": []}"#).unwrap();
        let error = install(home, bin).unwrap_err();
        assert!(error.to_string().ends_with("was left unchanged"), "{error}");
        assert_eq!(fs::read_to_string(&broken).unwrap(), r#"{"hooks": []}"#);
    }
}

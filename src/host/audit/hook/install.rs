//! Installs the hook in the settings files of the owner's agents.
//!
//! A file is replaced atomically and keeps its mode and owner. An invalid file is left unchanged.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::settings::{self, Unusable, Wanted};
use svc_base::fsx::{self, FileError};

const TOOLS: &str = "Write|Edit|MultiEdit|NotebookEdit|Bash|apply_patch";

const fn of_tools(event: &'static str) -> Wanted {
    Wanted { event, matcher: Some(TOOLS) }
}

const fn at(event: &'static str) -> Wanted {
    Wanted { event, matcher: None }
}

/// An agent's program, and its settings file below the home.
struct Program {
    actor: &'static str,
    file: &'static str,
    wanted: &'static [Wanted],
}

const PROGRAMS: [Program; 2] = [
    Program {
        actor: "claude-code",
        file: ".claude/settings.json",
        wanted: &[
            of_tools("PreToolUse"),
            of_tools("PostToolUse"),
            of_tools("PostToolUseFailure"),
            at("Stop"),
            at("SubagentStop"),
            at("SessionEnd"),
        ],
    },
    Program {
        actor: "codex",
        file: ".codex/hooks.json",
        wanted: &[
            of_tools("PreToolUse"),
            of_tools("PostToolUse"),
            at("Stop"),
            at("SubagentStop"),
            at("Interrupt"),
            at("SessionEnd"),
        ],
    },
];

#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error("{} is no JSON and is left as it is: fix it, and run this again", .path.display())]
    NoJson {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{} is left as it is", .path.display())]
    Unusable {
        path: PathBuf,
        #[source]
        source: Unusable,
    },
    #[error(transparent)]
    File(#[from] FileError),
}

/// Installs the hook in `bin` for all programs; a failure for one does not prevent the others.
///
/// # Errors
/// The first failure.
pub fn install(home: &Path, bin: &Path) -> Result<(), InstallError> {
    let hook = bin.join("svc-hook");
    for_all(home, |program, settings| {
        // `exec` replaces the shell, so that the hook's parent is the agent's process, which identifies the call.
        let command = format!("exec {} {}", hook.display(), program.actor);
        settings::install(settings, program.wanted, &command)
    })
}

/// Removes the hook from all programs.
///
/// # Errors
/// As [`install`].
pub fn uninstall(home: &Path) -> Result<(), InstallError> {
    for_all(home, |_, settings| settings::uninstall(settings))
}

fn for_all(
    home: &Path,
    change: impl Fn(&Program, &mut Value) -> Result<bool, Unusable>,
) -> Result<(), InstallError> {
    let mut all = Ok(());
    for program in PROGRAMS {
        let done = change_file(&home.join(program.file), |settings| change(&program, settings));
        all = all.and(done);
    }
    all
}

fn change_file(
    path: &Path,
    change: impl FnOnce(&mut Value) -> Result<bool, Unusable>,
) -> Result<(), InstallError> {
    // The owner may have replaced the file with a symbolic link.
    let target = fsx::resolve_link(path);
    let text = fsx::read_if_exists(&target)?.unwrap_or_default();
    let is_empty = text.iter().all(u8::is_ascii_whitespace);
    let mut settings = if is_empty {
        json!({})
    } else {
        serde_json::from_slice(&text)
            .map_err(|source| InstallError::NoJson { path: path.to_owned(), source })?
    };
    let is_changed =
        change(&mut settings).map_err(|source| InstallError::Unusable { path: path.to_owned(), source })?;
    if !is_changed {
        return Ok(());
    }
    let mut text = serde_json::to_vec_pretty(&settings).expect("a JSON value serializes");
    text.push(b'\n');
    write(&target, &text)?;
    println!("{}: changed", path.display());
    Ok(())
}

fn write(path: &Path, text: &[u8]) -> Result<(), FileError> {
    let was = fs::metadata(path).ok();
    let mode = was.as_ref().map_or(0o600, |was| was.permissions().mode() & 0o7777);
    fsx::write_atomic(path, text, mode)?;
    let Some(was) = was else { return Ok(()) };
    let now = fs::metadata(path).map_err(FileError::at("stat", path))?;
    if (now.uid(), now.gid()) != (was.uid(), was.gid()) {
        std::os::unix::fs::chown(path, Some(was.uid()), Some(was.gid()))
            .map_err(FileError::at("give back", path))?;
    }
    // Restores the bits that the umask removed.
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(FileError::at("set the mode of", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn install_is_idempotent_and_uninstall_complete() {
        let dir = tempfile::tempdir().unwrap();
        let (home, bin) = (dir.path(), Path::new("/opt/svc/bin"));
        let claude = home.join(".claude/settings.json");
        install(home, bin).unwrap();
        let first = fs::read(&claude).unwrap();
        assert_eq!(read(&claude)["hooks"]["PostToolUseFailure"][0]["matcher"], TOOLS);
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
        assert!(error.to_string().contains("hooks.json is no JSON"), "{error}");
        assert_eq!(fs::read_to_string(&broken).unwrap(), "{ // mine\n}");
        assert!(home.join(".claude/settings.json").is_symlink());
        assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o666);
        let settings = read(&real);
        let names: Vec<_> = settings.as_object().unwrap().keys().collect();
        assert_eq!(names, ["z", "model", "a", "hooks"]);
        fs::write(&broken, r#"{"hooks": []}"#).unwrap();
        let error = install(home, bin).unwrap_err();
        assert!(error.to_string().ends_with("is left as it is"), "{error}");
        assert_eq!(fs::read_to_string(&broken).unwrap(), r#"{"hooks": []}"#);
    }
}

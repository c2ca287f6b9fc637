//! A request path within an app's directory, whose content the owner and the agents control: every opened file is
//! inside the directory.

use std::fs;
use std::io::Read;
use std::path::{Component, Path};
use std::sync::LazyLock;

use proptest::prelude::*;
use svc::beneath::DirFd;
use svc::gateway::bridge_fuzzing::path_in_app;

use super::Target;

pub fn target() -> Target {
    Target { name: "app-path", valid: paths().boxed(), check_any, check_valid, cases: 2000 }
}

const INSIDE: &[u8] = b"inside";

/// An app's directory with files, symlinks that point outside it, and a hidden file. A static is never dropped;
/// `cargo xtask test` deletes the directory with all other temporary files.
static APP: LazyLock<(tempfile::TempDir, DirFd)> = LazyLock::new(|| {
    let dir = tempfile::tempdir().expect("create a temporary directory");
    let app = dir.path().join("app");
    fs::create_dir_all(app.join("a/b")).expect("create a directory");
    for name in ["index.html", "a/b/page", "a/ü 1.txt"] {
        fs::write(app.join(name), INSIDE).expect("write a file");
    }
    for name in ["../secret", ".hidden"] {
        fs::write(app.join(name), "secret").expect("write a file");
    }
    std::os::unix::fs::symlink("..", app.join("up")).expect("create a symbolic link");
    std::os::unix::fs::symlink("../secret", app.join("out")).expect("create a symbolic link");
    std::os::unix::fs::symlink("/", app.join("a/root")).expect("create a symbolic link");
    let app_dir = DirFd::open(&app).expect("the directory exists");
    (dir, app_dir)
});

const FILES: [&str; 3] = ["index.html", "a/b/page", "a/ü 1.txt"];

fn paths() -> impl Strategy<Value = Vec<u8>> {
    let encode = |text: &str, encodes_all: bool| -> String {
        let encode_byte = |byte: u8| match byte {
            b'/' => "/".to_owned(),
            byte if !encodes_all && byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
            byte => format!("%{byte:02x}"),
        };
        text.bytes().map(encode_byte).collect()
    };
    let file = prop::sample::select(&FILES[..]);
    (file, any::<bool>()).prop_map(move |(path, encodes_all)| encode(path, encodes_all).into_bytes())
}

fn check_any(bytes: &[u8]) -> Result<(), String> {
    let Ok(text) = std::str::from_utf8(bytes) else { return Ok(()) };
    let Some(path) = path_in_app(text) else { return Ok(()) };
    let is_allowed = |part: Component<'_>| match part {
        Component::Normal(name) => !name.as_encoded_bytes().starts_with(b"."),
        _ => false,
    };
    if path.has_root()
        || !path.components().all(is_allowed)
        || path.as_os_str().as_encoded_bytes().contains(&0)
    {
        return Err(format!("{} was accepted", path.display()));
    }
    match read_file(&path) {
        Some(content) if content != INSIDE => {
            Err(format!("{} is a file outside the directory", path.display()))
        }
        _ => Ok(()),
    }
}

fn read_file(path: &Path) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    APP.1.open_file(path).ok()?.take(100).read_to_end(&mut content).ok()?;
    Some(content)
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let path = path_in_app(text).ok_or("the path was rejected")?;
    if FILES.iter().any(|file| Path::new(file) == path) && read_file(&path).as_deref() == Some(INSIDE) {
        Ok(())
    } else {
        Err(format!("parsed as {}", path.display()))
    }
}

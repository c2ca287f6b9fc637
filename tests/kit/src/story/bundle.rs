//! The smallest host bundle that boots: the binary with a link per applet, and two test apps.
//!
//! The same inputs give the same bytes: entries in order, no times, no owners.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;
use sha2::{Digest, Sha256};
use tar::{EntryType, Header};

use crate::child;

pub const ARCHIVE: &str = "svc-host-bundle.tar.gz";

const APPS: [(&str, &str); 4] = [
    ("app/apps/notes/svc.json", include_str!("../../apps/notes/svc.json")),
    ("app/apps/notes/dist/index.html", include_str!("../../apps/notes/dist/index.html")),
    ("app/apps/tasks/svc.json", include_str!("../../apps/tasks/svc.json")),
    ("app/apps/tasks/dist/index.html", include_str!("../../apps/tasks/dist/index.html")),
];

/// What an entry of the archive is.
enum Entry {
    Directory,
    File(Vec<u8>),
    Program(PathBuf),
    Link(String),
}

/// A built bundle.
#[derive(Debug, Clone)]
pub struct Bundle {
    pub dir: PathBuf,
    pub sha256: String,
    pub size_bytes: u64,
}

/// Builds `svc-host-bundle.tar.gz` and its `.sha256` in `out`, with `svc` as the host's binary.
pub fn minimal(svc: &Path, image_version: &str, out: &Path) -> Result<Bundle> {
    fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    let staging = tempfile::tempdir_in(out)?;
    let program = without_symbols(svc, staging.path())?;
    let entries = entries(svc, program, image_version)?;
    let unfinished = staging.path().join(ARCHIVE);
    let file = File::create(&unfinished)?;
    let gzip = GzEncoder::new(Hashing { inner: file, hasher: Sha256::new(), size: 0 }, Compression::fast());
    let mut archive = tar::Builder::new(gzip);
    for (path, entry) in &entries {
        append(&mut archive, path, entry).with_context(|| format!("pack {path}"))?;
    }
    let written = archive.into_inner()?.finish()?;
    written.inner.sync_all()?;
    let sha256 = hex::encode(written.hasher.finalize());
    fs::rename(&unfinished, out.join(ARCHIVE))?;
    fs::write(out.join(format!("{ARCHIVE}.sha256")), format!("{sha256}  {ARCHIVE}\n"))?;
    Ok(Bundle { dir: out.to_owned(), sha256, size_bytes: written.size })
}

fn entries(svc: &Path, program: PathBuf, image_version: &str) -> Result<BTreeMap<String, Entry>> {
    let mut entries = BTreeMap::new();
    for (path, content) in APPS {
        entries.insert(path.to_owned(), Entry::File(content.as_bytes().to_vec()));
    }
    for applet in ask(svc, "--list")?.lines() {
        entries.insert(format!("bin/{applet}"), Entry::Link("svc".to_owned()));
    }
    entries.insert("bin/svc".to_owned(), Entry::Program(program));
    entries.insert("runtime".to_owned(), Entry::Directory);
    entries.insert("systemd".to_owned(), Entry::Directory);
    let release = release(svc, image_version)?;
    entries.insert("release.json".to_owned(), Entry::File(release));
    let parents: Vec<String> = entries.keys().flat_map(|path| parents(path)).collect();
    for parent in parents {
        entries.entry(parent).or_insert(Entry::Directory);
    }
    Ok(entries)
}

fn parents(path: &str) -> Vec<String> {
    path.match_indices('/').map(|(at, _)| path[..at].to_owned()).collect()
}

fn release(svc: &Path, image_version: &str) -> Result<Vec<u8>> {
    // "svc 0.1.0 (commit …, date)"
    let version = ask(svc, "--version")?;
    let version = version.split_whitespace().nth(1).unwrap_or("unknown").to_owned();
    let created_at = format!("{:.3}", jiff::Timestamp::from_second(source_date())?);
    let component =
        |name: &str, version: &str, path: &str| json!({"name": name, "version": version, "path": path});
    let release = json!({
        "version": 1,
        "imageVersion": image_version,
        "createdAt": created_at,
        "components": [
            component("svc", &version, "bin/svc"),
            component("notes", "1.0.0", "app/apps/notes"),
            component("tasks", "1.0.0", "app/apps/tasks"),
        ],
    });
    let mut text = serde_json::to_vec_pretty(&release)?;
    text.push(b'\n');
    Ok(text)
}

/// When the sources were made, so that the time of the build is in no byte: `SOURCE_DATE_EPOCH`, else the commit's.
fn source_date() -> i64 {
    let said = std::env::var("SOURCE_DATE_EPOCH").ok();
    let commit = || {
        let mut git = Command::new("git");
        git.current_dir(env!("CARGO_MANIFEST_DIR")).args(["show", "-s", "--format=%ct", "HEAD"]);
        child::run(git, Duration::from_secs(20)).ok()
    };
    said.or_else(commit).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn ask(svc: &Path, word: &str) -> Result<String> {
    let mut command = Command::new(svc);
    command.arg(word);
    let said = child::run(command, Duration::from_secs(30))?;
    ensure!(!said.trim().is_empty(), "{} {word} says nothing", svc.display());
    Ok(said)
}

/// A copy without debug information, a quarter of the size; without `strip`, the binary as it is.
fn without_symbols(svc: &Path, dir: &Path) -> Result<PathBuf> {
    let stripped = dir.join("svc");
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg("-o").arg(&stripped).arg(svc);
    match child::run(strip, Duration::from_secs(60)) {
        Ok(_) => Ok(stripped),
        Err(_) => svc.canonicalize().with_context(|| format!("find {}", svc.display())),
    }
}

fn append(archive: &mut tar::Builder<impl Write>, path: &str, entry: &Entry) -> Result<()> {
    let mut header = Header::new_gnu();
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    match entry {
        Entry::Directory => {
            header.set_entry_type(EntryType::Directory);
            header.set_mode(0o755);
            archive.append_data(&mut header, format!("{path}/"), io::empty())?;
        }
        Entry::File(content) => {
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            archive.append_data(&mut header, path, content.as_slice())?;
        }
        Entry::Program(program) => {
            let file = File::open(program)?;
            header.set_mode(0o755);
            header.set_size(file.metadata()?.len());
            archive.append_data(&mut header, path, file)?;
        }
        Entry::Link(target) => {
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(0o777);
            archive.append_link(&mut header, path, target)?;
        }
    }
    Ok(())
}

struct Hashing {
    inner: File,
    hasher: Sha256,
    size: u64,
}

impl Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.size += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn fake_svc(dir: &Path) -> PathBuf {
        let path = dir.join("fake");
        let script = "#!/bin/sh\ncase $1 in --list) echo svc-a; echo svcctl;; *) echo 'svc 0.1.0 (commit x, y)';; esac\n";
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn the_same_inputs_give_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let svc = fake_svc(dir.path());
        let one = minimal(&svc, "v1", &dir.path().join("one")).unwrap();
        let two = minimal(&svc, "v1", &dir.path().join("two")).unwrap();
        assert_eq!(one.sha256, two.sha256);
        let bytes = fs::read(one.dir.join(ARCHIVE)).unwrap();
        assert_eq!(hex::encode(Sha256::digest(&bytes)), one.sha256);
        assert_eq!(bytes.len() as u64, one.size_bytes);
    }

    #[test]
    fn the_archive_holds_the_binary_a_link_per_applet_and_the_apps() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = minimal(&fake_svc(dir.path()), "v1", &dir.path().join("out")).unwrap();
        let file = File::open(bundle.dir.join(ARCHIVE)).unwrap();
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
        let mut found = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let entry = entry.unwrap();
            let link = entry.link_name().unwrap().map(|link| link.display().to_string());
            found.insert(entry.path().unwrap().display().to_string(), link);
        }
        assert_eq!(found["bin/svc-a"].as_deref(), Some("svc"));
        for path in ["bin/svc", "app/apps/notes/svc.json", "app/apps/tasks/dist/index.html", "release.json"] {
            assert_eq!(found[path], None, "{path}");
        }
        assert!(found.contains_key("runtime/") && found.contains_key("systemd/"), "{found:?}");
    }
}

//! A bundle's archive, as the updater unpacks it. For any content, the updater neither creates nor changes anything
//! outside the target directory, and an accepted archive contains no link that points outside it. A case is the tar
//! within the bundle; corruption of the compressed bytes is detected by their checksum.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use svc::host::update::{UnpackLimits, unpack};
use tar::EntryType;

use super::Target;

const LIMITS: UnpackLimits = UnpackLimits { entries: 40, bytes: 200_000 };
/// A file next to the target directory; no entry may reach it.
const OUTSIDE: &str = "outside";

/// One entry with an arbitrary header, without a builder's checks.
#[derive(Debug, Clone)]
struct Entry {
    path: Vec<u8>,
    link: Vec<u8>,
    kind: u8,
    mode: u32,
    body: Vec<u8>,
    /// The length that the header declares; `None` means the body's length.
    size: Option<u64>,
}

fn file(path: &str, body: &[u8]) -> Entry {
    Entry { path: path.into(), link: Vec::new(), kind: b'0', mode: 0o644, body: body.to_vec(), size: None }
}

fn link(path: &str, target: &str) -> Entry {
    Entry { link: target.into(), kind: b'2', mode: 0o777, ..file(path, b"") }
}

fn build_tar(entries: &[Entry]) -> Vec<u8> {
    let mut archive = Vec::new();
    for entry in entries {
        let mut header = tar::Header::new_gnu();
        let old = header.as_old_mut();
        let (path, link) =
            (&entry.path[..entry.path.len().min(100)], &entry.link[..entry.link.len().min(100)]);
        old.name[..path.len()].copy_from_slice(path);
        old.linkname[..link.len()].copy_from_slice(link);
        header.set_entry_type(EntryType::new(entry.kind));
        header.set_mode(entry.mode);
        header.set_size(entry.size.unwrap_or(entry.body.len() as u64));
        header.set_cksum();
        archive.extend_from_slice(header.as_bytes());
        archive.extend_from_slice(&entry.body);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), Compression::fast());
    out.write_all(bytes).expect("writing to memory does not fail");
    out.finish().expect("writing to memory does not fail")
}

/// Recomputes the header checksums, so that mutated headers are parsed.
pub(super) fn with_valid_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut offset = 0_usize;
    while let Some(block) = offset.checked_add(512).and_then(|end| bytes.get_mut(offset..end)) {
        let mut header = tar::Header::new_old();
        header.as_mut_bytes().copy_from_slice(block);
        header.set_cksum();
        block.copy_from_slice(header.as_bytes());
        let size = header.entry_size().ok().and_then(|size| usize::try_from(size).ok()).unwrap_or_default();
        offset = offset.saturating_add(512).saturating_add(size).saturating_add(511) / 512 * 512;
        // An end-of-archive marker is a block of zeros without a checksum.
        let next = offset.checked_add(512).and_then(|end| bytes.get(offset..end));
        if next.is_none_or(|next| next.iter().all(|&byte| byte == 0)) {
            break;
        }
    }
    bytes
}

pub fn target() -> Target {
    let valid = prop_oneof![1 => valid_release().boxed(), 4 => hostile_archive().boxed()].boxed();
    Target {
        name: "archive",
        valid,
        check_any: check_any_archive,
        check_valid: check_valid_archive,
        cases: 500,
    }
}

/// Generates archives with a valid release's files and links. Numbered names avoid duplicates and conflicts with
/// directories.
pub(super) fn valid_release() -> impl Strategy<Value = Vec<u8>> {
    let body = prop::collection::vec(any::<u8>(), 0..700);
    prop::collection::vec((0..4usize, body, any::<bool>()), 1..8).prop_map(|files| {
        let mut entries = Vec::new();
        for (number, (depth, body, is_executable)) in files.iter().enumerate() {
            let path = format!("{}f{number}", "d/".repeat(*depth));
            entries.push(Entry { mode: if *is_executable { 0o755 } else { 0o644 }, ..file(&path, body) });
            entries.push(link(&format!("{path}.link"), &format!("f{number}")));
        }
        build_tar(&entries)
    })
}

/// Whether a path is one of [`valid_release`]'s: `f0`, `d/f1.link`.
pub(super) fn is_valid_release_path(path: &str) -> bool {
    let name = path.trim_start_matches("d/");
    let number = name.strip_prefix('f').map(|name| name.strip_suffix(".link").unwrap_or(name));
    number.is_some_and(|number| number.len() == 1 && number < "8")
}

/// Generates archives of arbitrary entries, many of which try to escape the target directory.
pub(super) fn hostile_archive() -> impl Strategy<Value = Vec<u8>> {
    let name = || {
        prop_oneof![
            4 => "(\\./)?[ab](/[ab]){0,2}",
            2 => "(\\.\\./){1,3}outside",
            1 => "[ab]/(\\.\\./){1,4}outside",
            1 => Just("/tmp/svc-fuzz-outside".to_owned()),
            1 => Just("..".to_owned()),
            1 => Just(String::new()),
            1 => "\\PC{1,60}",
        ]
    };
    let kind = prop_oneof![
        4 => Just(b'0'),
        4 => Just(b'2'),
        2 => Just(b'5'),
        2 => prop::sample::select(&b"1346LKxgSMV\0"[..]),
        1 => any::<u8>(),
    ];
    let mode = prop_oneof![4 => Just(0o755), 1 => Just(0o4755), 1 => Just(0o2755), 1 => Just(0o1777), 1 => 0..0o10_000_u32];
    let body = prop_oneof![
        3 => prop::collection::vec(any::<u8>(), 0..60),
        1 => name().prop_map(|name| format!("{name}\0").into_bytes()),
        1 => ("path|linkpath|size|mtime|GNU.sparse.map", name())
            .prop_map(|(key, value)| format_pax_record(&key, &value)),
    ];
    let size =
        prop_oneof![8 => Just(None), 1 => any::<u64>().prop_map(Some), 1 => (0..5000u64).prop_map(Some)];
    let entry = (name(), name(), kind, mode, body, size).prop_map(|(path, link, kind, mode, body, size)| {
        Entry { path: path.into(), link: link.into(), kind, mode, body, size }
    });
    prop::collection::vec(entry, 1..10).prop_map(|entries| build_tar(&entries))
}

/// Formats `len key=value\n`, where `len` includes its own digits.
fn format_pax_record(key: &str, value: &str) -> Vec<u8> {
    let rest = format!(" {key}={value}\n");
    let mut length = rest.len() + 1;
    while length.to_string().len() + rest.len() != length {
        length += 1;
    }
    format!("{length}{rest}").into_bytes()
}

/// The target directory for an archive, with a file next to it.
struct UnpackDir {
    root: tempfile::TempDir,
}

impl UnpackDir {
    fn new() -> Self {
        let root = tempfile::tempdir().expect("create a temporary directory");
        fs::write(root.path().join(OUTSIDE), "untouched").expect("write a file");
        fs::create_dir(root.path().join("into")).expect("create a directory");
        Self { root }
    }

    fn target_path(&self) -> PathBuf {
        self.root.path().join("into")
    }

    /// Checks that the file next to the target directory is unchanged, and that nothing was created next to the
    /// directory or at `/tmp/svc-fuzz-outside`.
    fn check_outside(&self) -> Result<(), String> {
        let mut names: Vec<_> = fs::read_dir(self.root.path())
            .map_err(|error| error.to_string())?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        if names != ["into", OUTSIDE] {
            return Err(format!("unexpected entries next to the directory: {names:?}"));
        }
        let outside = self.root.path().join(OUTSIDE);
        let mode = fs::symlink_metadata(&outside).map_err(|error| error.to_string())?.permissions().mode();
        let content = fs::read(&outside).unwrap_or_default();
        if content != b"untouched" || mode & 0o7000 != 0 || Path::new("/tmp/svc-fuzz-outside").exists() {
            return Err("a file outside the directory was changed".to_owned());
        }
        Ok(())
    }
}

/// Checks an unpacked release: it contains only files, directories and links within it; no file is set-ID, sticky, or
/// writable by group or others; the total size is within the limit.
fn check_release(into: &Path) -> Result<(), String> {
    let root = fs::canonicalize(into).map_err(|error| error.to_string())?;
    let (mut bytes, mut pending) = (0, vec![root.clone()]);
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).map_err(|error| error.to_string())?.flatten() {
            let path = entry.path();
            let meta = fs::symlink_metadata(&path).map_err(|error| error.to_string())?;
            let mode = meta.permissions().mode();
            if meta.is_symlink() {
                let target = fs::canonicalize(&path);
                if !target.as_ref().is_ok_and(|target| target.starts_with(&root)) {
                    return Err(format!("{} points to {target:?}", path.display()));
                }
            } else if meta.is_dir() {
                pending.push(path);
            } else if !meta.is_file() || mode & 0o7022 != 0 {
                return Err(format!("{} has the mode {mode:o}", path.display()));
            } else {
                bytes += meta.len();
            }
        }
    }
    if bytes > LIMITS.bytes { Err(format!("{bytes} bytes exceed the limit")) } else { Ok(()) }
}

fn check_any_archive(bytes: &[u8]) -> Result<(), String> {
    for tar in [bytes.to_vec(), with_valid_checksums(bytes.to_vec())] {
        let dir = UnpackDir::new();
        let result = unpack(&*gzip(&tar), &dir.target_path(), LIMITS);
        dir.check_outside()?;
        if result.is_ok() {
            check_release(&dir.target_path())?;
        }
    }
    Ok(())
}

/// Checks that archives without hostile entries are accepted; others need not be.
fn check_valid_archive(bytes: &[u8]) -> Result<(), String> {
    let mut archive = tar::Archive::new(bytes);
    let mut expected = Vec::new();
    for entry in archive.entries().into_iter().flatten() {
        let Ok(mut entry) = entry else { return Ok(()) };
        let path = entry.path().map(std::borrow::Cow::into_owned).unwrap_or_default();
        if !is_valid_release_path(&path.to_string_lossy()) {
            return Ok(());
        }
        let mut body = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut body).map_err(|error| error.to_string())?;
        if entry.header().entry_type() == EntryType::Regular {
            expected.push((path, body, entry.header().mode().unwrap_or_default()));
        }
    }
    let dir = UnpackDir::new();
    unpack(&*gzip(bytes), &dir.target_path(), LIMITS).map_err(|error| error.to_string())?;
    for (path, body, mode) in expected {
        let unpacked = dir.target_path().join(&path);
        let linked = unpacked
            .with_file_name(format!("{}.link", unpacked.file_name().unwrap_or_default().to_string_lossy()));
        let unpacked_mode =
            fs::metadata(&unpacked).map_err(|error| error.to_string())?.permissions().mode() & 0o7777;
        if fs::read(&unpacked).ok() != Some(body.clone())
            || fs::read(linked).ok() != Some(body)
            || unpacked_mode != mode
        {
            return Err(format!("{} has unexpected content", path.display()));
        }
    }
    Ok(())
}

/// Tests the checks themselves: they detect each effect that an archive must not have.
#[test]
fn archive_checks_detect_each_violation() {
    type Violation = fn(&UnpackDir);
    let violations: [(&str, Violation); 8] = [
        ("a link that points outside", |dir| {
            std::os::unix::fs::symlink("../outside", dir.target_path().join("x"))
                .expect("create a symbolic link");
        }),
        ("a dangling link", |dir| {
            std::os::unix::fs::symlink("none", dir.target_path().join("x")).expect("create a symbolic link");
        }),
        ("a FIFO", |dir| {
            nix::unistd::mkfifo(&dir.target_path().join("x"), nix::sys::stat::Mode::S_IRWXU)
                .expect("create a FIFO");
        }),
        ("a set-user-ID bit", |dir| {
            let path = dir.target_path().join("x");
            fs::write(&path, "").expect("write a file");
            fs::set_permissions(path, fs::Permissions::from_mode(0o4755)).expect("set the mode");
        }),
        ("a group-writable file", |dir| {
            let path = dir.target_path().join("x");
            fs::write(&path, "").expect("write a file");
            fs::set_permissions(path, fs::Permissions::from_mode(0o664)).expect("set the mode");
        }),
        ("more bytes than the limit", |dir| {
            fs::write(dir.target_path().join("x"), vec![0; 200_001]).expect("write a file");
        }),
        ("a file next to the directory", |dir| {
            fs::write(dir.root.path().join("x"), "").expect("write a file");
        }),
        ("a change to the file next to the directory", |dir| {
            fs::write(dir.root.path().join(OUTSIDE), "!").expect("write a file");
        }),
    ];
    for (violation, violate) in violations {
        let dir = UnpackDir::new();
        let check = |dir: &UnpackDir| dir.check_outside().and_then(|()| check_release(&dir.target_path()));
        check(&dir).expect("the directory is unchanged");
        violate(&dir);
        check(&dir).expect_err(violation);
    }
}

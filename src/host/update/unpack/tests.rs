//! Tests the unpacker with valid, hostile and corrupt archives: nothing outside the directory is ever touched.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

use super::*;

/// A raw entry, which bypasses all checks in the `tar` crate's builder.
struct RawEntry<'a> {
    path: &'a [u8],
    kind: EntryType,
    mode: u32,
    link: &'a [u8],
    body: &'a [u8],
}

fn file<'a>(path: &'a str, body: &'a [u8]) -> RawEntry<'a> {
    RawEntry { path: path.as_bytes(), kind: EntryType::Regular, mode: 0o644, link: b"", body }
}

fn link<'a>(path: &'a str, target: &'a str) -> RawEntry<'a> {
    RawEntry {
        path: path.as_bytes(),
        kind: EntryType::Symlink,
        mode: 0o777,
        link: target.as_bytes(),
        body: b"",
    }
}

fn archive(entries: &[RawEntry<'_>]) -> Vec<u8> {
    let mut builder = Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for entry in entries {
        let mut header = Header::new_gnu();
        let old = header.as_old_mut();
        old.name[..entry.path.len()].copy_from_slice(entry.path);
        old.linkname[..entry.link.len()].copy_from_slice(entry.link);
        header.set_entry_type(entry.kind);
        header.set_mode(entry.mode);
        header.set_size(entry.body.len() as u64);
        header.set_cksum();
        builder.append(&header, entry.body).unwrap();
    }
    builder.into_inner().unwrap().finish().unwrap()
}

/// Unpacks an archive next to a file that must not change.
fn try_unpack(bytes: &[u8]) -> (tempfile::TempDir, Result<(), UnpackError>) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("outside"), "untouched").unwrap();
    let into = dir.path().join("release");
    fs::create_dir(&into).unwrap();
    let result = unpack(bytes, &into, UnpackLimits { entries: 50, bytes: 1 << 20 });
    assert_eq!(fs::read_to_string(dir.path().join("outside")).unwrap(), "untouched");
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    (dir, result)
}

#[test]
fn unpack_extracts_bundle() {
    let mut program = file("./bin/svc", b"program");
    program.mode = 0o755;
    let entries = [
        program,
        link("bin/svc-gateway", "svc"),
        file("release.json", b"{}"),
        link("app/self", "../bin/svc"),
    ];
    let (dir, result) = try_unpack(&archive(&entries));
    result.unwrap();
    let root = dir.path().join("release");
    assert_eq!(fs::read(root.join("bin/svc-gateway")).unwrap(), b"program");
    assert_eq!(fs::read(root.join("app/self")).unwrap(), b"program");
    assert_eq!(fs::metadata(root.join("bin/svc")).unwrap().permissions().mode() & 0o7777, 0o755);
    assert_eq!(fs::metadata(root.join("release.json")).unwrap().permissions().mode() & 0o7777, 0o644);
}

#[test]
fn unpack_rejects_hostile_entries() {
    let entry_of_kind = |kind| RawEntry { path: b"x", kind, mode: 0o644, link: b"outside", body: b"" };
    let setuid = RawEntry { mode: 0o4755, ..file("bin/x", b"") };
    let setgid = RawEntry { mode: 0o2755, ..file("bin/x", b"") };
    let long = "d/".repeat(49) + "x";
    let many: Vec<String> = (0..60).map(|n| format!("f{n}")).collect();
    let cases: Vec<(&str, Vec<RawEntry<'_>>)> = vec![
        ("an absolute path", vec![file("/outside", b"!")]),
        ("a path with `..`", vec![file("../outside", b"!")]),
        ("a path with `..` in the middle", vec![file("a/../../outside", b"!")]),
        ("an absolute link", vec![link("x", "/etc/passwd")]),
        ("a link that leaves the directory", vec![link("x", "../outside")]),
        ("a nested link that leaves the directory", vec![link("a/b/x", "../../../outside")]),
        ("a file below a link", vec![file("d/f", b""), link("x", "d"), file("x/y", b"!")]),
        ("a file over a link", vec![file("f", b""), link("x", "f"), file("x", b"!")]),
        ("a file over a file", vec![file("x", b"1"), file("x", b"2")]),
        (
            "a directory over a link",
            vec![link("x", "d"), RawEntry { kind: EntryType::Directory, mode: 0o755, ..file("x", b"") }],
        ),
        (
            "a link through a link",
            vec![file("a/b/f", b""), link("a/b/p", "../.."), link("t", "a/b/p/../outside")],
        ),
        ("a dangling link", vec![link("x", "nowhere")]),
        ("a link through a file", vec![file("f", b""), link("x", "f/y")]),
        ("a cycle of links", vec![link("x", "y"), link("y", "x")]),
        ("a hard link", vec![entry_of_kind(EntryType::Link)]),
        ("a character device", vec![entry_of_kind(EntryType::Char)]),
        ("a block device", vec![entry_of_kind(EntryType::Block)]),
        ("a pipe", vec![entry_of_kind(EntryType::Fifo)]),
        ("a sparse file", vec![entry_of_kind(EntryType::GNUSparse)]),
        ("an unknown kind", vec![entry_of_kind(EntryType::new(b'Z'))]),
        ("a setuid bit", vec![setuid]),
        ("a setgid bit", vec![setgid]),
        ("too many entries", many.iter().map(|name| file(name, b"")).collect()),
        ("too many bytes", vec![file(&long, &[0; 600_000]), file("y", &[0; 600_000])]),
    ];
    for (name, entries) in cases {
        let (_dir, result) = try_unpack(&archive(&entries));
        let error = result.expect_err(name);
        assert!(!error.is_local_error(), "{name} counts as a local error: {error:?}");
    }
}

#[test]
fn classify_link_error_blames_archive_only_for_dangling_link() {
    use nix::libc::{EIO, ELOOP, EMFILE, ENOENT, ENOMEM, ENOTDIR};
    for (errno, is_local_error) in
        [(ENOENT, false), (ENOTDIR, false), (ELOOP, false), (EIO, true), (EMFILE, true), (ENOMEM, true)]
    {
        let error = classify_link_error(Path::new("x"), io::Error::from_raw_os_error(errno));
        assert_eq!(error.is_local_error(), is_local_error, "{error:?}");
    }
}

/// Builds a PAX record, `len key=value\n`, where `len` counts its own digits.
fn build_pax_record(key: &str, value: &str) -> Vec<u8> {
    let rest = format!(" {key}={value}\n");
    let len = (1..).map(|digits| rest.len() + digits).find(|len| len.to_string().len() + rest.len() == *len);
    format!("{}{rest}", len.unwrap()).into_bytes()
}

fn extension_header<'a>(kind: EntryType, body: &'a [u8]) -> RawEntry<'a> {
    RawEntry { kind, ..file("././@LongLink", body) }
}

#[test]
fn unpack_checks_long_names() {
    let long = format!("{}/file", "d".repeat(200));
    let gnu = [extension_header(EntryType::GNULongName, long.as_bytes()), file("short", b"1")];
    let (dir, result) = try_unpack(&archive(&gnu));
    result.unwrap();
    assert_eq!(fs::read(dir.path().join("release").join(&long)).unwrap(), b"1");

    let attributes = [build_pax_record("mtime", "1.5"), build_pax_record("path", &long)].concat();
    let (dir, result) =
        try_unpack(&archive(&[extension_header(EntryType::XHeader, &attributes), file("short", b"2")]));
    result.unwrap();
    assert_eq!(fs::read(dir.path().join("release").join(&long)).unwrap(), b"2");

    let up = build_pax_record("path", "../outside");
    let up_link = build_pax_record("linkpath", "../outside");
    let size = build_pax_record("size", "1");
    let huge = vec![b'x'; 70_000];
    let rejected: [&[RawEntry<'_>]; 6] = [
        &[extension_header(EntryType::GNULongName, b"../outside\0"), file("x", b"!")],
        &[extension_header(EntryType::GNULongLink, b"../outside\0"), link("x", "y")],
        &[extension_header(EntryType::XHeader, &up), file("x", b"!")],
        &[extension_header(EntryType::XHeader, &up_link), link("x", "y")],
        &[extension_header(EntryType::XHeader, &size), file("x", b"!")],
        &[extension_header(EntryType::GNULongName, &huge), file("x", b"!")],
    ];
    for entries in rejected {
        assert!(try_unpack(&archive(entries)).1.is_err());
    }
}

#[test]
fn unpack_rejects_corrupt_archive() {
    let whole = archive(&[file("bin/svc", &[7; 50_000]), file("release.json", b"{}")]);
    assert!(try_unpack(&whole).1.is_ok());
    for len in [0, 5, whole.len() / 2, whole.len() - 1] {
        assert!(try_unpack(&whole[..len]).1.is_err(), "truncated to {len} bytes");
    }
    let mut flipped = whole.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0xff;
    assert!(try_unpack(&flipped).1.is_err());
    assert!(try_unpack(b"not gzip at all").1.is_err());
}

#[test]
fn unpack_stops_bomb_at_limit() {
    let mut builder = Builder::new(GzEncoder::new(Vec::new(), Compression::best()));
    let mut header = Header::new_gnu();
    header.set_size(64 << 20);
    header.set_mode(0o644);
    builder.append_data(&mut header, "zeros", io::repeat(0).take(64 << 20)).unwrap();
    let bomb = builder.into_inner().unwrap().finish().unwrap();
    assert!(matches!(try_unpack(&bomb).1, Err(UnpackError::Tar(TarError::Rejected { .. }))));

    let mut trailing = GzEncoder::new(Vec::new(), Compression::best());
    trailing.write_all(&[0; 1024]).unwrap();
    trailing.write_all(&vec![0; 8 << 20]).unwrap();
    // Padding after the end marker is read up to the limit and discarded.
    assert!(try_unpack(&trailing.finish().unwrap()).1.is_ok());
}

#[test]
fn unpack_reads_archive_in_chunks() {
    let whole = archive(&[file("bin/svc", &[7; 300_000])]);
    let (chunks, reader) = channel();
    let dir = tempfile::tempdir().unwrap();
    let into = dir.path().to_owned();
    let unpacking = std::thread::spawn(move || unpack(reader, &into, UnpackLimits::BUNDLE));
    for chunk in whole.chunks(7) {
        chunks.blocking_send(Bytes::copy_from_slice(chunk)).unwrap();
    }
    drop(chunks);
    unpacking.join().unwrap().unwrap();
    assert_eq!(fs::metadata(dir.path().join("bin/svc")).unwrap().len(), 300_000);
}

//! Tests for long names, invalid archives and limits.

use super::*;

const LIMITS: TarLimits = TarLimits {
    max_entries: 20,
    max_name_bytes: 1000,
    max_total_name_bytes: 4000,
    max_file_bytes: 10_000,
    max_total_file_bytes: 15_000,
};

/// Builds an entry. `size` may differ from the length of `body`.
fn entry(kind: u8, path: &[u8], size: u64, body: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..path.len()].copy_from_slice(path);
    header.set_entry_type(EntryType::new(kind));
    header.set_mode(0o644);
    header.set_mtime(0);
    header.set_size(size);
    header.set_cksum();
    let mut bytes = [header.as_bytes().as_slice(), body].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn entry_with_body(kind: u8, path: &str, body: &[u8]) -> Vec<u8> {
    entry(kind, path.as_bytes(), body.len() as u64, body)
}

fn build_pax_record(key: &str, value: &str) -> Vec<u8> {
    let rest = format!(" {key}={value}\n");
    // The length prefix counts its own digits (POSIX pax).
    let len = (1..).map(|digits| rest.len() + digits).find(|len| len.to_string().len() + rest.len() == *len);
    format!("{}{rest}", len.unwrap()).into_bytes()
}

fn read_all(archive: impl Read) -> Result<Vec<(PathBuf, Vec<u8>)>, TarError> {
    let mut archive = tar::Archive::new(archive);
    let mut entries = TarReader::new(&mut archive, LIMITS)?;
    let mut found = Vec::new();
    while let Some(mut entry) = entries.next_entry()? {
        let mut body = Vec::new();
        entry.read_to_end(&mut body).map_err(TarError::Malformed)?;
        found.push((entry.path, body));
    }
    Ok(found)
}

#[test]
fn next_entry_reads_long_names() {
    let long = "d/".repeat(200) + "f";
    for record in [
        entry_with_body(b'L', "././@LongLink", long.as_bytes()),
        entry_with_body(b'x', "pax", &build_pax_record("path", &long)),
    ] {
        let found = read_all([record, entry_with_body(b'0', "short", b"body")].concat().as_slice()).unwrap();
        assert_eq!(found, [(PathBuf::from(&long), b"body".to_vec())]);
    }
}

#[test]
fn next_entry_rejects_invalid_archives() {
    let file = || entry_with_body(b'0', "f", b"");
    let long = "n".repeat(1001);
    let mut cases = vec![
        ("a sparse file", entry(b'S', b"f", 0, b"")),
        ("a hard link", entry(b'1', b"f", 0, b"")),
        ("a pipe", entry(b'6', b"f", 0, b"")),
        ("an unsupported entry type", entry(b'Z', b"f", 0, b"")),
        ("a directory with content", entry_with_body(b'5', "d", b"x")),
        ("two entries with the same path", [file(), file()].concat()),
        ("two entries with equivalent paths", [file(), entry_with_body(b'0', "./f", b"")].concat()),
        ("a long-name record without an entry", entry_with_body(b'L', "l", b"name")),
        (
            "two long-name records for one entry",
            [entry_with_body(b'L', "l", b"a"), entry_with_body(b'L', "l", b"b"), file()].concat(),
        ),
        ("a file with a link target", [entry_with_body(b'K', "l", b"a"), file()].concat()),
        (
            "a name over the limit",
            [entry_with_body(b'x', "l", &build_pax_record("path", &long)), file()].concat(),
        ),
        (
            "a NUL byte in a name",
            [entry_with_body(b'x', "l", &build_pax_record("path", "a\0b")), file()].concat(),
        ),
        (
            "a size in a PAX header",
            [entry_with_body(b'x', "l", &build_pax_record("size", "0")), file()].concat(),
        ),
        (
            "a sparse map",
            [entry_with_body(b'x', "l", &build_pax_record("GNU.sparse.map", "0,1")), file()].concat(),
        ),
        (
            "a path in a global PAX header",
            [entry_with_body(b'g', "l", &build_pax_record("path", "a")), file()].concat(),
        ),
        ("a truncated file", entry(b'0', b"f", 600, b"x")),
        ("an oversized file", entry(b'0', b"f", 10_001, b"")),
        ("a size beyond all limits", entry(b'0', b"f", u64::MAX >> 1, b"")),
    ];
    let sum = [entry_with_body(b'0', "a", &[0; 9000]), entry_with_body(b'0', "b", &[0; 9000])].concat();
    cases.push(("too many bytes", sum));
    let many = |count: usize| {
        (0..count).flat_map(|n| entry_with_body(b'0', &format!("f{n}"), b"")).collect::<Vec<u8>>()
    };
    cases.push(("too many entries", many(21)));
    let names = (0..5).flat_map(|n| {
        [
            entry_with_body(b'L', "l", format!("{n}{}", "n".repeat(900)).as_bytes()),
            entry_with_body(b'0', "f", b""),
        ]
        .concat()
    });
    cases.push(("too many bytes in names", names.collect()));
    for (name, bytes) in cases {
        assert!(read_all(bytes.as_slice()).is_err(), "{name} was accepted");
    }
    assert_eq!(read_all(many(20).as_slice()).unwrap().len(), 20);
}

/// Records whose header claims more bytes than a name can have aren't read.
#[test]
fn next_entry_does_not_read_oversized_record() {
    /// Yields the given bytes, then endlessly reports full buffers. Counts everything it returns.
    struct CountingReader<'a>(&'a [u8], &'a std::cell::Cell<u64>);
    impl Read for CountingReader<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let read = self.0.read(into)?;
            let len = if read == 0 { into.len() } else { read };
            self.1.set(self.1.get() + len as u64);
            Ok(len)
        }
    }
    for kind in *b"LKxg" {
        let header = entry(kind, b"l", 2 << 30, b"");
        let count = std::cell::Cell::new(0);
        let error = read_all(CountingReader(&header, &count)).unwrap_err();
        assert!(matches!(error, TarError::LimitExceeded { .. }), "{error}");
        assert!(count.get() <= 4096, "{} bytes were read", count.get());
    }
}

#[test]
fn quoted_path_is_safe_for_a_terminal() {
    let name = OsStr::from_bytes(b"a\x1b[2J\xff\n\xe2\x80\xaeb");
    let quoted = quote_path(Path::new(name));
    assert!(!quoted.chars().any(|c| c.is_control() || c == '\u{202e}'), "{quoted}");
    assert!(quote_path(Path::new(&"x".repeat(5000))).len() < 300);
}

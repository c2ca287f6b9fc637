//! Compares an archive's manifest with the entries that precede it in the archive.
//!
//! Both have the same order, so the manifest is streamed rather than held in memory. Strings longer than any valid
//! entry needs are rejected.

use std::fmt;
use std::io::{self, BufReader, Read};
use std::path::Path;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use sha2::{Digest, Sha256};

use crate::snapshots::archive::ArchiveEntry;
use crate::system::tar_reader::EntryKind;
use crate::system::tar_reader::quote_path;
use svc_base::untrusted_text;

/// Maximum string length: enough for a 16 KiB path with every byte written as `%XX` or as a six-character JSON escape.
const MAX_STRING_BYTES: usize = 128 * 1024;

/// Digest of an [`ArchiveEntry`], unique per entry.
pub type EntryDigest = [u8; 32];

/// Digests an entry's path, kind, size and content hash.
pub fn entry_digest(entry: &ArchiveEntry) -> EntryDigest {
    let kind = match entry.kind {
        EntryKind::File => b'f',
        EntryKind::Directory => b'd',
        EntryKind::Symlink => b'l',
    };
    let mut hash = Sha256::new();
    hash.update([kind, u8::from(entry.sha256.is_some())]);
    hash.update(entry.size_bytes.to_le_bytes());
    hash.update((entry.path.len() as u64).to_le_bytes());
    hash.update(&entry.path);
    hash.update(entry.sha256.as_deref().unwrap_or_default());
    hash.finalize().into()
}

/// Checks that the manifest lists exactly the entries that were read.
///
/// # Errors
/// A description of the mismatch or the syntax error. It may quote the manifest, but is safe to print.
pub fn compare(manifest: impl Read, digests: &[EntryDigest]) -> Result<(), String> {
    let inner = BufReader::with_capacity(1 << 16, manifest);
    let bounded = BoundedStrings { inner, state: StringState::Outside };
    let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 16, bounded));
    let compared = ManifestVisitor { digests }.deserialize(&mut json);
    compared
        .and_then(|()| json.end())
        .map_err(|error| untrusted_text::truncate_printable(&format!("manifest.json: {error}")))
}

struct ManifestVisitor<'a> {
    digests: &'a [EntryDigest],
}

impl<'de> DeserializeSeed<'de> for ManifestVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ManifestVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an archive's manifest")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        enum Member {
            Entries,
            #[serde(other)]
            Other,
        }
        let mut has_entries = false;
        while let Some(member) = members.next_key()? {
            match member {
                Member::Entries if has_entries => {
                    return Err(serde::de::Error::duplicate_field("entries"));
                }
                Member::Entries => {
                    members.next_value_seed(EntriesVisitor { digests: self.digests })?;
                    has_entries = true;
                }
                Member::Other => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        if has_entries { Ok(()) } else { Err(serde::de::Error::missing_field("entries")) }
    }
}

struct EntriesVisitor<'a> {
    digests: &'a [EntryDigest],
}

impl<'de> DeserializeSeed<'de> for EntriesVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for EntriesVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let mut digests = self.digests.iter();
        while let Some(entry) = entries.next_element::<ArchiveEntry>()? {
            let name = quote_path(Path::new(&entry.path));
            match digests.next() {
                Some(digest) if *digest == entry_digest(&entry) => {}
                Some(_) => {
                    let reason = format!("the manifest lists {name} here, but the archive's entry differs");
                    return Err(serde::de::Error::custom(reason));
                }
                None => {
                    let reason = format!("the entry {name} is missing from the archive");
                    return Err(serde::de::Error::custom(reason));
                }
            }
        }
        match digests.len() {
            0 => Ok(()),
            count => {
                let reason = format!("entries missing from the manifest, at the end of the archive: {count}");
                Err(serde::de::Error::custom(reason))
            }
        }
    }
}

/// Passes JSON through, failing on strings longer than [`MAX_STRING_BYTES`], because a parser buffers whole strings.
struct BoundedStrings<R> {
    inner: R,
    state: StringState,
}

#[derive(Clone, Copy)]
enum StringState {
    Outside,
    Inside { length: usize, is_escaped: bool },
}

impl<R: Read> Read for BoundedStrings<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        for byte in &into[..read] {
            self.state = match (self.state, byte) {
                (StringState::Outside, b'"') => StringState::Inside { length: 0, is_escaped: false },
                (StringState::Outside, _) => StringState::Outside,
                (StringState::Inside { is_escaped: false, .. }, b'"') => StringState::Outside,
                (StringState::Inside { length, .. }, _) if length >= MAX_STRING_BYTES => {
                    return Err(io::Error::other("string too long"));
                }
                (StringState::Inside { length, is_escaped }, byte) => {
                    StringState::Inside { length: length + 1, is_escaped: !is_escaped && *byte == b'\\' }
                }
            };
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str) -> ArchiveEntry {
        ArchiveEntry {
            path: path.to_owned(),
            kind: EntryKind::File,
            size_bytes: 3,
            sha256: Some("ab".repeat(32)),
        }
    }

    fn manifest(entries: &[ArchiveEntry]) -> String {
        serde_json::json!({"version": 1, "entries": entries, "leftOut": ["a \" b"]}).to_string()
    }

    #[test]
    fn compare_accepts_only_same_entries_in_order() {
        let entries = [entry("home/a"), entry("home/b")];
        let digests = entries.each_ref().map(entry_digest);
        compare(manifest(&entries).as_bytes(), &digests).unwrap();
        let mut larger = entries.clone();
        larger[1].size_bytes = 4;
        let swapped = [entries[1].clone(), entries[0].clone()];
        let longer = [entries[0].clone(), entries[1].clone(), entry("home/c")];
        for (other, reason) in [
            (&larger[..], "but the archive's entry differs"),
            (&swapped, "but the archive's entry differs"),
            (&longer, "\"home/c\" is missing from the archive"),
            (&entries[..1], "missing from the manifest, at the end of the archive: 1"),
        ] {
            let error = compare(manifest(other).as_bytes(), &digests).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        let twice = format!("{{\"entries\":[],\"entries\":{}}}", serde_json::json!(entries));
        for broken in ["", "{}", "[]", "{\"entries\":1}", twice.as_str()] {
            compare(broken.as_bytes(), &digests).unwrap_err();
        }
        compare(format!("{} x", manifest(&entries)).as_bytes(), &digests).unwrap_err();
        let escape = r#"{"entries":[{"path":"a","kind":"\u001b[2J","sizeBytes":3}]}"#;
        let error = compare(escape.as_bytes(), &digests).unwrap_err();
        assert!(error.contains("unknown variant") && !error.contains('\x1b'), "{error}");
    }

    /// The string is 100 MiB long and unterminated, so a parser would buffer all of it.
    #[test]
    fn compare_refuses_oversized_string() {
        let endless = Read::chain(&b"{\"leftOut\":[\""[..], io::repeat(b'x').take(100 << 20));
        let error = compare(endless, &[]).unwrap_err();
        assert!(error.contains("too long"), "{error}");
        let escaped = format!("{{\"entries\":[],\"leftOut\":[\"{}\"]}}", "\\\"".repeat(1000));
        compare(escaped.as_bytes(), &[]).unwrap();
    }
}

//! The reader for untrusted archives: for any input, every returned entry is within the limits.

use std::collections::HashSet;
use std::io::Read;

use proptest::prelude::*;
use svc::host::system::tar_reader::{TarLimits, TarReader};

use super::Target;
use super::archive::{hostile_archive, is_valid_release_path, valid_release, with_valid_checksums};

const LIMITS: TarLimits = TarLimits {
    max_entries: 16,
    max_name_bytes: 200,
    max_total_name_bytes: 600,
    max_file_bytes: 4_000,
    max_total_file_bytes: 8_000,
};

pub fn target() -> Target {
    let valid = prop_oneof![1 => valid_release().boxed(), 4 => hostile_archive().boxed()].boxed();
    Target { name: "tar-entries", valid, check_any, check_valid, cases: 2000 }
}

/// Reads an archive; returns the path and size of each entry, or `None` if the archive was rejected. The error names
/// the violated rule.
fn read_entries(bytes: &[u8], limits: TarLimits) -> Result<Option<Vec<(String, u64)>>, String> {
    let mut archive = tar::Archive::new(bytes);
    let Ok(mut reader) = TarReader::new(&mut archive, limits) else { return Ok(None) };
    let mut entries = Vec::new();
    loop {
        let mut entry = match reader.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) => return Ok(Some(entries)),
            Err(error) if error.to_string().chars().any(char::is_control) => {
                return Err(format!("an error contains control characters: {error:?}"));
            }
            Err(_) => return Ok(None),
        };
        let mut body = Vec::new();
        let result = entry.read_to_end(&mut body);
        let (size, length) = (entry.size, body.len() as u64);
        if length > size || (result.is_ok() && length != size) {
            return Err(format!("read {length} bytes of a {size}-byte file"));
        }
        if entry.path.as_os_str().len().max(entry.link.as_os_str().len()) > limits.max_name_bytes {
            return Err("a name is too long".to_owned());
        }
        if result.is_err() {
            return Ok(None);
        }
        entries.push((entry.path.to_string_lossy().into_owned(), size));
    }
}

fn check_any(bytes: &[u8]) -> Result<(), String> {
    for tar in [bytes.to_vec(), with_valid_checksums(bytes.to_vec())] {
        let Some(entries) = read_entries(&tar, LIMITS)? else { continue };
        let paths: HashSet<_> = entries.iter().map(|(path, _)| path).collect();
        let sum: u64 = entries.iter().map(|(_, size)| size).sum();
        if entries.len() > LIMITS.max_entries || sum > LIMITS.max_total_file_bytes {
            return Err(format!("{} entries totaling {sum} bytes exceed the limits", entries.len()));
        }
        if paths.len() != entries.len() {
            return Err("two entries have the same name".to_owned());
        }
    }
    Ok(())
}

/// Checks that every entry of a valid archive, as the `tar` crate parses it, is returned.
fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let mut expected = Vec::new();
    for entry in tar::Archive::new(bytes).entries().into_iter().flatten() {
        let Ok(entry) = entry else { return Ok(()) };
        let path = entry.path().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
        if !is_valid_release_path(&path) {
            return Ok(());
        }
        expected.push((path, entry.size()));
    }
    let larger_limits = TarLimits {
        max_total_name_bytes: 10_000,
        max_file_bytes: 1 << 20,
        max_total_file_bytes: 1 << 20,
        ..LIMITS
    };
    match read_entries(bytes, larger_limits)? {
        Some(entries) if entries == expected => Ok(()),
        entries => Err(format!("{entries:?} instead of {expected:?}")),
    }
}

//! A database dump's header: an entry count is returned only for bytes that begin with a dump's signature.

use proptest::prelude::*;
use svc::host::snapshots::backup::count_dump_entries;

use super::Target;

pub fn target() -> Target {
    Target { name: "dump-head", valid: heads().boxed(), check_any, check_valid, cases: 2000 }
}

fn heads() -> impl Strategy<Value = Vec<u8>> {
    let name = "[a-z0-9. ]{0,20}";
    (14..=16_u8, 4..=8_u8, name, 0..100_000_u32).prop_map(|(minor, int_size, name, entries)| {
        let int = |value: i32| {
            let mut bytes = vec![u8::from(value < 0)];
            bytes.extend_from_slice(&u64::from(value.unsigned_abs()).to_le_bytes()[..usize::from(int_size)]);
            bytes
        };
        let mut head = b"PGDMP".to_vec();
        head.extend([1, minor, 0, int_size, 8, 1]);
        if minor >= 15 {
            head.push(1);
        } else {
            head.extend(int(-1));
        }
        (0..7).for_each(|part| head.extend(int(part)));
        for text in [&*name, "16.14", "16.14"] {
            head.extend(int(i32::try_from(text.len()).expect("the length fits in i32")));
            head.extend_from_slice(text.as_bytes());
        }
        head.extend(int(i32::try_from(entries).expect("the number of entries fits in i32")));
        head
    })
}

fn check_any(bytes: &[u8]) -> Result<(), String> {
    match count_dump_entries(bytes) {
        Some(entries) if !bytes.starts_with(b"PGDMP\x01") => {
            Err(format!("{entries} entries without a dump header"))
        }
        _ => Ok(()),
    }
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let int_size = usize::from(bytes[8]);
    let last = &bytes[bytes.len() - int_size..];
    let expected = last.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    let actual = count_dump_entries(bytes);
    if actual.map(u64::from) == Some(expected) {
        Ok(())
    } else {
        Err(format!("{actual:?} instead of {expected}"))
    }
}

//! Parses the header of a custom-format dump, up to the TOC entry count.
//!
//! The layout follows `ReadHead` and `ReadToc` in PostgreSQL's `pg_backup_archiver.c`, for archive formats 1.14 (up to
//! PostgreSQL 15) to 1.16 (PostgreSQL 17 and later).

/// How much of a dump to pass to [`count_entries`]. Headers are usually much shorter: their only strings are the
/// database name and two version numbers.
pub const HEAD_BYTES: usize = 4096;

/// Returns the number of TOC entries, or `None` if `head` isn't the start of a custom-format dump or ends before the
/// count.
pub fn count_entries(head: &[u8]) -> Option<u32> {
    let mut reader = Reader { bytes: head.strip_prefix(b"PGDMP")?, int_size: 4 };
    let (major, minor, _revision) = (reader.read_byte()?, reader.read_byte()?, reader.read_byte()?);
    if major != 1 || !(14..=16).contains(&minor) {
        return None;
    }
    reader.int_size = usize::from(reader.read_byte()?);
    let _offset_size = reader.read_byte()?;
    const CUSTOM: u8 = 1;
    if reader.read_byte()? != CUSTOM {
        return None;
    }
    if minor >= 15 {
        let _compression_algorithm = reader.read_byte()?;
    } else {
        let _compression_level = reader.read_int()?;
    }
    for _time_part in 0..7 {
        reader.read_int()?;
    }
    for _name_or_version in 0..3 {
        reader.skip_text()?;
    }
    u32::try_from(reader.read_int()?).ok()
}

struct Reader<'a> {
    bytes: &'a [u8],
    int_size: usize,
}

impl Reader<'_> {
    fn read_byte(&mut self) -> Option<u8> {
        let (first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(*first)
    }

    /// Reads a sign byte and a little-endian magnitude.
    fn read_int(&mut self) -> Option<i64> {
        let is_negative = self.read_byte()? != 0;
        let mut value: i64 = 0;
        for index in 0..self.int_size {
            value |= i64::from(self.read_byte()?).checked_shl(8 * u32::try_from(index).ok()?)?;
        }
        // `i64::MIN` cannot be negated.
        if is_negative { value.checked_neg() } else { Some(value) }
    }

    fn skip_text(&mut self) -> Option<()> {
        // A length of -1 encodes a null string.
        let length = usize::try_from(self.read_int()?.max(0)).ok()?;
        self.bytes = self.bytes.get(length..)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(entries: u8) -> Vec<u8> {
        let int = |value: u8| [0, value, 0, 0, 0];
        let mut head = b"PGDMP\x01\x0f\x00\x04\x08\x01\x01".to_vec();
        (0..7).for_each(|n| head.extend(int(n)));
        for text in ["svc", "16.14", "16.14"] {
            head.extend(int(text.len() as u8));
            head.extend(text.as_bytes());
        }
        head.extend(int(entries));
        head
    }

    #[test]
    fn count_entries_reads_only_custom_format_head() {
        assert_eq!(count_entries(&head(7)), Some(7));
        assert_eq!(count_entries(&head(0)), Some(0));
        assert_eq!(count_entries(b"PGDMP"), None);
        assert_eq!(count_entries(b"-- plain SQL"), None);
    }

    proptest! {
        #[test]
        fn count_entries_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = count_entries(&bytes);
            let _ = count_entries(&[b"PGDMP\x01\x0f\x00", bytes.as_slice()].concat());
        }
    }
}

//! A row read from a table as one JSON object. PostgreSQL sends the values in its binary format and the bridge writes
//! the JSON, because `row_to_json` and `to_char` cost PostgreSQL several times as much.

use std::error::Error;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};
use uuid::Uuid;

use super::sql::MAX_ROW_BYTES;
use crate::apps::{Column, ColumnType};

/// Larger integers lose precision in JavaScript.
const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;

/// Why a row could not be written.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    #[error(transparent)]
    Database(#[from] tokio_postgres::Error),
    /// The row's JSON is larger than the maximum.
    #[error("the row is too large")]
    TooLarge,
}

/// The layout of a result row, and the maximum size of its JSON.
#[derive(Debug, Clone, Copy)]
pub struct RowFormat<'c> {
    /// Index of the first value; the others follow in the order of `columns`.
    pub first: usize,
    /// The columns as selected by [`super::sql::Sql::push_raw_values`] or returned by
    /// [`super::sql::Sql::push_returned_values`].
    pub columns: &'c [&'c Column],
    pub max_bytes: usize,
}

impl<'c> RowFormat<'c> {
    /// The format of rows that are read.
    pub fn for_read(columns: &'c [&'c Column]) -> Self {
        Self { first: 0, columns, max_bytes: MAX_ROW_BYTES }
    }

    /// The format of rows that a write returns. They must not be refused, because the write may already be committed.
    /// Their size is bounded nevertheless: text of [`MAX_ROW_BYTES`] becomes at most six times as many bytes of JSON.
    pub fn for_write(first: usize, columns: &'c [&'c Column]) -> Self {
        Self { first, columns, max_bytes: usize::MAX }
    }
}

/// Appends a row; returns the size of its JSON. After an error, `out` is unchanged.
///
/// # Errors
/// See [`RowError`].
pub fn write_row(row: &Row, format: RowFormat<'_>, out: &mut Vec<u8>) -> Result<usize, RowError> {
    let start = out.len();
    let written = write_object(row, format, out);
    if written.is_err() {
        out.truncate(start);
    }
    written.map(|()| out.len() - start)
}

fn write_object(row: &Row, format: RowFormat<'_>, out: &mut Vec<u8>) -> Result<(), RowError> {
    let RowFormat { first, columns, max_bytes } = format;
    let max_length = out.len().saturating_add(max_bytes);
    for (index, column) in columns.iter().enumerate() {
        out.extend_from_slice(if index == 0 { b"{\"" } else { b",\"" });
        // A column's name needs no escaping.
        out.extend_from_slice(column.name.as_str().as_bytes());
        out.extend_from_slice(b"\":");
        match row.try_get::<_, Option<BinaryValue<'_>>>(first + index)? {
            Some(BinaryValue(raw)) if can_fit(column.kind, raw, max_length.saturating_sub(out.len())) => {
                write_value(column.kind, raw, out);
            }
            Some(_) => return Err(RowError::TooLarge),
            None => out.extend_from_slice(b"null"),
        }
    }
    out.push(b'}');
    if out.len() <= max_length { Ok(()) } else { Err(RowError::TooLarge) }
}

/// Whether the JSON of a value can fit into `max_bytes`. Escaped text and base64 can be much larger than the value, so
/// they are measured exactly before they are written.
fn can_fit(kind: ColumnType, raw: &[u8], max_bytes: usize) -> bool {
    /// Length of the longest escape, such as `\u0001`.
    const MAX_ESCAPE_BYTES: usize = 6;
    match kind {
        ColumnType::Bytea => raw.len().div_ceil(3) * 4 <= max_bytes,
        ColumnType::Text if raw.len() > max_bytes / MAX_ESCAPE_BYTES => {
            raw.iter().map(|byte| escaped_bytes(*byte)).sum::<usize>() <= max_bytes
        }
        _ => raw.len() <= max_bytes,
    }
}

/// The number of bytes that a byte of UTF-8 text takes in a JSON string.
fn escaped_bytes(byte: u8) -> usize {
    match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
    }
}

/// Appends a value as JSON; see `README.md`. The casts in the statement determine PostgreSQL's format; a value in any
/// other format would become `null`.
fn write_value(kind: ColumnType, raw: &[u8], out: &mut Vec<u8>) {
    let written = match kind {
        ColumnType::Boolean => {
            raw.first().map(|byte| out.extend_from_slice(if *byte == 0 { b"false" } else { b"true" }))
        }
        ColumnType::Integer => {
            raw.try_into().ok().map(|bytes| write_number(i32::from_be_bytes(bytes).into(), out))
        }
        ColumnType::Bigint => raw.try_into().ok().map(|bytes| write_bigint(i64::from_be_bytes(bytes), out)),
        ColumnType::Text | ColumnType::Numeric => {
            std::str::from_utf8(raw).ok().map(|text| write_string(text, out))
        }
        // These values are already JSON.
        ColumnType::Double | ColumnType::Date | ColumnType::Jsonb => {
            out.extend_from_slice(raw);
            Some(())
        }
        ColumnType::Timestamptz => {
            raw.try_into().ok().map(|bytes| write_timestamp(i64::from_be_bytes(bytes), out))
        }
        ColumnType::Uuid => raw.try_into().ok().map(|bytes| write_uuid(bytes, out)),
        ColumnType::Bytea => {
            write_quoted(STANDARD.encode(raw).as_bytes(), out);
            Some(())
        }
    };
    if written.is_none() {
        tracing::error!(
            ?kind,
            bytes = raw.len(),
            "PostgreSQL sent a value in an unknown format; returning null"
        );
        out.extend_from_slice(b"null");
    }
}

fn write_number(number: i64, out: &mut Vec<u8>) {
    serde_json::to_writer(&mut *out, &number).expect("a number can be written to memory");
}

fn write_bigint(number: i64, out: &mut Vec<u8>) {
    if number.unsigned_abs() <= MAX_SAFE_INTEGER {
        return write_number(number, out);
    }
    out.push(b'"');
    write_number(number, out);
    out.push(b'"');
}

fn write_string(text: &str, out: &mut Vec<u8>) {
    serde_json::to_writer(&mut *out, text).expect("a string can be written to memory");
}

fn write_quoted(text: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    out.extend_from_slice(text);
    out.push(b'"');
}

fn write_uuid(bytes: [u8; 16], out: &mut Vec<u8>) {
    let mut buffer = [0; uuid::fmt::Hyphenated::LENGTH];
    let text = Uuid::from_bytes(bytes).hyphenated().encode_lower(&mut buffer);
    write_quoted(text.as_bytes(), out);
}

/// Appends `"YYYY-MM-DDTHH:MM:SS.mmmZ"` in UTC, from microseconds since 2000-01-01. Like PostgreSQL's `to_char`, it
/// drops units smaller than milliseconds, prints years above 9999 with more digits, and prints a year before 1 as its
/// BC number without the era. Infinity has no RFC 3339 representation; it is written as PostgreSQL prints it.
fn write_timestamp(micros: i64, out: &mut Vec<u8>) {
    const MICROS_PER_DAY: i64 = 86_400_000_000;
    match micros {
        i64::MAX => return out.extend_from_slice(b"\"infinity\""),
        i64::MIN => return out.extend_from_slice(b"\"-infinity\""),
        _ => {}
    }
    let (year, month, day) = civil_date(micros.div_euclid(MICROS_PER_DAY));
    let millis = micros.rem_euclid(MICROS_PER_DAY) / 1000;
    let (seconds, millis) = (millis / 1000, millis % 1000);
    out.push(b'"');
    write_padded(if year > 0 { year } else { 1 - year }, 4, out);
    for (separator, number, width) in [
        (b'-', month, 2),
        (b'-', day, 2),
        (b'T', seconds / 3600, 2),
        (b':', seconds / 60 % 60, 2),
        (b':', seconds % 60, 2),
        (b'.', millis, 3),
    ] {
        out.push(separator);
        write_padded(number, width, out);
    }
    out.extend_from_slice(b"Z\"");
}

/// Appends a number of at most eight digits, with leading zeros.
fn write_padded(number: i64, width: usize, out: &mut Vec<u8>) {
    let mut digits = [b'0'; 8];
    let (mut rest, mut start) = (number.unsigned_abs(), digits.len());
    while rest > 0 && start > 0 {
        start -= 1;
        digits[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    out.extend_from_slice(&digits[start.min(digits.len() - width)..]);
}

/// Converts a number of days since 2000-01-01 to a year, month and day of the proleptic Gregorian calendar, with a year
/// 0. The years of the calculation begin on 1 March, so that a leap day is the last day of its year (Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms").
fn civil_date(days_since_2000: i64) -> (i64, i64, i64) {
    const DAYS_PER_ERA: i64 = 146_097;
    /// From 0000-03-01 to 2000-01-01.
    const EPOCH_OFFSET: i64 = 730_425;
    let days = days_since_2000 + EPOCH_OFFSET;
    let (era, day_of_era) = (days.div_euclid(DAYS_PER_ERA), days.rem_euclid(DAYS_PER_ERA));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

/// The unparsed bytes of a value of any type.
struct BinaryValue<'a>(&'a [u8]);

impl<'a> FromSql<'a> for BinaryValue<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn write_to_string(kind: ColumnType, raw: &[u8]) -> String {
        let mut out = Vec::new();
        write_value(kind, raw, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn values_are_written_as_documented() {
        for (kind, raw, expected) in [
            (ColumnType::Boolean, &[1][..], "true"),
            (ColumnType::Integer, &(-7_i32).to_be_bytes(), "-7"),
            (ColumnType::Bigint, &((1_i64 << 53) - 1).to_be_bytes(), "9007199254740991"),
            (ColumnType::Bigint, &(-(1_i64 << 53)).to_be_bytes(), "\"-9007199254740992\""),
            (ColumnType::Bigint, &i64::MIN.to_be_bytes(), "\"-9223372036854775808\""),
            (ColumnType::Numeric, b"1.50", "\"1.50\""),
            (ColumnType::Double, b"\"NaN\"", "\"NaN\""),
            (ColumnType::Text, "a\"\\\n\u{1}é".as_bytes(), "\"a\\\"\\\\\\n\\u0001é\""),
            (ColumnType::Jsonb, b"{\"a\": 1}", "{\"a\": 1}"),
            (ColumnType::Uuid, &[0xab; 16], "\"abababab-abab-abab-abab-abababababab\""),
            (ColumnType::Bytea, &[0, 255], "\"AP8=\""),
            (ColumnType::Integer, &[0; 3], "null"),
        ] {
            assert_eq!(write_to_string(kind, raw), expected, "{kind:?}");
        }
    }

    #[test]
    fn timestamps_match_postgres_to_char() {
        // The results of PostgreSQL 16's `to_char`.
        for (micros, expected) in [
            (0, "\"2000-01-01T00:00:00.000Z\""),
            (-1, "\"1999-12-31T23:59:59.999Z\""),
            (5_097_600_000_000, "\"2000-02-29T00:00:00.000Z\""),
            (252_455_616_000_000_000, "\"10000-01-01T00:00:00.000Z\""),
            (-63_082_281_600_000_000, "\"0001-01-01T00:00:00.000Z\""),
            (-63_113_904_000_000_000, "\"0001-01-01T00:00:00.000Z\""),
            (i64::MAX, "\"infinity\""),
            (i64::MIN, "\"-infinity\""),
        ] {
            let json = write_to_string(ColumnType::Timestamptz, &micros.to_be_bytes());
            assert_eq!(json, expected, "{micros}");
        }
    }

    proptest! {
        #[test]
        fn timestamps_match_independent_calendar(millis in -62_135_596_800_000_i64..253_402_300_800_000) {
            let expected = jiff::Timestamp::from_millisecond(millis).unwrap();
            let micros = (millis - 946_684_800_000) * 1000;
            let expected = format!("\"{expected:.3}\"");
            prop_assert_eq!(write_to_string(ColumnType::Timestamptz, &micros.to_be_bytes()), expected);
        }

        #[test]
        fn text_round_trips_through_json(text in any::<String>()) {
            let json = write_to_string(ColumnType::Text, text.as_bytes());
            let parsed: String = serde_json::from_str(&json).unwrap();
            let size: usize = text.bytes().map(escaped_bytes).sum();
            prop_assert_eq!((parsed, size + 2), (text, json.len()));
        }
    }
}

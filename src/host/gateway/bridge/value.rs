//! Converts a JSON value to a typed parameter. Error messages never quote the value.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::{RoundMode, Timestamp, TimestampRound, Unit};
use serde_json::value::RawValue;

use super::fields::{is_null, string_value};
use super::param::Param;
use crate::apps::ColumnType;

/// Maximum number of digits before the decimal point, and also after it. PostgreSQL allows 131,072 and 16,383, so a
/// number of a few bytes, with an exponent, could make every response that contains it large.
const MAX_DIGITS: i64 = 1000;
const TOO_MANY_DIGITS: &str = "must have at most 1000 digits before the decimal point and 1000 after it";
/// 0001-01-01T00:00:00Z in Unix seconds. PostgreSQL prints earlier times as "BC".
const YEAR_ONE_SECONDS: i64 = -62_135_596_800;

/// Converts a value to the parameter for a column of type `kind`.
///
/// # Errors
/// The value is invalid for this type; the message states why, without quoting the value.
pub fn bind(kind: ColumnType, raw: &RawValue) -> Result<Param, &'static str> {
    if is_null(raw) {
        return Ok(Param::Null(kind));
    }
    match kind {
        ColumnType::Text => bind_text(raw, "must be a string without NUL"),
        ColumnType::Boolean => match raw.get() {
            "true" => Ok(Param::Bool(true)),
            "false" => Ok(Param::Bool(false)),
            _ => Err("must be true or false"),
        },
        ColumnType::Integer => parse_as(raw.get(), Param::Int4, "must be a 32-bit integer"),
        ColumnType::Bigint => {
            let expected = "must be a 64-bit integer, or a string that contains one";
            parse_as(
                &string_value(raw).ok_or(expected).or_else(|_| number_text(raw, expected))?,
                Param::Int8,
                expected,
            )
        }
        ColumnType::Numeric => bind_numeric(raw),
        ColumnType::Double => bind_double(raw),
        ColumnType::Date => {
            let expected = "must be a date, YYYY-MM-DD";
            let text = string_value(raw).ok_or(expected)?;
            let day: jiff::civil::Date = text.parse().map_err(|_| expected)?;
            // Accept only one notation, and no year before 1, which PostgreSQL would print as "BC".
            if day.to_string() == text && day.year() >= 1 { Ok(Param::Date(day)) } else { Err(expected) }
        }
        ColumnType::Timestamptz => bind_timestamp(raw, Unit::Millisecond, RoundMode::HalfExpand),
        ColumnType::Jsonb if json_expansion(raw.get()).is_none() => Err(TOO_MANY_DIGITS),
        ColumnType::Jsonb => Ok(Param::Jsonb(raw.get().to_owned())),
        ColumnType::Uuid => {
            parse_as(&string_value(raw).ok_or("must be a UUID")?, Param::Uuid, "must be a UUID")
        }
        ColumnType::Bytea => {
            let expected = "must be a base64 string (RFC 4648, with padding)";
            let text = string_value(raw).ok_or(expected)?;
            STANDARD.decode(text.as_bytes()).map(Param::Bytea).map_err(|_| expected)
        }
    }
}

fn bind_text(raw: &RawValue, expected: &'static str) -> Result<Param, &'static str> {
    let text = string_value(raw).filter(|text| !text.contains('\0')).ok_or(expected)?;
    Ok(Param::Text(text.into_owned()))
}

fn number_text<'a>(
    raw: &'a RawValue,
    expected: &'static str,
) -> Result<std::borrow::Cow<'a, str>, &'static str> {
    let text = raw.get();
    if text.starts_with(|c: char| c == '-' || c.is_ascii_digit()) { Ok(text.into()) } else { Err(expected) }
}

fn parse_as<T: std::str::FromStr>(
    text: &str,
    make: fn(T) -> Param,
    expected: &'static str,
) -> Result<Param, &'static str> {
    text.parse().map(make).map_err(|_| expected)
}

/// Binds a JSON number, or a string that contains one, as text, so that it keeps all digits.
fn bind_numeric(raw: &RawValue) -> Result<Param, &'static str> {
    let expected = "must be a number, or a string that contains one";
    let text = string_value(raw).ok_or(expected).or_else(|_| number_text(raw, expected))?;
    // JSON's number grammar is a subset of PostgreSQL's.
    let is_number = text.starts_with(|c: char| c == '-' || c.is_ascii_digit())
        && serde_json::from_str::<&RawValue>(&text).is_ok_and(|parsed| parsed.get() == text);
    if !is_number {
        Err(expected)
    } else if number_expansion(&text).is_none() {
        Err(TOO_MANY_DIGITS)
    } else {
        Ok(Param::Text(text.into_owned()))
    }
}

/// The approximate number of bytes by which PostgreSQL's output of a JSON number is longer than `number`; `None` if the
/// number has too many digits.
fn number_expansion(number: &str) -> Option<usize> {
    let unsigned = number.trim_start_matches('-');
    let (digits, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    // An exponent beyond 64 bits is too large in either direction.
    let exponent: i64 = exponent.parse().ok()?;
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let length = |text: &str| i64::try_from(text.len()).unwrap_or(i64::MAX);
    let before = length(whole).saturating_add(exponent);
    let after = length(fraction).saturating_sub(exponent);
    if before > MAX_DIGITS || after > MAX_DIGITS {
        return None;
    }
    let printed = before.max(1).saturating_add(after.max(0));
    usize::try_from(printed.saturating_sub(length(unsigned))).ok().or(Some(0))
}

/// The approximate number of bytes by which a value in the response is longer than in the request, because exponents
/// are expanded.
pub fn expansion_bytes(kind: ColumnType, param: &Param) -> usize {
    let bytes = match (kind, param) {
        (ColumnType::Numeric, Param::Text(number)) => number_expansion(number),
        (ColumnType::Jsonb, Param::Jsonb(json)) => json_expansion(json),
        _ => None,
    };
    bytes.unwrap_or(0)
}

/// The sum of [`number_expansion`] over all numbers in a JSON text; `None` if one has too many digits.
fn json_expansion(json: &str) -> Option<usize> {
    let bytes = json.as_bytes();
    let (mut index, mut added) = (0, 0);
    while let Some(byte) = bytes.get(index) {
        let rest = &bytes[index + 1..];
        index += 1 + match byte {
            b'"' => string_length(rest),
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &&u8| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-');
                let length = rest.iter().take_while(is_part).count();
                added += number_expansion(&json[index..=index + length])?;
                length
            }
            _ => 0,
        };
    }
    Some(added)
}

/// The length of the rest of a JSON string, including its closing quote.
fn string_length(rest: &[u8]) -> usize {
    let mut is_escaped = false;
    let end = rest.iter().position(|byte| {
        let is_end = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(rest.len(), |end| end + 1)
}

fn bind_double(raw: &RawValue) -> Result<Param, &'static str> {
    let expected = "must be a number, or one of \"NaN\", \"Infinity\", \"-Infinity\"";
    if let Some(text) = string_value(raw) {
        return match text.as_ref() {
            "NaN" => Ok(Param::Double(f64::NAN)),
            "Infinity" => Ok(Param::Double(f64::INFINITY)),
            "-Infinity" => Ok(Param::Double(f64::NEG_INFINITY)),
            _ => Err(expected),
        };
    }
    let value: f64 = number_text(raw, expected)?.parse().map_err(|_| expected)?;
    if value.is_finite() { Ok(Param::Double(value)) } else { Err("is out of range for a double") }
}

/// Converts the operand of `operator`, one of `<`, `<=`, `>`, `>=`. A time keeps its microseconds: rounded to
/// milliseconds, as stored times are, it could equal a stored time that differs from it.
///
/// # Errors
/// Those of [`bind`].
pub fn bind_range_operand(kind: ColumnType, operator: &str, raw: &RawValue) -> Result<Param, &'static str> {
    if kind != ColumnType::Timestamptz || is_null(raw) {
        return bind(kind, raw);
    }
    // For times in whole microseconds, `x < t` is equivalent to `x < ceil(t)`, and `x > t` to `x > floor(t)`.
    let mode = if matches!(operator, "<" | ">=") { RoundMode::Ceil } else { RoundMode::Floor };
    bind_timestamp(raw, Unit::Microsecond, mode)
}

/// Converts a time, rounded to `unit`. Columns store milliseconds, so rounding to milliseconds lets an `eq` filter with
/// the inserted text find the stored value.
fn bind_timestamp(raw: &RawValue, unit: Unit, mode: RoundMode) -> Result<Param, &'static str> {
    let expected = "must be an RFC 3339 time with an offset, in the years 1 to 9999";
    let time: Timestamp = string_value(raw).ok_or(expected)?.parse().map_err(|_| expected)?;
    let time = time.round(TimestampRound::new().smallest(unit).mode(mode)).map_err(|_| expected)?;
    if time.as_second() >= YEAR_ONE_SECONDS { Ok(Param::Timestamp(time)) } else { Err(expected) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind_json(kind: ColumnType, json: &str) -> Result<Param, &'static str> {
        bind(kind, serde_json::from_str(json).unwrap())
    }

    #[test]
    fn bind_uses_column_type() {
        use ColumnType as C;
        assert_eq!(bind_json(C::Text, r#""a\n""#), Ok(Param::Text("a\n".into())));
        assert_eq!(bind_json(C::Boolean, "true"), Ok(Param::Bool(true)));
        assert_eq!(bind_json(C::Integer, "-5"), Ok(Param::Int4(-5)));
        assert_eq!(bind_json(C::Bigint, "9007199254740993"), Ok(Param::Int8(9_007_199_254_740_993)));
        assert_eq!(bind_json(C::Bigint, r#""-9223372036854775808""#), Ok(Param::Int8(i64::MIN)));
        assert_eq!(bind_json(C::Numeric, "0.10"), Ok(Param::Text("0.10".into())));
        assert_eq!(bind_json(C::Numeric, r#""1e3""#), Ok(Param::Text("1e3".into())));
        assert_eq!(bind_json(C::Double, r#""Infinity""#), Ok(Param::Double(f64::INFINITY)));
        assert_eq!(bind_json(C::Jsonb, r#"{"a": 1.10}"#), Ok(Param::Jsonb(r#"{"a": 1.10}"#.into())));
        assert_eq!(bind_json(C::Bytea, r#""AAE=""#), Ok(Param::Bytea(vec![0, 1])));
        let day = jiff::civil::date(2026, 2, 28);
        assert_eq!(bind_json(C::Date, r#""2026-02-28""#), Ok(Param::Date(day)));
        let timestamp = |text: &str| Ok(Param::Timestamp(text.parse().unwrap()));
        let input = r#""2026-01-02T03:04:05.6789004+01:00""#;
        assert_eq!(bind_json(C::Timestamptz, input), timestamp("2026-01-02T02:04:05.679Z"));
        let raw = || serde_json::from_str(input).unwrap();
        assert_eq!(bind_range_operand(C::Timestamptz, "<", raw()), timestamp("2026-01-02T02:04:05.678901Z"));
        assert_eq!(bind_range_operand(C::Timestamptz, "<=", raw()), timestamp("2026-01-02T02:04:05.678900Z"));
        assert_eq!(bind_json(C::Jsonb, "null"), Ok(Param::Null(C::Jsonb)));
    }

    #[test]
    fn bind_limits_digits_including_exponent() {
        use ColumnType as C;
        let digits = "9".repeat(1000);
        for text in [digits.as_str(), "1e999", "-1E+999", "1e-1000", "0.5e-999", &format!("0.{digits}")] {
            assert_eq!(bind_json(C::Numeric, text).err(), None, "{text}");
            assert!(bind_json(C::Jsonb, text).is_ok(), "{text}");
        }
        for text in [format!("{digits}0"), format!("0.{digits}1"), format!("{digits}e1")] {
            assert_eq!(bind_json(C::Numeric, &text), Err(TOO_MANY_DIGITS), "{text}");
            assert_eq!(bind_json(C::Jsonb, &format!("[{text}]")), Err(TOO_MANY_DIGITS), "{text}");
        }
        assert_eq!(json_expansion(r#"[1e3, -1e5, 12.5e1, -0.1e-2, 15, "1e9"]"#), Some(1 + 3));
        // Digits in a string are not a number.
        for text in [r#"{"1e131071": "1e131071"}"#, r#"["\\", "\"1e131071", true, null]"#] {
            assert!(bind_json(C::Jsonb, text).is_ok(), "{text}");
        }
    }

    #[test]
    fn bind_rejects_invalid_values() {
        use ColumnType as C;
        let cases = [
            (C::Text, "1"),
            (C::Text, r#""a\u0000""#),
            (C::Text, r#""\ud800""#),
            (C::Boolean, r#""true""#),
            (C::Integer, "2147483648"),
            (C::Integer, "1.5"),
            (C::Bigint, "9223372036854775808"),
            (C::Bigint, "true"),
            (C::Numeric, r#""1; DROP TABLE t""#),
            (C::Numeric, r#"" 1""#),
            (C::Numeric, r#""NaN""#),
            (C::Numeric, "1e1000"),
            (C::Numeric, r#""-1e131071""#),
            (C::Numeric, "0.1e-1000"),
            (C::Numeric, "1e99999999999999999999"),
            (C::Jsonb, r#"{"a\"": [1, 1e131071]}"#),
            (C::Jsonb, "1E+131071"),
            (C::Jsonb, "-1e-16383"),
            (C::Double, "1e999"),
            (C::Date, r#""2026-02-30""#),
            (C::Date, r#""2026-02-28T00:00:00""#),
            (C::Date, r#""20260228""#),
            (C::Date, r#""0000-12-31""#),
            (C::Date, r#""-000044-03-15""#),
            (C::Timestamptz, r#""0000-12-31T23:59:59Z""#),
            (C::Timestamptz, r#""9999-12-31T23:59:59.9999Z""#),
            (C::Timestamptz, r#""2026-01-02T03:04:05""#),
            (C::Uuid, r#""x""#),
            (C::Bytea, r#""a""#),
        ];
        for (kind, json) in cases {
            let error = bind_json(kind, json).expect_err(json);
            assert!(error.starts_with("must ") || error.starts_with("is out"), "{error}");
        }
    }
}

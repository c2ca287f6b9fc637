//! From a JSON value to a typed parameter. What does not fit is refused in words that quote nothing of it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::{RoundMode, Timestamp, TimestampRound, Unit};
use serde_json::value::RawValue;

use super::fields::{is_null, text};
use super::param::Param;
use crate::host::gateway::apps::ColumnType;

/// Of a number, before the point and after it. PostgreSQL would take 131,072: a few bytes with an exponent would make
/// every answer with that number large.
const MAX_DIGITS: i64 = 1000;
const TOO_MANY_DIGITS: &str = "must have at most 1000 digits before the point and after it";
/// 0001-01-01T00:00:00Z, in seconds: PostgreSQL prints what is earlier as "BC".
const YEAR_ONE: i64 = -62_135_596_800;

/// The parameter for a column of type `kind`.
///
/// # Errors
/// What the value must be.
pub fn bind(kind: ColumnType, raw: &RawValue) -> Result<Param, &'static str> {
    if is_null(raw) {
        return Ok(Param::Null(kind));
    }
    match kind {
        ColumnType::Text => string(raw, "must be a string without NUL"),
        ColumnType::Boolean => match raw.get() {
            "true" => Ok(Param::Bool(true)),
            "false" => Ok(Param::Bool(false)),
            _ => Err("must be true or false"),
        },
        ColumnType::Integer => parsed(raw.get(), Param::Int4, "must be an integer of 32 bits"),
        ColumnType::Bigint => {
            let why = "must be an integer of 64 bits, or a string of one";
            parsed(&text(raw).ok_or(why).or_else(|_| number(raw, why))?, Param::Int8, why)
        }
        ColumnType::Numeric => numeric(raw),
        ColumnType::Double => double(raw),
        ColumnType::Date => {
            let why = "must be a date, YYYY-MM-DD";
            let text = text(raw).ok_or(why)?;
            let day: jiff::civil::Date = text.parse().map_err(|_| why)?;
            // One form alone, and no year before 1: PostgreSQL would print that one as "BC".
            if day.to_string() == text && day.year() >= 1 { Ok(Param::Date(day)) } else { Err(why) }
        }
        ColumnType::Timestamptz => timestamp(raw, Unit::Millisecond, RoundMode::HalfExpand),
        ColumnType::Jsonb if json_expansion(raw.get()).is_none() => Err(TOO_MANY_DIGITS),
        ColumnType::Jsonb => Ok(Param::Jsonb(raw.get().to_owned())),
        ColumnType::Uuid => parsed(&text(raw).ok_or("must be a UUID")?, Param::Uuid, "must be a UUID"),
        ColumnType::Bytea => {
            let why = "must be a string of base64 (RFC 4648, with padding)";
            let text = text(raw).ok_or(why)?;
            STANDARD.decode(text.as_bytes()).map(Param::Bytea).map_err(|_| why)
        }
    }
}

fn string(raw: &RawValue, why: &'static str) -> Result<Param, &'static str> {
    let text = text(raw).filter(|text| !text.contains('\0')).ok_or(why)?;
    Ok(Param::Text(text.into_owned()))
}

fn number<'a>(raw: &'a RawValue, why: &'static str) -> Result<std::borrow::Cow<'a, str>, &'static str> {
    let text = raw.get();
    if text.starts_with(|c: char| c == '-' || c.is_ascii_digit()) { Ok(text.into()) } else { Err(why) }
}

fn parsed<T: std::str::FromStr>(
    text: &str,
    make: fn(T) -> Param,
    why: &'static str,
) -> Result<Param, &'static str> {
    text.parse().map(make).map_err(|_| why)
}

/// A number of any length: as a JSON number or a string that reads as one.
fn numeric(raw: &RawValue) -> Result<Param, &'static str> {
    let why = "must be a number, or a string of one";
    let text = text(raw).ok_or(why).or_else(|_| number(raw, why))?;
    // JSON's grammar of numbers is a part of PostgreSQL's.
    let is_number = text.starts_with(|c: char| c == '-' || c.is_ascii_digit())
        && serde_json::from_str::<&RawValue>(&text).is_ok_and(|parsed| parsed.get() == text);
    match () {
        () if !is_number => Err(why),
        () if number_expansion(&text).is_none() => Err(TOO_MANY_DIGITS),
        () => Ok(Param::Text(text.into_owned())),
    }
}

/// How many bytes longer PostgreSQL prints a number of JSON's grammar; `None` where it has too many digits.
fn number_expansion(number: &str) -> Option<usize> {
    let unsigned = number.trim_start_matches('-');
    let (digits, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    // An exponent beyond 64 bits is too large either way.
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

/// How many bytes longer a value is in an answer than in its request, because of exponents.
pub fn expansion(kind: ColumnType, param: &Param) -> usize {
    let more = match (kind, param) {
        (ColumnType::Numeric, Param::Text(number)) => number_expansion(number),
        (ColumnType::Jsonb, Param::Jsonb(json)) => json_expansion(json),
        _ => None,
    };
    more.unwrap_or(0)
}

/// [`number_expansion`] of all numbers within a JSON text; `None` where one has too many digits.
fn json_expansion(json: &str) -> Option<usize> {
    let bytes = json.as_bytes();
    let (mut at, mut more) = (0, 0);
    while let Some(byte) = bytes.get(at) {
        let rest = &bytes[at + 1..];
        at += 1 + match byte {
            b'"' => string_length(rest),
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &&u8| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-');
                let length = rest.iter().take_while(is_part).count();
                more += number_expansion(&json[at..=at + length])?;
                length
            }
            _ => 0,
        };
    }
    Some(more)
}

/// Of the rest of a string of JSON, with its closing quote.
fn string_length(rest: &[u8]) -> usize {
    let mut is_escaped = false;
    let end = rest.iter().position(|byte| {
        let is_end = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(rest.len(), |end| end + 1)
}

fn double(raw: &RawValue) -> Result<Param, &'static str> {
    let why = "must be a number, or one of \"NaN\", \"Infinity\", \"-Infinity\"";
    if let Some(text) = text(raw) {
        return match text.as_ref() {
            "NaN" => Ok(Param::Double(f64::NAN)),
            "Infinity" => Ok(Param::Double(f64::INFINITY)),
            "-Infinity" => Ok(Param::Double(f64::NEG_INFINITY)),
            _ => Err(why),
        };
    }
    let value: f64 = number(raw, why)?.parse().map_err(|_| why)?;
    if value.is_finite() { Ok(Param::Double(value)) } else { Err("is out of range for a double") }
}

/// The parameter that a column is compared with by `operator`, one of `<`, `<=`, `>`, `>=`. A time keeps the digits that
/// a column would round away: nothing that lies before it is taken for equal to it.
///
/// # Errors
/// What the value must be.
pub fn bind_bound(kind: ColumnType, operator: &str, raw: &RawValue) -> Result<Param, &'static str> {
    if kind != ColumnType::Timestamptz || is_null(raw) {
        return bind(kind, raw);
    }
    // For times of whole microseconds, `x < t` holds where `x < ceil(t)` does, and `x > t` where `x > floor(t)` does.
    let mode = if matches!(operator, "<" | ">=") { RoundMode::Ceil } else { RoundMode::Floor };
    timestamp(raw, Unit::Microsecond, mode)
}

/// To the millisecond, where a column keeps it: what was written can be sought by the same text.
fn timestamp(raw: &RawValue, unit: Unit, mode: RoundMode) -> Result<Param, &'static str> {
    let why = "must be a time, RFC 3339 with an offset, in the years 1 to 9999";
    let at: Timestamp = text(raw).ok_or(why)?.parse().map_err(|_| why)?;
    let at = at.round(TimestampRound::new().smallest(unit).mode(mode)).map_err(|_| why)?;
    if at.as_second() >= YEAR_ONE { Ok(Param::Timestamp(at)) } else { Err(why) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(kind: ColumnType, json: &str) -> Result<Param, &'static str> {
        bind(kind, serde_json::from_str(json).unwrap())
    }

    #[test]
    fn values_take_their_column_s_type() {
        use ColumnType as C;
        assert_eq!(one(C::Text, r#""a\n""#), Ok(Param::Text("a\n".into())));
        assert_eq!(one(C::Boolean, "true"), Ok(Param::Bool(true)));
        assert_eq!(one(C::Integer, "-5"), Ok(Param::Int4(-5)));
        assert_eq!(one(C::Bigint, "9007199254740993"), Ok(Param::Int8(9_007_199_254_740_993)));
        assert_eq!(one(C::Bigint, r#""-9223372036854775808""#), Ok(Param::Int8(i64::MIN)));
        assert_eq!(one(C::Numeric, "0.10"), Ok(Param::Text("0.10".into())));
        assert_eq!(one(C::Numeric, r#""1e3""#), Ok(Param::Text("1e3".into())));
        assert_eq!(one(C::Double, r#""Infinity""#), Ok(Param::Double(f64::INFINITY)));
        assert_eq!(one(C::Jsonb, r#"{"a": 1.10}"#), Ok(Param::Jsonb(r#"{"a": 1.10}"#.into())));
        assert_eq!(one(C::Bytea, r#""AAE=""#), Ok(Param::Bytea(vec![0, 1])));
        let day = jiff::civil::date(2026, 2, 28);
        assert_eq!(one(C::Date, r#""2026-02-28""#), Ok(Param::Date(day)));
        let at = |text: &str| Ok(Param::Timestamp(text.parse().unwrap()));
        let given = r#""2026-01-02T03:04:05.6789004+01:00""#;
        assert_eq!(one(C::Timestamptz, given), at("2026-01-02T02:04:05.679Z"));
        let raw = || serde_json::from_str(given).unwrap();
        assert_eq!(bind_bound(C::Timestamptz, "<", raw()), at("2026-01-02T02:04:05.678901Z"));
        assert_eq!(bind_bound(C::Timestamptz, "<=", raw()), at("2026-01-02T02:04:05.678900Z"));
        assert_eq!(one(C::Jsonb, "null"), Ok(Param::Null(C::Jsonb)));
    }

    #[test]
    fn numbers_have_as_many_digits_as_their_exponent_makes() {
        use ColumnType as C;
        let digits = "9".repeat(1000);
        for text in [digits.as_str(), "1e999", "-1E+999", "1e-1000", "0.5e-999", &format!("0.{digits}")] {
            assert_eq!(one(C::Numeric, text).err(), None, "{text}");
            assert!(one(C::Jsonb, text).is_ok(), "{text}");
        }
        for text in [format!("{digits}0"), format!("0.{digits}1"), format!("{digits}e1")] {
            assert_eq!(one(C::Numeric, &text), Err(TOO_MANY_DIGITS), "{text}");
            assert_eq!(one(C::Jsonb, &format!("[{text}]")), Err(TOO_MANY_DIGITS), "{text}");
        }
        assert_eq!(json_expansion(r#"[1e3, -1e5, 12.5e1, -0.1e-2, 15, "1e9"]"#), Some(1 + 3));
        // Within a string it is no number.
        for text in [r#"{"1e131071": "1e131071"}"#, r#"["\\", "\"1e131071", true, null]"#] {
            assert!(one(C::Jsonb, text).is_ok(), "{text}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_without_quoting_it() {
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
            let why = one(kind, json).expect_err(json);
            assert!(why.starts_with("must ") || why.starts_with("is out"), "{why}");
        }
    }
}

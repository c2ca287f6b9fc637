//! From a JSON value to a typed parameter. What does not fit is refused in words that quote nothing of it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::{RoundMode, Timestamp, TimestampRound, Unit};
use serde_json::value::RawValue;

use super::fields::{is_null, text};
use super::param::Param;
use crate::host::gateway::apps::ColumnType;

/// The longest text of a numeric value; PostgreSQL's own limit lies far beyond any use.
const LONGEST_NUMERIC: usize = 1000;
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
    let is_number = text.len() <= LONGEST_NUMERIC
        && text.starts_with(|c: char| c == '-' || c.is_ascii_digit())
        && serde_json::from_str::<&RawValue>(&text).is_ok_and(|parsed| parsed.get() == text);
    if is_number { Ok(Param::Text(text.into_owned())) } else { Err(why) }
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
            assert!(why.starts_with("must be") || why.starts_with("is out"), "{why}");
        }
    }
}

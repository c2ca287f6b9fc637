//! Tests for the filter grammar, the generated SQL and the limits.

use super::*;
use crate::apps::Manifest;
use serde_json::json;

pub(super) fn table() -> Table {
    let columns: serde_json::Map<String, serde_json::Value> =
        ColumnType::ALL.iter().map(|kind| (format!("c_{}", kind.name()), json!(kind.name()))).collect();
    let manifest = json!({ "name": "n", "slug": "n", "version": "1", "runtime": "static",
        "storage": { "tables": { "t": { "columns": columns } } } });
    Manifest::from_value(&manifest).unwrap().tables.remove(0)
}

fn filter_sql(filter: &str) -> Result<String, String> {
    let table = table();
    let raw: &RawValue = serde_json::from_str(filter).unwrap();
    let parsed = Filter::parse(&table, raw, "/filter").map_err(|e| format!("{} {}", e.pointer, e.detail))?;
    let mut sql = Sql::default();
    parsed.write(&mut sql);
    Ok(sql.text)
}

#[test]
fn filter_writes_expected_sql() {
    let cases = [
        ("{}", "TRUE"),
        (r#"{"c_text":"a"}"#, r#""t"."c_text" = $1"#),
        (r#"{"c_text":null}"#, r#""t"."c_text" IS NULL"#),
        (r#"{"c_text":{"ne":null}}"#, r#""t"."c_text" IS NOT NULL"#),
        (r#"{"c_integer":{"gt":1,"lte":5}}"#, r#"("t"."c_integer" > $1 AND "t"."c_integer" <= $2)"#),
        (r#"{"c_numeric":{"gte":"1.5"}}"#, r#""t"."c_numeric" >= $1::text::numeric"#),
        (r#"{"c_uuid":{"in":[]}}"#, r#""t"."c_uuid" = ANY ($1)"#),
        (r#"{"c_numeric":{"in":[1,"2.5"]}}"#, r#""t"."c_numeric" = ANY ($1::text[]::numeric[])"#),
        (r#"{"c_jsonb":{"in":[{"a":1}]}}"#, r#""t"."c_jsonb" = ANY ($1)"#),
        (r#"{"c_text":{"in":["a","b"]}}"#, r#""t"."c_text" = ANY ($1)"#),
        (r#"{"c_text":{"ilike":"%a"}}"#, r#""t"."c_text" ILIKE $1"#),
        (r#"{"c_text":{"contains":"a"}}"#, r#"strpos("t"."c_text", $1) > 0"#),
        (r#"{"c_jsonb":{"contains":{"a":1}}}"#, r#""t"."c_jsonb" @> $1"#),
        (r#"{"c_boolean":{"isNull":false}}"#, r#""t"."c_boolean" IS NOT NULL"#),
        (
            r#"{"or":[{"c_text":"a"},{"not":{"c_text":"b"}}],"and":[{"c_integer":1}]}"#,
            r#"(("t"."c_text" = $1 OR NOT ("t"."c_text" = $2)) AND ("t"."c_integer" = $3))"#,
        ),
    ];
    for (filter, sql) in cases {
        assert_eq!(filter_sql(filter).as_deref(), Ok(sql), "{filter}");
    }
}

#[test]
fn invalid_filter_is_rejected_with_pointer() {
    let cases = [
        ("[]", "/filter must"),
        (r#"{"nope":1}"#, "/filter/nope is not a column"),
        (r#"{"c_text\"; DROP":1}"#, "is not a column"),
        (r#"{"c_text":{"regex":"a"}}"#, "/filter/c_text/regex is not an operator"),
        (r#"{"c_text":{}}"#, "must name an operator"),
        (r#"{"c_text":{"gt":null}}"#, "must not be null"),
        (r#"{"c_text":{"in":[null]}}"#, "must not be null"),
        (r#"{"c_text":{"in":"a"}}"#, "must be an array"),
        (r#"{"c_integer":{"like":"1%"}}"#, "type text"),
        (r#"{"c_text":{"like":"a\\"}}"#, "backslash"),
        (r#"{"c_jsonb":{"lt":1}}"#, "jsonb"),
        (r#"{"c_integer":{"contains":1}}"#, "type text or jsonb"),
        (r#"{"and":[]}"#, "/filter/and must be"),
        (r#"{"not":{}}"#, "/filter/not must not be empty"),
        (r#"{"or":[{"c_integer":1},{}]}"#, "/filter/or/1 must not be empty"),
        (r#"{"and":[{}]}"#, "/filter/and/0 must not be empty"),
        (r#"{"or":[{"c_integer":"s3cret"}]}"#, "/filter/or/0/c_integer must be"),
    ];
    for (filter, part) in cases {
        let error = filter_sql(filter).expect_err(filter);
        assert!(error.contains(part) && !error.contains("s3cret"), "{filter}: {error}");
    }
}

#[test]
fn filter_bounds_depth_terms_and_in_values() {
    let nested = |depth: usize| {
        format!("{}{}{}", r#"{"not":"#.repeat(depth - 1), r#"{"c_integer":1}"#, "}".repeat(depth - 1))
    };
    assert!(filter_sql(&nested(5)).is_ok());
    assert!(filter_sql(&nested(6)).expect_err("depth 6 should be rejected").contains("levels deep"));
    let terms = |count: usize| json!({ "and": vec![json!({ "c_integer": 1 }); count] }).to_string();
    assert!(filter_sql(&terms(50)).is_ok());
    assert!(filter_sql(&terms(51)).expect_err("51 terms should be rejected").contains("at most 50"));
    assert!(filter_sql(&json!({ "c_integer": { "in": vec![1; 1001] } }).to_string()).is_err());
}

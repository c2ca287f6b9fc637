//! Arbitrary values of every type pass through the bridge into PostgreSQL and back unchanged.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use reqwest::Method;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::bridge::TestApp;

/// A value as sent, and as returned.
type Pair = (Value, Value);

fn unchanged(value: Value) -> Pair {
    (value.clone(), value)
}

fn text() -> BoxedStrategy<Pair> {
    any::<String>().prop_map(|text| unchanged(json!(text.replace('\0', "\u{fffd}")))).boxed()
}

fn bigint() -> BoxedStrategy<Pair> {
    let safe = (1_i64 << 53) - 1;
    let number =
        prop_oneof![any::<i64>(), -safe - 2..=-safe + 2, safe - 2..=safe + 2, Just(i64::MIN), Just(i64::MAX)];
    (number, any::<bool>())
        .prop_map(move |(number, is_text)| {
            let sent = if is_text { json!(number.to_string()) } else { json!(number) };
            let is_safe = number.unsigned_abs() <= safe.unsigned_abs();
            (sent, if is_safe { json!(number) } else { json!(number.to_string()) })
        })
        .boxed()
}

fn numeric() -> BoxedStrategy<Pair> {
    let digits = ("-?", "(0|[1-9][0-9]{0,60})", proptest::option::of("[0-9]{1,60}"));
    digits
        .prop_map(|(sign, whole, fraction)| {
            let fraction = fraction.map_or_else(String::new, |digits| format!(".{digits}"));
            let is_zero = format!("{whole}{fraction}").bytes().all(|byte| matches!(byte, b'0' | b'.'));
            let text = format!("{}{whole}{fraction}", if is_zero { "" } else { &sign });
            unchanged(json!(text))
        })
        .boxed()
}

fn double() -> BoxedStrategy<Pair> {
    let number = prop_oneof![any::<f64>(), Just(-0.0), Just(f64::MAX), Just(f64::MIN_POSITIVE), Just(5e-324)];
    let finite =
        number.prop_filter("finite", |number| number.is_finite()).prop_map(|number| unchanged(json!(number)));
    let special =
        prop_oneof![Just("NaN"), Just("Infinity"), Just("-Infinity")].prop_map(|word| unchanged(json!(word)));
    prop_oneof![8 => finite, 1 => special].boxed()
}

fn date() -> BoxedStrategy<Pair> {
    let any = (1_i16..=9999, 1_i8..=12, 1_i8..=28).prop_map(|(y, m, d)| format!("{y:04}-{m:02}-{d:02}"));
    let edge = prop_oneof![Just("0001-01-01"), Just("9999-12-31"), Just("2024-02-29"), Just("1582-10-10")];
    prop_oneof![any, edge.prop_map(str::to_owned)].prop_map(|text| unchanged(json!(text))).boxed()
}

fn timestamptz() -> BoxedStrategy<Pair> {
    let ms = prop_oneof![
        -62_135_596_800_000_i64..=253_402_200_000_000,
        Just(-62_135_596_800_000),
        -5_i64..5,
        Just(-1)
    ];
    let offset = (0_i64..=14 * 4).prop_map(|quarters| quarters * 15);
    (ms, offset, any::<bool>())
        .prop_map(|(ms, minutes, is_east)| {
            let timestamp = jiff::Timestamp::from_millisecond(ms).expect("the timestamp is in range");
            let seconds = i32::try_from(minutes * 60).unwrap_or(0);
            let offset = jiff::tz::Offset::from_seconds(if is_east { seconds } else { -seconds })
                .expect("the offset is valid");
            // Local time may be outside the year range that the format supports.
            let local = offset.to_datetime(timestamp);
            let sent = if (1..=9999).contains(&local.year()) {
                format!(
                    "{local:.3}{}{:02}:{:02}",
                    if is_east { '+' } else { '-' },
                    minutes / 60,
                    minutes % 60
                )
            } else {
                format!("{timestamp:.3}")
            };
            (json!(sent), json!(format!("{timestamp:.3}")))
        })
        .boxed()
}

fn jsonb() -> BoxedStrategy<Pair> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<String>().prop_map(|text| json!(text.replace('\0', "\u{1}"))),
    ];
    let tree = leaf.prop_recursive(5, 24, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[a-z\"\\\\é]{0,5}", inner, 0..4).prop_map(|map| json!(map)),
        ]
    });
    tree.prop_filter("not null at the top", |value| !value.is_null()).prop_map(unchanged).boxed()
}

fn columns() -> Vec<(&'static str, BoxedStrategy<Pair>)> {
    let bytes = proptest::collection::vec(any::<u8>(), 0..200);
    vec![
        ("title", text()),
        ("done", any::<bool>().prop_map(|value| unchanged(json!(value))).boxed()),
        ("size", any::<i32>().prop_map(|value| unchanged(json!(value))).boxed()),
        ("big", bigint()),
        ("price", numeric()),
        ("ratio", double()),
        ("day", date()),
        ("at", timestamptz()),
        ("meta", jsonb()),
        ("ref", any::<u128>().prop_map(|bits| unchanged(json!(uuid::Uuid::from_u128(bits)))).boxed()),
        ("raw", bytes.prop_map(|bytes| unchanged(json!(STANDARD.encode(bytes)))).boxed()),
    ]
}

/// A row with its values as text, because `serde_json` would round the last digit of a double.
type RawRow = BTreeMap<String, Box<RawValue>>;

async fn query_raw_rows(app: &TestApp, action: &str, fields: Value) -> Result<Vec<RawRow>> {
    let request = app.host.owner_request(Method::POST, "/api/bridge/query").json(&app.body(action, fields));
    let text = request.send().await?.error_for_status()?.text().await?;
    let response: BTreeMap<String, Box<RawValue>> = serde_json::from_str(&text)?;
    let data = response["data"].get();
    let list = if data.starts_with('[') { data.to_owned() } else { format!("[{data}]") };
    Ok(serde_json::from_str(&list)?)
}

fn check_row(row: &RawRow, sent: &Value, expected: &serde_json::Map<String, Value>) -> Result<()> {
    for (name, value) in expected {
        let got = row[name].get();
        let is_same = match value.as_f64().filter(|_| name == "ratio") {
            Some(number) => got.parse::<f64>()?.to_bits() == number.to_bits(),
            // The order of names in an object does not matter.
            None => serde_json::from_str::<Value>(got)? == *value,
        };
        ensure!(is_same, "{name}: {} became {got}", sent[name]);
    }
    Ok(())
}

#[tokio::test]
async fn values_of_every_type_round_trip_and_match_filters() -> Result<()> {
    let app = TestApp::new().await?;
    let columns = columns();
    let mut runner = TestRunner::default();
    let mut draw = |strategy: &BoxedStrategy<Pair>| {
        strategy.new_tree(&mut runner).map(|tree| tree.current()).expect("the strategy generates a value")
    };
    for _ in 0..8 {
        let (mut rows, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..50 {
            let (mut row, mut expected_row) = (serde_json::Map::new(), serde_json::Map::new());
            for (name, strategy) in &columns {
                let (sent, returned) = draw(strategy);
                row.insert((*name).to_owned(), sent);
                expected_row.insert((*name).to_owned(), returned);
            }
            rows.push(Value::Object(row));
            expected.push(expected_row);
        }
        let inserted = query_raw_rows(&app, "insertMany", json!({ "rows": rows })).await?;
        ensure!(inserted.len() == rows.len(), "{} rows instead of {}", inserted.len(), rows.len());
        for ((row, sent), expected) in inserted.iter().zip(&rows).zip(&expected) {
            check_row(row, sent, expected)?;
        }
        // Reads the same rows through `find` and `get`, in the same order, because ids are ordered by time.
        let ids: Vec<Value> =
            inserted.iter().map(|row| Ok(serde_json::from_str(row["id"].get())?)).collect::<Result<_>>()?;
        let page = json!({ "filter": { "id": { "in": ids } }, "orderBy": ["id"], "limit": 50 });
        let found = query_raw_rows(&app, "find", page).await?;
        let got = query_raw_rows(&app, "get", json!({ "id": ids[0] })).await?;
        ensure!(found.len() == inserted.len() && got.len() == 1, "{} and {} rows", found.len(), got.len());
        for (read, written) in found.iter().zip(&inserted).chain(got.iter().zip(&inserted)) {
            for (name, value) in written {
                ensure!(read[name].get() == value.get(), "{name}: read {}, written {value}", read[name]);
            }
        }
        // Writes one row through `insert`, and finds it with each of its values as a filter.
        let (sent, expected_row) = (&rows[0], &expected[0]);
        let id: Value = serde_json::from_str(inserted[0]["id"].get())?;
        app.query_data("delete", json!({ "id": id })).await?;
        let single = query_raw_rows(&app, "insert", json!({ "data": sent })).await?;
        check_row(&single[0], sent, expected_row)?;
        let id: Value = serde_json::from_str(single[0]["id"].get())?;
        for name in expected_row.keys() {
            for filter in [json!({ name: { "eq": sent[name] } }), json!({ name: { "in": [sent[name]] } })] {
                let filter = json!({ "and": [{ "id": id }, filter] });
                let found = app.query_data("count", json!({ "filter": filter })).await?;
                ensure!(found["count"] == 1, "{name} is not found by {filter}");
            }
        }
    }
    Ok(())
}

/// Compares the gateway's JSON with that of `row_to_json`, including values that only the owner's SQL can store.
#[tokio::test]
async fn values_set_by_sql_match_row_to_json() -> Result<()> {
    let app = TestApp::new().await?;
    let admin = app.database.connect().await?;
    let times = [
        "infinity",
        "-infinity",
        "0044-03-15 12:00:00.123 BC",
        "0001-12-31 23:59:59.999 BC",
        "0001-01-01",
        "1582-10-10 00:00:00.001",
        "1999-12-31 23:59:59.999",
        "2000-02-29",
        "2100-03-01",
        "9999-12-31 23:59:59.999",
        "10000-01-01",
        "294276-12-31 23:59:59.999",
        "4714-11-24 BC",
    ];
    let days = ["infinity", "-infinity", "0044-03-15 BC", "0001-01-01", "9999-12-31", "5874897-12-31"];
    let doubles =
        ["NaN", "Infinity", "-Infinity", "1e20", "1e-7", "-0", "0.1", "5e-324", "1.7976931348623157e308"];
    let numerics = ["NaN", "Infinity", "1e1000", "0.0", "-0.10"];
    let documents = ["null", "1e400", "\"\\u0001\"", "{\"b\": 1, \"a\": [1.50, {}]}"];
    for (column, kind, values) in [
        ("at", "timestamptz", &times[..]),
        ("day", "date", &days),
        ("ratio", "double precision", &doubles),
        ("price", "numeric", &numerics),
        ("meta", "jsonb", &documents),
        ("title", "text", &["", "\u{1}\u{7f}\u{2028}\"\\/\u{1f980}"]),
        ("raw", "bytea", &["", "\\xdeadbeef00"]),
    ] {
        for value in values {
            let sql = format!("INSERT INTO {}.things ({column}) VALUES ($1::text::{kind})", app.schema());
            admin.execute(&sql, &[value]).await?;
        }
    }
    let utc = |column: &str| {
        let format = "YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"";
        format!("coalesce(to_char({column} AT TIME ZONE 'UTC', '{format}'), {column}::text) AS {column}")
    };
    let sql = format!(
        "SELECT row_to_json(r)::text FROM (SELECT id, title, done, size, big, price::text AS price, ratio, day, \
         {}, meta, ref, translate(encode(raw, 'base64'), E'\\n', '') AS raw, {}, {} FROM {}.things) AS r",
        utc("at"),
        utc("created_at"),
        utc("updated_at"),
        app.schema()
    );
    let mut expected: BTreeMap<String, RawRow> = BTreeMap::new();
    for row in admin.query(&sql, &[]).await? {
        let row: RawRow = serde_json::from_str(row.try_get(0)?)?;
        expected.insert(row["id"].get().to_owned(), row);
    }
    let found = query_raw_rows(&app, "find", json!({ "orderBy": ["id"], "limit": 100 })).await?;
    let delete = app.body("delete", json!({ "filter": { "id": { "isNull": false } }, "returning": true }));
    let request = app.host.owner_request(Method::POST, "/api/bridge/query").json(&delete);
    let text = request.send().await?.error_for_status()?.text().await?;
    let response: BTreeMap<String, BTreeMap<String, Box<RawValue>>> = serde_json::from_str(&text)?;
    let deleted: Vec<RawRow> = serde_json::from_str(response["data"]["rows"].get())?;
    ensure!(found.len() == expected.len() && deleted.len() == expected.len() && found.len() > 40);
    for row in found.iter().chain(&deleted) {
        for (name, value) in &expected[row["id"].get()] {
            ensure!(row[name].get() == value.get(), "{name}: {} instead of {value}", row[name]);
        }
    }
    Ok(())
}

#[tokio::test]
async fn column_with_changed_type_is_read_as_registered_type() -> Result<()> {
    let app = TestApp::new().await?;
    let row = app.insert(json!({ "meta": { "a": 1 }, "size": 1234, "title": "7", "done": true })).await?;
    let admin = app.database.connect().await?;
    let change = async |sql: &str| {
        admin.batch_execute(&sql.replace("things", &format!("{}.things", app.schema()))).await
    };
    change("ALTER TABLE things ALTER COLUMN size TYPE text, ALTER COLUMN done TYPE text").await?;
    change("ALTER TABLE things ALTER COLUMN title TYPE integer USING title::integer").await?;
    // This column is replaced, because its index does not support the new type.
    change("ALTER TABLE things DROP COLUMN meta, ADD COLUMN meta text").await?;
    change(r#"UPDATE things SET meta = '{"a": 1}'"#).await?;
    assert_eq!(app.query_data("get", json!({ "id": row["id"] })).await?, row);
    change("UPDATE things SET meta = 'not JSON'").await?;
    assert_eq!(app.query("get", json!({ "id": row["id"] })).await?.0, 400);
    assert_eq!(app.query_data("find", json!({ "columns": ["size"] })).await?, json!([{ "size": 1234 }]));
    Ok(())
}

#[tokio::test]
async fn every_type_enforces_its_limits() -> Result<()> {
    let app = TestApp::new().await?;
    let refused = [
        ("title", json!("a\u{0}b")),
        ("size", json!(2_147_483_648_i64)),
        ("big", json!("9223372036854775808")),
        ("price", json!("NaN")),
        ("price", json!("1_000")),
        ("ratio", json!("nan")),
        ("day", json!("0000-01-01")),
        ("day", json!("2026-02-29")),
        ("day", json!("infinity")),
        ("at", json!("2026-01-02 03:04:05")),
        ("at", json!("0000-06-01T00:00:00Z")),
        ("at", json!("infinity")),
        ("meta", json!({ "a": "\u{0}" })),
        ("ref", json!("not a uuid")),
        ("raw", json!("AA")),
        ("done", json!(1)),
    ];
    for (name, value) in refused {
        let (status, problem) = app.query("insert", json!({ "data": { name: value } })).await?;
        assert_eq!(
            (status, problem["code"].as_str()),
            (400, Some("invalid_request")),
            "{name} {value} {problem}"
        );
        assert!(
            problem["errors"][0]["pointer"].as_str().is_some_and(|pointer| pointer.starts_with("/data")),
            "{problem}"
        );
    }
    let at = |text: &str| json!({ "at": text });
    let row = app.insert(at("2026-01-02T03:04:05.9996+00:00")).await?;
    assert_eq!(row["at"], "2026-01-02T03:04:06.000Z", "the column must round to milliseconds");
    let bounds = [
        (json!({ "gt": "2026-01-02T03:04:05.9999Z" }), 1),
        (json!({ "lt": "2026-01-02T03:04:06.0001Z" }), 1),
        (json!({ "lt": "2026-01-02T03:04:06Z" }), 0),
        (json!({ "gte": "2026-01-02T04:04:06+01:00" }), 1),
        (json!({ "gte": "2026-01-02T03:04:06.0001Z" }), 0),
    ];
    for (bound, count) in bounds {
        let found = app.query_data("count", json!({ "filter": { "at": bound } })).await?;
        assert_eq!(found["count"], count, "{bound}");
    }
    assert_eq!(
        app.insert(json!({ "meta": null })).await?["meta"],
        Value::Null,
        "a JSON null must be stored as SQL NULL"
    );
    Ok(())
}

#[tokio::test]
async fn json_value_keeps_its_digits_and_is_bounded() -> Result<()> {
    let app = TestApp::new().await?;
    let send = async |meta: &str| -> Result<(u16, String)> {
        let head = json!({ "action": "insert", "app": app.slug, "table": "things" }).to_string();
        let body = format!("{},\"data\":{{\"meta\":{meta}}}}}", head.trim_end_matches('}'));
        let request = app.host.owner_request(Method::POST, "/api/bridge/query");
        let response = request.header("content-type", "application/json").body(body).send().await?;
        Ok((response.status().as_u16(), response.text().await?))
    };
    let (status, text) = send(r#"{"n": 12345678901234567890.123456789, "s": 1.500}"#).await?;
    assert_eq!(status, 201, "{text}");
    assert!(text.contains("12345678901234567890.123456789") && text.contains("1.500"), "{text}");
    let (_, text) = send(r#"{"a": 1, "a": 2}"#).await?;
    assert!(
        text.contains(r#"{"a": 2}"#),
        "the last of two duplicate names must win, as in JavaScript: {text}"
    );
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    assert_eq!(send(&deep(1000)).await?.0, 201);
    assert_eq!(send(&deep(200_000)).await?.0, 400, "deeper than PostgreSQL's stack permits");
    assert_eq!(send("\"\\ud800\"").await?.0, 400, "a lone surrogate");
    assert_eq!(app.count().await?, 3, "the gateway must still be available");
    Ok(())
}

//! Tests for the planner's SQL and errors, and for its invariant over arbitrary requests: SQL text never contains a
//! value, and every quoted name in it comes from the planner or the manifest.

use super::*;
use crate::apps::Manifest;
use crate::bridge::request::{Action, BridgeRequest};
use proptest::prelude::*;
use serde_json::{Value, json};

fn table() -> Table {
    let columns: serde_json::Map<String, Value> =
        ColumnType::ALL.iter().map(|kind| (format!("c_{}", kind.name()), json!(kind.name()))).collect();
    let manifest = json!({ "name": "n", "slug": "n", "version": "1", "runtime": "static",
        "storage": { "tables": { "things": { "columns": columns } } } });
    Manifest::from_value(&manifest).unwrap().tables.remove(0)
}

fn plan_statements(table: &Table, request: &Value) -> Result<Vec<Sql>, String> {
    let body = request.to_string();
    let request = BridgeRequest::parse(body.as_bytes()).map_err(|problem| problem.detail)?;
    let calls = match request.action {
        Action::Table(call) => vec![call],
        Action::Transaction(calls) => calls,
        Action::Schemas => return Err("the request is not for a table".into()),
    };
    let join_errors = |errors: Vec<FieldError>| {
        errors
            .iter()
            .map(|error| format!("{} {}", error.pointer, error.detail))
            .collect::<Vec<_>>()
            .join("; ")
    };
    let schema: SqlIdentifier = "app_n".parse().unwrap();
    let mut statements = Vec::new();
    for call in calls {
        let planned = plan(&schema, table, &call.operation).map_err(join_errors)?;
        statements.extend(planned.statements().cloned());
    }
    Ok(statements)
}

/// Text that starts with an SQL injection, followed by a run of letters that the planner's own SQL never contains, and
/// by arbitrary characters.
fn hostile_text() -> BoxedStrategy<String> {
    let attack = prop_oneof![
        Just("'; DROP TABLE x; --"),
        Just("\" OR 1=1 --"),
        Just("$1"),
        Just("\\"),
        Just("')) UNION SELECT"),
        Just("/*"),
    ];
    (attack, "[qzQZ]{6,12}", "[^\\x00]{0,12}")
        .prop_map(|(attack, marker, rest)| format!("{attack}{marker}{rest}"))
        .boxed()
}

fn value() -> BoxedStrategy<Value> {
    prop_oneof![
        hostile_text().prop_map(Value::from),
        (7_654_321_i64..i64::MAX).prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        Just(Value::Null),
        hostile_text().prop_map(|text| json!({ "deep": [text] })),
        proptest::collection::vec(hostile_text().prop_map(Value::from), 0..3).prop_map(Value::from),
        Just(json!("0192d1f0-0000-7000-8000-0000deadbeef")),
        Just(json!("2026-03-04T05:06:07Z")),
    ]
    .boxed()
}

fn name() -> BoxedStrategy<String> {
    prop_oneof![
        4 => proptest::sample::select(ColumnType::ALL.to_vec()).prop_map(|kind| format!("c_{}", kind.name())),
        1 => Just("id".to_owned()),
        1 => Just("created_at".to_owned()),
        1 => hostile_text(),
    ]
    .boxed()
}

fn filter() -> BoxedStrategy<Value> {
    let operator = prop_oneof![
        12 => proptest::sample::select(vec!["eq", "ne", "gt", "gte", "lt", "lte", "in", "like", "ilike", "isNull", "contains"])
            .prop_map(str::to_owned),
        1 => hostile_text(),
    ];
    let leaf = (name(), operator, value(), any::<bool>()).prop_map(|(name, operator, value, is_short)| {
        if is_short { json!({ name: value }) } else { json!({ name: { operator: value } }) }
    });
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 1..3).prop_map(|parts| json!({ "and": parts })),
            proptest::collection::vec(inner.clone(), 1..3).prop_map(|parts| json!({ "or": parts })),
            inner.prop_map(|part| json!({ "not": part })),
        ]
    })
    .boxed()
}

/// The selector of a mutation, with `returning` and an optional `maxAffected`.
fn mutation() -> BoxedStrategy<Value> {
    let selector = prop_oneof![
        filter().prop_map(|filter| json!({ "filter": filter })),
        Just(json!({ "id": "0192d1f0-0000-7000-8000-0000deadbeef" })),
        value().prop_map(|id| json!({ "id": id })),
    ];
    (selector, proptest::option::of(0..2000_u32), any::<bool>())
        .prop_map(|(mut mutation, max_affected, returning)| {
            if let Some(max_affected) = max_affected {
                mutation["maxAffected"] = max_affected.into();
            }
            mutation["returning"] = returning.into();
            mutation
        })
        .boxed()
}

/// Data that is valid in at least half of the cases, so that statements are tested, not just rejections.
fn data() -> BoxedStrategy<Value> {
    let valid = (hostile_text(), any::<i32>(), hostile_text()).prop_map(|(text, number, deep)| {
        json!({ "c_text": text, "c_integer": number, "c_numeric": number.to_string(), "c_jsonb": { "a": [deep] } })
    });
    let any = proptest::collection::btree_map(name(), value(), 0..6).prop_map(|data| json!(data));
    prop_oneof![valid, any].boxed()
}

fn write() -> BoxedStrategy<Value> {
    let with_action = |action: &str, fields: Value| {
        let mut request = json!({ "action": action, "app": "n", "table": "things" });
        if let (Some(request), Value::Object(fields)) = (request.as_object_mut(), fields) {
            request.extend(fields);
        }
        request
    };
    prop_oneof![
        proptest::collection::vec(data(), 1..5)
            .prop_map(move |rows| with_action("insertMany", json!({ "rows": rows }))),
        (data(), proptest::collection::vec(name(), 1..3), any::<bool>()).prop_map(
            move |(data, key, is_merge)| {
                let resolution = if is_merge { "merge" } else { "ignore" };
                with_action("upsert", json!({ "data": data, "onConflict": key, "resolution": resolution }))
            }
        ),
        (data(), mutation()).prop_map(move |(data, mut mutation)| {
            mutation["data"] = data;
            with_action("update", mutation)
        }),
        mutation().prop_map(move |mutation| with_action("delete", mutation)),
    ]
    .boxed()
}

fn request() -> BoxedStrategy<Value> {
    let data = proptest::collection::btree_map(name(), value(), 0..6);
    let order = proptest::collection::vec((name(), any::<bool>()), 0..3);
    prop_oneof![
        data.prop_map(|data| json!({ "action": "insert", "app": "n", "table": "things", "data": data })),
        value().prop_map(|id| json!({ "action": "get", "app": "n", "table": "things", "id": id })),
        filter().prop_map(|f| json!({ "action": "count", "app": "n", "table": "things", "filter": f })),
        (filter(), order, proptest::collection::vec(name(), 1..4), 1..1000_u32, hostile_text()).prop_map(
            |(filter, order, columns, limit, after)| {
                let order: Vec<Value> = order
                    .into_iter()
                    .map(|(column, is_ascending)| json!({ "column": column, "direction": if is_ascending { "asc" } else { "desc" } }))
                    .collect();
                let mut find = json!({ "action": "find", "app": "n", "table": "things", "filter": filter,
                    "columns": columns, "orderBy": order, "limit": limit, "count": "exact" });
                if limit % 7 == 0 {
                    find["after"] = after.into();
                }
                find
            }
        ),
        write(),
        write(),
        proptest::collection::vec(write(), 1..4).prop_map(|operations| {
            let operations: Vec<Value> = operations
                .into_iter()
                .map(|mut operation| {
                    operation.as_object_mut().unwrap().remove("app");
                    operation
                })
                .collect();
            json!({ "action": "transaction", "app": "n", "operations": operations })
        }),
    ]
    .boxed()
}

/// Checks that SQL contains no hostile text, that its quoted names come from the planner or the manifest, and that its
/// numbers are placeholders or come from the planner.
fn check_names_and_numbers(text: &str, table: &Table) -> Result<(), String> {
    if text.as_bytes().windows(6).any(|run| run.iter().all(|letter| b"qzQZ".contains(letter))) {
        return Err("it contains the marker of a hostile text".to_owned());
    }
    let mut rest = text;
    let mut unquoted = String::new();
    while let Some(start) = rest.find('"') {
        unquoted.push_str(&rest[..start]);
        let end = rest[start + 1..].find('"').ok_or("unclosed quote")? + start + 1;
        let name = &rest[start + 1..end];
        let planner_names = ["t", "hit", "done", "h", "d", "count", "app_n", "things"];
        if !planner_names.contains(&name) && table.column(name).is_none() {
            return Err(format!("unknown name {name:?}"));
        }
        rest = &rest[end + 1..];
    }
    unquoted.push_str(rest);
    let numbers = numbers_outside_placeholders(&unquoted);
    let planner_numbers = ["8388608", "20", "1", "0"];
    match numbers.iter().find(|number| !planner_numbers.contains(&number.as_str())) {
        Some(number) => Err(format!("the number {number} is not a placeholder")),
        None => Ok(()),
    }
}

/// The digit sequences in a text that are not placeholders.
fn numbers_outside_placeholders(text: &str) -> Vec<String> {
    let mut numbers = Vec::new();
    let mut previous = ' ';
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c.is_ascii_digit() && previous != '$' {
            let mut run = String::from(c);
            while let Some(d) = chars.next_if(char::is_ascii_digit) {
                run.push(d);
            }
            numbers.push(run);
        } else if c == '$' {
            while chars.next_if(char::is_ascii_digit).is_some() {}
        }
        previous = c;
    }
    numbers
}

/// Arbitrary JSON, biased toward names and values that occur in requests.
fn arbitrary_json() -> BoxedStrategy<Value> {
    let word = || {
        prop_oneof![
            name(),
            proptest::sample::select(vec![
                "and", "or", "not", "eq", "in", "action", "table", "filter", "things", "delete"
            ])
            .prop_map(str::to_owned),
            any::<String>(),
        ]
    };
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        word().prop_map(Value::from),
    ];
    leaf.prop_recursive(7, 40, 5, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::btree_map(word(), inner, 0..5).prop_map(|map| json!(map)),
        ]
    })
    .boxed()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sql_contains_no_values_and_only_known_names(request in request()) {
        let table = table();
        if let Ok(statements) = plan_statements(&table, &request) {
            for sql in statements {
                prop_assert!(check_names_and_numbers(&sql.text, &table).is_ok(), "{}: {}",
                    check_names_and_numbers(&sql.text, &table).unwrap_err(), sql.text);
                let placeholders = sql.text.matches('$').count();
                prop_assert_eq!(placeholders, sql.params.len(), "{}", &sql.text);
            }
        }
    }

    #[test]
    fn plan_never_panics(text in "[\\[\\]{}\",:a-z0-9\\\\ -]{0,60}", filter in arbitrary_json()) {
        let table = table();
        let _ = BridgeRequest::parse(text.as_bytes());
        for action in ["find", "count", "delete"] {
            let _ = plan_statements(&table, &json!({ "action": action, "app": "n", "table": "things", "filter": filter }));
        }
        let rows = json!({ "action": "insertMany", "app": "n", "table": "things", "rows": filter });
        let _ = plan_statements(&table, &rows);
        let order = json!({ "action": "find", "app": "n", "table": "things", "orderBy": filter, "columns": filter });
        let _ = plan_statements(&table, &order);
        let transaction = json!({ "action": "transaction", "app": "n", "operations": filter });
        let _ = plan_statements(&table, &transaction);
    }

    #[test]
    fn sql_depends_only_on_request_shape(a in hostile_text(), b in hostile_text(), n in any::<i32>(), m in any::<i32>()) {
        let table = table();
        let sql_texts = |text: &str, number: i32| {
            let insert = json!({ "action": "insert", "app": "n", "table": "things",
                "data": { "c_text": text, "c_integer": number } });
            let find = json!({ "action": "find", "app": "n", "table": "things", "limit": (number as u32 % 1000) + 1,
                "filter": { "c_text": text, "c_integer": { "in": [number] } } });
            [insert, find].map(|request| plan_statements(&table, &request).unwrap()[0].text.clone())
        };
        prop_assert_eq!(sql_texts(&a, n), sql_texts(&b, m));
    }
}

#[test]
fn insert_uses_table_column_order() {
    let table = table();
    let request = json!({ "action": "insert", "app": "n", "table": "things",
        "data": { "c_numeric": "1.5", "c_text": null, "id": "0192d1f0-0000-7000-8000-000000000001" } });
    let sql = &plan_statements(&table, &request).unwrap()[0];
    let head = r#"INSERT INTO "app_n"."things" AS "t" ("id", "c_text", "c_numeric") VALUES ($1, $2, $3::text::numeric) RETURNING "#;
    assert!(sql.text.starts_with(head), "{}", sql.text);
    assert_eq!(sql.params[1], Param::Null(ColumnType::Text));
}

#[test]
fn plan_reports_every_invalid_field() {
    let table = table();
    let request = json!({ "action": "insert", "app": "n", "table": "things",
        "data": { "c_integer": "x", "nope": 1, "created_at": "2026-01-01T00:00:00Z", "id": null } });
    let error = plan_statements(&table, &request).unwrap_err();
    for part in ["/data/c_integer", "/data/nope", "/data/created_at is set by", "/data/id must not be null"] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

#[test]
fn find_pages_follow_order_and_cursor() {
    let table = table();
    let find = |order: Value, after: Option<String>| {
        let mut request = json!({ "action": "find", "app": "n", "table": "things", "orderBy": order });
        if let Some(after) = after {
            request["after"] = after.into();
        }
        plan_statements(&table, &request).map(|statements| statements[0].text.clone())
    };
    let newest = json!([{ "column": "created_at", "direction": "desc" }]);
    let encode_cursor = |order: &Value| {
        let text = order.to_string();
        let raw: &RawValue = serde_json::from_str(&text).unwrap();
        Order::parse(&table, Some(raw)).map(|order| {
            let keys = order
                .keys
                .iter()
                .map(|(column, _)| column.is_nullable().then(String::new).or(Some("1".into())));
            Cursor::new(&order, "", keys.collect()).encode().unwrap()
        })
    };
    let sql = find(newest.clone(), None).unwrap();
    assert!(
        sql.contains(
            r#"ORDER BY "t"."created_at" DESC NULLS FIRST, "t"."id"::uuid DESC NULLS FIRST LIMIT $1"#
        ),
        "{sql}"
    );
    let cursor = encode_cursor(&newest).unwrap();
    let sql = find(newest, Some(cursor.clone())).unwrap();
    assert!(
        sql.contains(r#"("t"."created_at", "t"."id"::uuid) < ($1::text::timestamptz, $2::text::uuid)"#),
        "{sql}"
    );
    assert!(find(json!(["id"]), Some(cursor.clone())).unwrap_err().contains("a different orderBy"));
    let filtered = json!({ "action": "find", "app": "n", "table": "things", "after": cursor,
        "orderBy": [{ "column": "created_at", "direction": "desc" }], "filter": { "c_text": "a" } });
    assert!(plan_statements(&table, &filtered).unwrap_err().contains("a different filter"));
    assert!(find(json!(["id"]), Some("x".into())).unwrap_err().contains("/after"));
    assert!(find(json!(["c_jsonb"]), None).unwrap_err().contains("jsonb"));
    assert!(find(json!([{ "column": "id", "direction": "up" }]), None).is_err());
    assert!(find(json!("id"), None).is_err());
}

#[test]
fn find_bounds_limit() {
    let table = table();
    let plan_limit = |limit: Value| {
        plan_statements(&table, &json!({ "action": "find", "app": "n", "table": "things", "limit": limit }))
    };
    assert_eq!(plan_limit(json!(1000)).unwrap()[0].params, [Param::Int8(1001)]);
    for bad in [json!(0), json!(1001), json!(-1), json!("5"), json!(1.5), json!(null)] {
        assert!(plan_limit(bad.clone()).is_err(), "{bad}");
    }
}

#[test]
fn filter_fingerprint_ignores_notation() {
    let table = table();
    let fingerprint = |text: &str| {
        let raw: &RawValue = serde_json::from_str(text).unwrap();
        cursor::fingerprint(&Filter::parse(&table, raw, "").unwrap())
    };
    assert_eq!(fingerprint(r#"{"c_text":"a"}"#), fingerprint(r#" { "c_text" : { "eq" : "\u0061" } }"#));
    assert_ne!(fingerprint(r#"{"c_text":"a"}"#), fingerprint(r#"{"c_text":"b"}"#));
    assert_ne!(fingerprint(r#"{"c_text":"a"}"#), fingerprint(r#"{"c_text":{"like":"a"}}"#));
    assert_ne!(fingerprint(r#"{"c_text":{"in":["ab"]}}"#), fingerprint(r#"{"c_text":{"in":["a","b"]}}"#));
    assert_eq!(fingerprint("{}"), "");
}

#[test]
fn insert_many_groups_rows_by_columns() {
    let table = table();
    let request = json!({ "action": "insertMany", "app": "n", "table": "things", "rows": [
        { "c_text": "a", "c_numeric": 1 }, { "c_numeric": 2, "c_text": null }, { "c_text": "c" }] });
    let sql = plan_statements(&table, &request).unwrap();
    assert_eq!(sql.len(), 2);
    let head = r#"INSERT INTO "app_n"."things" AS "t" ("id", "c_text", "c_numeric") SELECT * FROM unnest($1, $2, $3::text[]::numeric[]) RETURNING "#;
    assert!(sql[0].text.starts_with(head), "{}", sql[0].text);
    assert_eq!(sql[0].params.len(), 3);
    let many = |count: usize| {
        let rows = vec![json!({ "c_text": "a" }); count];
        plan_statements(
            &table,
            &json!({ "action": "insertMany", "app": "n", "table": "things", "rows": rows }),
        )
    };
    assert!(many(1000).is_ok() && many(1001).is_err() && many(0).is_err());
}

#[test]
fn mutation_rejects_empty_filter_and_enforces_max_affected() {
    let table = table();
    let first_sql = |action: &str, fields: Value| {
        let mut request = json!({ "action": action, "app": "n", "table": "things" });
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        plan_statements(&table, &request).map(|sql| sql[0].text.clone())
    };
    for filter in [json!({}), json!({ "and": [{}] }), json!({ "or": [{ "c_text": "a" }, {}] })] {
        let error = first_sql("delete", json!({ "filter": filter })).unwrap_err();
        assert!(error.contains("must not be empty"), "{error}");
    }
    let id = "0192d1f0-0000-7000-8000-0000deadbeef";
    assert_eq!(
        first_sql("delete", json!({ "id": id })).unwrap(),
        r#"DELETE FROM "app_n"."things" AS "t" WHERE "t"."id" = $1"#
    );
    insta::assert_snapshot!(
        first_sql("update", json!({ "filter": { "c_integer": 5 }, "data": { "c_text": "x" }, "maxAffected": 3 })).unwrap(),
        @r#"WITH "hit" AS MATERIALIZED (SELECT "t"."id" FROM "app_n"."things" AS "t" WHERE "t"."c_integer" = $1 LIMIT $2 FOR UPDATE), "done" AS (UPDATE "app_n"."things" AS "t" SET "c_text" = $3, "updated_at" = now() FROM "hit" WHERE "t"."id" = "hit"."id" AND (SELECT count(*) FROM "hit") <= $4 RETURNING TRUE) SELECT (SELECT count(*) FROM "hit"), (SELECT count(*) FROM "done")"#
    );
    let over_bound = json!({ "filter": { "c_integer": 5 }, "returning": true, "maxAffected": 1001 });
    assert!(first_sql("delete", over_bound).unwrap_err().contains("/maxAffected"));
    assert!(first_sql("update", json!({ "id": id, "data": {} })).unwrap_err().contains("/data"));
    assert!(
        first_sql("update", json!({ "id": id, "data": { "id": id } }))
            .unwrap_err()
            .contains("cannot be changed")
    );
    for bad in [json!(-1), json!("1"), json!(1.5), json!(null)] {
        assert!(first_sql("delete", json!({ "id": id, "maxAffected": bad })).is_err());
    }
}

#[test]
fn upsert_requires_key_in_data() {
    let table = table();
    let first_sql = |key: Value, data: Value| {
        let request =
            json!({ "action": "upsert", "app": "n", "table": "things", "data": data, "onConflict": key });
        plan_statements(&table, &request).map(|sql| sql[0].text.clone())
    };
    let sql = first_sql(json!(["c_text"]), json!({ "c_text": "a", "c_integer": 1 })).unwrap();
    let tail = r#" ON CONFLICT ("c_text") DO UPDATE SET "updated_at" = now(), "c_integer" = excluded."c_integer" RETURNING "#;
    assert!(sql.contains(tail), "{sql}");
    for (key, data) in [
        (json!(["c_text"]), json!({ "c_integer": 1 })),
        (json!(["c_text"]), json!({ "c_text": null })),
        (json!(["id"]), json!({ "c_text": "a" })),
    ] {
        assert!(first_sql(key, data).unwrap_err().contains("onConflict names it"));
    }
    for key in [json!([]), json!("c_text"), json!(["nope"]), json!(["c_text\") DO NOTHING --"])] {
        assert!(first_sql(key.clone(), json!({ "c_text": "a" })).is_err(), "{key}");
    }
}

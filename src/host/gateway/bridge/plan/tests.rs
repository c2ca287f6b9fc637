//! The planner's invariant, over arbitrary requests: a value never gets into the SQL text, and every name in it is one of
//! the manifest's, quoted.

use super::*;
use crate::host::gateway::apps::Manifest;
use crate::host::gateway::bridge::request::{Action, Request};
use proptest::prelude::*;
use serde_json::{Value, json};

fn table() -> Table {
    let columns: serde_json::Map<String, Value> =
        ColumnType::ALL.iter().map(|kind| (format!("c_{}", kind.name()), json!(kind.name()))).collect();
    let manifest = json!({ "name": "n", "slug": "n", "version": "1", "runtime": "static",
        "storage": { "tables": { "things": { "columns": columns } } } });
    Manifest::from_value(&manifest).unwrap().tables.remove(0)
}

fn planned(table: &Table, request: &Value) -> Result<Vec<Sql>, String> {
    let body = request.to_string();
    let request = Request::parse(body.as_bytes()).map_err(|problem| problem.detail)?;
    let Action::Table { operation, .. } = request.action else { return Err("not on a table".into()) };
    let wrong = |wrong: Vec<FieldError>| {
        wrong.iter().map(|w| format!("{} {}", w.pointer, w.detail)).collect::<Vec<_>>().join("; ")
    };
    let schema: Name = "app_n".parse().unwrap();
    Ok(match plan(&schema, table, &operation).map_err(wrong)? {
        Plan::Made(sql) | Plan::One(sql) | Plan::Number(sql) => vec![sql],
        Plan::Page(page) => std::iter::once(page.rows).chain(page.count).collect(),
    })
}

/// Text that cannot be mistaken for a part of our own SQL, between parts that try to leave their quotes.
fn hostile() -> impl Strategy<Value = String> {
    let attack = prop_oneof![
        Just("'; DROP TABLE x; --"),
        Just("\" OR 1=1 --"),
        Just("$1"),
        Just("\\"),
        Just("')) UNION SELECT"),
        Just("/*"),
    ];
    (attack, "[qzQZ]{6,12}", "[^\\x00]{0,12}")
        .prop_map(|(attack, mark, rest)| format!("{attack}{mark}{rest}"))
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        hostile().prop_map(Value::from),
        (7_654_321_i64..i64::MAX).prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        Just(Value::Null),
        hostile().prop_map(|text| json!({ "deep": [text] })),
        proptest::collection::vec(hostile().prop_map(Value::from), 0..3).prop_map(Value::from),
        Just(json!("0192d1f0-0000-7000-8000-0000deadbeef")),
        Just(json!("2026-03-04T05:06:07Z")),
    ]
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => proptest::sample::select(ColumnType::ALL.to_vec()).prop_map(|kind| format!("c_{}", kind.name())),
        1 => Just("id".to_owned()),
        1 => Just("created_at".to_owned()),
        1 => hostile(),
    ]
}

fn filter() -> impl Strategy<Value = Value> {
    let operator = prop_oneof![
        12 => proptest::sample::select(vec!["eq", "ne", "gt", "gte", "lt", "lte", "in", "like", "ilike", "isNull", "contains"])
            .prop_map(str::to_owned),
        1 => hostile(),
    ];
    let leaf = (name(), operator, value(), any::<bool>()).prop_map(|(name, operator, value, short)| {
        if short { json!({ name: value }) } else { json!({ name: { operator: value } }) }
    });
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 1..3).prop_map(|parts| json!({ "and": parts })),
            proptest::collection::vec(inner.clone(), 1..3).prop_map(|parts| json!({ "or": parts })),
            inner.prop_map(|part| json!({ "not": part })),
        ]
    })
}

fn request() -> impl Strategy<Value = Value> {
    let data = proptest::collection::btree_map(name(), value(), 0..6);
    let order = proptest::collection::vec((name(), any::<bool>()), 0..3);
    prop_oneof![
        data.prop_map(|data| json!({ "action": "insert", "app": "n", "table": "things", "data": data })),
        value().prop_map(|id| json!({ "action": "get", "app": "n", "table": "things", "id": id })),
        filter().prop_map(|f| json!({ "action": "count", "app": "n", "table": "things", "filter": f })),
        (filter(), order, proptest::collection::vec(name(), 1..4), 1..1000_u32, hostile()).prop_map(
            |(filter, order, columns, limit, after)| {
                let order: Vec<Value> = order
                    .into_iter()
                    .map(|(column, up)| json!({ "column": column, "direction": if up { "asc" } else { "desc" } }))
                    .collect();
                let mut find = json!({ "action": "find", "app": "n", "table": "things", "filter": filter,
                    "columns": columns, "orderBy": order, "limit": limit, "count": "exact" });
                if limit % 7 == 0 {
                    find["after"] = after.into();
                }
                find
            }
        ),
    ]
}

/// Everything that the planner may write: its own words, the manifest's names in quotes, placeholders.
fn is_only_ours(text: &str, table: &Table) -> Result<(), String> {
    let mut rest = text;
    let mut outside = String::new();
    while let Some(start) = rest.find('"') {
        outside.push_str(&rest[..start]);
        let end = rest[start + 1..].find('"').ok_or("an open quote")? + start + 1;
        let name = &rest[start + 1..end];
        let known = ["t", "#", "app_n", "things"].contains(&name) || table.column(name).is_some();
        // The quotes inside of to_char's pattern.
        if !known && !["T", "Z"].contains(&name) {
            return Err(format!("an unknown name {name:?}"));
        }
        rest = &rest[end + 1..];
    }
    outside.push_str(rest);
    let digits = regex_like_numbers(&outside);
    let fixed = ["9007199254740991", "64", "24", "8", "3", "0"];
    match digits.iter().find(|number| !fixed.contains(&number.as_str())) {
        Some(number) => Err(format!("a number {number} that is no placeholder")),
        None => Ok(()),
    }
}

/// Runs of digits that are neither placeholders nor parts of words that we wrote.
fn regex_like_numbers(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut before = ' ';
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c.is_ascii_digit() && before != '$' {
            let mut run = String::from(c);
            while let Some(d) = chars.next_if(char::is_ascii_digit) {
                run.push(d);
            }
            found.push(run);
        } else if c == '$' {
            while chars.next_if(char::is_ascii_digit).is_some() {}
        }
        before = c;
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_value_gets_into_the_text_and_every_name_is_the_manifest_s(request in request()) {
        let table = table();
        if let Ok(statements) = planned(&table, &request) {
            for sql in statements {
                prop_assert!(is_only_ours(&sql.text, &table).is_ok(), "{}: {}",
                    is_only_ours(&sql.text, &table).unwrap_err(), sql.text);
                let placeholders = sql.text.matches('$').count();
                prop_assert_eq!(placeholders, sql.params.len(), "{}", &sql.text);
            }
        }
    }

    #[test]
    fn the_text_depends_on_the_shape_alone(a in hostile(), b in hostile(), n in any::<i32>(), m in any::<i32>()) {
        let table = table();
        let of = |text: &str, number: i32| {
            let insert = json!({ "action": "insert", "app": "n", "table": "things",
                "data": { "c_text": text, "c_integer": number } });
            let find = json!({ "action": "find", "app": "n", "table": "things", "limit": (number as u32 % 1000) + 1,
                "filter": { "c_text": text, "c_integer": { "in": [number] } } });
            [insert, find].map(|request| planned(&table, &request).unwrap()[0].text.clone())
        };
        prop_assert_eq!(of(&a, n), of(&b, m));
    }
}

#[test]
fn an_insert_names_its_columns_in_the_table_s_order() {
    let table = table();
    let request = json!({ "action": "insert", "app": "n", "table": "things",
        "data": { "c_numeric": "1.5", "c_text": null, "id": "0192d1f0-0000-7000-8000-000000000001" } });
    let sql = &planned(&table, &request).unwrap()[0];
    let head = r#"INSERT INTO "app_n"."things" AS "t" ("id", "c_text", "c_numeric") VALUES ($1, $2, $3::text::numeric) RETURNING "#;
    assert!(sql.text.starts_with(head), "{}", sql.text);
    assert_eq!(sql.params[1], Param::Null(ColumnType::Text));
}

#[test]
fn every_field_that_does_not_fit_is_named() {
    let table = table();
    let request = json!({ "action": "insert", "app": "n", "table": "things",
        "data": { "c_integer": "x", "nope": 1, "created_at": "2026-01-01T00:00:00Z", "id": null } });
    let why = planned(&table, &request).unwrap_err();
    for part in ["/data/c_integer", "/data/nope", "/data/created_at is set by", "/data/id must not be null"] {
        assert!(why.contains(part), "{part} in {why}");
    }
}

#[test]
fn pages_follow_the_order_and_its_cursor() {
    let table = table();
    let find = |order: Value, after: Option<String>| {
        let mut request = json!({ "action": "find", "app": "n", "table": "things", "orderBy": order });
        if let Some(after) = after {
            request["after"] = after.into();
        }
        planned(&table, &request).map(|statements| statements[0].text.clone())
    };
    let newest = json!([{ "column": "created_at", "direction": "desc" }]);
    let parsed = |order: &Value| {
        let text = order.to_string();
        let raw: &RawValue = serde_json::from_str(&text).unwrap();
        Order::parse(&table, Some(raw)).map(|order| {
            let keys = order
                .keys
                .iter()
                .map(|(column, _)| column.is_nullable().then(String::new).or(Some("1".into())));
            Cursor::new(&order, keys.collect()).encode()
        })
    };
    let sql = find(newest.clone(), None).unwrap();
    assert!(
        sql.contains(r#"ORDER BY "t"."created_at" DESC NULLS FIRST, "t"."id" DESC NULLS FIRST LIMIT $1"#),
        "{sql}"
    );
    let cursor = parsed(&newest).unwrap();
    let sql = find(newest, Some(cursor.clone())).unwrap();
    assert!(
        sql.contains(r#"("t"."created_at", "t"."id") < ($1::text::timestamptz(3), $2::text::uuid)"#),
        "{sql}"
    );
    assert!(find(json!(["id"]), Some(cursor)).unwrap_err().contains("another orderBy"));
    assert!(find(json!(["id"]), Some("x".into())).unwrap_err().contains("/after"));
    assert!(find(json!(["c_jsonb"]), None).unwrap_err().contains("jsonb"));
    assert!(find(json!([{ "column": "id", "direction": "up" }]), None).is_err());
    assert!(find(json!("id"), None).is_err());
}

#[test]
fn limits_are_bounded() {
    let table = table();
    let with = |limit: Value| {
        planned(&table, &json!({ "action": "find", "app": "n", "table": "things", "limit": limit }))
    };
    assert_eq!(with(json!(1000)).unwrap()[0].params, [Param::Int8(1001)]);
    for bad in [json!(0), json!(1001), json!(-1), json!("5"), json!(1.5), json!(null)] {
        assert!(with(bad.clone()).is_err(), "{bad}");
    }
}

//! Tests bridge pagination: sorting by every sortable type, ties and NULLs, inserts between pages, and cursors from
//! different queries. Also covers how filters compare NULLs.

use std::collections::HashSet;

use anyhow::Result;
use serde_json::{Value, json};

use super::bridge::TestApp;

#[tokio::test]
async fn pages_in_any_order_match_unpaged_result() -> Result<()> {
    let app = TestApp::new().await?;
    let rows: Vec<Value> = (0..24_i64)
        .map(|n| {
            let or_null = |value: Value| if n % 6 == 5 { Value::Null } else { value };
            let k = n % 4;
            json!({
                "title": or_null(json!(["", "B", "a", "é\"'\\"][k as usize])),
                "done": or_null(json!(k > 1)), "size": or_null(json!(k - 2)),
                "big": or_null(json!((i64::MAX - k).to_string())), "price": or_null(json!(format!("{k}.{k}0"))),
                "ratio": or_null([json!("NaN"), json!("-Infinity"), json!(0.1), json!(-0.0)][k as usize].clone()),
                "day": or_null(json!(format!("000{}-01-01", k + 1))),
                "at": or_null(json!(format!("2026-01-01T00:00:00.00{k}Z"))),
                "raw": or_null(json!(["", "AA==", "AAA=", "/w=="][k as usize])),
            })
        })
        .collect();
    app.query_data("insertMany", json!({ "rows": rows })).await?;
    for column in ["id", "title", "done", "size", "big", "price", "ratio", "day", "at", "raw", "created_at"] {
        for direction in ["asc", "desc"] {
            let order = json!([{ "column": column, "direction": direction }, { "column": "size", "direction": "desc" }]);
            let find = |limit: u32, after: Option<&Value>| {
                let mut params = json!({ "orderBy": order, "limit": limit });
                if let Some(after) = after {
                    params["after"] = after.clone();
                }
                app.body("find", params)
            };
            let ids = |page: &Value| -> Vec<Value> {
                page["data"].as_array().into_iter().flatten().map(|row| row["id"].clone()).collect()
            };
            let all_ids = ids(&app.host.query(&find(1000, None)).await?.1);
            let (mut paged_ids, mut after) = (Vec::new(), None);
            loop {
                let (status, page) = app.host.query(&find(5, after.as_ref())).await?;
                assert!(status.is_success(), "{column} {direction} {page}");
                paged_ids.extend(ids(&page));
                after = Some(page["nextCursor"].clone()).filter(Value::is_string);
                if after.is_none() {
                    break;
                }
            }
            assert_eq!(paged_ids, all_ids, "{column} {direction}");
            assert_eq!(paged_ids.len(), 24);
        }
    }
    Ok(())
}

#[tokio::test]
async fn inserts_between_pages_cause_no_gap_or_duplicate() -> Result<()> {
    let app = TestApp::new().await?;
    let rows: Vec<Value> = (0..20).map(|n| json!({ "title": "first", "size": n / 4 })).collect();
    app.query_data("insertMany", json!({ "rows": rows })).await?;
    let (mut paged_ids, mut after) = (Vec::new(), Value::Null);
    for round in 0.. {
        let mut find = json!({ "orderBy": ["size"], "limit": 3 });
        if after.is_string() {
            find["after"] = after.take();
        }
        let (_, mut page) = app.query("find", find).await?;
        let rows = page["data"].as_array().cloned().unwrap_or_default();
        paged_ids
            .extend(rows.into_iter().filter(|row| row["title"] == "first").map(|row| row["id"].to_string()));
        after = page["nextCursor"].take();
        if after.is_null() {
            break;
        }
        // Inserts rows before all others, among them, and after them.
        for size in [-1, round % 5, 9] {
            app.insert(json!({ "title": "later", "size": size })).await?;
        }
        if round > 60 {
            break;
        }
    }
    assert_eq!(paged_ids.len(), 20, "each row must be returned once");
    assert_eq!(paged_ids.iter().collect::<HashSet<_>>().len(), 20);
    Ok(())
}

#[tokio::test]
async fn cursor_is_bound_to_its_order_and_filter() -> Result<()> {
    let app = TestApp::new().await?;
    app.query_data("insertMany", json!({ "rows": vec![json!({ "title": "a", "size": 1 }); 5] })).await?;
    let (_, page) = app.query("find", json!({ "filter": { "title": "a" }, "limit": 2 })).await?;
    let cursor = page["nextCursor"].clone();
    let find_with = async |params: Value| -> Result<(u16, String)> {
        let mut find = json!({ "limit": 2, "after": cursor });
        find.as_object_mut()
            .into_iter()
            .for_each(|find| find.extend(params.as_object().cloned().unwrap_or_default()));
        let (status, body) = app.query("find", find).await?;
        Ok((status, body["detail"].as_str().unwrap_or_default().to_owned()))
    };
    let equivalent_filter = json!({ "filter": { "title": { "eq": "a" } } });
    assert_eq!(find_with(equivalent_filter).await?.0, 200, "an equivalent filter must be accepted");
    for (params, reason) in [
        (json!({}), "belongs to a different filter"),
        (json!({ "filter": { "title": "b" } }), "belongs to a different filter"),
        (json!({ "filter": { "title": "a" }, "orderBy": ["size"] }), "belongs to a different orderBy"),
        (json!({ "filter": { "title": "a" }, "after": "AAAA" }), "is not a cursor"),
        (json!({ "filter": { "title": "a" }, "after": "" }), "is not a cursor"),
    ] {
        let (status, detail) = find_with(params.clone()).await?;
        assert_eq!(status, 400, "{params}");
        assert!(detail.starts_with("/after") && detail.contains(reason), "{params}: {detail}");
    }
    Ok(())
}

#[tokio::test]
async fn nulls_match_no_comparison() -> Result<()> {
    let app = TestApp::new().await?;
    app.query_data("insertMany", json!({ "rows": [{ "size": 1 }, { "size": 2 }, { "size": null }] })).await?;
    let cases = [
        (json!({ "size": { "ne": 1 } }), 1),
        (json!({ "not": { "size": 1 } }), 1),
        (json!({ "size": null }), 1),
        (json!({ "size": { "eq": null } }), 1),
        (json!({ "size": { "ne": null } }), 2),
        (json!({ "or": [{ "size": { "ne": 1 } }, { "size": { "isNull": true } }] }), 2),
        (json!({ "size": { "in": [] } }), 0),
        (json!({ "not": { "size": { "in": [] } } }), 3),
        (json!({ "not": { "size": { "isNull": true } } }), 2),
    ];
    for (filter, count) in cases {
        let found = app.query_data("count", json!({ "filter": filter })).await?;
        assert_eq!(found["count"], count, "{filter}");
    }
    for filter in [json!({ "size": { "gt": null } }), json!({ "size": { "in": [1, null] } })] {
        assert_eq!(app.query("count", json!({ "filter": filter })).await?.0, 400, "{filter}");
    }
    Ok(())
}

#[tokio::test]
async fn pages_use_registered_type_after_column_type_change() -> Result<()> {
    let app = TestApp::new().await?;
    let rows: Vec<Value> = (0..6)
        .map(|n| {
            let (day, at) = (format!("2026-01-0{}", n + 1), format!("2026-01-01T00:00:00.00{n}Z"));
            json!({ "size": n, "day": day, "at": at })
        })
        .collect();
    app.query_data("insertMany", json!({ "rows": rows })).await?;
    let table = format!("{}.things", app.schema());
    let change = format!(
        "ALTER TABLE {table} ALTER COLUMN size TYPE numeric, ALTER COLUMN day TYPE timestamp,
             ALTER COLUMN at TYPE timestamp;
         UPDATE {table} SET size = size / 3, day = day + interval '7 hours'"
    );
    app.database.connect().await?.batch_execute(&change).await?;
    for column in ["size", "day", "at"] {
        let (mut paged_ids, mut after) = (Vec::new(), Value::Null);
        // A cursor that does not advance would repeat a row.
        for _ in 0..10 {
            let mut find = json!({ "orderBy": [column], "limit": 1 });
            if after.is_string() {
                find["after"] = after.take();
            }
            let (status, mut page) = app.query("find", find).await?;
            assert_eq!(status, 200, "{column} {page}");
            paged_ids.extend(page["data"].as_array().into_iter().flatten().map(|row| row["id"].to_string()));
            after = page["nextCursor"].take();
            if after.is_null() {
                break;
            }
        }
        assert_eq!(paged_ids.len(), 6, "{column}");
        assert_eq!(paged_ids.iter().collect::<HashSet<_>>().len(), 6, "{column}");
    }
    Ok(())
}

//! Tests `insertMany`, `upsert`, `update` and `delete`, and the resulting rows.

use anyhow::Result;
use serde_json::{Value, json};

use super::bridge::TestApp;

const ABSENT_ID: &str = "0192d1f0-0000-7000-8000-000000000000";

fn as_slice(rows: &Value) -> &[Value] {
    rows.as_array().map_or(&[], Vec::as_slice)
}

#[tokio::test]
async fn insert_many_returns_rows_in_request_order() -> Result<()> {
    let app = TestApp::new().await?;
    let admin = app.database.connect().await?;
    // The owner has set a default. A row without the column gets it; a row with null does not.
    admin
        .batch_execute(&format!("ALTER TABLE {}.things ALTER COLUMN size SET DEFAULT 7", app.schema()))
        .await?;
    let rows = json!([
        { "title": "a", "size": 1, "price": "1.50", "meta": { "x": [1] }, "raw": "AAE=" },
        { "title": "b" },
        { "title": "c", "size": null },
        { "title": "d", "big": "9223372036854775807", "done": true, "ratio": 0.5, "day": "2026-01-02",
          "at": "2026-01-02T03:04:05Z", "ref": ABSENT_ID },
        { "title": "e" }
    ]);
    let (status, response) = app.query("insertMany", json!({ "rows": rows })).await?;
    assert_eq!(status, 201, "{response}");
    let inserted: Vec<_> =
        as_slice(&response["data"]).iter().map(|row| (&row["title"], &row["size"])).collect();
    let expected = json!([["a", 1], ["b", 7], ["c", null], ["d", 7], ["e", 7]]);
    let expected: Vec<_> = as_slice(&expected).iter().map(|pair| (&pair[0], &pair[1])).collect();
    assert_eq!(inserted, expected, "{response}");
    assert_eq!(response["data"][0]["price"], "1.50");
    assert_eq!(response["data"][3]["big"], "9223372036854775807");
    assert_eq!(app.count().await?, 5);

    let thousand: Vec<Value> = (0..1000).map(|n| json!({ "title": format!("n{n}"), "size": n })).collect();
    let inserted = app.query_data("insertMany", json!({ "rows": thousand })).await?;
    assert_eq!(as_slice(&inserted).len(), 1000);
    assert!(
        as_slice(&inserted).iter().zip(0..).all(|(row, n)| row["size"] == json!(n)),
        "the rows must be in request order"
    );
    Ok(())
}

#[tokio::test]
async fn insert_many_with_a_bad_row_inserts_no_row() -> Result<()> {
    let app = TestApp::new().await?;
    let duplicate_ref = "0192d1f0-0000-7000-8000-000000000001";
    let refused =
        json!([{ "title": "a", "ref": duplicate_ref }, { "title": "b", "size": "x" }, { "nope": 1 }, 5]);
    let (status, problem) = app.query("insertMany", json!({ "rows": refused })).await?;
    assert_eq!(status, 400);
    let text = problem["detail"].as_str().unwrap_or_default();
    for pointer in ["/rows/1/size", "/rows/2/nope", "/rows/3:"] {
        assert!(text.contains(pointer), "{pointer} in {text}");
    }
    // The second request's rows have two sets of columns, so it needs a two-statement transaction.
    for rows in [
        json!([{ "ref": duplicate_ref }, { "ref": duplicate_ref }]),
        json!([{ "ref": duplicate_ref }, { "ref": duplicate_ref, "size": 1 }]),
    ] {
        let (status, problem) = app.query("insertMany", json!({ "rows": rows })).await?;
        assert_eq!((status, problem["code"].as_str()), (409, Some("conflict")), "{problem}");
        assert_eq!(app.count().await?, 0, "a row was inserted");
    }
    Ok(())
}

#[tokio::test]
async fn upsert_inserts_merges_or_ignores() -> Result<()> {
    let app = TestApp::new().await?;
    let key = "0192d1f0-0000-7000-8000-000000000001";
    let upsert = |data: Value, resolution: Value| {
        let mut fields = json!({ "data": data, "onConflict": ["ref"] });
        if resolution.is_string() {
            fields["resolution"] = resolution;
        }
        fields
    };
    let inserted =
        app.query_data("upsert", upsert(json!({ "ref": key, "title": "a", "size": 1 }), json!(null))).await?;
    assert_eq!((&inserted["title"], &inserted["size"]), (&json!("a"), &json!(1)));
    let merged =
        app.query_data("upsert", upsert(json!({ "ref": key, "title": "b" }), json!("merge"))).await?;
    assert_eq!((&merged["id"], &merged["title"], &merged["size"]), (&inserted["id"], &json!("b"), &json!(1)));
    let emptied = app.query_data("upsert", upsert(json!({ "ref": key, "title": null }), json!(null))).await?;
    assert_eq!(
        (&emptied["title"], &emptied["size"]),
        (&Value::Null, &json!(1)),
        "null must overwrite the stored value"
    );
    let ignored =
        app.query_data("upsert", upsert(json!({ "ref": key, "title": "c" }), json!("ignore"))).await?;
    assert_eq!(ignored, emptied, "the row must be unchanged");
    assert_eq!(app.count().await?, 1);
    let by_id = json!({ "data": { "id": inserted["id"], "title": "d" }, "onConflict": ["id"] });
    assert_eq!(app.query_data("upsert", by_id).await?["title"], "d");

    for (data, key) in [
        (json!({ "title": "x" }), json!(["title"])),
        (json!({ "title": "x", "ref": key }), json!(["title", "ref"])),
        (json!({ "title": "x" }), json!(["ref"])),
        (json!({ "ref": null }), json!(["ref"])),
    ] {
        let (status, problem) = app.query("upsert", json!({ "data": data, "onConflict": key })).await?;
        assert_eq!((status, problem["code"].as_str()), (400, Some("invalid_request")), "{key} {problem}");
    }
    Ok(())
}

#[tokio::test]
async fn concurrent_upserts_with_same_key_create_one_row() -> Result<()> {
    let app = TestApp::new().await?;
    let key = "0192d1f0-0000-7000-8000-000000000001";
    let upserts = (0..60).map(|n| {
        let resolution = if n % 2 == 0 { "ignore" } else { "merge" };
        let data = json!({ "ref": key, "size": n });
        let app = &app;
        async move {
            app.query_data("upsert", json!({ "data": data, "onConflict": ["ref"], "resolution": resolution }))
                .await
        }
    });
    let rows = futures_util::future::try_join_all(upserts).await?;
    assert!(rows.iter().all(|row| row["id"] == rows[0]["id"]), "every upsert must return the same row");
    assert_eq!(app.count().await?, 1);
    Ok(())
}

#[tokio::test]
async fn update_changes_only_named_columns() -> Result<()> {
    let app = TestApp::new().await?;
    let row = app.insert(json!({ "title": "a", "size": 1, "price": "1" })).await?;
    for n in 2..6 {
        app.insert(json!({ "title": "b", "size": n })).await?;
    }
    let by_id = json!({ "id": row["id"], "data": { "title": "z", "price": null } });
    assert_eq!(app.query_data("update", by_id.clone()).await?, json!({ "affected": 1 }));
    let current = app.query_data("get", json!({ "id": row["id"] })).await?;
    assert_eq!(
        (&current["title"], &current["price"], &current["size"]),
        (&json!("z"), &Value::Null, &json!(1))
    );
    assert_eq!(current["created_at"], row["created_at"]);
    assert_ne!(current["updated_at"], row["updated_at"]);
    let mut returned = by_id;
    returned["returning"] = json!(true);
    let data = app.query_data("update", returned).await?;
    assert_eq!((&data["affected"], &data["rows"][0]["title"]), (&json!(1), &json!("z")));

    let many = json!({ "filter": { "title": "b" }, "data": { "done": true } });
    assert_eq!(app.query_data("update", many).await?, json!({ "affected": 4 }));
    let none = json!({ "filter": { "title": "none" }, "data": { "done": true } });
    assert_eq!(app.query_data("update", none).await?, json!({ "affected": 0 }));
    let absent = json!({ "id": ABSENT_ID, "data": { "done": true } });
    assert_eq!(app.query("update", absent).await?.0, 404);
    Ok(())
}

#[tokio::test]
async fn update_or_delete_beyond_its_limit_changes_nothing() -> Result<()> {
    let app = TestApp::new().await?;
    for n in 0..5 {
        app.insert(json!({ "title": "b", "size": n })).await?;
    }
    for returning in [false, true] {
        for (action, data) in [("update", json!({ "title": "c" })), ("delete", Value::Null)] {
            let mut fields = json!({ "filter": { "title": "b" }, "maxAffected": 4, "returning": returning });
            if !data.is_null() {
                fields["data"] = data;
            }
            let (status, problem) = app.query(action, fields.clone()).await?;
            assert_eq!((status, problem["code"].as_str()), (409, Some("conflict")), "{action} {problem}");
            assert_eq!(problem["maxAffected"], 4);
            assert_eq!(app.find_titles(json!({})).await?, ["b"; 5], "{action}");
            fields["filter"] = json!({ "size": { "gte": 3 }, "title": "b" });
            fields["maxAffected"] = json!(2);
            let response = app.query_data(action, fields).await?;
            assert_eq!(response["affected"], 2, "{action} {response}");
            assert_eq!(response.get("rows").map(|rows| as_slice(rows).len()), returning.then_some(2));
            app.query_data("delete", json!({ "filter": { "size": { "gte": 3 } } })).await?;
            for n in 3..5 {
                app.insert(json!({ "title": "b", "size": n })).await?;
            }
        }
    }
    let none = json!({ "filter": { "title": "b" }, "maxAffected": 0 });
    assert_eq!(app.query("delete", none).await?.0, 409);
    Ok(())
}

#[tokio::test]
async fn delete_requires_a_filter_and_removes_only_matches() -> Result<()> {
    let app = TestApp::new().await?;
    let row = app.insert(json!({ "title": "a" })).await?;
    app.insert(json!({ "title": "b", "size": 1 })).await?;
    let deleted = app.query_data("delete", json!({ "id": row["id"], "returning": true })).await?;
    assert_eq!(deleted, json!({ "affected": 1, "rows": [row] }));
    assert_eq!(app.query("delete", json!({ "id": row["id"] })).await?.0, 404);
    for filter in [json!({}), json!({ "and": [{}] }), json!({ "or": [{ "title": "x" }, {}] }), Value::Null] {
        for action in ["delete", "update"] {
            let mut fields = json!({ "filter": filter });
            if action == "update" {
                fields["data"] = json!({ "size": 9 });
            }
            assert_eq!(app.query(action, fields).await?.0, 400, "{action} {filter}");
        }
    }
    assert_eq!(app.count().await?, 1);
    assert_eq!(app.query_data("delete", json!({ "filter": { "size": 1 } })).await?, json!({ "affected": 1 }));
    Ok(())
}

#[tokio::test]
async fn concurrent_update_rechecks_its_filter() -> Result<()> {
    let app = TestApp::new().await?;
    for n in 0..3 {
        app.insert(json!({ "title": "b", "size": n })).await?;
    }
    let mut admin = app.database.connect().await?;
    let observer = app.database.connect().await?;
    let concurrent = admin.transaction().await?;
    let sql = format!("UPDATE {}.things SET title = 'gone' WHERE size = 0", app.schema());
    concurrent.execute(&sql, &[]).await?;
    let change = json!({ "filter": { "title": "b" }, "data": { "done": true }, "maxAffected": 3 });
    let updating = app.query_data("update", change);
    let committing = async {
        app.host
            .wait_until("the update is waiting", async || {
                let waiting = "SELECT count(*) FROM pg_stat_activity \
                     WHERE datname = current_database() AND wait_event_type = 'Lock'";
                Ok(observer.query_one(waiting, &[]).await?.get::<_, i64>(0) == 1)
            })
            .await?;
        concurrent.commit().await?;
        Ok::<_, anyhow::Error>(())
    };
    let (changed, committed) = tokio::join!(updating, committing);
    committed?;
    assert_eq!(changed?, json!({ "affected": 2 }), "a row that no longer matches must be unchanged");
    Ok(())
}

//! In a `transaction`, all operations or none take effect, and the error response identifies the failed operation.

use anyhow::Result;
use serde_json::{Value, json};

use super::bridge::TestApp;

const KEY: &str = "0192d1f0-0000-7000-8000-000000000001";

async fn run_transaction(app: &TestApp, operations: Value) -> Result<(u16, Value)> {
    let body = json!({ "action": "transaction", "app": app.slug, "operations": operations });
    let (status, response) = app.host.query(&body).await?;
    Ok((status.as_u16(), response))
}

fn operation(action: &str, fields: Value) -> Value {
    let mut operation = json!({ "action": action, "table": "things" });
    if let (Some(operation), Value::Object(fields)) = (operation.as_object_mut(), fields) {
        operation.extend(fields);
    }
    operation
}

#[tokio::test]
async fn transaction_returns_the_result_of_each_operation() -> Result<()> {
    let app = TestApp::new().await?;
    let operations = json!([
        operation("insert", json!({ "data": { "id": KEY, "title": "a" } })),
        operation("insertMany", json!({ "rows": [{ "title": "b" }, { "title": "c", "size": 3 }] })),
        operation("upsert", json!({ "data": { "id": KEY, "size": 1 }, "onConflict": ["id"] })),
        operation(
            "upsert",
            json!({ "data": { "id": KEY, "size": 9 }, "onConflict": ["id"], "resolution": "ignore" })
        ),
        operation("update", json!({ "filter": { "title": "b" }, "data": { "size": 2 }, "maxAffected": 1 })),
        operation("get", json!({ "id": KEY })),
        operation("find", json!({ "orderBy": ["size"], "columns": ["title"], "limit": 2, "count": "exact" })),
        operation("delete", json!({ "filter": { "title": "c" }, "returning": true })),
        operation("count", json!({})),
    ]);
    let (status, response) = run_transaction(&app, operations).await?;
    assert_eq!(status, 200, "{response}");
    let results = &response["data"];
    assert_eq!(results.as_array().map(Vec::len), Some(9));
    assert_eq!(results[0]["data"]["title"], "a");
    assert_eq!(results[1]["data"][1]["title"], "c");
    assert_eq!(results[2]["data"]["size"], 1);
    assert_eq!(results[3]["data"]["size"], 1, "the row must be unchanged");
    assert_eq!(results[4], json!({ "data": { "affected": 1 } }));
    assert_eq!(results[5]["data"]["size"], 1);
    assert_eq!(results[6]["data"], json!([{ "title": "a" }, { "title": "b" }]));
    assert!(results[6]["nextCursor"].is_string() && results[6]["count"] == 3);
    assert_eq!(results[7]["data"]["rows"][0]["title"], "c");
    assert_eq!(results[8], json!({ "data": { "count": 2 } }));
    assert_eq!(app.count().await?, 2);
    Ok(())
}

#[tokio::test]
async fn failed_transaction_changes_nothing_and_names_operation() -> Result<()> {
    let app = TestApp::new().await?;
    app.insert(json!({ "title": "there", "ref": KEY })).await?;
    let good = || operation("insert", json!({ "data": { "title": "new" } }));
    let cases = [
        (operation("insert", json!({ "data": { "ref": KEY } })), 409, "conflict"),
        (operation("get", json!({ "id": "0192d1f0-0000-7000-8000-00000000dead" })), 404, "not_found"),
        (operation("delete", json!({ "id": "0192d1f0-0000-7000-8000-00000000dead" })), 404, "not_found"),
        (operation("delete", json!({ "filter": { "title": "there" }, "maxAffected": 0 })), 409, "conflict"),
        (operation("insert", json!({ "data": { "meta": "\u{0}" } })), 400, "invalid_request"),
        (
            operation("upsert", json!({ "data": { "title": "x" }, "onConflict": ["title"] })),
            400,
            "invalid_request",
        ),
        (operation("insert", json!({ "data": { "size": "x" } })), 400, "invalid_request"),
        (json!({ "action": "get", "table": "none", "id": KEY }), 404, "not_found"),
    ];
    for (bad, status, code) in cases {
        // Wherever the failing operation is, neither earlier nor later operations take effect.
        for index in [0, 1, 2] {
            let mut operations = vec![good(), good()];
            operations.insert(index, bad.clone());
            let (actual, problem) = run_transaction(&app, json!(operations)).await?;
            assert_eq!((actual, problem["code"].as_str()), (status, Some(code)), "{bad} {problem}");
            assert_eq!(problem["operation"], index, "{bad} {problem}");
            assert_eq!(app.find_titles(json!({})).await?, ["there"], "{bad} at {index}");
        }
    }
    let wrong = operation("insert", json!({ "data": { "size": "x" } }));
    let (_, problem) = run_transaction(&app, json!([good(), wrong])).await?;
    assert_eq!(problem["errors"][0]["pointer"], "/operations/1/data/size", "{problem}");
    Ok(())
}

#[tokio::test]
async fn failing_deferred_constraint_is_not_reported_as_success() -> Result<()> {
    let app = TestApp::new().await?;
    let admin = app.database.connect().await?;
    admin
        .batch_execute(&format!(
            "ALTER TABLE {0}.things ADD CONSTRAINT fk_ref FOREIGN KEY (ref) REFERENCES {0}.things (id)
                DEFERRABLE INITIALLY DEFERRED",
            app.schema()
        ))
        .await?;
    let orphan = operation("insert", json!({ "data": { "ref": KEY } }));
    let (status, problem) = run_transaction(&app, json!([orphan])).await?;
    assert_eq!((status, problem["constraint"].as_str()), (409, Some("fk_ref")), "{problem}");
    assert_eq!(
        app.query("insert", json!({ "data": { "ref": KEY } })).await?.0,
        409,
        "a single insert must be refused, too"
    );
    assert_eq!(app.count().await?, 0);
    let parent = operation("insert", json!({ "data": { "id": KEY } }));
    let child = operation("insert", json!({ "data": { "ref": KEY } }));
    assert_eq!(run_transaction(&app, json!([child, parent])).await?.0, 200);
    Ok(())
}

#[tokio::test]
async fn single_requests_never_join_a_transaction() -> Result<()> {
    let app = TestApp::new().await?;
    let pair = |n: i32, is_valid: bool| {
        // Only PostgreSQL rejects this value, after the first operation has succeeded.
        let meta = if is_valid { json!(n) } else { json!("\u{0}") };
        json!([
            operation("insert", json!({ "data": { "title": format!("pair{n}") } })),
            operation("insert", json!({ "data": { "title": format!("pair{n}"), "meta": meta } })),
        ])
    };
    for round in 0..5 {
        let transactions = (0..60).map(|n| {
            let app = &app;
            async move {
                let (status, response) = run_transaction(app, pair(n, n % 3 > 0)).await?;
                anyhow::ensure!(status == if n % 3 > 0 { 200 } else { 400 }, "{status} {response}");
                Ok(())
            }
        });
        let singles = (0..120).map(|n| {
            let app = &app;
            async move { app.insert(json!({ "title": format!("single{round}-{n}") })).await.map(drop) }
        });
        let (pairs, singles) = tokio::join!(
            futures_util::future::try_join_all(transactions),
            futures_util::future::try_join_all(singles)
        );
        pairs?;
        singles?;
    }
    let single = json!({ "filter": { "title": { "like": "single%" } } });
    assert_eq!(
        app.query_data("count", single).await?["count"],
        600,
        "every single insert must be independent of the transactions"
    );
    let pair = json!({ "filter": { "title": { "like": "pair%" } } });
    assert_eq!(
        app.query_data("count", pair).await?["count"],
        400,
        "200 transactions must commit, each with both rows"
    );
    Ok(())
}

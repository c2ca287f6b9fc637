//! The bridge limits the digits per number and per request, the bytes per row, and the bytes per response. Each limit
//! is enforced before the oversized data is held in memory.

use anyhow::Result;
use kit::pg::test_database;
use reqwest::StatusCode;
use serde_json::{Value, json};

use super::host::{Host, host_with_app, unique_name};

async fn count(host: &Host, app: &str) -> Result<Value> {
    Ok(host.query_data(&json!({ "action": "count", "app": app, "table": "t" })).await?["count"].clone())
}

fn first_error(problem: &Value) -> String {
    format!("{} {}", problem["errors"][0]["pointer"], problem["errors"][0]["detail"])
}

#[tokio::test]
async fn numeric_exponent_cannot_inflate_response() -> Result<()> {
    let (database, app) = (test_database().await?, unique_name("digits"));
    let tables = json!({ "t": { "columns": { "n": "numeric", "j": "jsonb" } } });
    let host = host_with_app(&database, &app, &tables).await?;
    let insert_many = |row: &Value, times: usize| json!({ "action": "insertMany", "app": app, "table": "t", "rows": vec![row.clone(); times] });
    for row in [json!({ "n": "1e131071" }), json!({ "n": "1e-16383" })] {
        let (status, problem) = host.query(&insert_many(&row, 1000)).await?;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(first_error(&problem).contains("\"/rows/0/n\" \"must have at most 1000 digits"), "{problem}");
    }
    let body =
        |action: &str, rows: &str| format!(r#"{{"action":"{action}","app":"{app}","table":"t",{rows}}}"#);
    let long = body("insert", r#""data":{"j":{"a":[1e131071]}}"#);
    let (status, problem) = host.raw_query(&long).await?;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(problem.contains("/data/j") && problem.contains("1000 digits"), "{problem}");
    // Each number is within its limit, but together they exceed the limit for a request.
    let numbers = vec!["1e999"; 100].join(",");
    let rows =
        |count: usize| format!(r#""rows":[{}]"#, vec![format!(r#"{{"j":[{numbers}]}}"#); count].join(","));
    let (status, problem) = host.raw_query(&body("insertMany", &rows(100))).await?;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{problem}");
    assert!(problem.contains("send fewer rows"), "{problem}");
    assert_eq!(count(&host, &app).await?, 0);
    let (status, created) = host.raw_query(&body("insertMany", &rows(10))).await?;
    assert_eq!((status, created.len() / 1_000_000), (StatusCode::CREATED, 1));
    Ok(())
}

/// The fourth row exceeds the row limit, so PostgreSQL fails only after it has returned more than a response can
/// contain.
#[tokio::test]
async fn late_find_error_rolls_back_transaction() -> Result<()> {
    let (database, app) = (test_database().await?, unique_name("late"));
    let host =
        host_with_app(&database, &app, &json!({ "t": { "columns": { "a": "text", "n": "integer" } } }))
            .await?;
    let admin = database.connect().await?;
    let schema = format!("app_{}", app.replace('-', "_"));
    for (n, mib) in [(1, 5), (2, 5), (3, 1), (4, 9)] {
        let sql = format!("INSERT INTO {schema}.t (n, a) VALUES ({n}, repeat('x', {mib} << 20))");
        admin.batch_execute(&sql).await?;
    }
    let operations = json!([
        { "action": "insert", "table": "t", "data": { "n": 5 } },
        { "action": "find", "table": "t", "orderBy": ["n"], "filter": { "n": { "lt": 5 } } },
    ]);
    let (status, problem) =
        host.query(&json!({ "action": "transaction", "app": app, "operations": operations })).await?;
    assert_eq!((status, &problem["operation"]), (StatusCode::BAD_REQUEST, &json!(1)), "{problem}");
    assert_eq!(count(&host, &app).await?, 4, "the insert was not rolled back");
    Ok(())
}

/// Only the owner's own SQL can create such a large row.
#[tokio::test]
async fn oversized_row_is_readable_with_fewer_columns() -> Result<()> {
    let (database, app) = (test_database().await?, unique_name("large"));
    let tables = json!({ "t": { "columns": { "a": "text", "b": "text", "n": "integer" } } });
    let host = host_with_app(&database, &app, &tables).await?;
    let row = host
        .query_data(&json!({ "action": "insert", "app": app, "table": "t", "data": { "a": "x", "n": 7 } }))
        .await?;
    let schema = format!("app_{}", app.replace('-', "_"));
    let admin = database.connect().await?;
    let update_sql = |bytes: usize| format!("UPDATE {schema}.t SET a = repeat('x', {bytes})");
    admin.batch_execute(&update_sql(8 * 1024 * 1024)).await?;
    for request in [
        json!({ "action": "get", "app": app, "table": "t", "id": row["id"] }),
        json!({ "action": "find", "app": app, "table": "t" }),
    ] {
        let (status, problem) = host.query(&request).await?;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(first_error(&problem).contains("read it with fewer `columns`"), "{problem}");
    }
    let narrow = json!({ "action": "find", "app": app, "table": "t", "columns": ["id", "n"] });
    assert_eq!(host.query_data(&narrow).await?[0]["n"], 7);
    // An update that would create and return such a row is rejected.
    admin.batch_execute(&update_sql(7_900_000)).await?;
    let grow = json!({
        "action": "update", "app": app, "table": "t", "id": row["id"], "returning": true,
        "data": { "b": "y".repeat(900_000) },
    });
    let (status, problem) = host.query(&grow).await?;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(first_error(&problem).contains("makes the row larger than 8 MiB"), "{problem}");
    let get = json!({ "action": "get", "app": app, "table": "t", "id": row["id"] });
    assert_eq!(host.query_data(&get).await?["b"], Value::Null);
    // The results of fifty such operations in one transaction are not held in memory.
    for operation in [
        json!({ "action": "get", "table": "t", "id": row["id"] }),
        json!({ "action": "find", "table": "t", "limit": 1 }),
    ] {
        let before = host.peak_memory_bytes()?;
        let operations = vec![operation; 50];
        let (status, problem) =
            host.query(&json!({ "action": "transaction", "app": app, "operations": operations })).await?;
        assert_eq!((status, &problem["operation"]), (StatusCode::BAD_REQUEST, &json!(1)), "{problem}");
        assert!(first_error(&problem).contains("send fewer operations"), "{problem}");
        // The kernel sums per-processor counters, so a later reading can be slightly lower.
        let growth = host.peak_memory_bytes()?.saturating_sub(before);
        assert!(growth < 100 << 20, "peak memory grew by {growth} bytes");
    }
    // The transaction's connection is replaced, and its remaining results are not read.
    assert_eq!(host.query_data(&narrow).await?[0]["n"], 7);
    Ok(())
}

/// The rows are written by two statements, because they have different columns.
#[tokio::test]
async fn insert_many_may_return_more_than_a_transaction() -> Result<()> {
    let (database, app) = (test_database().await?, unique_name("wide"));
    let tables = json!({ "t": { "columns": { "a": "text", "m": "integer", "n": "integer" } } });
    let host = host_with_app(&database, &app, &tables).await?;
    let schema = format!("app_{}", app.replace('-', "_"));
    let set_default = format!("ALTER TABLE {schema}.t ALTER a SET DEFAULT repeat('x', 1 << 20)");
    database.connect().await?.batch_execute(&set_default).await?;
    let rows = [vec![json!({ "m": 1 }); 5], vec![json!({ "n": 2 }); 5]].concat();
    let many = json!({ "action": "insertMany", "app": app, "table": "t", "rows": rows });
    let (status, created) = host.query(&many).await?;
    assert_eq!((status, created["data"].as_array().map(Vec::len)), (StatusCode::CREATED, Some(10)));
    assert_eq!((&created["data"][0]["m"], &created["data"][9]["n"]), (&json!(1), &json!(2)));
    let operations = json!([{ "action": "insertMany", "table": "t", "rows": rows }]);
    let (status, problem) =
        host.query(&json!({ "action": "transaction", "app": app, "operations": operations })).await?;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{problem}");
    assert!(first_error(&problem).contains("send fewer operations"), "{problem}");
    assert_eq!(count(&host, &app).await?, 10);
    Ok(())
}

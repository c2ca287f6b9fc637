//! Tests which requests the bridge rejects, the order of its checks, and what its responses must not reveal.

use std::time::Duration;

use anyhow::Result;
use kit::pg::{TestDatabase, test_database};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use svc::http::proof::Route;

use super::host::{Host, Machine, host_with_app, send_json, unique_name};

async fn host_with_notes() -> Result<(Host, String, TestDatabase)> {
    let (database, slug) = (test_database().await?, unique_name("notes"));
    let tables = json!({ "notes": { "columns": { "title": "text", "size": "integer", "price": "numeric" },
        "unique": ["title"] } });
    let machine = {
        let mut machine = Machine::new(&database.url())?;
        machine.env.insert("BRIDGE_STATEMENT_TIMEOUT_MS".into(), "700".into());
        machine.add_app(&slug, &tables)?;
        machine
    };
    let host = machine.start()?;
    host.wait_until_registered(&slug).await?;
    Ok((host, slug, database))
}

#[tokio::test]
async fn query_checks_run_in_documented_order() -> Result<()> {
    let (host, slug, _database) = host_with_notes().await?;
    let path = "/api/bridge/query";
    let send_request = async |request: reqwest::RequestBuilder| -> Result<(u16, String)> {
        let (status, problem) = send_json(request).await?;
        Ok((status.as_u16(), problem["code"].as_str().unwrap_or_default().to_owned()))
    };
    let refusal = |status: u16, code: &str| (status, code.to_owned());
    assert_eq!(
        send_request(host.unsigned_request(Method::GET, path)).await?,
        refusal(405, "method_not_allowed")
    );
    let large = "x".repeat(1024 * 1024 + 1);
    assert_eq!(
        send_request(host.unsigned_request(Method::POST, path).body(large.clone())).await?,
        refusal(413, "request_too_large")
    );
    assert_eq!(
        send_request(host.unsigned_request(Method::POST, path).body("{")).await?,
        refusal(401, "unauthorized")
    );
    let owner = || host.owner_request(Method::POST, path);
    let stream = futures_util::stream::iter(vec![Ok::<_, std::io::Error>(large)]);
    let streamed =
        owner().header("content-type", "application/json").body(reqwest::Body::wrap_stream(stream));
    assert_eq!(
        send_request(streamed).await?,
        refusal(413, "request_too_large"),
        "a chunked body without a length"
    );
    assert_eq!(send_request(owner().body("{")).await?, refusal(415, "unsupported_media_type"));
    let json_body =
        |text: &'static str| owner().header("content-type", "application/json; charset=utf-8").body(text);
    assert_eq!(send_request(json_body("{")).await?, refusal(400, "invalid_request"));
    let unknown = json!({ "action": "get", "app": "none", "table": "none", "id": "x", "extra": 1 });
    assert_eq!(
        send_request(owner().json(&unknown)).await?,
        refusal(400, "invalid_request"),
        "the schema must be checked before the lookup"
    );
    for (app, table) in
        [("none", "notes"), (slug.as_str(), "none"), (slug.as_str(), "pg_class"), ("../x", "notes")]
    {
        let find = json!({ "action": "find", "app": app, "table": table });
        assert_eq!(send_request(owner().json(&find)).await?, refusal(404, "not_found"), "{app} {table}");
    }
    let absent = json!({ "action": "get", "app": slug, "table": "notes", "id": "0192d1f0-0000-7000-8000-000000000000" });
    assert_eq!(send_request(owner().json(&absent)).await?, refusal(404, "not_found"));
    Ok(())
}

#[tokio::test]
async fn names_with_sql_are_rejected_or_not_found() -> Result<()> {
    let (host, slug, database) = host_with_notes().await?;
    let attack = "notes\"; DROP TABLE notes; --";
    let find = |fields: Value| {
        let mut body = json!({ "action": "find", "app": slug, "table": "notes" });
        if let (Some(body), Value::Object(fields)) = (body.as_object_mut(), fields) {
            body.extend(fields);
        }
        body
    };
    let cases = [
        (find(json!({ "table": attack })), 404),
        (find(json!({ "app": attack })), 404),
        (find(json!({ "columns": [attack] })), 400),
        (find(json!({ "orderBy": [attack] })), 400),
        (find(json!({ "orderBy": [{ "column": "title", "direction": "asc; DROP TABLE notes" }] })), 400),
        (find(json!({ "filter": { attack: 1 } })), 400),
        (find(json!({ "filter": { "title": { "= '' OR 1=1 --": 1 } } })), 400),
        (find(json!({ "limit": "1; DROP TABLE notes" })), 400),
        (find(json!({ "after": "eyJvcmRlciI6ImlkIiwia2V5cyI6WyJ4JyBPUiAxPTEgLS0iXX0" })), 400),
        (json!({ "action": "insert", "app": slug, "table": "notes", "data": { attack: "x" } }), 400),
        (json!({ "action": attack, "app": slug, "table": "notes" }), 400),
        (json!({ "action": "get", "app": slug, "table": "notes", "id": "x' OR '1'='1" }), 400),
    ];
    for (body, status) in cases {
        let (actual, problem) = host.query(&body).await?;
        assert_eq!(actual.as_u16(), status, "{body}: {problem}");
    }
    let insert = json!({ "action": "insert", "app": slug, "table": "notes", "data": { "title": attack } });
    assert_eq!(host.query_data(&insert).await?["title"], attack, "a value may contain any text");
    let found = host.query_data(&find(json!({ "filter": { "title": attack } }))).await?;
    assert_eq!(found.as_array().map(Vec::len), Some(1));
    let remaining = database
        .connect()
        .await?
        .query_one("SELECT count(*) FROM pg_class WHERE relname = 'notes'", &[])
        .await?;
    assert_eq!(remaining.get::<_, i64>(0), 1);
    Ok(())
}

#[tokio::test]
async fn database_error_response_quotes_no_value() -> Result<()> {
    let (host, slug, database) = host_with_notes().await?;
    let insert = |data: Value| json!({ "action": "insert", "app": slug, "table": "notes", "data": data });
    host.query_data(&insert(json!({ "title": "s3cret-value" }))).await?;
    let error_text = |problem: &Value| format!("{} {}", problem["detail"], problem["errors"]);
    let mut responses = String::new();
    let (status, problem) = host.query(&insert(json!({ "title": "s3cret-value" }))).await?;
    assert_eq!((status, problem["code"].as_str()), (StatusCode::CONFLICT, Some("conflict")));
    assert!(problem["constraint"].is_string() && problem["retryable"] == false, "{problem}");
    responses += &error_text(&problem);

    let admin = database.connect().await?;
    let schema = format!("app_{}", slug.replace('-', "_"));
    admin
        .batch_execute(&format!(
            "ALTER TABLE {schema}.notes ADD CONSTRAINT small CHECK (size < 1000);
             ALTER TABLE {schema}.notes ADD COLUMN required text NOT NULL DEFAULT 'x';
             ALTER TABLE {schema}.notes ALTER COLUMN required DROP DEFAULT"
        ))
        .await?;
    let (status, problem) = host.query(&insert(json!({ "size": 987_654 }))).await?;
    assert_eq!(status, StatusCode::BAD_REQUEST, "check or not-null violation (SQLSTATE 23514 or 23502)");
    responses += &error_text(&problem);
    admin
        .batch_execute(&format!(
            "ALTER TABLE {schema}.notes DROP COLUMN required;
             ALTER TABLE {schema}.notes ALTER COLUMN price TYPE numeric(5)"
        ))
        .await?;
    let huge = "1928374650".to_owned();
    let (status, problem) = host.query(&insert(json!({ "price": huge }))).await?;
    assert_eq!(
        (status, problem["code"].as_str()),
        (StatusCode::BAD_REQUEST, Some("invalid_request")),
        "{problem}"
    );
    responses += &error_text(&problem);
    admin.batch_execute(&format!("REVOKE INSERT ON {schema}.notes FROM {schema}")).await?;
    let (status, problem) = host.query(&insert(json!({ "title": "s3cret-other" }))).await?;
    assert_eq!(status, StatusCode::FORBIDDEN, "insufficient privilege (SQLSTATE 42501)");
    responses += &error_text(&problem);
    let log = host.log();
    for secret in ["s3cret-value", "s3cret-other", "987654", &huge] {
        assert!(!responses.contains(secret), "{secret} in {responses}");
        assert!(!log.contains(secret), "{secret} in the log");
    }
    Ok(())
}

#[tokio::test]
async fn slow_statement_is_cancelled() -> Result<()> {
    let (host, slug, database) = host_with_notes().await?;
    let mut admin = database.connect().await?;
    let lock = admin.transaction().await?;
    lock.batch_execute(&format!("LOCK TABLE app_{}.notes", slug.replace('-', "_"))).await?;
    let find = json!({ "action": "find", "app": slug, "table": "notes" });
    let (status, problem) = host.query(&find).await?;
    assert_eq!((status, problem["code"].as_str()), (StatusCode::GATEWAY_TIMEOUT, Some("deadline_exceeded")));
    lock.rollback().await?;
    assert_eq!(host.query(&find).await?.0, StatusCode::OK, "the connection must still be usable");
    Ok(())
}

#[tokio::test]
async fn platform_cannot_use_the_bridge() -> Result<()> {
    let (host, slug, _database) = host_with_notes().await?;
    let mut claims = host.machine.claims(Route::Internal);
    claims.method = Some("POST".into());
    claims.path = Some("/api/bridge/query".into());
    claims.jti = Some("one".into());
    let proof = host.machine.signer.sign(&claims);
    let find = json!({ "action": "find", "app": slug, "table": "notes" });
    let request =
        host.unsigned_request(Method::POST, "/api/bridge/query").header("x-svc-proof", proof).json(&find);
    assert_eq!(request.send().await?.status(), StatusCode::FORBIDDEN);
    Ok(())
}

#[tokio::test]
async fn bridge_reports_database_outage_and_recovers() -> Result<()> {
    let binaries = kit::pg::PgBinaries::locate_or_fetch(&kit::fetch::target_dir())?;
    let server = kit::pg::PgServer::start(&binaries, kit::pg::PgOptions::default()).await?;
    server.create_database("svc").await?;
    server.stop().await?;
    let slug = "notes";
    let machine = Machine::new(&server.url("svc"))?;
    machine.add_app(slug, &json!({ "notes": { "columns": { "title": "text" } } }))?;
    let host = machine.start()?;
    let insert = json!({ "action": "insert", "app": slug, "table": "notes", "data": { "title": "x" } });
    let assert_unavailable = async || -> Result<()> {
        let response = host.owner_request(Method::POST, "/api/bridge/query").json(&insert).send().await?;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(response.headers().contains_key("retry-after"));
        let problem: Value = response.json().await?;
        assert_eq!(problem["code"], "database_unavailable");
        Ok(())
    };
    assert_unavailable().await?;
    server.restart().await?;
    host.wait_until_registered(slug).await?;
    host.query_data(&insert).await?;
    assert_eq!(host.get("/readyz").await?.0, StatusCode::OK);
    server.kill9().await?;
    assert_unavailable().await?;
    assert_eq!(host.get("/readyz").await?.0, StatusCode::SERVICE_UNAVAILABLE);
    server.restart().await?;
    let find = json!({ "action": "find", "app": slug, "table": "notes" });
    host.wait_until("the bridge is available again", async || {
        Ok(host.query(&find).await?.0 == StatusCode::OK)
    })
    .await?;
    assert_eq!(host.query_data(&find).await?.as_array().map(Vec::len), Some(1));
    tokio::time::timeout(Duration::from_secs(5), server.stop()).await??;
    Ok(())
}

#[tokio::test]
async fn long_index_value_is_rejected_and_large_page_ends_early() -> Result<()> {
    let (host, slug, _database) = host_with_notes().await?;
    let title = "x".repeat(900 * 1024);
    let insert = json!({ "action": "insert", "app": slug, "table": "notes", "data": { "title": title } });
    let (status, problem) = host.query(&insert).await?;
    assert_eq!(status, StatusCode::BAD_REQUEST, "too long for its unique index: {problem}");
    let tables = json!({ "t": { "columns": { "body": "text" } } });
    let (database, slug) = (test_database().await?, unique_name("large"));
    let host = host_with_app(&database, &slug, &tables).await?;
    let body = "y".repeat(900 * 1024);
    let insert = json!({ "action": "insert", "app": slug, "table": "t", "data": { "body": body } });
    for _ in 0..20 {
        assert_eq!(host.query_data(&insert).await?["body"].as_str().map(str::len), Some(900 * 1024));
    }
    let (mut rows, mut pages, mut after) = (0, 0, Value::Null);
    loop {
        let mut find = json!({ "action": "find", "app": slug, "table": "t" });
        if after.is_string() {
            find["after"] = after.take();
        }
        let (_, mut page) = host.query(&find).await?;
        rows += page["data"].as_array().map_or(0, Vec::len);
        pages += 1;
        after = page["nextCursor"].take();
        if after.is_null() {
            break;
        }
    }
    assert_eq!(
        (rows, pages),
        (20, 2),
        "a page must end early at the size limit, and the next one must continue"
    );
    Ok(())
}

//! Tests the storage quota for an app's tables.

use std::time::Duration;

use anyhow::{Context, Result};
use http::{Method, StatusCode};
use kit::pg::test_database;
use serde_json::{Value, json};
use svc::http::proof::Route;

use super::host::{Host, Machine, send_json, unique_name};

const CONFIG: &str = "home/svc/home/system/config.json";
const QUERY: &str = "/api/bridge/query";

/// Sends a query as an app's own page does.
async fn query_as_app(host: &Host, slug: &str, body: &Value) -> Result<(StatusCode, Value)> {
    let mut claims = host.machine.claims(Route::App);
    claims.app = Some(slug.to_owned());
    let proof = host.machine.signer.sign(&claims);
    send_json(host.unsigned_request(Method::POST, QUERY).header("x-svc-proof", proof).json(body)).await
}

/// Returns a request that inserts an incompressible row of 20 KB.
fn insert_body(slug: &str) -> Value {
    let text: String = (0..625).map(|_| uuid::Uuid::new_v4().simple().to_string()).collect();
    json!({ "action": "insert", "app": slug, "table": "t", "data": { "a": text } })
}

/// Inserts as the app until the quota rejects an insert even after the app's size has been measured again.
async fn fill_until_refused(host: &Host, slug: &str) -> Result<Value> {
    for _ in 0..100 {
        if query_as_app(host, slug, &insert_body(slug)).await?.0 == StatusCode::CREATED {
            continue;
        }
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let (status, problem) = query_as_app(host, slug, &insert_body(slug)).await?;
        if status == StatusCode::INSUFFICIENT_STORAGE {
            return Ok(problem);
        }
    }
    anyhow::bail!("no insert was refused")
}

async fn fetch_storage(host: &Host, slug: &str) -> Result<Value> {
    let (_, list) = host.get("/api/apps").await?;
    let app = list["apps"].as_array().and_then(|apps| apps.iter().find(|app| app["slug"] == slug));
    Ok(app.context("no such app")?["storage"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn app_at_its_quota_cannot_add_rows() -> Result<()> {
    let database = test_database().await?;
    let (full, other) = (unique_name("full"), unique_name("other"));
    let machine = Machine::new(&database.url())?;
    for slug in [&full, &other] {
        machine.add_app(slug, &json!({ "t": { "columns": { "a": "text" } } }))?;
    }
    let config_with_quota =
        |bytes: u64| json!({ "theme": "dark", "storage": { "apps": { &full: bytes } } }).to_string();
    machine.write(CONFIG, &config_with_quota(400_000))?;
    let host = machine.start()?;
    for slug in [&full, &other] {
        host.wait_until_registered(slug).await?;
    }

    let problem = fill_until_refused(&host, &full).await?;
    assert_eq!(problem["code"], "storage_quota_reached");
    assert!(problem["detail"].as_str().context("no detail")?.contains("400000"), "{problem}");
    assert_eq!(fetch_storage(&host, &full).await?["quotaBytes"], 400_000);
    // The refused insert triggers a measurement.
    host.wait_until("the size is measured", async || {
        Ok(fetch_storage(&host, &full).await?["databaseBytes"].as_u64().context("no size")? > 100_000)
    })
    .await?;
    assert!(fetch_storage(&host, &other).await?["quotaBytes"].as_u64().context("no quota")? >= 1 << 30);

    let update = json!({ "action": "update", "app": full, "table": "t", "filter": { "a": { "ne": "" } }, "data": { "a": "b" },
        "maxAffected": 1000 });
    assert_eq!(query_as_app(&host, &full, &update).await?.0, StatusCode::INSUFFICIENT_STORAGE);
    let mut operation = insert_body(&full);
    operation.as_object_mut().context("not an object")?.remove("app");
    let transaction = json!({ "action": "transaction", "app": full, "operations": [operation] });
    assert_eq!(query_as_app(&host, &full, &transaction).await?.0, StatusCode::INSUFFICIENT_STORAGE);
    let count = json!({ "action": "count", "app": full, "table": "t" });
    assert_eq!(query_as_app(&host, &full, &count).await?.0, StatusCode::OK);
    assert_eq!(
        query_as_app(&host, &other, &insert_body(&other)).await?.0,
        StatusCode::CREATED,
        "another app's quota must be separate"
    );
    host.query_data(&insert_body(&full)).await.context("the owner must still be able to add rows")?;
    let delete = json!({ "action": "delete", "app": full, "table": "t", "filter": { "a": { "ne": "" } }, "maxAffected": 1000 });
    let (status, response) = query_as_app(&host, &full, &delete).await?;
    assert_eq!(status, StatusCode::OK, "{response}");

    host.machine.write(CONFIG, &config_with_quota(100_000_000))?;
    assert_eq!(
        query_as_app(&host, &full, &insert_body(&full)).await?.0,
        StatusCode::CREATED,
        "the raised quota must permit the insert"
    );
    Ok(())
}

/// Returns a host with one app whose quota is `quota_bytes`, once the app's size has been measured.
async fn host_with_quota(database_url: &str, slug: &str, columns: &Value, quota_bytes: u64) -> Result<Host> {
    let machine = Machine::new(database_url)?;
    machine.add_app(slug, &json!({ "t": { "columns": columns } }))?;
    machine.write(CONFIG, &json!({ "storage": { "apps": { slug: quota_bytes } } }).to_string())?;
    let host = machine.start()?;
    host.wait_until_registered(slug).await?;
    let measurement = async {
        while fetch_storage(&host, slug).await?["databaseBytes"].is_null() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(20), measurement)
        .await
        .context("the size was not measured")??;
    Ok(host)
}

/// Repeats the request until the quota rejects it. Fails after 25 s, which is less than the interval between regular
/// measurements.
async fn repeat_until_refused(host: &Host, slug: &str, body: &Value, expected: StatusCode) -> Result<()> {
    let started = std::time::Instant::now();
    while started.elapsed() < Duration::from_secs(25) {
        match query_as_app(host, slug, body).await? {
            (StatusCode::INSUFFICIENT_STORAGE, _) => return Ok(()),
            (status, response) => assert_eq!(status, expected, "{response}"),
        }
    }
    anyhow::bail!("no request was refused")
}

#[tokio::test(flavor = "multi_thread")]
async fn quota_counts_transactions_that_are_rolled_back() -> Result<()> {
    let database = test_database().await?;
    let slug = unique_name("failing");
    let host = host_with_quota(&database.url(), &slug, &json!({ "a": "text" }), 400_000).await?;
    let mut first = insert_body(&slug);
    first.as_object_mut().context("not an object")?.remove("app");
    let second = json!({ "action": "delete", "table": "t", "id": uuid::Uuid::new_v4() });
    let failing = json!({ "action": "transaction", "app": slug, "operations": [first, second] });
    repeat_until_refused(&host, &slug, &failing, StatusCode::NOT_FOUND).await?;
    let count = json!({ "action": "count", "app": slug, "table": "t" });
    assert_eq!(
        query_as_app(&host, &slug, &count).await?.1["data"]["count"],
        0,
        "every transaction must be rolled back"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn quota_counts_the_rows_that_an_update_rewrites() -> Result<()> {
    let database = test_database().await?;
    let slug = unique_name("rewriting");
    let host = host_with_quota(&database.url(), &slug, &json!({ "n": "integer" }), 2_000_000).await?;
    let rows = vec![json!({ "n": 1 }); 500];
    let many = json!({ "action": "insertMany", "app": slug, "table": "t", "rows": rows });
    assert_eq!(query_as_app(&host, &slug, &many).await?.0, StatusCode::CREATED);
    let update =
        json!({ "action": "update", "app": slug, "table": "t", "filter": { "n": 1 }, "data": { "n": 1 } });
    repeat_until_refused(&host, &slug, &update, StatusCode::OK).await
}

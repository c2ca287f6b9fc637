//! How much of the disk the rows of an app may take.

use std::time::Duration;

use anyhow::{Context, Result};
use http::{Method, StatusCode};
use kit::pg::test_database;
use serde_json::{Value, json};
use svc::http::proof::Route;

use super::host::{Host, Machine, answer, unique};

const CONFIG: &str = "home/svc/home/system/config.json";
const QUERY: &str = "/api/bridge/query";

/// A request of an app's own page.
async fn by_app(host: &Host, slug: &str, body: &Value) -> Result<(StatusCode, Value)> {
    let mut claims = host.machine.claims(Route::App);
    claims.app = Some(slug.to_owned());
    let proof = host.machine.signer.sign(&claims);
    answer(host.bare(Method::POST, QUERY).header("x-svc-proof", proof).json(body)).await
}

/// A row of 20 KB that does not compress.
fn insert(slug: &str) -> Value {
    let text: String = (0..625).map(|_| uuid::Uuid::new_v4().simple().to_string()).collect();
    json!({ "action": "insert", "app": slug, "table": "t", "data": { "a": text } })
}

/// Inserts as the app until it is refused, also after its size was measured again.
async fn fill(host: &Host, slug: &str) -> Result<Value> {
    for _ in 0..100 {
        if by_app(host, slug, &insert(slug)).await?.0 == StatusCode::CREATED {
            continue;
        }
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let (status, problem) = by_app(host, slug, &insert(slug)).await?;
        if status == StatusCode::INSUFFICIENT_STORAGE {
            return Ok(problem);
        }
    }
    anyhow::bail!("the app was never refused")
}

async fn storage(host: &Host, slug: &str) -> Result<Value> {
    let (_, list) = host.get("/api/apps").await?;
    let app = list["apps"].as_array().and_then(|apps| apps.iter().find(|app| app["slug"] == slug));
    Ok(app.context("no such app")?["storage"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn app_at_its_quota_adds_no_rows() -> Result<()> {
    let database = test_database().await?;
    let (full, other) = (unique("full"), unique("other"));
    let machine = Machine::new(&database.url())?;
    for slug in [&full, &other] {
        machine.app(slug, &json!({ "t": { "columns": { "a": "text" } } }))?;
    }
    let quota = |bytes: u64| json!({ "theme": "dark", "storage": { "apps": { &full: bytes } } }).to_string();
    machine.write(CONFIG, &quota(400_000))?;
    let host = machine.start()?;
    for slug in [&full, &other] {
        host.until_registered(slug).await?;
    }

    let problem = fill(&host, &full).await?;
    assert_eq!(problem["code"], "storage_quota_reached");
    assert!(problem["detail"].as_str().context("a detail")?.contains("400000"), "{problem}");
    let shown = storage(&host, &full).await?;
    assert_eq!(shown["quotaBytes"], 400_000);
    assert!(shown["databaseBytes"].as_u64().context("a size")? > 100_000, "{shown}");
    assert!(storage(&host, &other).await?["quotaBytes"].as_u64().context("a quota")? >= 1 << 30);

    let update = json!({ "action": "update", "app": full, "table": "t", "filter": { "a": { "ne": "" } }, "data": { "a": "b" },
        "maxAffected": 1000 });
    assert_eq!(by_app(&host, &full, &update).await?.0, StatusCode::INSUFFICIENT_STORAGE);
    let mut operation = insert(&full);
    operation.as_object_mut().context("an object")?.remove("app");
    let together = json!({ "action": "transaction", "app": full, "operations": [operation] });
    assert_eq!(by_app(&host, &full, &together).await?.0, StatusCode::INSUFFICIENT_STORAGE);
    let find = json!({ "action": "count", "app": full, "table": "t" });
    assert_eq!(by_app(&host, &full, &find).await?.0, StatusCode::OK);
    assert_eq!(by_app(&host, &other, &insert(&other)).await?.0, StatusCode::CREATED, "another app");
    host.data(&insert(&full)).await.context("the owner adds rows")?;
    let delete = json!({ "action": "delete", "app": full, "table": "t", "filter": { "a": { "ne": "" } }, "maxAffected": 1000 });
    let (status, answer) = by_app(&host, &full, &delete).await?;
    assert_eq!(status, StatusCode::OK, "{answer}");

    host.machine.write(CONFIG, &quota(100_000_000))?;
    assert_eq!(by_app(&host, &full, &insert(&full)).await?.0, StatusCode::CREATED, "the owner has raised it");
    Ok(())
}

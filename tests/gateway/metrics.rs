//! The gateway serves `/metrics` only on its Unix socket, with correct values.

use anyhow::Result;
use reqwest::{Method, StatusCode};
use serde_json::json;

use super::host::{Host, host_with_app, send_json, unique_name};
use crate::exposition::Exposition;

pub fn scrape(host: &Host) -> Result<Exposition> {
    let response = host.send_over_socket("GET /metrics HTTP/1.0\nHost: gateway\n\n")?;
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or_default();
    anyhow::ensure!(head.starts_with("HTTP/1.0 200") || head.starts_with("HTTP/1.1 200"), "{response}");
    anyhow::ensure!(head.to_lowercase().contains("content-type: text/plain; version=0.0.4"), "{head}");
    Exposition::parse(body)
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_served_only_on_the_socket() -> Result<()> {
    let database = kit::pg::test_database().await?;
    let slug = unique_name("notes");
    let tables = json!({"notes": {"columns": {"title": "text"}, "unique": [["title"]]}});
    let host = host_with_app(&database, &slug, &tables).await?;
    let before = scrape(&host)?;

    let insert = json!({"action": "insert", "app": slug, "table": "notes", "data": {"title": "one"}});
    assert!(host.query(&insert).await?.0.is_success());
    assert_eq!(host.query(&insert).await?.0, StatusCode::CONFLICT);
    assert_eq!(send_json(host.unsigned_request(Method::GET, "/api/apps")).await?.0, StatusCode::UNAUTHORIZED);
    let forged = host.unsigned_request(Method::GET, "/api/apps").header("x-svc-proof", "a.b.c");
    assert_eq!(send_json(forged).await?.0, StatusCode::UNAUTHORIZED);
    let logs = host.machine.path("home/svc/home/system/logs");
    std::fs::create_dir_all(&logs)?;
    let key = "system/db/snapshots/2026-01-02T03-04-05.678Z-1.dump";
    let lines = [
        json!({"status": "success", "key": key}),
        json!({"kind": "database", "status": "error", "key": null}),
        json!({"kind": "files", "status": "success", "key": "files/snapshots/ab"}),
    ];
    std::fs::write(logs.join("backup.jsonl"), lines.map(|line| format!("{line}\n")).concat())?;

    let after = scrape(&host)?;
    for series in [
        "svc_http_requests_total{listener=\"gateway\",method=\"POST\",route=\"/api/bridge/query\",status=\"2xx\"}",
        "svc_http_requests_total{listener=\"gateway\",method=\"POST\",route=\"/api/bridge/query\",status=\"4xx\"}",
        "svc_http_requests_total{listener=\"gateway\",method=\"GET\",route=\"/api/apps\",status=\"4xx\"}",
        "svc_http_request_duration_seconds_count{listener=\"gateway\",route=\"/api/bridge/query\"}",
        "svc_bridge_actions_total{action=\"insert\",outcome=\"ok\"}",
        "svc_bridge_actions_total{action=\"insert\",outcome=\"conflict\"}",
        "svc_bridge_sqlstates_total{class=\"23\"}",
        "svc_gateway_proofs_total{outcome=\"verified\"}",
        "svc_gateway_proofs_total{outcome=\"refused\"}",
    ] {
        let (old, new) = (before.get(series).unwrap_or(0.0), after.get(series).unwrap_or(0.0));
        assert!(new >= old + 1.0, "{series}: {old}, then {new}: {:#?}", after.samples);
    }
    assert_eq!(after.get("svc_gateway_apps"), Some(1.0));
    assert_eq!(after.get("svc_backup_last_run_success"), Some(0.0));
    assert_eq!(after.get("svc_backup_last_success_timestamp_seconds"), Some(1_767_323_045.0));
    assert!(after.get("svc_database_pool_connections{state=\"open\"}").is_some_and(|open| open >= 1.0));

    // The database's address is also shown only on the socket.
    let by_socket = host.send_over_socket("GET /readyz HTTP/1.0\nHost: gateway\n\n")?;
    let url = reqwest::Url::parse(&database.url())?;
    let server = format!("\"server\":\"127.0.0.1:{}\"", url.port().unwrap_or_default());
    assert!(by_socket.contains(&server), "{by_socket}");
    let (status, ready) = send_json(host.unsigned_request(Method::GET, "/readyz")).await?;
    assert_eq!((status, ready.get("server")), (StatusCode::OK, None));

    // The public port has no such route; with the owner's proof, the request is forwarded to the shell.
    assert_eq!(send_json(host.unsigned_request(Method::GET, "/metrics")).await?.0, StatusCode::UNAUTHORIZED);
    let (status, body) = host.get("/metrics").await?;
    assert!(status != StatusCode::OK && !body.to_string().contains("svc_build_info"), "{status} {body}");
    Ok(())
}

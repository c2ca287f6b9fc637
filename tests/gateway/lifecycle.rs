//! Tests the gateway's startup and shutdown, and how it forwards requests to other services.

use std::io::{Read, Write};

use anyhow::Result;
use reqwest::{Method, StatusCode};
use serde_json::json;
use svc::http::proof::Route;

use super::host::{Machine, UNREACHABLE_DATABASE, send_json};

#[tokio::test]
async fn superseded_machine_stops_and_refuses_to_start() -> Result<()> {
    let mut host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    host.machine.write("var/lib/svc/superseded.json", "{}")?;
    assert_eq!(host.wait_for_exit().await?.code(), Some(0), "{}", host.log());
    let output = host.machine.run_to_end()?;
    assert_eq!(output.status.code(), Some(77));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("superseded.json"), "{stderr}");
    Ok(())
}

#[tokio::test]
async fn invalid_configuration_lists_every_error() -> Result<()> {
    let mut machine = Machine::new("s3cret-not-a-url")?;
    machine.env.insert("GATEWAY_LISTEN".into(), "nowhere".into());
    machine.env.remove("SVC_EPOCH");
    let output = machine.run_to_end()?;
    assert_eq!(output.status.code(), Some(78));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    for name in ["GATEWAY_LISTEN", "SVC_EPOCH", "DATABASE_URL"] {
        assert!(stderr.contains(name), "{name} in {stderr}");
    }
    assert!(!stderr.contains("s3cret"), "{stderr}");
    Ok(())
}

#[tokio::test]
async fn tls_key_survives_restarts() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let path = host.machine.path("var/lib/svc/tls/cert.pem");
    let first = std::fs::read(&path)?;
    let host = host.restart()?;
    assert_eq!(std::fs::read(&path)?, first);
    assert_eq!(host.unsigned_request(Method::GET, "/livez").send().await?.status(), StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn sigterm_shuts_the_gateway_down() -> Result<()> {
    let mut host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    host.terminate()?;
    assert_eq!(host.wait_for_exit().await?.code(), Some(0));
    Ok(())
}

#[tokio::test]
async fn settings_are_read_from_env_files() -> Result<()> {
    let mut machine = Machine::new(UNREACHABLE_DATABASE)?;
    let mut file = String::new();
    for (name, value) in std::mem::take(&mut machine.env) {
        if name == "GATEWAY_LISTEN" {
            machine.env.insert(name, value);
        } else {
            file.push_str(&svc::config::format_env_line(&name, &value));
        }
    }
    machine.write("opt/svc/env/host.env", &file)?;
    let host = machine.start()?;
    assert_eq!(host.get("/api/backups").await?.0, StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn absent_service_is_reported_as_page_or_problem() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let page = host.owner_request(Method::GET, "/").header("accept", "text/html").send().await?;
    assert_eq!(page.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(page.headers()["content-type"].to_str()?.starts_with("text/html"));
    let (status, problem) = send_json(host.owner_request(Method::GET, "/")).await?;
    assert_eq!((status, problem["code"].as_str()), (StatusCode::SERVICE_UNAVAILABLE, Some("unavailable")));
    let code_request =
        host.unsigned_request(Method::GET, "/api/apps").header("x-svc-proof", host.proof(Route::Code));
    let (status, problem) = send_json(code_request).await?;
    assert_eq!(
        status,
        StatusCode::SERVICE_UNAVAILABLE,
        "route `code` must select the code server: {problem}"
    );
    Ok(())
}

#[tokio::test]
async fn shell_and_code_requests_are_forwarded_without_proof() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    for (name, route, path) in
        [("shell.sock", Route::Shell, "/some/page"), ("code.sock", Route::Code, "/api/apps")]
    {
        let listener = host.machine.bind_owner_socket(name)?;
        let upstream = std::thread::spawn(move || -> std::io::Result<String> {
            let (mut stream, _) = listener.accept()?;
            let mut request = Vec::new();
            let mut buffer = [0_u8; 4096];
            while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                let size = stream.read(&mut buffer)?;
                request.extend_from_slice(&buffer[..size]);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi")?;
            Ok(String::from_utf8_lossy(&request).to_lowercase())
        });
        let response =
            host.unsigned_request(Method::GET, path).header("x-svc-proof", host.proof(route)).send().await?;
        assert_eq!((response.status(), response.text().await?.as_str()), (StatusCode::OK, "hi"));
        let forwarded = upstream.join().expect("the upstream thread should not panic")?;
        assert!(forwarded.starts_with(&format!("get {path} http/1.1")), "{forwarded}");
        assert!(!forwarded.contains("x-svc-proof"), "{forwarded}");
    }
    Ok(())
}

#[tokio::test]
async fn websocket_is_proxied() -> Result<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let listener = host.machine.bind_owner_socket("code.sock")?;
    let upstream = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        let (mut request, mut byte) = (Vec::new(), [0_u8; 1]);
        while !request.ends_with(b"\r\n\r\n") {
            stream.read_exact(&mut byte)?;
            request.push(byte[0]);
        }
        stream.write_all(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        )?;
        let mut frame = [0_u8; 5];
        stream.read_exact(&mut frame)?;
        stream.write_all(&frame)
    });
    let request = host
        .unsigned_request(Method::GET, "/socket")
        .header("x-svc-proof", host.proof(Route::Code))
        .header("connection", "upgrade")
        .header("upgrade", "websocket");
    let response = request.send().await?;
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    let mut socket = response.upgrade().await?;
    socket.write_all(b"hello").await?;
    let mut echo = [0_u8; 5];
    socket.read_exact(&mut echo).await?;
    assert_eq!(&echo, b"hello");
    Ok(upstream.join().expect("the upstream thread should not panic")?)
}

#[tokio::test]
async fn backups_are_listed_newest_first() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    assert_eq!(host.get("/api/backups").await?.1, json!({ "backups": [], "nextCursor": null }));
    let timestamp = |n: i32| format!("2026-01-0{n}T03:04:05.678Z");
    let line = |n| json!({ "timestamp": timestamp(n), "status": "success", "stage": "done" }).to_string();
    let lines = (1..=3).map(line).collect::<Vec<_>>();
    host.machine.write("home/svc/home/system/logs/backup.jsonl", &(lines.join("\n") + "\n{\"torn"))?;
    let (_, listed) = host.get("/api/backups?limit=2").await?;
    assert_eq!(listed["backups"][0]["timestamp"], timestamp(3));
    assert_eq!(listed["backups"].as_array().map(Vec::len), Some(2));
    assert_eq!(host.get("/api/backups?limit=x").await?.0, StatusCode::BAD_REQUEST);
    Ok(())
}

#[tokio::test]
async fn more_apps_than_connections_are_all_served() -> Result<()> {
    let binaries = kit::pg::PgBinaries::locate_or_fetch(&kit::fetch::target_dir())?;
    let settings = vec![("max_connections".into(), "23".into())];
    let options = kit::pg::PgOptions { settings, ..kit::pg::PgOptions::default() };
    let server = kit::pg::PgServer::start(&binaries, options).await?;
    server.create_database("svc").await?;
    let machine = Machine::new(&server.url("svc"))?;
    let apps: Vec<String> = (0..9).map(|n| format!("app{n}")).collect();
    for app in &apps {
        machine.add_app(app, &json!({ "t": { "columns": { "a": "integer" } } }))?;
    }
    let host = machine.start()?;
    for app in &apps {
        host.wait_until_registered(app).await?;
    }
    // Nine apps share four connections: of the 23, 3 are reserved for superusers, and 16 for tools, backups and the
    // gateway.
    let requests = (0..360).map(|n| {
        let body = json!({ "action": "insert", "app": apps[n % 9], "table": "t", "data": { "a": n } });
        let host = &host;
        async move { host.query_data(&body).await }
    });
    futures_util::future::try_join_all(requests).await?;
    let connections = server
        .connect("svc")
        .await?
        .query_one("SELECT count(*) FROM pg_stat_activity WHERE usename LIKE 'app_app%'", &[])
        .await?;
    assert!(connections.get::<_, i64>(0) <= 4, "{} connections", connections.get::<_, i64>(0));
    Ok(())
}

/// A server that has lost its volume has an empty database. The marker names a different database, so the gateway does
/// not serve the empty one.
#[tokio::test]
async fn database_that_differs_from_the_marker_is_not_served() -> Result<()> {
    let (database, slug) = (kit::pg::test_database().await?, super::host::unique_name("notes"));
    let machine = Machine::new(&database.url())?;
    machine.add_app(&slug, &json!({ "notes": { "columns": { "title": "text" } } }))?;
    // A marker from an earlier release names no database, so the gateway adopts this one.
    machine.write("opt/svc/restore-complete", "{\"version\":1}")?;
    let host = machine.start()?;
    host.wait_until_registered(&slug).await?;
    let marker: serde_json::Value =
        serde_json::from_slice(&std::fs::read(host.machine.path("opt/svc/restore-complete"))?)?;
    let mut changed = marker.clone();
    changed["databaseIdentity"]["systemIdentifier"] = json!("1");
    host.machine.write("opt/svc/restore-complete", &changed.to_string())?;
    let host = host.restart()?;
    host.wait_until("the log names the mismatch", async || Ok(host.log().contains("instead of 1"))).await?;
    assert_eq!(
        host.unsigned_request(Method::GET, "/readyz").send().await?.status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
    let insert = json!({ "action": "insert", "app": slug, "table": "notes", "data": { "title": "a" } });
    assert_eq!(host.query(&insert).await?.0, StatusCode::SERVICE_UNAVAILABLE);
    host.machine.write("opt/svc/restore-complete", &marker.to_string())?;
    host.wait_until_registered(&slug).await
}

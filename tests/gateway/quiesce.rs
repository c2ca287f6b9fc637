//! Writers are stopped before a final backup. A request or a heartbeat response resumes them; a restart does not.

use anyhow::Result;
use http::StatusCode;
use kit::pg::test_database;
use reqwest::Method;
use serde_json::{Value, json};
use svc::host::system::quiesce;
use svc::host::system::quiesce::Quiesce;
use svc::http::proof::Route;
use svc::machine::id::OperationId;

use super::dispatch::{machine_with_runner, request_dispatch, wait_until_finished, wait_until_recorded};
use super::host::{Host, host_with_app, send_json, unique_name};

/// Sends a request to the gateway as the platform does.
async fn send_as_platform(
    host: &Host,
    method: Method,
    path: &str,
    body: Value,
) -> Result<(StatusCode, Value)> {
    let mut claims = host.machine.claims(Route::Internal);
    claims.method = Some(method.to_string());
    claims.path = Some(path.into());
    claims.jti = Some(uuid::Uuid::now_v7().to_string());
    let request =
        host.unsigned_request(method, path).header("x-svc-proof", host.machine.signer.sign(&claims));
    send_json(if body.is_null() { request } else { request.json(&body) }).await
}

async fn quiesce(host: &Host, operation: OperationId) -> Result<Value> {
    let path = "/_svc/internal/quiesce";
    let (status, state) =
        send_as_platform(host, Method::POST, path, json!({ "operationId": operation })).await?;
    assert_eq!((status, &state["operationId"]), (StatusCode::OK, &json!(operation)), "{state}");
    Ok(state)
}

async fn resume(host: &Host, operation: OperationId) -> Result<StatusCode> {
    let path = "/_svc/internal/resume";
    Ok(send_as_platform(host, Method::POST, path, json!({ "operationId": operation })).await?.0)
}

async fn quiesce_and_wait(host: &Host, operation: OperationId) -> Result<()> {
    host.wait_until(
        "no writer remains",
        async || Ok(!quiesce(host, operation).await?["quiescedAt"].is_null()),
    )
    .await
}

fn insert_body(slug: &str) -> Value {
    json!({ "action": "insert", "app": slug, "table": "notes", "data": { "title": "a" } })
}

#[tokio::test]
async fn inserts_are_refused_until_writers_resume() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("notes"));
    let host =
        host_with_app(&database, &slug, &json!({ "notes": { "columns": { "title": "text" } } })).await?;
    let operation = OperationId::new();
    quiesce_and_wait(&host, operation).await?;
    let refused =
        host.owner_request(Method::POST, "/api/bridge/query").json(&insert_body(&slug)).send().await?;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.headers()["content-type"], "application/problem+json");
    assert!(refused.headers().contains_key("retry-after"));
    let limits = host.owner_request(Method::PUT, "/api/limits").json(&json!({ "daily": 5 })).send().await?;
    assert_eq!(
        limits.status(),
        StatusCode::SERVICE_UNAVAILABLE,
        "a limit change must be refused, because it would be lost with this machine"
    );
    let quiesced_at = quiesce(&host, operation).await?["quiescedAt"].clone();
    // A crash changes neither the state nor its start time.
    let host = host.restart()?;
    host.wait_until_registered(&slug).await?;
    assert_eq!(host.query(&insert_body(&slug)).await?.0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(quiesce(&host, operation).await?["quiescedAt"], quiesced_at);
    assert_eq!(
        resume(&host, OperationId::new()).await?,
        StatusCode::CONFLICT,
        "another operation must not resume the writers"
    );
    assert_eq!(host.query(&insert_body(&slug)).await?.0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(resume(&host, operation).await?, StatusCode::OK);
    assert_eq!(resume(&host, operation).await?, StatusCode::OK, "resuming must be idempotent");
    assert_eq!(host.query(&insert_body(&slug)).await?.0, StatusCode::CREATED);
    let limits = host.owner_request(Method::PUT, "/api/limits").json(&json!({ "daily": 5 })).send().await?;
    assert_eq!(limits.status(), StatusCode::OK);
    Ok(())
}

/// A statement whose client disconnected may still commit, so the machine is quiesced only after all statements have
/// ended.
#[tokio::test]
async fn quiesce_waits_for_statements_that_are_still_running() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("notes"));
    let host =
        host_with_app(&database, &slug, &json!({ "notes": { "columns": { "title": "text" } } })).await?;
    let mut admin = database.connect().await?;
    let observer = database.connect().await?;
    let lock = admin.transaction().await?;
    let schema = format!("app_{}", slug.replace('-', "_"));
    lock.batch_execute(&format!("LOCK TABLE {schema}.notes IN ACCESS EXCLUSIVE MODE")).await?;
    let body = insert_body(&slug);
    let inserting = host.query(&body);
    let operation = OperationId::new();
    let quiescing = async {
        host.wait_until("the insert is waiting", async || {
            let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
            Ok(observer.query_one(waiting, &[]).await?.get::<_, i64>(0) == 1)
        })
        .await?;
        assert!(
            quiesce(&host, operation).await?["quiescedAt"].is_null(),
            "the machine must not be quiesced while an insert is in flight"
        );
        lock.commit().await?;
        Ok::<_, anyhow::Error>(())
    };
    let (inserted, quiesced) = tokio::join!(inserting, quiescing);
    quiesced?;
    assert_eq!(inserted?.0, StatusCode::CREATED, "an admitted insert must complete");
    quiesce_and_wait(&host, operation).await
}

#[tokio::test]
async fn quiesce_waits_while_the_database_refuses_connections() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("notes"));
    let host =
        host_with_app(&database, &slug, &json!({ "notes": { "columns": { "title": "text" } } })).await?;
    let admin = database.server().connect("postgres").await?;
    let allow =
        |allowed: bool| format!("ALTER DATABASE \"{}\" WITH ALLOW_CONNECTIONS {allowed}", database.name());
    admin.batch_execute(&allow(false)).await?;
    // Ends the gateway's connections, so that it must reconnect.
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1";
    admin.execute(end, &[&database.name()]).await?;
    let operation = OperationId::new();
    assert!(
        quiesce(&host, operation).await?["quiescedAt"].is_null(),
        "the machine must not be quiesced while statements may be running"
    );
    admin.batch_execute(&allow(true)).await?;
    quiesce_and_wait(&host, operation).await
}

#[tokio::test]
async fn quiesce_ends_and_records_running_dispatches() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    let (status, running) = request_dispatch(&host, json!({ "prompt": "hold it" })).await?;
    assert_eq!(status, StatusCode::ACCEPTED, "{running}");
    let id = running["id"].as_str().unwrap_or_default().to_owned();
    host.wait_until("the dispatch is running", async || {
        Ok(host.get(&format!("/api/dispatch/{id}")).await?.1["status"] == "running")
    })
    .await?;
    let operation = OperationId::new();
    let first = quiesce(&host, operation).await?;
    assert_eq!((&first["quiescedAt"], &first["runningDispatches"]), (&Value::Null, &json!(1)));
    quiesce_and_wait(&host, operation).await?;
    let ended = wait_until_finished(&host, &id).await?;
    assert_eq!(ended["status"], "error");
    let (_, page) = host.get("/api/interactions").await?;
    let entry = &page["interactions"][0];
    assert_eq!((&entry["id"], &entry["status"]), (&json!(id), &json!("error")), "{page}");
    assert_eq!(entry["error"]["name"], "Interrupted", "{entry}");
    assert!(entry["error"]["message"].as_str().unwrap_or_default().contains("final backup"), "{entry}");
    let (status, problem) = request_dispatch(&host, json!({ "prompt": "ok now" })).await?;
    assert_eq!((status, &problem["code"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("unavailable")));
    assert_eq!(resume(&host, operation).await?, StatusCode::OK);
    let (_, again) = request_dispatch(&host, json!({ "prompt": "ok now" })).await?;
    let again = wait_until_finished(&host, again["id"].as_str().unwrap_or_default()).await?;
    assert_eq!(again["status"], "success", "{again}");
    Ok(())
}

/// A queued dispatch is not a writer: it keeps its position, even across a gateway restart, and runs on resume.
#[tokio::test]
async fn queued_dispatches_stay_queued_until_writers_resume() -> Result<()> {
    let (machine, _runner) =
        machine_with_runner(&json!({ "dispatch": { "defaultAgent": "coder", "concurrency": 1 } }))?;
    let host = machine.start()?;
    request_dispatch(&host, json!({ "prompt": "hold it", "id": "runs" })).await?;
    for id in ["first", "second"] {
        assert_eq!(
            request_dispatch(&host, json!({ "prompt": "ok", "id": id })).await?.0,
            StatusCode::ACCEPTED
        );
    }
    let status = async |host: &Host, id: &str| -> Result<Value> {
        Ok(host.get(&format!("/api/dispatch/{id}")).await?.1["status"].clone())
    };
    host.wait_until("the dispatch is running", async || Ok(status(&host, "runs").await? == "running"))
        .await?;
    let operation = OperationId::new();
    quiesce_and_wait(&host, operation).await?;
    assert_eq!(wait_until_recorded(&host, "runs").await?["error"]["name"], "Interrupted");
    let host = host.restart()?;
    host.wait_until("the queued dispatch is restored", async || {
        Ok(status(&host, "second").await? == "queued")
    })
    .await?;
    // Gives the dispatcher time for several attempts to start the queued dispatch.
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    for id in ["first", "second"] {
        assert_eq!(status(&host, id).await?, "queued", "{id}");
    }
    assert!(
        !quiesce(&host, operation).await?["quiescedAt"].is_null(),
        "a queued dispatch must not count as a writer"
    );
    let (_, page) = host.get("/api/interactions").await?;
    assert_eq!(page["interactions"].as_array().map(Vec::len), Some(1), "{page}");

    assert_eq!(resume(&host, operation).await?, StatusCode::OK);
    for id in ["first", "second"] {
        assert_eq!(wait_until_finished(&host, id).await?["status"], "success", "{id}");
        wait_until_recorded(&host, id).await?;
    }
    let (_, page) = host.get("/api/interactions?status=success").await?;
    let order: Vec<&str> = page["interactions"]
        .as_array()
        .into_iter()
        .flatten()
        .rev()
        .filter_map(|interaction| interaction["id"].as_str())
        .collect();
    assert_eq!(order, ["first", "second"]);
    Ok(())
}

/// The sync agent removes the quiesce file when the platform no longer names the operation.
#[tokio::test]
async fn writers_resume_when_the_file_is_removed() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    let operation = OperationId::new();
    quiesce_and_wait(&host, operation).await?;
    assert_eq!(request_dispatch(&host, json!({ "prompt": "ok" })).await?.0, StatusCode::SERVICE_UNAVAILABLE);
    let layout = svc::host::system::layout::Layout::new(host.machine.path(""));
    assert!(
        !quiesce::resume(&layout, OperationId::new()).await?,
        "another operation must not resume the writers"
    );
    assert!(Quiesce::read(&layout)?.is_some());
    assert!(quiesce::resume(&layout, operation).await?);
    host.wait_until("dispatches are accepted", async || {
        Ok(request_dispatch(&host, json!({ "prompt": "ok" })).await?.0 == StatusCode::ACCEPTED)
    })
    .await
}

#[tokio::test]
async fn backup_is_reported_while_running_and_afterwards() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    let fetch_backup = async || -> Result<Value> {
        Ok(send_as_platform(&host, Method::GET, "/_svc/internal/backup", Value::Null).await?.1)
    };
    assert_eq!(fetch_backup().await?, json!({ "running": false }));
    let progress = json!({ "version": 1, "beganAt": "2026-01-02T03:04:05.000Z", "stage": "dump",
        "dumpedBytes": 7, "uploadedBytes": 5, "updatedAt": "2026-01-02T03:04:06.000Z" });
    host.machine.write("var/lib/svc/backup-progress.json", &progress.to_string())?;
    assert_eq!(
        fetch_backup().await?,
        json!({ "running": false }),
        "a killed run must not be reported as running"
    );
    let lock = svc::host::system::lock::Lock::acquire(&host.machine.path("var/lib/svc/backup.lock"))?;
    let backup = fetch_backup().await?;
    assert_eq!(
        (&backup["running"], &backup["dumpedBytes"], &backup["uploadedBytes"]),
        (&json!(true), &json!(7), &json!(5))
    );
    drop(lock);
    let key = "system/db/snapshots/2026-01-02T03-04-05.678Z-1.dump";
    let last =
        json!({ "timestamp": "2026-01-02T03:04:05.000Z", "status": "success", "stage": "done", "key": key });
    host.machine.write("var/lib/svc/last-backup.json", &last.to_string())?;
    let backup = fetch_backup().await?;
    assert_eq!(
        (&backup["last"]["takenAt"], &backup["last"]["beganAt"]),
        (&json!("2026-01-02T03:04:05.678Z"), &json!("2026-01-02T03:04:05.000Z"))
    );
    Ok(())
}

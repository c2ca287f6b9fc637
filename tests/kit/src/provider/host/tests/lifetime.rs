//! Tests for a host after its boot: crashes, requests, power, loss, and restart from its disk.

use serde_json::json;

use super::*;

#[tokio::test]
async fn failed_service_is_restarted_within_limit() -> Result<()> {
    let testbed = Testbed::start("{\"svc-gateway\": [\"serve:1\", \"serve:1\", \"serve\"]}").await?;
    testbed.boot("a").await?;
    let gateway_starts =
        || testbed.call_lines("a").map(|order| order.iter().filter(|call| *call == "svc-gateway").count());
    wait_for("the gateway has started three times", || gateway_starts().is_ok_and(|count| count == 3))
        .await?;

    let failing = Testbed::start("{\"svc-sync-agent\": [\"serve:1\"]}").await?;
    failing.boot("a").await.ok();
    let log = || failing.simulator.unit_log("a", "svc-sync-agent").unwrap_or_default();
    wait_for("the start limit is reached", || log().contains("failed 5 times")).await
}

#[tokio::test]
async fn exit_codes_0_and_78_are_final() -> Result<()> {
    for exit_code in [0, 78] {
        let testbed = Testbed::start(&format!("{{\"svc-gateway\": [\"serve:{exit_code}\"]}}")).await?;
        testbed.boot("a").await.ok();
        let log = || testbed.simulator.unit_log("a", "svc-gateway").unwrap_or_default();
        wait_for("the gateway has ended", || log().contains("is not restarted")).await?;
        assert_eq!(testbed.call_lines("a")?.iter().filter(|call| *call == "svc-gateway").count(), 1);
        let restarted = testbed.simulator.run_unit("a", "svc-gateway", &[]).await?;
        let count = testbed.call_lines("a")?.iter().filter(|call| *call == "svc-gateway").count();
        assert_eq!(count, 2, "an operator may start it again ({restarted:?})");
    }
    Ok(())
}

#[tokio::test]
async fn request_file_starts_its_unit() -> Result<()> {
    let testbed = Testbed::start("{}").await?;
    testbed.boot("a").await?;
    let request = testbed.file("a", "var/lib/svc/requests/backup")?;
    fs::create_dir_all(request.parent().context("the path has no parent")?)?;
    fs::write(&request, "")?;
    wait_for("the request is removed", || !request.exists()).await?;
    assert_eq!(testbed.call_lines("a")?.last().map(String::as_str), Some("svc-db-backup run --request"));
    Ok(())
}

#[tokio::test]
async fn run_unit_runs_oneshots_and_services() -> Result<()> {
    let testbed = Testbed::start("{\"svc-db-backup\": [0, 77]}").await?;
    testbed.boot("a").await?;
    let first = testbed.simulator.run_unit("a", "svc-db-backup", &["run"]).await?;
    assert!(first.status.success());
    assert_eq!(String::from_utf8(first.stdout)?, "svc-db-backup runs\n");
    let second =
        testbed.simulator.run_unit_with("a", "svc-db-backup", &["run"], &[("FAILPOINTS", "y=panic")]).await?;
    assert_eq!(second.status.code(), Some(77));
    let last = testbed.calls("a")?.pop().context("no calls")?;
    assert_eq!(last.env.get("FAILPOINTS").map(String::as_str), Some("y=panic"));

    testbed.simulator.stop_service("a", "svc-gateway").await?;
    assert!(testbed.simulator.run_unit("a", "svc-gateway", &[]).await?.status.success());
    assert!(testbed.simulator.run_unit("a", "svc-gateway", &[]).await?.status.success(), "already running");
    assert_eq!(testbed.call_lines("a")?.iter().filter(|call| *call == "svc-gateway").count(), 2);
    Ok(())
}

#[tokio::test]
async fn killed_server_restarts_with_its_data() -> Result<()> {
    let testbed = Testbed::start("{}").await?;
    let id = testbed.boot("a").await?;
    let url = database_url(&testbed, "a")?;
    query(&url, "CREATE TABLE numbers AS SELECT 7 AS n").await?;
    testbed.simulator.kill_server("a").await?;
    assert_eq!(testbed.simulator.server_by_name("a").map(|server| server.status), Some(Power::Off));
    let pids: Vec<i32> =
        testbed.calls("a")?.iter().flat_map(|call| [Some(call.pid), call.child]).flatten().collect();
    assert_eq!(pids.len(), 8);
    wait_for("the processes have ended", || pids.iter().all(|pid| !is_running(*pid))).await?;
    assert!(query(&url, "SELECT 1").await.is_err(), "the database survived");

    let env = testbed.file("a", "opt/svc/env/host.env")?;
    fs::write(&env, fs::read_to_string(&env)? + "MINE=1\n")?;
    fs::remove_file(testbed.file("a", "calls.jsonl")?)?;
    assert_eq!(testbed.api.run_action(id, "poweron", json!({})).await?, "success");
    testbed.simulator.wait_until_booted("a", TIMEOUT).await?;
    assert_eq!(
        testbed.call_lines("a")?,
        ["svc-restore", "svc-apps install-apps", "svc-gateway", "svc-register", "svc-sync-agent"]
    );
    assert!(fs::read_to_string(&env)?.contains("MINE=1"), "user-data was written again");
    assert_eq!(database_url(&testbed, "a")?, url);
    assert_eq!(query(&url, "SELECT n FROM numbers").await?, "7");
    Ok(())
}

#[tokio::test]
async fn reboot_and_shutdown_stop_all_services() -> Result<()> {
    let testbed = Testbed::start("{}").await?;
    let id = testbed.boot("a").await?;
    assert_eq!(testbed.api.run_action(id, "reboot", json!({})).await?, "success");
    testbed.simulator.wait_until_booted("a", TIMEOUT).await?;
    assert_eq!(testbed.call_lines("a")?.len(), 6 + 5);

    assert_eq!(testbed.api.run_action(id, "shutdown", json!({})).await?, "success");
    testbed.simulator.wait_for_power("a", Power::Off).await?;
    let log = testbed.simulator.unit_log("a", "svc-gateway")?;
    assert_eq!(log.matches("svc-gateway was stopped").count(), 2, "{log}");
    for call in testbed.calls("a")? {
        assert!(!is_running(call.pid), "{call:?}");
    }
    Ok(())
}

#[tokio::test]
async fn lost_server_restarts_from_disk() -> Result<()> {
    let testbed = Testbed::start("{}").await?;
    let id = testbed.boot("a").await?;
    let b_id = testbed.boot("b").await?;
    query(&database_url(&testbed, "a")?, "CREATE TABLE numbers AS SELECT 7 AS n").await?;
    let address = testbed.simulator.server_by_name("a").map(|server| server.ipv4);
    assert!(testbed.simulator.start_from_disk("a").is_err(), "the provider lists it");

    testbed.simulator.lose_server("a").await?;
    assert_eq!(testbed.api.get(&format!("/servers/{id}")).await?.status, 404);
    let url = testbed.simulator.start_database_only("a").await?;
    assert_eq!(query(&url, "SELECT n FROM numbers").await?, "7");
    testbed.simulator.stop_unlisted("a").await?;

    let call_count = testbed.calls("a")?.len();
    testbed.simulator.start_from_disk("a")?;
    testbed.simulator.wait_until_booted("a", TIMEOUT).await?;
    let started = &testbed.calls("a")?[call_count..];
    let listen =
        format!("{}:{}", address.context("the server had no address")?, testbed.simulator.https_port());
    assert!(started.iter().all(|call| call.env["GATEWAY_LISTEN"] == listen));
    assert!(testbed.simulator.run_unit("a", "svc-db-backup", &["run"]).await?.status.success());
    assert_eq!(testbed.simulator.servers().len(), 1, "only b is listed");

    // A deleted server can be restarted in the same way.
    assert_eq!(testbed.api.delete(b_id).await?.status, 200);
    testbed.simulator.start_from_disk("b")?;
    testbed.simulator.wait_until_booted("b", TIMEOUT).await
}

#[tokio::test]
async fn dropping_simulator_kills_hosts() -> Result<()> {
    let testbed = Testbed::start("{}").await?;
    testbed.boot("a").await?;
    let url = database_url(&testbed, "a")?;
    let pids: Vec<i32> =
        testbed.calls("a")?.iter().flat_map(|call| [Some(call.pid), call.child]).flatten().collect();
    let Testbed { simulator, .. } = testbed;
    drop(simulator);
    wait_for("the processes have ended", || pids.iter().all(|pid| !is_running(*pid))).await?;
    assert!(query(&url, "SELECT 1").await.is_err(), "the database survived");
    Ok(())
}

#[tokio::test]
async fn hosts_are_controlled_over_http() -> Result<()> {
    let testbed = Testbed::start("{}").await?;
    testbed.boot("a").await?;
    let control = Api::new(testbed.simulator.control_url(), String::new());
    let host = control.get("/hosts/a").await?.body;
    assert_eq!((&host["boot"]["state"], &host["listed"]), (&json!("up"), &json!(true)));
    let run = control.post("/hosts/a/units/svc-db-backup/start", json!({"args": ["run"]})).await?.body;
    assert_eq!((&run["code"], &run["stdout"]), (&json!(0), &json!("svc-db-backup runs\n")));
    assert_eq!(control.post("/servers/a/lose", json!({})).await?.status, 200);
    assert_eq!(control.get("/hosts/a").await?.body["boot"]["state"], "off");
    assert_eq!(control.post("/hosts/a/start-from-disk", json!({})).await?.status, 200);
    testbed.simulator.wait_until_booted("a", TIMEOUT).await?;
    assert_eq!(control.post("/hosts/a/stop", json!({})).await?.status, 200);
    assert_eq!(control.get("/hosts/a").await?.body["boot"]["state"], "off");
    Ok(())
}

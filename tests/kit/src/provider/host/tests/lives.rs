//! A host's life after its boot: crashes, requests, power, death, and coming back from its disk.

use serde_json::json;

use super::*;

#[tokio::test]
async fn a_service_that_fails_is_restarted_within_a_bound() -> Result<()> {
    let stage = Stage::set("{\"svc-gateway\": [\"serve:1\", \"serve:1\", \"serve\"]}").await?;
    stage.boot("a").await?;
    let gateways =
        || stage.order("a").map(|order| order.iter().filter(|call| *call == "svc-gateway").count());
    until("the third gateway", || gateways().is_ok_and(|count| count == 3)).await?;

    let failing = Stage::set("{\"svc-sync-agent\": [\"serve:1\"]}").await?;
    failing.boot("a").await.ok();
    let log = || failing.simulator.unit_log("a", "svc-sync-agent").unwrap_or_default();
    until("the limit of starts", || log().contains("failed 5 times")).await
}

#[tokio::test]
async fn an_end_with_0_or_78_is_final() -> Result<()> {
    for code in [0, 78] {
        let stage = Stage::set(&format!("{{\"svc-gateway\": [\"serve:{code}\"]}}")).await?;
        stage.boot("a").await.ok();
        let log = || stage.simulator.unit_log("a", "svc-gateway").unwrap_or_default();
        until("the gateway's end", || log().contains("is not restarted")).await?;
        assert_eq!(stage.order("a")?.iter().filter(|call| *call == "svc-gateway").count(), 1);
        let again = stage.simulator.run_unit("a", "svc-gateway", &[]).await?;
        let count = stage.order("a")?.iter().filter(|call| *call == "svc-gateway").count();
        assert_eq!(count, 2, "an operator may start it again ({again:?})");
    }
    Ok(())
}

#[tokio::test]
async fn a_request_file_starts_its_unit() -> Result<()> {
    let stage = Stage::set("{}").await?;
    stage.boot("a").await?;
    let request = stage.file("a", "var/lib/svc/requests/backup")?;
    fs::create_dir_all(request.parent().context("parent")?)?;
    fs::write(&request, "")?;
    until("the request is taken", || !request.exists()).await?;
    assert_eq!(stage.order("a")?.last().map(String::as_str), Some("svc-db-backup run --request"));
    Ok(())
}

#[tokio::test]
async fn single_units_run_as_an_operator_would() -> Result<()> {
    let stage = Stage::set("{\"svc-db-backup\": [0, 77]}").await?;
    stage.boot("a").await?;
    let good = stage.simulator.run_unit("a", "svc-db-backup", &["run"]).await?;
    assert!(good.status.success());
    assert_eq!(String::from_utf8(good.stdout)?, "svc-db-backup speaks\n");
    let bad =
        stage.simulator.run_unit_with("a", "svc-db-backup", &["run"], &[("FAILPOINTS", "y=panic")]).await?;
    assert_eq!(bad.status.code(), Some(77));
    let last = stage.calls("a")?.pop().context("calls")?;
    assert_eq!(last.env.get("FAILPOINTS").map(String::as_str), Some("y=panic"));

    stage.simulator.stop_service("a", "svc-gateway").await?;
    assert!(stage.simulator.run_unit("a", "svc-gateway", &[]).await?.status.success());
    assert!(stage.simulator.run_unit("a", "svc-gateway", &[]).await?.status.success(), "already running");
    assert_eq!(stage.order("a")?.iter().filter(|call| *call == "svc-gateway").count(), 2);
    Ok(())
}

#[tokio::test]
async fn a_killed_server_leaves_no_process_and_starts_again_with_its_data() -> Result<()> {
    let stage = Stage::set("{}").await?;
    let id = stage.boot("a").await?;
    let url = database_url(&stage, "a")?;
    query(&url, "CREATE TABLE kept AS SELECT 7 AS n").await?;
    stage.simulator.kill_server("a").await?;
    assert_eq!(stage.simulator.server_by_name("a").map(|server| server.status), Some(Power::Off));
    let pids: Vec<i32> =
        stage.calls("a")?.iter().flat_map(|call| [Some(call.pid), call.child]).flatten().collect();
    assert_eq!(pids.len(), 8);
    until("the processes are gone", || pids.iter().all(|pid| !is_running(*pid))).await?;
    assert!(query(&url, "SELECT 1").await.is_err(), "the database survived");

    let env = stage.file("a", "opt/svc/env/host.env")?;
    fs::write(&env, fs::read_to_string(&env)? + "MINE=1\n")?;
    fs::remove_file(stage.file("a", "calls.jsonl")?)?;
    assert_eq!(stage.api.act(id, "poweron", json!({})).await?, "success");
    stage.simulator.booted("a", LONG).await?;
    assert_eq!(
        stage.order("a")?,
        ["svc-restore", "svc-apps install-apps", "svc-gateway", "svc-register", "svc-sync-agent"]
    );
    assert!(fs::read_to_string(&env)?.contains("MINE=1"), "user-data was written again");
    assert_eq!(database_url(&stage, "a")?, url);
    assert_eq!(query(&url, "SELECT n FROM kept").await?, "7");
    Ok(())
}

#[tokio::test]
async fn a_shutdown_ends_the_services_in_order_and_a_reboot_brings_them_back() -> Result<()> {
    let stage = Stage::set("{}").await?;
    let id = stage.boot("a").await?;
    assert_eq!(stage.api.act(id, "reboot", json!({})).await?, "success");
    stage.simulator.booted("a", LONG).await?;
    assert_eq!(stage.order("a")?.len(), 6 + 5);

    assert_eq!(stage.api.act(id, "shutdown", json!({})).await?, "success");
    stage.simulator.wait_for_power("a", Power::Off).await?;
    let log = stage.simulator.unit_log("a", "svc-gateway")?;
    assert_eq!(log.matches("svc-gateway was stopped").count(), 2, "{log}");
    for call in stage.calls("a")? {
        assert!(!is_running(call.pid), "{call:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_lost_server_can_be_started_again_from_its_disk() -> Result<()> {
    let stage = Stage::set("{}").await?;
    let id = stage.boot("a").await?;
    let other = stage.boot("b").await?;
    query(&database_url(&stage, "a")?, "CREATE TABLE kept AS SELECT 7 AS n").await?;
    let address = stage.simulator.server_by_name("a").map(|server| server.ipv4);
    assert!(stage.simulator.start_from_disk("a").is_err(), "the provider has it");

    stage.simulator.vanish_server("a").await?;
    assert_eq!(stage.api.get(&format!("/servers/{id}")).await?.status, 404);
    let url = stage.simulator.start_database_only("a").await?;
    assert_eq!(query(&url, "SELECT n FROM kept").await?, "7");
    stage.simulator.stop_unlisted("a").await?;

    let calls = stage.calls("a")?.len();
    stage.simulator.start_from_disk("a")?;
    stage.simulator.booted("a", LONG).await?;
    let started = &stage.calls("a")?[calls..];
    let listen = format!("{}:{}", address.context("it had one")?, stage.simulator.https_port());
    assert!(started.iter().all(|call| call.env["GATEWAY_LISTEN"] == listen));
    assert!(stage.simulator.run_unit("a", "svc-db-backup", &["run"]).await?.status.success());
    assert_eq!(stage.simulator.servers().len(), 1, "only b is listed");

    // Deleting is the same, from the provider's side.
    assert_eq!(stage.api.delete(other).await?.status, 200);
    stage.simulator.start_from_disk("b")?;
    stage.simulator.booted("b", LONG).await
}

#[tokio::test]
async fn a_simulator_that_goes_takes_its_hosts_along() -> Result<()> {
    let stage = Stage::set("{}").await?;
    stage.boot("a").await?;
    let url = database_url(&stage, "a")?;
    let pids: Vec<i32> =
        stage.calls("a")?.iter().flat_map(|call| [Some(call.pid), call.child]).flatten().collect();
    let Stage { simulator, .. } = stage;
    drop(simulator);
    until("the processes are gone", || pids.iter().all(|pid| !is_running(*pid))).await?;
    assert!(query(&url, "SELECT 1").await.is_err(), "the database survived");
    Ok(())
}

#[tokio::test]
async fn hosts_are_driven_over_http_as_well() -> Result<()> {
    let stage = Stage::set("{}").await?;
    stage.boot("a").await?;
    let control = Api::at(stage.simulator.control_url(), String::new());
    let host = control.get("/hosts/a").await?.body;
    assert_eq!((&host["boot"]["state"], &host["listed"]), (&json!("up"), &json!(true)));
    let run = control.post("/hosts/a/units/svc-db-backup/start", json!({"args": ["run"]})).await?.body;
    assert_eq!((&run["code"], &run["stdout"]), (&json!(0), &json!("svc-db-backup speaks\n")));
    assert_eq!(control.post("/servers/a/vanish", json!({})).await?.status, 200);
    assert_eq!(control.get("/hosts/a").await?.body["boot"]["state"], "off");
    assert_eq!(control.post("/hosts/a/start-from-disk", json!({})).await?.status, 200);
    stage.simulator.booted("a", LONG).await?;
    assert_eq!(control.post("/hosts/a/stop", json!({})).await?.status, 200);
    assert_eq!(control.get("/hosts/a").await?.body["boot"]["state"], "off");
    Ok(())
}

//! One boot: its order, its gate, its failures.

use super::*;

#[tokio::test]
async fn the_units_start_in_order_with_their_environment_and_nothing_else() -> Result<()> {
    let stage = Stage::set("{}").await?;
    stage.simulator.set_next_server_env(&[("FAILPOINTS", "x=off")])?;
    stage.boot("a").await?;
    assert_eq!(
        stage.order("a")?,
        [
            "svc-update boot",
            "svc-restore",
            "svc-apps install-apps",
            "svc-gateway",
            "svc-register",
            "svc-sync-agent"
        ]
    );
    let stages = fs::read_to_string(stage.file("a", "stages")?)?;
    assert_eq!(stages, "database\nbundle\nrestore\ngateway\nregister\n");

    let host = stage.simulator.hosts()?.remove(0);
    for call in stage.calls("a")? {
        let value = |name: &str| call.env.get(name).map(String::as_str);
        assert_eq!(value("SVC_ROOT"), host.disk.to_str());
        let listen = format!("{}:{}", host.ipv4, stage.simulator.https_port());
        assert_eq!(value("GATEWAY_LISTEN"), Some(listen.as_str()));
        assert_eq!(value("FAILPOINTS"), Some("x=off"));
        let is_service = call.unit == "svc-gateway" || call.unit == "svc-sync-agent";
        assert_eq!(value("NOTIFY_SOCKET").is_some(), is_service, "{}", call.unit);
        // LC_CTYPE is the interpreter's own doing.
        let known = "SVC_ROOT GATEWAY_LISTEN SVC_PG_BIN_DIR SVC_SYSTEMCTL PATH RUST_LOG RUST_BACKTRACE FAILPOINTS STANDIN NOTIFY_SOCKET LC_CTYPE";
        let strange: Vec<_> =
            call.env.keys().filter(|key| !known.split(' ').any(|name| name == *key)).collect();
        assert!(strange.is_empty(), "{strange:?}");
    }

    let env = stage.file("a", "opt/svc/env/host.env")?;
    assert_eq!(fs::metadata(&env)?.permissions().mode() & 0o777, 0o600);
    assert!(fs::read_to_string(&env)?.starts_with("SVC_HANDLE=ada\n"));
    let url = database_url(&stage, "a")?;
    assert_eq!(
        query(&url, "SELECT current_database() || count(*) FROM pg_tables WHERE schemaname = 'public'")
            .await?,
        "svc0"
    );
    let log = stage.simulator.unit_log("a", "svc-restore")?;
    assert!(log.contains("svc-restore speaks\n") && log.contains("svc-restore ends with 0\n"), "{log}");
    Ok(())
}

#[tokio::test]
async fn a_failed_unit_stops_the_boot_and_is_reported_with_its_words() -> Result<()> {
    for (unit, stage_name, ran) in [
        ("svc-update", "bundle", &["svc-update boot"][..]),
        ("svc-restore", "restore", &["svc-update boot", "svc-restore"]),
        (
            "svc-register",
            "register",
            &["svc-update boot", "svc-restore", "svc-apps install-apps", "svc-gateway", "svc-register"],
        ),
    ] {
        let stage = Stage::set(&format!("{{\"{unit}\": [70, 0]}}")).await?;
        let (failed_at, message) = stage.fail("a").await?;
        assert_eq!(failed_at, stage_name);
        assert!(message.contains(&format!("{unit} ends with 70")), "{message}");
        let order = stage.order("a")?;
        let (report, before) = order.split_last().context("no calls")?;
        assert_eq!(before, ran);
        assert!(
            report.starts_with(&format!("svc-register failure --stage {stage_name} --message ")),
            "{report}"
        );
        assert!(report.contains("ends with 70"), "{report}");
    }
    Ok(())
}

#[tokio::test]
async fn without_the_gates_marker_the_gateway_does_not_start() -> Result<()> {
    // A restore that says that it is done and is not.
    let stage = Stage::set("{\"svc-restore\": [\"skip\"]}").await?;
    assert_eq!(stage.fail("a").await?.0, "gateway");
    let by_hand = stage.simulator.run_unit("a", "svc-gateway", &[]).await?;
    assert!(!by_hand.status.success());
    assert!(!stage.order("a")?.contains(&"svc-gateway".to_owned()));
    Ok(())
}

#[tokio::test]
async fn a_gateway_that_never_says_ready_is_a_failure_of_its_stage() -> Result<()> {
    let standin = "{\"svc-gateway\": [\"hang\"]}";
    let stage =
        Stage::set_with(standin, |settings| settings.ready_deadline = Duration::from_millis(700)).await?;
    let (failed_at, message) = stage.fail("a").await?;
    assert_eq!(failed_at, "gateway");
    assert!(message.contains("not ready within"), "{message}");
    assert!(!stage.order("a")?.contains(&"svc-register".to_owned()));
    for call in stage.calls("a")? {
        assert!(!is_running(call.pid), "{} was left running", call.unit);
    }
    Ok(())
}

#[tokio::test]
async fn registration_is_tried_again_while_the_platform_is_away() -> Result<()> {
    let stage = Stage::set("{\"svc-register\": [75, 75, 0]}").await?;
    stage.boot("a").await?;
    let tries = stage.order("a")?.iter().filter(|call| *call == "svc-register").count();
    assert_eq!(tries, 3);

    let never = Stage::set_with("{\"svc-register\": [75]}", |settings| {
        settings.register_deadline = Duration::from_millis(200);
    });
    assert_eq!(never.await?.fail("a").await?.0, "register");
    Ok(())
}

#[tokio::test]
async fn user_data_that_cannot_be_read_fails_the_boot() -> Result<()> {
    let stage = Stage::set("{}").await?;
    stage.api.create("a", "#!/bin/sh\nexit 0").await?;
    stage.simulator.wait_for_power("a", Power::Running).await?;
    let error = stage.simulator.booted("a", LONG).await.expect_err("no cloud-config").to_string();
    assert!(error.contains("user-data"), "{error}");
    Ok(())
}

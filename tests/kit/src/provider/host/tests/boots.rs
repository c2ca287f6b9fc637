//! Boot tests: order, gate, failures.

use super::*;

#[tokio::test]
async fn units_start_in_order_with_expected_environment() -> Result<()> {
    let testbed = Testbed::start("{}").await?;
    testbed.simulator.set_next_server_env(&[("FAILPOINTS", "x=off")])?;
    testbed.boot("a").await?;
    assert_eq!(
        testbed.call_lines("a")?,
        [
            "svc-update boot",
            "svc-restore",
            "svc-apps install-apps",
            "svc-gateway",
            "svc-register",
            "svc-sync-agent"
        ]
    );
    let stages = fs::read_to_string(testbed.file("a", "stages")?)?;
    assert_eq!(stages, "database\nbundle\nrestore\ngateway\nregister\n");

    let host = testbed.simulator.hosts()?.remove(0);
    for call in testbed.calls("a")? {
        let value = |name: &str| call.env.get(name).map(String::as_str);
        assert_eq!(value("SVC_ROOT"), host.disk.to_str());
        let listen = format!("{}:{}", host.ipv4, testbed.simulator.https_port());
        assert_eq!(value("GATEWAY_LISTEN"), Some(listen.as_str()));
        assert_eq!(value("FAILPOINTS"), Some("x=off"));
        let is_service = call.unit == "svc-gateway" || call.unit == "svc-sync-agent";
        assert_eq!(value("NOTIFY_SOCKET").is_some(), is_service, "{}", call.unit);
        // The interpreter sets LC_CTYPE itself.
        let expected = "SVC_ROOT GATEWAY_LISTEN SVC_PG_BIN_DIR SVC_SYSTEMCTL PATH RUST_LOG RUST_BACKTRACE FAILPOINTS STANDIN NOTIFY_SOCKET LC_CTYPE";
        let unexpected: Vec<_> =
            call.env.keys().filter(|key| !expected.split(' ').any(|name| name == *key)).collect();
        assert!(unexpected.is_empty(), "{unexpected:?}");
    }

    let env = testbed.file("a", "opt/svc/env/host.env")?;
    assert_eq!(fs::metadata(&env)?.permissions().mode() & 0o777, 0o600);
    assert!(fs::read_to_string(&env)?.starts_with("SVC_HANDLE=ada\n"));
    let url = database_url(&testbed, "a")?;
    assert_eq!(
        query(&url, "SELECT current_database() || count(*) FROM pg_tables WHERE schemaname = 'public'")
            .await?,
        "svc0"
    );
    let log = testbed.simulator.unit_log("a", "svc-restore")?;
    assert!(log.contains("svc-restore runs\n") && log.contains("svc-restore ends with 0\n"), "{log}");
    Ok(())
}

#[tokio::test]
async fn failed_unit_stops_boot_and_is_reported() -> Result<()> {
    for (unit, expected_stage, expected_order) in [
        ("svc-update", "bundle", &["svc-update boot"][..]),
        ("svc-restore", "restore", &["svc-update boot", "svc-restore"]),
        (
            "svc-register",
            "register",
            &["svc-update boot", "svc-restore", "svc-apps install-apps", "svc-gateway", "svc-register"],
        ),
    ] {
        let testbed = Testbed::start(&format!("{{\"{unit}\": [70, 0]}}")).await?;
        let (failed_stage, message) = testbed.expect_boot_failure("a").await?;
        assert_eq!(failed_stage, expected_stage);
        assert!(message.contains(&format!("{unit} ends with 70")), "{message}");
        let order = testbed.call_lines("a")?;
        let (report, previous_calls) = order.split_last().context("no calls")?;
        assert_eq!(previous_calls, expected_order);
        assert!(
            report.starts_with(&format!("svc-register failure --stage {expected_stage} --message ")),
            "{report}"
        );
        assert!(report.contains("ends with 70"), "{report}");
    }
    Ok(())
}

#[tokio::test]
async fn gateway_does_not_start_without_restore_marker() -> Result<()> {
    // The restore succeeds without restoring anything.
    let testbed = Testbed::start("{\"svc-restore\": [\"skip\"]}").await?;
    assert_eq!(testbed.expect_boot_failure("a").await?.0, "gateway");
    let run = testbed.simulator.run_unit("a", "svc-gateway", &[]).await?;
    assert!(!run.status.success());
    assert!(!testbed.call_lines("a")?.contains(&"svc-gateway".to_owned()));
    Ok(())
}

#[tokio::test]
async fn gateway_that_never_becomes_ready_fails_boot() -> Result<()> {
    let standin = "{\"svc-gateway\": [\"hang\"]}";
    let testbed =
        Testbed::start_with(standin, |settings| settings.ready_timeout = Duration::from_millis(700)).await?;
    let (failed_stage, message) = testbed.expect_boot_failure("a").await?;
    assert_eq!(failed_stage, "gateway");
    assert!(message.contains("not ready within"), "{message}");
    assert!(!testbed.call_lines("a")?.contains(&"svc-register".to_owned()));
    for call in testbed.calls("a")? {
        assert!(!is_running(call.pid), "{} is still running", call.unit);
    }
    Ok(())
}

#[tokio::test]
async fn registration_is_retried_while_platform_is_unreachable() -> Result<()> {
    let testbed = Testbed::start("{\"svc-register\": [75, 75, 0]}").await?;
    testbed.boot("a").await?;
    let attempts = testbed.call_lines("a")?.iter().filter(|call| *call == "svc-register").count();
    assert_eq!(attempts, 3);

    let unreachable = Testbed::start_with("{\"svc-register\": [75]}", |settings| {
        settings.register_timeout = Duration::from_millis(200);
    });
    assert_eq!(unreachable.await?.expect_boot_failure("a").await?.0, "register");
    Ok(())
}

#[tokio::test]
async fn malformed_user_data_fails_boot() -> Result<()> {
    let testbed = Testbed::start("{}").await?;
    testbed.api.create("a", "#!/bin/sh\nexit 0").await?;
    testbed.simulator.wait_for_power("a", Power::Running).await?;
    let error = testbed
        .simulator
        .wait_until_booted("a", TIMEOUT)
        .await
        .expect_err("user-data without #cloud-config is rejected")
        .to_string();
    assert!(error.contains("user-data"), "{error}");
    Ok(())
}

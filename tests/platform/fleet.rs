//! GET `/vps/fleet` returns the fleet's counts and the machines that need attention.

use serde_json::{Value, json};

use super::stack::{Stack, UserDataSettings, heartbeat_of};

fn find_reasons(fleet: &Value, machine: &str) -> Value {
    let row = fleet["attention"].as_array().unwrap().iter().find(|row| row["machineId"] == machine);
    row.map_or(Value::Null, |row| row["reasons"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_counts_machines_and_lists_problems() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let fleet = || stack.get(&process, "/vps/fleet");
    let empty = fleet().await.body;
    assert_eq!((&empty["totals"]["machines"], &empty["attention"]), (&json!(0), &json!([])));

    let healthy = stack.start_machine(&process, "user_1").await;
    let mut beat = heartbeat_of(&healthy);
    let key = "system/db/snapshots/x.dump";
    let started = std::time::Instant::now();
    let taken_at = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(100);
    beat["lastBackup"] =
        json!({"status": "success", "key": key, "takenAt": taken_at.to_string(), "sizeBytes": 1});
    stack.send_heartbeat(&process, &healthy, &beat).await;
    // A later failed backup does not remove the last successful one.
    let unhealthy = stack.start_machine(&process, "user_2").await;
    let mut beat = heartbeat_of(&unhealthy);
    beat["health"]["database"] = json!("failing");
    beat["lastBackup"] =
        json!({"status": "success", "key": key, "takenAt": taken_at.to_string(), "sizeBytes": 1});
    stack.send_heartbeat(&process, &unhealthy, &beat).await;
    beat["lastBackup"] = json!({"status": "error", "error": "disk full"});
    stack.send_heartbeat(&process, &unhealthy, &beat).await;
    let silent = stack.start_machine(&process, "user_3").await;
    stack.send_heartbeat(&process, &silent, &heartbeat_of(&silent)).await;
    let failed = stack.start_machine(&process, "user_4").await;
    stack.post(&process, &format!("/vps/{}/fail", failed.machine), &json!({"reason": "r"})).await;
    let booting = stack.provision(&process, "user_5").await;
    let booting = booting["machineId"].as_str().unwrap();
    let deleted = stack.start_machine(&process, "user_6").await;
    stack.delete(&process, &format!("/vps/{}", deleted.machine)).await;
    let client = stack.database.connect().await.unwrap();
    let old = "UPDATE user_machines SET heartbeat_at = now() - interval '5 minutes', \
               created_at = now() - interval '1 day' WHERE machine_id = $1";
    client.execute(old, &[&silent.machine.parse::<uuid::Uuid>().unwrap()]).await.unwrap();
    let slow = "UPDATE user_machines SET created_at = now() - interval '20 minutes' WHERE machine_id = $1";
    client.execute(slow, &[&booting.parse::<uuid::Uuid>().unwrap()]).await.unwrap();
    // A backup counts as no older than its machine's registration.
    let registered = "UPDATE user_machines SET registered_at = now() - interval '1 hour' \
                      WHERE backup_taken_at IS NOT NULL";
    client.execute(registered, &[]).await.unwrap();

    let overview = fleet().await.body;
    assert_eq!(
        overview["totals"],
        json!({
            "machines": 5,
            "byStatus": {"provisioning": 1, "running": 3, "recovering": 0, "resizing": 0, "failed": 1},
            "byImageVersion": {"v1": 5},
            "byHealth": {"healthy": 1, "unhealthy": 1, "silent": 1, "unknown": 2},
        })
    );
    let age = overview["backups"]["maxAgeSeconds"].as_u64().unwrap();
    assert!((100..=101 + started.elapsed().as_secs()).contains(&age), "{overview}");
    assert_eq!(overview["backups"]["never"], 2, "{overview}");
    assert_eq!(find_reasons(&overview, &healthy.machine), Value::Null, "{overview}");
    assert_eq!(find_reasons(&overview, &unhealthy.machine), json!(["database_failing", "backup_failing"]));
    assert_eq!(find_reasons(&overview, &silent.machine), json!(["heartbeat_silent", "backup_overdue"]));
    assert_eq!(find_reasons(&overview, &failed.machine), json!(["failed:operator"]));
    assert_eq!(find_reasons(&overview, booting), json!(["boot_slow"]));
    assert_eq!(overview["attentionTotal"], 4);
    assert!(overview["asOf"].as_str().unwrap().ends_with('Z'));

    stack.get(&process, "/vps/fleet?x=1").await.assert_problem(400, "invalid_request");
    let anonymous = stack.request(&process, reqwest::Method::GET, "/vps/fleet");
    stack.send(anonymous).await.assert_problem(401, "unauthorized");
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_code_server_is_shown_and_counts_as_unhealthy() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    for (code, expected_reasons, healthy_count) in [
        (Value::Null, Value::Null, 1),
        (json!("failing"), json!(["code_failing"]), 0),
        (json!("ok"), Value::Null, 1),
    ] {
        let mut beat = heartbeat_of(&host_settings);
        beat["health"]["code"] = code.clone();
        assert_eq!(stack.send_heartbeat(&process, &host_settings, &beat).await.status, 200);
        let fleet = stack.get(&process, "/vps/fleet").await.body;
        assert_eq!(find_reasons(&fleet, &host_settings.machine), expected_reasons, "{code}");
        assert_eq!(fleet["totals"]["byHealth"]["healthy"], healthy_count, "{code}");
        let machine = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
        assert_eq!(machine["health"].get("code").cloned().unwrap_or_default(), code);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeat_without_a_disk_is_accepted_and_shown() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let report_disk = async |disk: Option<Value>| {
        let mut beat = heartbeat_of(&host_settings);
        match disk {
            Some(disk) => beat["disk"] = disk,
            None => drop(beat.as_object_mut().unwrap().shift_remove("disk")),
        }
        let response = stack.send_heartbeat(&process, &host_settings, &beat).await;
        assert_eq!(response.status, 200, "{response:?}");
        let record = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
        let fleet = stack.get(&process, "/vps/fleet").await.body;
        (record["health"]["disk"].clone(), find_reasons(&fleet, &host_settings.machine))
    };
    let measured = json!({"totalBytes": 10, "freeBytes": 5});
    assert_eq!(report_disk(Some(measured.clone())).await, (measured.clone(), Value::Null));
    let unknown = (Value::Null, json!(["disk_unknown"]));
    assert_eq!(report_disk(Some(Value::Null)).await, unknown);
    assert_eq!(report_disk(None).await, unknown);
    assert_eq!(report_disk(Some(measured.clone())).await, (measured, Value::Null));
}

/// An operator drops a release key once every host trusts the next one.
#[tokio::test(flavor = "multi_thread")]
async fn fleet_shows_the_keys_that_hosts_trust() {
    const OLD: &str = "SYI72Ti3RJxzEy9+gM7OSAARF8/NglUPYX3o0A/AaLQ=";
    const NEW: &str = "eORXKO6/E/hnhpWscq+rlYmslv94xGDwuVdmREQ7pMk=";
    let ids = |keys: &str| keys.parse::<svc::store::bundle::TrustedKeys>().unwrap().ids();
    let (old, new) = (ids(OLD)[0].clone(), ids(NEW)[0].clone());
    let stack = Stack::start().await;
    let configured = format!("{OLD},{NEW}");
    let process =
        stack.start_platform_with(&[("BUNDLE_PUBLIC_KEYS", &configured), ("BUNDLE_KEYS_SEQUENCE", "1")]);
    let trusts_both = stack.start_machine(&process, "user_1").await;
    let user_data = &trusts_both.user_data;
    for line in [configured.as_str(), "SVC_BUNDLE_KEYS_SEQUENCE=\\\"1\\\""] {
        assert!(user_data.contains(line), "{line} is not in the user-data of a new machine");
    }
    let outdated = stack.start_machine(&process, "user_2").await;
    let beat_with_keys = |host_settings: &UserDataSettings, sequence: u64, ids: Value| {
        let mut beat = heartbeat_of(host_settings);
        beat["trustedKeys"] = json!({"sequence": sequence, "ids": ids});
        beat
    };
    for (host_settings, sequence, ids) in [(&trusts_both, 1, json!([old, new])), (&outdated, 0, json!([old]))]
    {
        assert_eq!(
            stack
                .send_heartbeat(&process, host_settings, &beat_with_keys(host_settings, sequence, ids))
                .await
                .status,
            200
        );
    }
    // A reported value remains if a later heartbeat omits it, because the host may have been rolled back to a
    // release that does not report it.
    assert_eq!(stack.send_heartbeat(&process, &trusts_both, &heartbeat_of(&trusts_both)).await.status, 200);
    let silent = stack.start_machine(&process, "user_3").await;

    let handle = async |host_settings: &UserDataSettings| {
        stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body["handle"].clone()
    };
    let (both_handle, outdated_handle, silent_handle) =
        (handle(&trusts_both).await, handle(&outdated).await, handle(&silent).await);
    let bundle_keys = stack.get(&process, "/vps/fleet").await.body["bundleKeys"].clone();
    assert_eq!(
        (&bundle_keys["notReporting"], &bundle_keys["notReportingHandles"]),
        (&json!(1), &json!([silent_handle]))
    );
    let key = |id: &str| {
        bundle_keys["keys"].as_array().unwrap().iter().find(|key| key["keyId"] == id).cloned().unwrap()
    };
    assert_eq!((&key(&old)["trusting"], &key(&old)["notTrusting"]), (&json!(2), &json!(0)), "{bundle_keys}");
    assert_eq!(key(&new)["trustingHandles"], json!([both_handle]), "{bundle_keys}");
    assert_eq!(key(&new)["notTrustingHandles"], json!([outdated_handle]), "{bundle_keys}");

    let too_many_ids = vec!["0123456789abcdef"; 17];
    for invalid in [
        beat_with_keys(&outdated, 1, json!(["\u{1b}[31m"])),
        beat_with_keys(&outdated, 1, json!(too_many_ids)),
        beat_with_keys(&outdated, 1 << 40, json!([old])),
    ] {
        stack.send_heartbeat(&process, &outdated, &invalid).await.assert_problem(400, "invalid_request");
    }
}

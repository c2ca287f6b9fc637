//! GET `/vps/fleet` over real rows: what is counted, and who needs somebody.

use serde_json::{Value, json};

use super::stack::{Stack, beat_of};

fn reasons(fleet: &Value, machine: &str) -> Value {
    let found = fleet["attention"].as_array().unwrap().iter().find(|row| row["machineId"] == machine);
    found.map_or(Value::Null, |row| row["reasons"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_fleet_is_counted_and_its_troubles_are_named() {
    let stack = Stack::start().await;
    let process = stack.platform();
    let fleet = || stack.get(&process, "/vps/fleet");
    let empty = fleet().await.body;
    assert_eq!((&empty["totals"]["machines"], &empty["attention"]), (&json!(0), &json!([])));

    let well = stack.running(&process, "user_1").await;
    let mut beat = beat_of(&well);
    let key = "system/db/snapshots/x.dump";
    let taken = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(100);
    beat["lastBackup"] =
        json!({"status": "success", "key": key, "takenAt": taken.to_string(), "sizeBytes": 1});
    stack.beat(&process, &well, &beat).await;
    // A run that fails later takes nothing of the last good one away.
    let ill = stack.running(&process, "user_2").await;
    let mut beat = beat_of(&ill);
    beat["health"]["database"] = json!("failing");
    beat["lastBackup"] =
        json!({"status": "success", "key": key, "takenAt": taken.to_string(), "sizeBytes": 1});
    stack.beat(&process, &ill, &beat).await;
    beat["lastBackup"] = json!({"status": "error", "error": "disk full"});
    stack.beat(&process, &ill, &beat).await;
    let silent = stack.running(&process, "user_3").await;
    stack.beat(&process, &silent, &beat_of(&silent)).await;
    let failed = stack.running(&process, "user_4").await;
    stack.post(&process, &format!("/vps/{}/fail", failed.machine), &json!({"reason": "r"})).await;
    let booting = stack.provision(&process, "user_5").await;
    let booting = booting["machineId"].as_str().unwrap();
    let gone = stack.running(&process, "user_6").await;
    stack.delete(&process, &format!("/vps/{}", gone.machine)).await;
    let client = stack.database.connect().await.unwrap();
    let old = "UPDATE user_machines SET heartbeat_at = now() - interval '5 minutes', \
               created_at = now() - interval '1 day' WHERE machine_id = $1";
    client.execute(old, &[&silent.machine.parse::<uuid::Uuid>().unwrap()]).await.unwrap();
    let slow = "UPDATE user_machines SET created_at = now() - interval '20 minutes' WHERE machine_id = $1";
    client.execute(slow, &[&booting.parse::<uuid::Uuid>().unwrap()]).await.unwrap();

    let seen = fleet().await.body;
    assert_eq!(
        seen["totals"],
        json!({
            "machines": 5,
            "byStatus": {"provisioning": 1, "running": 3, "recovering": 0, "resizing": 0, "failed": 1},
            "byImageVersion": {"v1": 5},
            "byHealth": {"healthy": 1, "unhealthy": 1, "silent": 1, "unknown": 2},
        })
    );
    let age = seen["backups"]["maxAgeSeconds"].as_u64().unwrap();
    assert!((100..160).contains(&age), "{seen}");
    assert_eq!(seen["backups"]["never"], 2, "{seen}");
    assert_eq!(reasons(&seen, &well.machine), Value::Null, "{seen}");
    assert_eq!(reasons(&seen, &ill.machine), json!(["database_failing", "backup_failing"]));
    assert_eq!(reasons(&seen, &silent.machine), json!(["heartbeat_silent", "backup_overdue"]));
    assert_eq!(reasons(&seen, &failed.machine), json!(["failed:operator"]));
    assert_eq!(reasons(&seen, booting), json!(["boot_slow"]));
    assert_eq!(seen["attentionTotal"], 4);
    assert!(seen["asOf"].as_str().unwrap().ends_with('Z'));

    stack.get(&process, "/vps/fleet?x=1").await.assert_problem(400, "invalid_request");
    let anonymous = stack.request(&process, reqwest::Method::GET, "/vps/fleet");
    stack.send(anonymous).await.assert_problem(401, "unauthorized");
}

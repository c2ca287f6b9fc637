//! If no active key verifies a fence, because a restore lost the key or a host forged the fence, the slot waits for an
//! operator.

use serde_json::{Value, json};
use svc::platform::platform_key_rotation::marker;

use super::restored_database::{RestorablePlatform, string_field};
use super::stack::{BUCKET, provision_body};

const NEW_KEY: &str = "0808080808080808080808080808080808080808080808080808080808080808";
const OLD_KEY: &str = "0707070707070707070707070707070707070707070707070707070707070707";

impl RestorablePlatform {
    /// Saves the database, then changes the platform's key.
    async fn change_key(&mut self) {
        self.save().await;
        self.stop().await;
        let both_keys = [("PLATFORM_KEY", NEW_KEY), ("PLATFORM_KEY_PREVIOUS", OLD_KEY)];
        self.process =
            Some(self.stack.start_platform_with(&[self.settings.clone(), both_keys.to_vec()].concat()));
    }

    /// Restores the old database and key. Removes the marker from the store, because it would make the platform refuse
    /// that key.
    async fn restore_with_old_key(&mut self) {
        self.stop().await;
        assert!(self.stack.store.remove(BUCKET, marker::MARKER_PATH));
        self.restore(&[]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fence_signed_by_later_key_does_not_free_the_slot() {
    let mut platform = RestorablePlatform::start(&[]).await;
    let old = platform.stack.start_machine(platform.process(), "user_1").await;
    platform.stack.store_snapshot("user_1");
    platform.change_key().await;
    let body = json!({"idpUserId": "user_1"});
    let recovery = platform.stack.post(platform.process(), "/vps/recover", &body).await.body;
    let later_machine = string_field(&recovery, "machineId");
    platform.stack.wait_until_ended(platform.process(), &string_field(&recovery, "operationId")).await;
    platform.restore_with_old_key().await;

    let refused = platform.stack.post(platform.process(), "/vps/recover", &body).await;
    refused.assert_problem(409, "invalid_state");
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(detail.contains("PLATFORM_KEY") && detail.contains(&later_machine), "{detail}");
    let resize = format!("/vps/{}/resize", old.machine);
    let refused = platform.stack.post(platform.process(), &resize, &json!({"serverType": "cpx32"})).await;
    refused.assert_problem(409, "invalid_state");

    let deleted = platform.stack.delete(platform.process(), &format!("/vps/{}", old.machine)).await.body;
    let operation = format!("/vps/operations/{}", string_field(&deleted, "operationId"));
    platform.wait_for_question(&operation, "unverified_fence").await;
    platform.wait_until_fleet_shows("unverified_fence").await;
    assert_eq!(platform.stack.provider.call_count("DELETE", "/servers/"), 0);
    // Without a decision, the operation checks the fence again, and waits again.
    assert_eq!(
        platform.stack.post(platform.process(), &format!("{operation}/continue"), &json!({})).await.status,
        200
    );
    platform.wait_for_question(&operation, "unverified_fence").await;
    // The other machine may hold the slot, so the deleted machine does not get it back either.
    let path = format!("{operation}/abandon");
    platform.stack.post(platform.process(), &path, &json!({})).await.assert_problem(409, "invalid_state");
    assert!(platform.power_state(&old.machine).is_some() && platform.power_state(&later_machine).is_some());
}

/// A host can write the pointer, but a forged fence only makes the host's own slot wait for an operator.
#[tokio::test(flavor = "multi_thread")]
async fn forged_fence_does_not_lock_the_slot() {
    let platform = RestorablePlatform::start(&[("DELETE_GRACE_SECONDS", "0")]).await;
    let host_settings = platform.stack.start_machine(platform.process(), "user_1").await;
    platform.stack.store_snapshot("user_1");
    let forge = |epoch: u64| {
        let mut pointer = platform.stack.pointer("user_1");
        pointer["fenceEpoch"] = json!(epoch);
        pointer["fenceMachineId"] = json!("019a0000-0000-7000-8000-000000000001");
        pointer["fenceProof"] = json!("00".repeat(32));
        pointer["seq"] = json!(pointer["seq"].as_u64().unwrap() + 1);
        platform.stack.write_pointer("user_1", &pointer);
    };
    forge(7);
    // The forgery does not change the machine's epoch.
    platform.send_heartbeat(&host_settings, 7, Value::Null).await;
    assert_eq!(platform.fetch_record(&host_settings.machine).await["epoch"], 1);
    let deleted = platform
        .stack
        .delete(platform.process(), &format!("/vps/{}?acceptLoss=true", host_settings.machine))
        .await
        .body;
    let operation = format!("/vps/operations/{}", string_field(&deleted, "operationId"));
    platform.wait_for_question(&operation, "unverified_fence").await;
    let response = platform
        .stack
        .post(platform.process(), &format!("{operation}/continue"), &json!({"acceptLoss": true}))
        .await;
    assert_eq!(response.status, 200, "{response:?}");
    // Another forgery does not require another decision.
    forge(9);
    platform.stack.wait_for_server_deletion(&host_settings.machine).await;
    // No machine in the slot can have had this epoch, so it is ignored.
    forge(100_000);
    let provisioned =
        platform.stack.post(platform.process(), "/vps/provision", &provision_body("user_1")).await;
    assert_eq!(provisioned.status, 202, "{provisioned:?}");
}

//! A fence that no key in force verifies: signed with a key lost in a restore, or forged by a host.

use serde_json::{Value, json};
use svc::platform::key_change::mark;

use super::restored_database::{Restorable, id};
use super::stack::{BUCKET, provision_body};

const NEW_KEY: &str = "0808080808080808080808080808080808080808080808080808080808080808";
const OLD_KEY: &str = "0707070707070707070707070707070707070707070707070707070707070707";

impl Restorable {
    /// Changes the platform's key, after saving the database.
    async fn change_key(&mut self) {
        self.save().await;
        let mut process = self.process.take().unwrap();
        process.kill();
        process.wait_until_killed().await;
        let both = [("PLATFORM_KEY", NEW_KEY), ("PLATFORM_KEY_PREVIOUS", OLD_KEY)];
        self.process = Some(self.stack.start_platform_with(&[self.settings.clone(), both.to_vec()].concat()));
    }

    /// Restores the old database and key. The marks that would refuse that key are lost, or were not written yet.
    async fn restore_with_old_key(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill();
        process.wait_until_killed().await;
        assert!(self.stack.store.remove(BUCKET, mark::MARK_PATH));
        self.restore(&[]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fence_signed_by_later_key_does_not_free_the_slot() {
    let mut it = Restorable::start(&[]).await;
    let old = it.stack.start_machine(it.process(), "user_1").await;
    it.stack.snapshot("user_1");
    it.change_key().await;
    let body = json!({"idpUserId": "user_1"});
    let recovery = it.stack.post(it.process(), "/vps/recover", &body).await.body;
    let forgotten = id(&recovery, "machineId");
    it.stack.wait_until_ended(it.process(), &id(&recovery, "operationId")).await;
    it.restore_with_old_key().await;

    let refused = it.stack.post(it.process(), "/vps/recover", &body).await;
    refused.assert_problem(409, "invalid_state");
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(detail.contains("PLATFORM_KEY") && detail.contains(&forgotten), "{detail}");
    let resize = format!("/vps/{}/resize", old.machine);
    let refused = it.stack.post(it.process(), &resize, &json!({"serverType": "cpx32"})).await;
    refused.assert_problem(409, "invalid_state");

    let deleted = it.stack.delete(it.process(), &format!("/vps/{}", old.machine)).await.body;
    let operation = format!("/vps/operations/{}", id(&deleted, "operationId"));
    it.until_key_is_requested(&operation).await;
    it.until_in_fleet("unverified_fence").await;
    assert_eq!(it.stack.provider.call_count("DELETE", "/servers/"), 0);
    // Without a decision it checks again, and waits again.
    assert_eq!(it.stack.post(it.process(), &format!("{operation}/continue"), &json!({})).await.status, 200);
    it.until_key_is_requested(&operation).await;
    // The other machine may hold the slot, so this one does not get it back either.
    let path = format!("{operation}/abandon");
    it.stack.post(it.process(), &path, &json!({})).await.assert_problem(409, "invalid_state");
    assert!(it.power(&old.machine).is_some() && it.power(&forgotten).is_some());
}

impl Restorable {
    async fn until_key_is_requested(&self, operation: &str) {
        let waiting = || async {
            let found = self.stack.get(self.process(), operation).await.body;
            (!found["question"].is_null()).then_some(found)
        };
        let waiting = self.stack.eventually("the operation waits", waiting).await;
        assert_eq!(waiting["question"]["code"], "unverified_fence", "{waiting}");
    }
}

/// A host can write the pointer: a forged fence makes only its own slot wait for an operator.
#[tokio::test(flavor = "multi_thread")]
async fn forged_fence_does_not_lock_the_slot() {
    let it = Restorable::start(&[("DELETE_GRACE_SECONDS", "0")]).await;
    let guest = it.stack.start_machine(it.process(), "user_1").await;
    it.stack.snapshot("user_1");
    let forge = |epoch: u64| {
        let mut pointer = it.stack.pointer("user_1");
        pointer["fenceEpoch"] = json!(epoch);
        pointer["fenceMachineId"] = json!("019a0000-0000-7000-8000-000000000001");
        pointer["fenceProof"] = json!("00".repeat(32));
        pointer["seq"] = json!(pointer["seq"].as_u64().unwrap() + 1);
        let seq = pointer["seq"].as_u64().unwrap();
        for key in [format!("pointer-log/{seq:016}.json"), "latest".to_owned()] {
            it.stack.store.write(BUCKET, &format!("user_1/primary/system/db/{key}"), pointer.to_string());
        }
    };
    forge(7);
    // It gains nothing from it, and serves as before.
    it.send_heartbeat(&guest, 7, Value::Null).await;
    assert_eq!(it.record(&guest.machine).await["epoch"], 1);
    let deleted =
        it.stack.delete(it.process(), &format!("/vps/{}?acceptLoss=true", guest.machine)).await.body;
    let operation = format!("/vps/operations/{}", id(&deleted, "operationId"));
    it.until_key_is_requested(&operation).await;
    let response =
        it.stack.post(it.process(), &format!("{operation}/continue"), &json!({"acceptLoss": true})).await;
    assert_eq!(response.status, 200, "{response:?}");
    // A different forgery needs no further decision.
    forge(9);
    let gone = || async { it.power(&guest.machine).is_none().then_some(()) };
    it.stack.eventually("its server is gone", gone).await;
    // No machine of the slot can have had this epoch, so it is ignored.
    forge(100_000);
    let provisioned = it.stack.post(it.process(), "/vps/provision", &provision_body("user_1")).await;
    assert_eq!(provisioned.status, 202, "{provisioned:?}");
}

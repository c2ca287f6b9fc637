//! A new machine gets its slot's release, not the platform process's default release.

use serde_json::json;

use super::stack::{Stack, heartbeat_of, provision_body, publish_unsigned};

#[tokio::test(flavor = "multi_thread")]
async fn recovery_keeps_the_release_of_the_slot() {
    let stack = Stack::start().await;
    publish_unsigned(&stack.store, "v2");
    let process = stack.start_platform();
    stack.subscribe(&process, "user_1").await;
    let mut body = provision_body("user_1");
    body["imageVersion"] = json!("v2");
    let provisioned = stack.post(&process, "/vps/provision", &body).await.body;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let mut registration = super::stack::registration(&host_settings.machine, 1);
    registration["imageVersion"] = json!("v2");
    assert_eq!(
        stack.register_as(&process, &host_settings.registration_token, &registration).await.status,
        200
    );
    stack.store_snapshot("user_1");

    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let machine = recovery["machineId"].as_str().unwrap();
    assert_eq!(stack.get(&process, &format!("/vps/{machine}")).await.body["imageVersion"], "v2");
    stack.wait_until_ended(&process, recovery["operationId"].as_str().unwrap()).await;
    let older = json!({"idpUserId": "user_1", "imageVersion": "v1"});
    let recovery = stack.post(&process, "/vps/recover", &older).await.body;
    let machine = recovery["machineId"].as_str().unwrap();
    assert_eq!(stack.get(&process, &format!("/vps/{machine}")).await.body["imageVersion"], "v1");
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_installs_release_host_rolled_back_to() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let report = async |version: &str, health: &str, updating: bool| {
        let mut beat = heartbeat_of(&host_settings);
        beat["imageVersion"] = json!(version);
        beat["health"]["gateway"] = json!(health);
        beat["updating"] = json!(updating);
        assert_eq!(stack.send_heartbeat(&process, &host_settings, &beat).await.status, 200, "{beat}");
    };
    let client = stack.database.connect().await.unwrap();
    let slot_release = async || {
        let sql = "SELECT image_version FROM slot_releases WHERE idp_user_id = 'user_1'";
        client.query_one(sql, &[]).await.unwrap().get::<_, String>(0)
    };
    report("v2", "ok", false).await;
    assert_eq!(slot_release().await, "v2");
    report("v3", "failing", false).await;
    report("v3", "ok", true).await;
    assert_eq!(slot_release().await, "v2", "a release that no heartbeat has confirmed must not be recorded");
    report("v1", "ok", false).await;
    assert_eq!(slot_release().await, "v1", "the release that the host rolled back to must be recorded");
    stack.store_snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let path = format!("/vps/{}", recovery["machineId"].as_str().unwrap());
    assert_eq!(stack.get(&process, &path).await.body["imageVersion"], "v1");
}

//! POST `/vps/:id/boot-stage` records boot stages and progress; it does not change the machine's status.

use reqwest::Method;
use serde_json::{Value, json};

use super::stack::{ApiResponse, Process, Stack, UserDataSettings};

async fn post_stage(
    stack: &Stack,
    process: &Process,
    host_settings: &UserDataSettings,
    token: &str,
    body: &Value,
) -> ApiResponse {
    let request = stack.request(process, Method::POST, &format!("/vps/{}/boot-stage", host_settings.machine));
    stack.send(request.bearer_auth(token).json(body)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn boot_stages_are_recorded_in_order() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let path = format!("/vps/{}", host_settings.machine);
    let record = || stack.get(&process, &path);
    assert_eq!(record().await.body["boot"], Value::Null);
    for stage in ["bundle", "database", "restore"] {
        let response = post_stage(
            &stack,
            &process,
            &host_settings,
            &host_settings.registration_token,
            &json!({"stage": stage}),
        )
        .await;
        assert_eq!((response.status, response.text.as_str()), (204, ""));
    }
    let booting = record().await.body;
    assert_eq!((&booting["status"], &booting["boot"]["stage"]), (&json!("provisioning"), &json!("restore")));
    let stages: Vec<_> =
        booting["boot"]["stages"].as_array().unwrap().iter().map(|stage| stage["stage"].clone()).collect();
    assert_eq!(json!(stages), json!(["bundle", "database", "restore"]));
    assert_eq!(booting["boot"]["at"], booting["boot"]["stages"][2]["at"]);
    // Boot stages do not use up the registration token.
    assert_eq!(stack.register(&process, &host_settings).await.status, 200);
    // The number of stored stages is bounded.
    for _ in 0..30 {
        post_stage(
            &stack,
            &process,
            &host_settings,
            &host_settings.registration_token,
            &json!({"stage": "register"}),
        )
        .await;
    }
    assert_eq!(record().await.body["boot"]["stages"].as_array().unwrap().len(), 20);
}

/// If a process is killed during the create request, the server is not recorded. The platform could not reach a machine
/// that registered in this state.
#[tokio::test(flavor = "multi_thread")]
async fn host_cannot_register_before_its_server_is_recorded() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let client = stack.database.connect().await.unwrap();
    let forget_server = "UPDATE user_machines SET provider_server_id = NULL, registration_expires_at = NULL";
    client.execute(forget_server, &[]).await.unwrap();
    let progress = json!({"stage": "restore", "progress": {"bytes": 10, "totalBytes": 100}});
    assert_eq!(
        post_stage(&stack, &process, &host_settings, &host_settings.registration_token, &progress)
            .await
            .status,
        204
    );
    let recorded = "SELECT registration_expires_at IS NULL, boot_progress IS NOT NULL FROM user_machines";
    let row = client.query_one(recorded, &[]).await.unwrap();
    assert_eq!((row.get(0), row.get(1)), (true, true));
    stack.register(&process, &host_settings).await.assert_problem(503, "unavailable");
}

/// An operation may wait for longer than `OPERATION_LIMIT_SECONDS` before it creates the server.
#[tokio::test(flavor = "multi_thread")]
async fn progress_extends_registration_of_an_old_machine() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let client = stack.database.connect().await.unwrap();
    let is_recorded = || async {
        let sql = "SELECT 1 FROM user_machines WHERE registration_expires_at IS NOT NULL";
        client.query_opt(sql, &[]).await.unwrap()
    };
    stack.eventually("the registration period starts", is_recorded).await;
    let remaining_seconds_after = async |progress: u64| -> f64 {
        let progress = json!({"stage": "restore", "progress": {"bytes": progress, "totalBytes": 100}});
        let reported =
            post_stage(&stack, &process, &host_settings, &host_settings.registration_token, &progress).await;
        assert_eq!(reported.status, 204, "{reported:?}");
        let sql = "SELECT extract(epoch FROM registration_expires_at - now())::float8 FROM user_machines";
        client.query_one(sql, &[]).await.unwrap().get(0)
    };
    let age = "UPDATE user_machines SET created_at = created_at - interval '2 days', \
               registration_expires_at = now() + interval '1 minute'";
    client.execute(age, &[]).await.unwrap();
    let seconds = remaining_seconds_after(10).await;
    assert!(seconds > 600.0, "{seconds} s left");
    let age = "UPDATE user_machines SET registration_started_at = now() - interval '2 days', \
               registration_expires_at = now() + interval '1 minute'";
    client.execute(age, &[]).await.unwrap();
    let seconds = remaining_seconds_after(20).await;
    assert!(seconds <= 60.0, "{seconds} s left: the registration was extended beyond the limit");
}

#[tokio::test(flavor = "multi_thread")]
async fn boot_stage_requires_registration_token_and_known_stage() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let provisioned = stack.provision(&process, "user_2").await;
    let other_host_settings =
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await;
    let stage = json!({"stage": "bundle"});
    let refused =
        post_stage(&stack, &process, &host_settings, &other_host_settings.registration_token, &stage).await;
    refused.assert_problem(401, "registration_rejected");
    let refused = post_stage(&stack, &process, &host_settings, &host_settings.upgrade_token, &stage).await;
    refused.assert_problem(401, "registration_rejected");
    // A newer host may send more fields.
    let extended = json!({"stage": "bundle", "message": "x"});
    assert_eq!(
        post_stage(&stack, &process, &host_settings, &host_settings.registration_token, &extended)
            .await
            .status,
        204
    );
    for invalid in [json!({"stage": "tea"}), json!({})] {
        let refused =
            post_stage(&stack, &process, &host_settings, &host_settings.registration_token, &invalid).await;
        refused.assert_problem(400, "invalid_request");
    }
    stack.delete(&process, &format!("/vps/{}", host_settings.machine)).await;
    let refused =
        post_stage(&stack, &process, &host_settings, &host_settings.registration_token, &stage).await;
    refused.assert_problem(401, "registration_rejected");
}

//! Tests which provisioning requests are accepted or rejected, their responses, and a new server's user-data.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use svc::config::parse_env_file;

use super::stack::{BUCKET, DIGEST, Stack, provision_body};

#[tokio::test(flavor = "multi_thread")]
async fn provisioning_requires_subscription_and_matching_plan() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provision = |body: Value| {
        let (stack, process) = (&stack, &process);
        async move { stack.post(process, "/vps/provision", &body).await }
    };
    provision(provision_body("user_1")).await.assert_problem(402, "subscription_required");
    let second = json!({"idpUserId": "user_1", "slot": "second", "plan": "max", "status": "active"});
    stack.set_slot(&process, &second).await;
    provision(provision_body("user_1")).await.assert_problem(402, "subscription_required");
    let ended = json!({"idpUserId": "user_1", "plan": "builder", "status": "active", "currentPeriodEnd": "2020-01-01T00:00:00Z"});
    stack.set_slot(&process, &ended).await;
    provision(provision_body("user_1")).await.assert_problem(402, "subscription_required");
    let builder = json!({"idpUserId": "user_1", "plan": "builder", "status": "active"});
    stack.set_slot(&process, &builder).await;
    let mut large = provision_body("user_1");
    large["serverType"] = json!("cpx52");
    provision(large).await.assert_problem(403, "server_type_not_allowed");
    let mut unpublished = provision_body("user_1");
    unpublished["imageVersion"] = json!("v9");
    provision(unpublished).await.assert_problem(404, "bundle_not_found");
    let digest = "system-bundles/v8/svc-host-bundle.tar.gz.sha256";
    stack.store.write(BUCKET, digest, "damaged");
    let mut damaged = provision_body("user_1");
    damaged["imageVersion"] = json!("v8");
    let refused = provision(damaged).await;
    refused.assert_problem(404, "bundle_not_found");
    assert!(refused.body["detail"].as_str().unwrap().contains(digest), "{refused:?}");
    let list_calls = || async { Some(stack.provider.calls()).filter(|calls| !calls.is_empty()) };
    let calls = stack.eventually("the platform calls the provider", list_calls).await;
    assert!(calls.iter().all(|call| call.method == "GET"), "{calls:?}");

    let first = provision(provision_body("user_1")).await;
    assert_eq!(first.status, 202, "{first:?}");
    let again = provision(provision_body("user_1")).await;
    assert_eq!((again.status, &again.body["machineId"]), (200, &first.body["machineId"]));
    let starter = json!({"idpUserId": "user_2", "plan": "starter", "status": "active"});
    stack.set_slot(&process, &starter).await;
    let taken = json!({"idpUserId": "user_2", "handle": "h-user-1"});
    provision(taken).await.assert_problem(409, "handle_taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn disabled_provisioning_affects_no_other_route() {
    let stack = Stack::start().await;
    let process =
        stack.start_platform_with(&[("CUSTOMER_VPS_ENABLED", "false"), ("BILLING_ENFORCEMENT", "off")]);
    stack.post(&process, "/vps/provision", &provision_body("user_1")).await.assert_problem(503, "disabled");
    assert_eq!(stack.get(&process, "/vps").await.status, 200);
    stack
        .post(&process, "/vps/recover", &json!({"idpUserId": "user_1"}))
        .await
        .assert_problem(404, "machine_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn new_server_gets_its_identity_and_restore_mode() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let provisioned = stack.provision(&process, "user_1").await;
    let machine = provisioned["machineId"].as_str().unwrap();
    let host_settings = stack.wait_for_host_settings(&process, machine).await;
    assert_eq!(
        (host_settings.machine.as_str(), host_settings.restore_mode.as_str(), host_settings.epoch.as_str()),
        (machine, "empty", "1")
    );
    assert!(host_settings.user_data.len() < 32 << 10 && host_settings.user_data.contains(DIGEST));
    assert!(
        host_settings.user_data.contains("http://platform.example/system-bundles/v1/svc-host-bundle.tar.gz")
    );
    let server = stack.provider.server_by_name(&format!("svc-{machine}")).unwrap();
    assert_eq!((server.labels["svc-machine"].as_str(), server.labels["svc-epoch"].as_str()), (machine, "1"));
    assert_eq!((server.server_type.as_str(), server.image.as_str()), ("cpx22", "debian-12"));
    // The fence names the machine. The machine's tokens appear neither in its row nor in the log.
    let pointer = stack.pointer("user_1");
    let proof = pointer["fenceProof"].clone();
    assert_eq!(proof.as_str().map(str::len), Some(64), "{pointer}");
    assert_eq!(
        pointer,
        json!({"version": 1, "fenceEpoch": 1, "fenceMachineId": machine, "fenceProof": proof, "seq": 1, "snapshot": null})
    );
    let client = stack.database.connect().await.unwrap();
    let rows = client.query("SELECT to_jsonb(m)::text FROM user_machines m", &[]).await.unwrap();
    for token in [&host_settings.registration_token, &host_settings.upgrade_token] {
        assert!(
            !rows[0].get::<_, String>(0).contains(token.as_str()) && !stack.log().contains(token.as_str())
        );
    }
}

/// Provisions a machine. Returns its server's type and the variables in its `update.env`.
async fn provision_server(settings: &[(&str, &str)]) -> (String, BTreeMap<String, String>) {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(settings);
    let provisioned = stack.provision(&process, "user_1").await;
    let machine = provisioned["machineId"].as_str().unwrap();
    let host_settings = stack.wait_for_host_settings(&process, machine).await;
    let user_data: Value =
        serde_json::from_str(host_settings.user_data.strip_prefix("#cloud-config\n").unwrap()).unwrap();
    let files = user_data["write_files"].as_array().unwrap();
    let file = files.iter().find(|file| file["path"] == "/opt/svc/env/update.env").unwrap();
    let variables = parse_env_file(file["content"].as_str().unwrap()).unwrap().into_iter().collect();
    let server = stack.provider.server_by_name(&format!("svc-{machine}")).unwrap();
    assert_eq!(stack.get(&process, &format!("/vps/{machine}")).await.body["serverType"], server.server_type);
    (server.server_type, variables)
}

#[tokio::test(flavor = "multi_thread")]
async fn setting_determines_the_default_server_type() {
    let (server_type, _) = provision_server(&[("PROVIDER_SERVER_TYPE", "cpx32")]).await;
    assert_eq!(server_type, "cpx32");
}

#[tokio::test(flavor = "multi_thread")]
async fn bundle_url_reaches_host_and_only_platform_gets_tokens() {
    let exact = ("SVC_HOST_BUNDLE_URL", "https://mirror.example/exact.tar.gz");
    let mirror_base = ("SVC_HOST_BUNDLE_BASE_URL", "https://mirror.example/base/");
    let platform_base = ("SVC_HOST_BUNDLE_BASE_URL", "http://platform.example/other");
    let bundle_url = |base: &str| format!("{base}/system-bundles/v1/svc-host-bundle.tar.gz");
    for (settings, url, is_platform_url) in [
        (vec![exact, mirror_base], exact.1.to_owned(), false),
        (vec![mirror_base], bundle_url("https://mirror.example/base"), false),
        (vec![platform_base], bundle_url("http://platform.example/other"), true),
        (vec![], bundle_url("http://platform.example"), true),
    ] {
        let (_, variables) = provision_server(&settings).await;
        assert_eq!(variables["SVC_HOST_BUNDLE_URL"], url);
        assert_eq!(variables.contains_key("SVC_HOST_BUNDLE_WITH_TOKEN"), is_platform_url, "{url}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_with_a_snapshot_never_starts_empty() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.store_snapshot("user_1");
    // The snapshot is from a machine that is not in the database, at an epoch below the first that the database
    // assigns.
    let mut pointer = stack.pointer("user_1");
    (pointer["fenceEpoch"], pointer["snapshot"]["epoch"]) = (json!(0), json!(0));
    stack.write_pointer("user_1", &pointer);
    let provisioned = stack.provision(&process, "user_1").await;
    assert_eq!(
        stack.wait_for_host_settings(&process, provisioned["machineId"].as_str().unwrap()).await.restore_mode,
        "required"
    );

    stack.subscribe(&process, "user_2").await;
    stack.store_snapshot("user_2");
    stack.store.remove(BUCKET, "user_2/primary/system/db/latest");
    let refused = stack.post(&process, "/vps/provision", &provision_body("user_2")).await;
    refused.assert_problem(409, "snapshot_unusable");
    assert!(refused.body["detail"].as_str().unwrap().contains("svcctl pointer rebuild"), "{refused:?}");
    stack.store.take_down();
    stack
        .post(&process, "/vps/provision", &provision_body("user_2"))
        .await
        .assert_problem(503, "store_unavailable");
    stack.store.bring_up().unwrap();
    let listed = stack.get(&process, "/vps?idpUserId=user_2").await;
    assert_eq!(listed.body, json!({"machines": [], "nextCursor": null}));
}

#[tokio::test(flavor = "multi_thread")]
async fn previews_need_no_subscription_and_are_limited() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PREVIEW_MAX_PER_OWNER", "2"), ("PREVIEW_TTL_HOURS", "1")]);
    let preview =
        |slot: &str| json!({"idpUserId": "user_1", "slot": slot, "handle": "ada", "kind": "preview"});
    assert_eq!(stack.post(&process, "/vps/provision", &preview("a")).await.status, 202);
    assert_eq!(stack.post(&process, "/vps/provision", &preview("b")).await.status, 202);
    let third = stack.post(&process, "/vps/provision", &preview("c")).await;
    third.assert_problem(429, "preview_limit_reached");
    assert!(third.headers.contains_key("retry-after"));
    let client = stack.database.connect().await.unwrap();
    let age = "UPDATE user_machines SET preview_expires_at = preview_expires_at - interval '1 hour'";
    assert_eq!(client.execute(age, &[]).await.unwrap(), 2);
    let have_ended = || async {
        let listed = stack.get(&process, "/vps?idpUserId=user_1").await.body;
        (listed["machines"] == json!([]) && stack.provider.servers().is_empty()).then_some(())
    };
    stack.eventually("the previews end", have_ended).await;
    assert!(stack.store.objects(BUCKET, "user_1/").len() >= 2, "the objects must be kept");
}

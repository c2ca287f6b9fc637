//! Tests how the platform handles failures of the provider's create call.

use kit::provider::{Fault, FaultRule};
use serde_json::json;

use super::stack::Stack;

async fn provision_despite(fault: Fault) -> Stack {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.provider.add_fault(FaultRule::once("POST", "/servers", fault.clone()));
    let provisioned = stack.provision(&process, "user_1").await;
    let operation = stack.wait_until_ended(&process, provisioned["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{fault:?}: {operation}\n{}", stack.log());
    assert!(stack.provider.pending_faults().is_empty());
    stack.assert_only_server(provisioned["machineId"].as_str().unwrap());
    assert_eq!(stack.provider.creations().len(), 1, "{fault:?}");
    stack
}

#[tokio::test(flavor = "multi_thread")]
async fn server_is_adopted_after_a_lost_create_response() {
    let stack = provision_despite(Fault::LostReplyAfterCommit).await;
    assert_eq!(stack.provider.call_count("POST", "/servers"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn server_is_adopted_after_a_late_create_response() {
    let stack = provision_despite(Fault::SlowReply { ms: 12_000 }).await;
    assert_eq!(stack.provider.call_count("POST", "/servers"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn create_without_effect_is_retried() {
    let stack = provision_despite(Fault::Timeout).await;
    assert_eq!(stack.provider.call_count("POST", "/servers"), 2);
    provision_despite(Fault::LostRequest).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn create_is_retried_after_unavailable_or_conflict_error() {
    provision_despite(Fault::Status { status: 503, code: "unavailable".into(), reset_in_seconds: None })
        .await;
    provision_despite(Fault::Status { status: 409, code: "conflict".into(), reset_in_seconds: None }).await;
}

/// The host cannot register, so the old machine must get its slot back without waiting for the registration deadline.
#[tokio::test(flavor = "multi_thread")]
async fn unstartable_server_ends_the_recovery() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    // The first call that the rule matches requests the old server's shutdown.
    stack
        .provider
        .add_fault(FaultRule { skip: 1, ..FaultRule::once("POST", "/servers", Fault::ActionError) });
    let body = json!({"idpUserId": "user_1", "acceptLoss": true});
    let recovery = stack.post(&process, "/vps/recover", &body).await.body;
    let operation = stack.wait_until_ended(&process, recovery["operationId"].as_str().unwrap()).await;
    assert_eq!(
        (&operation["state"], &operation["errorCode"]),
        (&json!("failed"), &json!("provider_unavailable")),
        "{operation}"
    );
    let new = stack.get(&process, &format!("/vps/{}", recovery["machineId"].as_str().unwrap())).await.body;
    let message = new["failure"]["message"].as_str().unwrap_or_default();
    assert!(message.starts_with("the provider could not start the machine's server"), "{new}");
    let has_returned = || async {
        let record = stack.get(&process, &format!("/vps/{}", old.machine)).await.body;
        record["replacedBy"].is_null().then_some(())
    };
    stack.eventually("the old machine has its slot back", has_returned).await;
    let is_deleted = || async { (stack.provider.servers().len() == 1).then_some(()) };
    stack.eventually("the server that did not start is deleted", is_deleted).await;
    stack.assert_only_server(&old.machine);
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_create_fails_the_machine_and_keeps_the_snapshot() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let provider_code = "unsupported_error";
    let refusal = Fault::Status { status: 422, code: provider_code.into(), reset_in_seconds: None };
    // The first call that the rule matches requests the old server's shutdown.
    stack.provider.add_fault(FaultRule { skip: 1, ..FaultRule::once("POST", "/servers", refusal) });
    let body = json!({"idpUserId": "user_1", "acceptLoss": true});
    let first = stack.post(&process, "/vps/recover", &body).await.body;
    let operation = stack.wait_until_ended(&process, first["operationId"].as_str().unwrap()).await;
    assert_eq!(
        (&operation["state"], &operation["errorCode"]),
        (&json!("failed"), &json!("provider_refused"))
    );
    let record = stack.get(&process, &format!("/vps/{}", first["machineId"].as_str().unwrap())).await;
    assert_eq!(record.body["status"], "failed");
    assert_eq!(record.body["failure"]["cause"], "provider_refused");
    assert!(!record.text.contains(provider_code), "the provider's error must not be shown: {}", record.text);
    assert!(!stack.pointer("user_1")["snapshot"].is_null());
    stack.assert_only_server(&old.machine);

    let second = stack.post(&process, "/vps/recover", &body).await;
    assert_eq!((second.status, &second.body["epoch"]), (202, &json!(4)), "{second:?}");
    assert_eq!(second.body["oldMachineId"], old.machine, "the old machine must have its slot back");
    let operation = stack.wait_until_ended(&process, second.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    stack.assert_only_server(second.body["machineId"].as_str().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_deleted_during_its_create_leaves_no_server() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.provider.add_fault(FaultRule::once("POST", "/servers", Fault::SlowReply { ms: 3000 }));
    let provisioned = stack.provision(&process, "user_1").await;
    stack
        .eventually("the create is in flight", || async {
            (stack.provider.call_count("POST", "/servers") > 0).then_some(())
        })
        .await;
    let response =
        stack.delete(&process, &format!("/vps/{}", provisioned["machineId"].as_str().unwrap())).await;
    let operation = stack.wait_until_ended(&process, response.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    stack.assert_no_server();
    assert_eq!(stack.provider.creations().len(), 1);
}

fn capacity_fault(code: &str) -> Fault {
    Fault::Status { status: 412, code: code.into(), reset_in_seconds: None }
}

fn logged_locations(operation: &serde_json::Value) -> Vec<String> {
    let lines = operation["log"].as_array().unwrap().iter().filter(|line| line["outcome"] == "location");
    lines.map(|line| line["detail"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn server_is_created_in_next_location_with_capacity() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PROVIDER_FALLBACK_LOCATIONS", "hel1, fsn1")]);
    stack.provider.add_fault(FaultRule::once("POST", "/servers", capacity_fault("resource_unavailable")));
    stack.provider.add_fault(FaultRule::once("POST", "/servers", capacity_fault("placement_error")));
    let provisioned = stack.provision(&process, "user_1").await;
    let operation = stack.wait_until_ended(&process, provisioned["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}\n{}", stack.log());
    assert_eq!(
        logged_locations(&operation),
        [
            "location nbg1 has no capacity for server type cpx22 (resource_unavailable): trying hel1 next",
            "location hel1 has no capacity for server type cpx22 (placement_error): trying fsn1 next"
        ]
    );
    assert_eq!(stack.provider.servers()[0].location, "fsn1");
    let record =
        stack.get(&process, &format!("/vps/{}", provisioned["machineId"].as_str().unwrap())).await.body;
    assert_eq!(
        (&record["location"], &record["fallbackLocations"]),
        (&json!("fsn1"), &json!(["nbg1", "hel1"]))
    );
    let fleet = stack.get(&process, "/vps/fleet").await.body;
    assert_eq!(fleet["alarms"], json!([]), "there must be no alarm if a location has capacity");
}

#[tokio::test(flavor = "multi_thread")]
async fn locations_are_retried_while_none_has_capacity() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.subscribe(&process, "user_1").await;
    stack.provider.add_fault(FaultRule::times(3, "POST", "/servers", capacity_fault("resource_unavailable")));
    let mut body = super::stack::provision_body("user_1");
    body["location"] = json!("hel1");
    body["fallbackLocations"] = json!(["fsn1"]);
    let provisioned = stack.post(&process, "/vps/provision", &body).await;
    assert_eq!(provisioned.status, 202, "{provisioned:?}");
    let operation = stack.wait_until_ended(&process, provisioned.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    let lines = logged_locations(&operation);
    assert_eq!(lines.len(), 3, "{operation}");
    assert!(
        lines[1].ends_with("(resource_unavailable), nor does any other location; hel1 is next"),
        "{lines:?}"
    );
    assert_eq!(stack.provider.servers()[0].location, "fsn1");
    let retries = operation["log"].as_array().unwrap().iter().filter(|line| line["outcome"] == "retry");
    let retries: Vec<&str> = retries.map(|line| line["detail"].as_str().unwrap()).collect();
    assert_eq!(retries.len(), 2, "{operation}");
    assert!(retries[0].contains("location fsn1 has no capacity for server type cpx22"), "{retries:?}");
    assert!(retries[0].ends_with("hel1 is next; retrying within 1 s"), "{retries:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_message_names_the_only_location_and_the_server_type() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.provider.add_fault(FaultRule::times(1, "POST", "/servers", capacity_fault("resource_unavailable")));
    let provisioned = stack.provision(&process, "user_1").await;
    let operation = stack.wait_until_ended(&process, provisioned["operationId"].as_str().unwrap()).await;
    let retry = operation["log"].as_array().unwrap().iter().find(|line| line["outcome"] == "retry").unwrap();
    assert_eq!(
        retry["detail"],
        "location nbg1 has no capacity for server type cpx22 (resource_unavailable); retrying within 1 s"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_location_is_rejected_before_anything_changes() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.subscribe(&process, "user_1").await;
    for (name, value) in [("location", json!("moon1")), ("fallbackLocations", json!(["hel1", "moon1"]))] {
        let mut body = super::stack::provision_body("user_1");
        body[name] = value;
        let refused = stack.post(&process, "/vps/provision", &body).await;
        refused.assert_problem(400, "invalid_request");
        assert_eq!(refused.body["errors"][0]["pointer"], format!("/{name}"));
        assert!(refused.body["detail"].as_str().unwrap().contains("moon1"), "{refused:?}");
    }
    let old = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let body = json!({"idpUserId": "user_1", "acceptLoss": true, "location": "moon1"});
    stack.post(&process, "/vps/recover", &body).await.assert_problem(400, "invalid_request");
    assert_eq!(stack.status(&process, &old.machine).await, "running");
    // A failing provider must not cause a rejection.
    let down = Fault::Status { status: 503, code: "unavailable".into(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(10, "GET", "/locations", down));
    let body = json!({"idpUserId": "user_1", "acceptLoss": true, "location": "hel1"});
    let recovery = stack.post(&process, "/vps/recover", &body).await;
    assert_eq!(recovery.status, 202, "{recovery:?}");
}

//! What the provider does to a create, and what the platform makes of it.

use kit::provider::{Fault, FaultRule};
use serde_json::json;

use super::stack::Stack;

async fn provisioned_despite(fault: Fault) -> Stack {
    let stack = Stack::start().await;
    let process = stack.platform();
    stack.provider.fault(FaultRule::once("POST", "/servers", fault.clone()));
    let made = stack.provision(&process, "user_1").await;
    let operation = stack.ended(&process, made["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{fault:?}: {operation}\n{}", stack.log());
    assert!(stack.provider.pending_faults().is_empty());
    stack.assert_only_server(made["machineId"].as_str().unwrap());
    assert_eq!(stack.provider.creations().len(), 1, "{fault:?}");
    stack
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_whose_reply_was_lost_is_adopted() {
    let stack = provisioned_despite(Fault::LostReplyAfterCommit).await;
    assert_eq!(stack.provider.call_count("POST", "/servers"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_that_came_too_late_is_adopted() {
    provisioned_despite(Fault::SlowReply { ms: 12_000 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_that_never_happened_is_sent_again_under_the_same_name() {
    let stack = provisioned_despite(Fault::Timeout).await;
    assert_eq!(stack.provider.call_count("POST", "/servers"), 2);
    provisioned_despite(Fault::LostRequest).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overloaded_provider_is_asked_again() {
    provisioned_despite(Fault::Status { status: 503, code: "unavailable".into(), reset_in_seconds: None })
        .await;
    provisioned_despite(Fault::Status { status: 409, code: "conflict".into(), reset_in_seconds: None }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_create_fails_the_machine_and_leaves_the_snapshot_for_another_try() {
    let stack = Stack::start().await;
    let process = stack.platform();
    let old = stack.running(&process, "user_1").await;
    stack.snapshot("user_1");
    let secret_words = "unsupported_error";
    let refusal = Fault::Status { status: 422, code: secret_words.into(), reset_in_seconds: None };
    // The first of these calls asks the old server to shut down.
    stack.provider.fault(FaultRule { skip: 1, ..FaultRule::once("POST", "/servers", refusal) });
    let body = json!({"idpUserId": "user_1", "acceptLoss": true});
    let first = stack.post(&process, "/vps/recover", &body).await.body;
    let operation = stack.ended(&process, first["operationId"].as_str().unwrap()).await;
    assert_eq!(
        (&operation["state"], &operation["errorCode"]),
        (&json!("failed"), &json!("provider_refused"))
    );
    let record = stack.get(&process, &format!("/vps/{}", first["machineId"].as_str().unwrap())).await;
    assert_eq!(record.body["status"], "failed");
    assert_eq!(record.body["failure"]["cause"], "provider_refused");
    assert!(!record.text.contains(secret_words), "the provider's words stay with us: {}", record.text);
    assert!(!stack.pointer("user_1")["snapshot"].is_null());
    stack.assert_only_server(&old.machine);

    let second = stack.post(&process, "/vps/recover", &body).await;
    assert_eq!((second.status, &second.body["epoch"]), (202, &json!(4)), "{second:?}");
    assert_eq!(second.body["oldMachineId"], old.machine, "it had its slot again");
    let operation = stack.ended(&process, second.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    stack.assert_only_server(second.body["machineId"].as_str().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_deleted_while_its_create_is_in_doubt_leaves_no_server() {
    let stack = Stack::start().await;
    let process = stack.platform();
    stack.provider.fault(FaultRule::once("POST", "/servers", Fault::SlowReply { ms: 3000 }));
    let made = stack.provision(&process, "user_1").await;
    stack
        .eventually("the create is out", || async {
            (stack.provider.call_count("POST", "/servers") > 0).then_some(())
        })
        .await;
    let answer = stack.delete(&process, &format!("/vps/{}", made["machineId"].as_str().unwrap())).await;
    let operation = stack.ended(&process, answer.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    stack.assert_no_server();
    assert_eq!(stack.provider.creations().len(), 1);
}

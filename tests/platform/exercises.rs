//! Recovery and rollback count as exercised only on slots that are marked as test slots.

use kit::provider::{Fault, FaultRule};
use reqwest::Method;
use serde_json::{Value, json};

use super::stack::{Process, SECRET, Stack, provision_body};

async fn fetch_exercises(stack: &Stack, process: &Process) -> Value {
    stack.get(process, "/vps/fleet").await.body["exercises"].clone()
}

async fn set_slot(stack: &Stack, process: &Process, overrides: Value) -> Value {
    let mut body = json!({"idpUserId": "user_1", "plan": "max", "status": "active"});
    body.as_object_mut().unwrap().extend(overrides.as_object().unwrap().clone());
    let response =
        stack.send(stack.request(process, Method::PUT, "/vps/slots").bearer_auth(SECRET).json(&body));
    response.await.body
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_and_rollback_on_a_test_slot_are_exercises() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let never = json!({"lastAt": null, "machineId": null, "isCurrent": false});
    assert_eq!(fetch_exercises(&stack, &process).await, json!({"recovery": never, "rollback": never}));

    stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let recovered = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await;
    let ended = stack.wait_until_ended(&process, recovered.body["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    assert_eq!(
        fetch_exercises(&stack, &process).await["recovery"],
        never,
        "the recovery of a customer's machine must not count"
    );

    assert_eq!(set_slot(&stack, &process, json!({"test": true})).await["test"], true);
    // The billing system's requests do not contain this field.
    assert_eq!(set_slot(&stack, &process, json!({})).await["test"], true);
    let exercises = fetch_exercises(&stack, &process).await;
    assert_eq!(
        (&exercises["recovery"]["isCurrent"], &exercises["rollback"]),
        (&json!(true), &never),
        "{exercises}"
    );
    let machine = &recovered.body["machineId"];
    let path = format!("/vps/{}/fail", machine.as_str().unwrap());
    assert_eq!(stack.post(&process, &path, &json!({"reason": "an exercise"})).await.status, 200);
    let exercises = fetch_exercises(&stack, &process).await;
    assert_eq!(
        (&exercises["rollback"]["isCurrent"], &exercises["rollback"]["machineId"]),
        (&json!(true), machine)
    );
    let client = stack.database.connect().await.unwrap();
    client.batch_execute("DELETE FROM operator_audit WHERE action = 'fail'").await.unwrap();
    assert_eq!(fetch_exercises(&stack, &process).await["rollback"], never);

    // A deletion counts only after its operation has succeeded; until a timeout, the operation waits for the provider
    // to power the server off.
    let down = || Fault::Status { status: 503, code: "unavailable".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "DELETE", "/servers/", down()));
    stack.provider.add_fault(FaultRule::times(1000, "POST", "/actions/", down()));
    let deleted = stack.delete(&process, &format!("/vps/{}", machine.as_str().unwrap())).await;
    assert_eq!(deleted.status, 202, "{deleted:?}");
    assert_eq!(fetch_exercises(&stack, &process).await["rollback"], never);
    stack.provider.clear_faults();
    stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    let exercises = fetch_exercises(&stack, &process).await;
    assert_eq!(
        (&exercises["rollback"]["isCurrent"], &exercises["rollback"]["machineId"]),
        (&json!(true), machine)
    );

    let set_age = "UPDATE operations SET ended_at = now() - interval '1 day' * (CASE kind WHEN 'recover' THEN 91 ELSE 89 END)";
    client.batch_execute(set_age).await.unwrap();
    stack.subscribe(&process, "user_2").await;
    let quote = stack.post(&process, "/vps/provision/quote", &provision_body("user_2")).await.body;
    let current = |name: &str| quote["exercises"][name]["isCurrent"].clone();
    assert_eq!((current("recovery"), current("rollback")), (json!(false), json!(true)), "{quote}");
    assert_eq!(set_slot(&stack, &process, json!({"test": false})).await["test"], false);
    assert_eq!(fetch_exercises(&stack, &process).await["rollback"], never);
}

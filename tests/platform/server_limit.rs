//! A provision request that would exceed the provider's server limit is rejected before anything is created.

use futures_util::future::join_all;
use kit::provider::{Fault, FaultRule, SimulatorOptions};
use serde_json::{Value, json};

use super::stack::{Process, Stack, provision_body};

const PROVISION: &str = "/vps/provision";

async fn count_machines(stack: &Stack, process: &Process) -> usize {
    stack.get(process, "/vps").await.body["machines"].as_array().unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn provision_beyond_the_declared_limit_creates_nothing() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PROVIDER_SERVER_LIMIT", "3")]);
    let users = ["user_1", "user_2", "user_3", "user_4", "user_5", "user_6"];
    for user in users {
        stack.subscribe(&process, user).await;
    }
    let host_settings = stack.start_machine(&process, "user_1").await;
    // Concurrent requests from other users also count.
    let bodies: Vec<Value> = users[1..].iter().map(|user| provision_body(user)).collect();
    let responses = join_all(bodies.iter().map(|body| stack.post(&process, PROVISION, body))).await;
    let accepted = responses.iter().filter(|response| response.status == 202).count();
    assert_eq!(accepted, 2, "{responses:?}");
    for refused in responses.iter().filter(|response| response.status != 202) {
        refused.assert_problem(409, "server_limit_reached");
        assert_eq!((&refused.body["servers"], &refused.body["serverLimit"]), (&json!(3), &json!(3)));
    }
    assert_eq!(count_machines(&stack, &process).await, 3);
    // A repeated request still returns the slot's machine.
    let again = stack.post(&process, PROVISION, &provision_body("user_1")).await;
    assert_eq!((again.status, again.body["machineId"].as_str()), (200, Some(host_settings.machine.as_str())));

    // A failed machine is replaced even though no other server fits within the limit.
    let failed = stack
        .post(&process, &format!("/vps/{}/fail", host_settings.machine), &json!({"reason": "test"}))
        .await;
    assert_eq!(failed.status, 200, "{failed:?}");
    let mut body = provision_body("user_1");
    (body["allowEmpty"], body["acceptLoss"]) = (json!(true), json!(true));
    let quote = stack.post(&process, "/vps/provision/quote", &body).await;
    assert_eq!((quote.status, &quote.body["serverLimit"]), (200, &json!(3)), "{quote:?}");
    let replaced = stack.post(&process, PROVISION, &body).await;
    assert_eq!(replaced.status, 202, "{replaced:?}");

    let with_larger_limit = stack.start_platform_with(&[("PROVIDER_SERVER_LIMIT", "5")]);
    let refused = bodies.iter().zip(&responses).find(|(_, response)| response.status != 202).unwrap().0;
    assert_eq!(stack.post(&with_larger_limit, PROVISION, refused).await.status, 202);
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_replacement_beyond_the_limit_is_refused() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PROVIDER_SERVER_LIMIT", "2")]);
    let first = stack.start_machine(&process, "user_1").await;
    let other_host_settings = stack.start_machine(&process, "user_2").await;
    let replacement = |user: &str| {
        let mut body = provision_body(user);
        (body["allowEmpty"], body["acceptLoss"]) = (json!(true), json!(true));
        body
    };
    let fail = async |machine: &str| {
        let failed = stack.post(&process, &format!("/vps/{machine}/fail"), &json!({"reason": "test"})).await;
        assert_eq!(failed.status, 200, "{failed:?}");
    };
    fail(&first.machine).await;
    let second = stack.post(&process, PROVISION, &replacement("user_1")).await;
    assert_eq!(second.status, 202, "{second:?}");
    // When the second machine fails, the first one gets its slot back, but the second one's server still exists.
    let second = second.body["machineId"].as_str().unwrap();
    stack.wait_for_host_settings(&process, second).await;
    // The platform would delete that server soon; this fault prevents the deletion during the checks below.
    let locked = Fault::Status { status: 423, code: "locked".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "DELETE", "/servers/", locked));
    fail(second).await;
    let recovery = json!({"idpUserId": "user_1", "allowEmpty": true, "acceptLoss": true});
    for (path, body) in [
        (PROVISION, replacement("user_1")),
        ("/vps/provision/quote", replacement("user_1")),
        ("/vps/recover", recovery),
    ] {
        let refused = stack.post(&process, path, &body).await;
        refused.assert_problem(409, "server_limit_reached");
        assert_eq!(refused.body["otherMachines"], json!([second]), "{path}");
        assert!(refused.body["detail"].as_str().unwrap().contains(second), "{path}: {refused:?}");
    }
    assert_eq!(stack.provider.servers().len(), 3);

    // Another slot may also have one replacement beyond the limit.
    fail(&other_host_settings.machine).await;
    let replaced = stack.post(&process, PROVISION, &replacement("user_2")).await;
    assert_eq!(replaced.status, 202, "{replaced:?}");
    // After a server is discarded, another replacement fits.
    let path = format!("/vps/{second}/discard");
    let discarded = stack.post(&process, &path, &json!({"acceptLoss": true})).await;
    assert_eq!(discarded.status, 202, "{discarded:?}");
    stack.provider.clear_faults();
    let is_accepted = || async {
        let again = stack.post(&process, PROVISION, &replacement("user_1")).await;
        (again.status == 202).then_some(())
    };
    stack.eventually("the slot gets its replacement", is_accepted).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn provider_refusal_blocks_provisioning_until_creation_succeeds() {
    let stack =
        Stack::start_with_provider(|_| SimulatorOptions { server_limit: 1, ..SimulatorOptions::record() })
            .await;
    let process = stack.start_platform();
    let first = stack.start_machine(&process, "user_1").await;
    let second = stack.provision(&process, "user_2").await;
    let is_raised = || async {
        let fleet = stack.get(&process, "/vps/fleet").await.body;
        (fleet["alarms"][0]["alarm"] == "provider_limit").then_some(())
    };
    stack.eventually("the provider's refusal raises the alarm", is_raised).await;
    stack.subscribe(&process, "user_3").await;
    for path in [PROVISION, "/vps/provision/quote"] {
        stack
            .post(&process, path, &provision_body("user_3"))
            .await
            .assert_problem(409, "server_limit_reached");
    }
    assert_eq!(count_machines(&stack, &process).await, 2);

    // The pending server creation succeeds once another server has been deleted.
    let deleted = stack.delete(&process, &format!("/vps/{}?acceptLoss=true", first.machine)).await;
    stack.wait_until_ended(&process, deleted.body["operationId"].as_str().unwrap()).await;
    let ended = stack.wait_until_ended(&process, second["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    let accepted = stack.post(&process, PROVISION, &provision_body("user_3")).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
}

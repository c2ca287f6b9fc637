//! Runs several platform processes on one database; some of them are killed, paused or terminated.

use futures_util::future::join_all;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::json;

use super::stack::{Stack, heartbeat};

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_share_keys_and_work_and_survive_a_kill() {
    let stack = Stack::start().await;
    let (mut first_process, second_process) = (stack.start_platform(), stack.start_platform());
    let users: Vec<String> = (0..8).map(|n| format!("user_{n}")).collect();
    // Each user's requests go to both processes and get the same machine.
    let requests = users.iter().map(|user| async {
        let first = stack.provision(&first_process, user).await;
        let again = stack.post(&second_process, "/vps/provision", &super::stack::provision_body(user)).await;
        assert_eq!(again.body["machineId"], first["machineId"], "{again:?}");
        first
    });
    let provisioned = join_all(requests).await;
    first_process.kill();
    let ended = provisioned
        .iter()
        .map(|accepted| stack.wait_until_ended(&second_process, accepted["operationId"].as_str().unwrap()));
    for operation in join_all(ended).await {
        assert_eq!(operation["state"], "succeeded", "{operation}");
    }
    assert_eq!(stack.provider.creations().len(), users.len());
    assert_eq!(stack.provider.servers().len(), users.len());

    let third_process = stack.start_platform();
    let host_settings =
        stack.wait_for_host_settings(&second_process, provisioned[0]["machineId"].as_str().unwrap()).await;
    let mut keys = Vec::new();
    for process in [&second_process, &third_process] {
        let request =
            stack.request(process, Method::POST, &format!("/vps/{}/heartbeat", host_settings.machine));
        let response = stack.send(request.bearer_auth(&host_settings.upgrade_token).json(&heartbeat())).await;
        keys.push(response.body["proofKeys"].clone());
    }
    assert_eq!(keys[0], keys[1]);
    assert_eq!(keys[0]["keys"].as_array().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_first_starts_create_one_key_per_purpose() {
    let stack = Stack::start().await;
    let empty = kit::pg::test_database().await.unwrap();
    let url = empty.url();
    let processes: Vec<_> = std::thread::scope(|scope| {
        let start = || stack.start_platform_with(&[("PLATFORM_DATABASE_URL", &url)]);
        let started: Vec<_> = (0..3).map(|_| scope.spawn(start)).collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for process in &processes {
        stack.wait_for_routes(process).await;
    }
    let client = empty.connect().await.unwrap();
    let keys = client.query("SELECT purpose FROM signing_keys ORDER BY purpose", &[]).await.unwrap();
    let purposes: Vec<String> = keys.iter().map(|key| key.get(0)).collect();
    assert_eq!(purposes, ["app", "proof"], "there must be one key per purpose");
}

#[tokio::test(flavor = "multi_thread")]
async fn termination_completes_requests_and_releases_leases() {
    let stack = Stack::start().await;
    let mut process = stack.start_platform_with(&[("PLATFORM_LEASE_SECONDS", "600")]);
    let provisioned = stack.provision(&process, "user_1").await;
    let machine = provisioned["machineId"].as_str().unwrap();
    stack.wait_for_host_settings(&process, machine).await;
    let request = stack.request(&process, Method::DELETE, &format!("/vps/{machine}"));
    let request = request.bearer_auth(super::stack::SECRET).header("prefer", "wait=60");
    stack.provider.add_fault(kit::provider::FaultRule::times(
        9,
        "DELETE",
        "/servers",
        kit::provider::Fault::SlowReply { ms: 700 },
    ));
    let stop = async {
        let is_called = || async { (stack.provider.call_count("DELETE", "/servers") > 0).then_some(()) };
        stack.eventually("the delete is in flight", is_called).await;
        kill(Pid::from_raw(i32::try_from(process.pid()).unwrap()), Signal::SIGTERM).unwrap();
    };
    let (response, ()) = tokio::join!(stack.send(request), stop);
    assert_eq!(response.status, 202, "{response:?}");
    assert!(process.wait_for_exit().await.success(), "{}", stack.log());
    let client = stack.database.connect().await.unwrap();
    let leased = client.query("SELECT 1 FROM operations WHERE lease_until IS NOT NULL", &[]).await.unwrap();
    assert!(leased.is_empty());

    let next = stack.start_platform();
    let operation = stack.wait_until_ended(&next, response.body["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], json!("succeeded"));
}

#[tokio::test(flavor = "multi_thread")]
async fn process_paused_beyond_its_lease_writes_nothing() {
    let stack = Stack::start().await;
    let paused = stack.start_platform();
    let pid = Pid::from_raw(i32::try_from(paused.pid()).unwrap());
    stack.provider.add_fault(kit::provider::FaultRule::once(
        "POST",
        "/servers",
        kit::provider::Fault::SlowReply { ms: 3000 },
    ));
    let provisioned = stack.provision(&paused, "user_1").await;
    let is_created = || async { (!stack.provider.servers().is_empty()).then_some(()) };
    stack.eventually("the create is in flight", is_created).await;
    kill(pid, Signal::SIGSTOP).unwrap();
    let successor = stack.start_platform();
    let operation = stack.wait_until_ended(&successor, provisioned["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    let path = format!("/vps/{}", provisioned["machineId"].as_str().unwrap());
    let fetch_record = || async {
        let mut record = stack.get(&successor, &path).await.body;
        // These fields change with time.
        record["copies"] = serde_json::Value::Null;
        record["heartbeatAt"] = serde_json::Value::Null;
        record
    };
    let before = fetch_record().await;
    kill(pid, Signal::SIGCONT).unwrap();
    // After the pause, the process serves requests again. A second operation gives it time to write with its expired
    // lease.
    assert_eq!(stack.get(&paused, "/readyz").await.status, 200);
    let second = stack.provision(&paused, "user_2").await;
    let operation = stack.wait_until_ended(&paused, second["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    assert_eq!(fetch_record().await, before);
    assert_eq!(stack.provider.creations().len(), 2);
}

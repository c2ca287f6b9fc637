//! Kills the platform with SIGKILL at every fail point of each kind of operation and of a rollout. After a restart, the
//! operation or rollout succeeds, and no server is orphaned.

use std::sync::Mutex;

use futures_util::{StreamExt, stream};
use kit::provider::Power;
use serde_json::json;
use svc::platform::operations::{OperationKind, fail_point_names};

use super::deploy::{Fleet, NEXT_VERSION};
use super::stack::{SECRET, Stack, UserDataSettings, heartbeat_of, provision_body};

const MAX_CONCURRENT_RUNS: usize = 3;

async fn run_for_every_fail_point<F: Future<Output = ()>>(kind: OperationKind, run: impl Fn(String) -> F) {
    let points = fail_point_names(kind);
    assert!(points.len() > kind.steps().len());
    stream::iter(points).map(run).buffer_unordered(MAX_CONCURRENT_RUNS).collect::<Vec<()>>().await;
}

/// Returns the value of `FAILPOINTS` that kills the process when it first reaches the fail point.
fn kill_setting(point: &str) -> String {
    format!("{point}=1*return(kill)")
}

#[tokio::test(flavor = "multi_thread")]
async fn provision_survives_a_kill_at_every_fail_point() {
    run_for_every_fail_point(OperationKind::Provision, |point| async move {
        let stack = Stack::start().await;
        let mut first = stack.start_platform_with(&[("FAILPOINTS", &kill_setting(&point))]);
        stack.subscribe(&first, "user_1").await;
        // The kill can precede the response.
        let _ = stack.try_post(&first, "/vps/provision", &provision_body("user_1")).await;
        first.wait_until_killed().await;

        let second = stack.start_platform();
        let repeated = stack.post(&second, "/vps/provision", &provision_body("user_1")).await;
        assert_eq!(repeated.status, 200, "{point}: {repeated:?}");
        let machine = repeated.body["machineId"].as_str().unwrap();
        let operation = stack.wait_until_ended(&second, repeated.body["operationId"].as_str().unwrap()).await;
        assert_eq!(operation["state"], "succeeded", "{point}: {operation}\n{}", stack.log());
        assert_eq!(stack.status(&second, machine).await, "running", "{point}");
        stack.assert_only_server(machine);
        assert_eq!(stack.provider.creations().len(), 1, "{point}");
        assert_eq!(stack.pointer("user_1")["fenceEpoch"], 1, "{point}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recover_survives_a_kill_at_every_fail_point() {
    run_for_every_fail_point(OperationKind::Recover, |point| async move {
        let stack = Stack::start().await;
        let mut setup = stack.start_platform();
        let old = stack.start_machine(&setup, "user_1").await;
        stack.store_snapshot("user_1");
        setup.kill();
        let mut first = stack.start_platform_with(&[("FAILPOINTS", &kill_setting(&point))]);
        let body = json!({"idpUserId": "user_1", "acceptLoss": true});
        let _ = stack.try_post(&first, "/vps/recover", &body).await;
        first.wait_until_killed().await;

        let second = stack.start_platform();
        let repeated = stack.post(&second, "/vps/recover", &body).await;
        assert_eq!(repeated.status, 202, "{point}: {repeated:?}");
        assert_eq!(repeated.body["oldMachineId"], old.machine, "{point}");
        let machine = repeated.body["machineId"].as_str().unwrap();
        let operation = stack.wait_until_ended(&second, repeated.body["operationId"].as_str().unwrap()).await;
        assert_eq!(operation["state"], "succeeded", "{point}: {operation}\n{}", stack.log());
        assert_eq!(stack.status(&second, machine).await, "running", "{point}");
        stack.assert_only_server(machine);
        assert_eq!(stack.provider.creations().len(), 2, "{point}");
        let pointer = stack.pointer("user_1");
        assert_eq!((&pointer["fenceEpoch"], pointer["snapshot"].is_null()), (&json!(2), false), "{point}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_survives_a_kill_at_every_fail_point() {
    run_for_every_fail_point(OperationKind::Delete, |point| async move {
        let stack = Stack::start().await;
        let mut first = stack.start_platform_with(&[("FAILPOINTS", &kill_setting(&point))]);
        let host_settings = stack.start_machine(&first, "user_1").await;
        let path = format!("/vps/{}?acceptLoss=true", host_settings.machine);
        let request = stack.request(&first, reqwest::Method::DELETE, &path).bearer_auth(SECRET);
        let _ = request.send().await;
        first.wait_until_killed().await;

        let second = stack.start_platform();
        let again = stack.delete(&second, &path).await;
        assert_eq!(again.status, 202, "{point}: {again:?}");
        let operation = stack.wait_until_ended(&second, again.body["operationId"].as_str().unwrap()).await;
        assert_eq!(operation["state"], "succeeded", "{point}: {operation}");
        stack.assert_no_server();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn server_removal_survives_a_kill_at_every_fail_point() {
    run_for_every_fail_point(OperationKind::RemoveServer, |point| async move {
        let stack = Stack::start().await;
        let mut first = stack.start_platform_with(&[("FAILPOINTS", &kill_setting(&point))]);
        let host_settings = stack.start_machine(&first, "user_1").await;
        let path = format!("/vps/{}?acceptLoss=true", host_settings.machine);
        let request = stack.request(&first, reqwest::Method::DELETE, &path).bearer_auth(SECRET);
        let _ = request.send().await;
        first.wait_until_killed().await;
        let second = stack.start_platform();
        let removal = stack.wait_until_removal_ended(&second, &host_settings.machine).await;
        assert_eq!(removal["state"], "succeeded", "{point}: {removal}\n{}", stack.log());
        stack.assert_no_server();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reinstatement_survives_a_kill_at_every_fail_point() {
    run_for_every_fail_point(OperationKind::Reinstate, |point| async move {
        let stack = Stack::start().await;
        let settings = [("FAILPOINTS", kill_setting(&point)), ("DELETE_GRACE_SECONDS", "600".to_owned())];
        let settings: Vec<(&str, &str)> = settings.iter().map(|(name, value)| (*name, &**value)).collect();
        let mut first = stack.start_platform_with(&settings);
        let host_settings = stack.start_machine(&first, "user_1").await;
        let deleted = stack.delete(&first, &format!("/vps/{}", host_settings.machine)).await.body;
        stack.wait_until_ended(&first, deleted["operationId"].as_str().unwrap()).await;
        let path = format!("/vps/{}/undelete", host_settings.machine);
        let _ = stack.try_post(&first, &path, &json!({})).await;
        let mut beat = heartbeat_of(&host_settings);
        beat["epoch"] = json!(2);
        let (host, body) = (&host_settings, &beat);
        let stack_ref = &stack;
        first
            .wait_until_killed_while(|base| async move {
                drop(stack_ref.try_send_heartbeat(&base, host, body).await);
            })
            .await;

        let second = stack.start_platform_with(&[("DELETE_GRACE_SECONDS", "600")]);
        let is_running = || async {
            let is_on = stack.provider.servers()[0].status == Power::Running;
            if is_on {
                stack.send_heartbeat(&second, &host_settings, &beat).await;
            }
            (is_on && stack.status(&second, &host_settings.machine).await == "running").then_some(())
        };
        stack.eventually(&point, is_running).await;
        stack.assert_only_server(&host_settings.machine);
        assert_eq!(stack.pointer("user_1")["fenceEpoch"], 2, "{point}");
    })
    .await;
}

/// Kills the platform at each of the power operation's fail points, and asserts that another process completes the
/// operation.
async fn assert_power_operation_survives_kills(
    kind: OperationKind,
    action: &'static str,
    expected_power: Power,
) {
    let run = |point: String| async move {
        let stack = Stack::start().await;
        let mut setup = stack.start_platform();
        let host_settings = stack.start_machine(&setup, "user_1").await;
        let path = format!("/vps/{}/power", host_settings.machine);
        if kind == OperationKind::PowerOn {
            let off = stack.post(&setup, &path, &json!({"action": "off"})).await;
            stack.wait_until_ended(&setup, off.body["operationId"].as_str().unwrap()).await;
        }
        setup.kill();
        let mut first = stack.start_platform_with(&[("FAILPOINTS", &kill_setting(&point))]);
        // The kill can precede the response.
        let _ = stack.try_post(&first, &path, &json!({"action": action})).await;
        first.wait_until_killed_while(|base| stack.try_send_heartbeats(base)).await;

        let second = stack.start_platform();
        let record = stack.get(&second, &format!("/vps/{}", host_settings.machine)).await.body;
        let operation = record["operations"][0]["operationId"].as_str().unwrap();
        let operation = stack.wait_until_ended_without_registrations(&second, operation).await;
        assert_eq!(operation["kind"], kind.as_str(), "{point}: {operation}");
        assert_eq!(operation["state"], "succeeded", "{point}: {operation}\n{}", stack.log());
        let record = stack.get(&second, &format!("/vps/{}", host_settings.machine)).await.body;
        assert_eq!(record["poweredOffAt"].is_null(), expected_power == Power::Running, "{point}: {record}");
        assert_eq!(stack.provider.servers()[0].status, expected_power, "{point}");
        stack.assert_only_server(&host_settings.machine);
    };
    run_for_every_fail_point(kind, run).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn power_on_survives_a_kill_at_every_fail_point() {
    assert_power_operation_survives_kills(OperationKind::PowerOn, "on", Power::Running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn power_off_survives_a_kill_at_every_fail_point() {
    assert_power_operation_survives_kills(OperationKind::PowerOff, "off", Power::Off).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reboot_survives_a_kill_at_every_fail_point() {
    assert_power_operation_survives_kills(OperationKind::Reboot, "reboot", Power::Running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resize_survives_a_kill_at_every_fail_point() {
    run_for_every_fail_point(OperationKind::Resize, |point| async move {
        let stack = Stack::start().await;
        let mut setup = stack.start_platform();
        let host_settings = stack.start_machine(&setup, "user_1").await;
        setup.kill();
        // The host ignores the shutdown, so its power must be cut and every step has an effect.
        stack.provider.set_obeys_shutdown(&format!("svc-{}", host_settings.machine), false).unwrap();
        let settings = [("FAILPOINTS", kill_setting(&point)), ("RESIZE_SHUTDOWN_SECONDS", "1".to_owned())];
        let settings: Vec<(&str, &str)> = settings.iter().map(|(name, value)| (*name, &**value)).collect();
        let mut first = stack.start_platform_with(&settings);
        let path = format!("/vps/{}/resize", host_settings.machine);
        let request = stack.request(&first, reqwest::Method::POST, &path).bearer_auth(SECRET);
        // The kill can precede the response.
        let _ = request.json(&json!({"serverType": "cpx32"})).send().await;
        first.wait_until_killed_while(|base| stack.try_send_heartbeats(base)).await;

        let second = stack.start_platform_with(&[("RESIZE_SHUTDOWN_SECONDS", "1")]);
        let record = stack.get(&second, &format!("/vps/{}", host_settings.machine)).await.body;
        let operation = record["operations"][0]["operationId"].as_str().unwrap();
        let operation = stack.wait_until_ended_without_registrations(&second, operation).await;
        assert_eq!(operation["kind"], "resize", "{point}: {operation}");
        assert_eq!(operation["state"], "succeeded", "{point}: {operation}\n{}", stack.log());
        let record = stack.get(&second, &format!("/vps/{}", host_settings.machine)).await.body;
        assert_eq!(
            (&record["status"], &record["serverType"]),
            (&json!("running"), &json!("cpx32")),
            "{point}"
        );
        stack.assert_only_server(&host_settings.machine);
        let server = stack.provider.servers().remove(0);
        assert_eq!((server.server_type.as_str(), server.disk_gb), ("cpx32", 80), "{point}");
        assert_eq!(stack.provider.creations().len(), 1, "{point}");
    })
    .await;
}

/// Hosts that install the requested release, and the order in which they installed it.
struct UpdatingHosts<'a> {
    stack: &'a Stack,
    hosts: &'a [UserDataSettings],
    updated: Mutex<Vec<usize>>,
}

impl UpdatingHosts<'_> {
    /// Sends a heartbeat from each host to a platform that may have been killed.
    async fn send_heartbeats(&self, base: String) {
        for (index, host_settings) in self.hosts.iter().enumerate() {
            let mut body = heartbeat_of(host_settings);
            if self.updated.lock().unwrap().contains(&index) {
                body["imageVersion"] = json!(NEXT_VERSION);
            }
            let Some(response) = self.stack.try_send_heartbeat(&base, host_settings, &body).await else {
                continue;
            };
            let mut updated = self.updated.lock().unwrap();
            if response["desiredImageVersion"] == NEXT_VERSION && !updated.contains(&index) {
                updated.push(index);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_survives_a_kill_at_every_fail_point_of_every_step() {
    // The canary gets the request; the canary succeeds and the other hosts get the request; the other hosts succeed.
    const STEPS: usize = 3;
    let mut points = Vec::new();
    for point in svc::platform::rollouts::FAILPOINTS {
        points.extend((0..STEPS).map(|nth| (*point, nth)));
    }
    let run = |(point, nth): (&'static str, usize)| async move {
        let failpoints = format!("{point}={nth}*off->1*return(kill)");
        let Fleet { stack, process: mut first, hosts } =
            Fleet::start(3, &[("FAILPOINTS", &failpoints)]).await;
        let body = json!({"imageVersion": NEXT_VERSION, "canary": 1, "batchSize": 2, "verify": false});
        // The kill can precede the response.
        let _ = stack.try_post(&first, "/vps/deploy", &body).await;
        let updating_hosts = UpdatingHosts { stack: &stack, hosts: &hosts, updated: Mutex::default() };
        first.wait_until_killed_while(|base| updating_hosts.send_heartbeats(base)).await;

        let second = stack.start_platform();
        let check = || async {
            updating_hosts.send_heartbeats(second.base.clone()).await;
            let list = stack.get(&second, "/vps/deploy").await.body;
            let rollout = list["rollouts"][0].clone();
            (rollout["state"] != "running").then_some(rollout)
        };
        let ended = stack.eventually("the rollout ends", check).await;
        assert_eq!(ended["state"], "succeeded", "{point} {nth}: {ended}");
        assert_eq!(ended["totals"]["updated"], 3, "{point} {nth}: {ended}");
        assert_eq!(
            updating_hosts.updated.lock().unwrap().first(),
            Some(&0),
            "{point} {nth}: the canary must come first"
        );
    };
    stream::iter(points).map(run).buffer_unordered(MAX_CONCURRENT_RUNS).collect::<Vec<()>>().await;
}

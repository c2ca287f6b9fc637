//! `svcctl` against a real platform when data is at risk: its output about copies, the questions that operations ask,
//! and ways to undo changes. The provider simulator only records servers; the tests simulate their hosts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::StatusCode;
use kit::provider::Power;
use serde_json::{Value, json};
use svc::http::server::{ListenerLimits, serve};
use svc::http::tls;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::svcctl;
use crate::platform::stack::{BUCKET, Process, SECRET, Stack, UserDataSettings, heartbeat_of, registration};

const USER: &str = "user_1";
const HANDLE: &str = "h-user-1";

/// An operator's `svcctl`, with a platform whose hosts the test simulates.
struct Operator {
    stack: Stack,
    process: Process,
    /// The latest epoch that each machine received.
    epochs: Mutex<BTreeMap<String, Value>>,
}

impl Operator {
    async fn start(settings: &[(&str, &str)]) -> Self {
        let stack = Stack::start().await;
        let defaults = [
            ("RESIZE_SHUTDOWN_SECONDS", "0"),
            ("LAST_BACKUP_DEADLINE_SECONDS", "1"),
            ("PREDECESSOR_KEEP_SECONDS", "86400"),
            ("DELETE_GRACE_SECONDS", "86400"),
        ];
        let settings: Vec<_> = defaults.iter().chain(settings).copied().collect();
        let process = stack.start_platform_with(&settings);
        Self { stack, process, epochs: Mutex::default() }
    }

    /// Runs `svcctl` while the hosts send heartbeats, and returns both of its output streams. It must exit with
    /// `exit_code`.
    async fn run(&self, exit_code: i32, args: &[&str]) -> String {
        let env = [("PLATFORM_PUBLIC_URL", self.process.base.as_str()), ("PLATFORM_SECRET", SECRET)];
        let output = tokio::select! {
            output = svcctl(args, &env) => output,
            () = self.run_hosts() => unreachable!("the simulated hosts never stop"),
        };
        let text =
            format!("{}{}", String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
        assert_eq!(output.status.code(), Some(exit_code), "{args:?}: {text}\n{}", self.stack.log());
        text
    }

    async fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        serde_json::from_str(&self.run(0, &args).await).unwrap()
    }

    /// Registers every running server, and sends its heartbeats with its latest epoch.
    async fn run_hosts(&self) {
        loop {
            for server in self.stack.provider.servers() {
                if server.status == Power::Running {
                    self.send_heartbeat(&UserDataSettings::from_server(&server)).await;
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn send_heartbeat(&self, host_settings: &UserDataSettings) {
        let record = self.stack.get(&self.process, &format!("/vps/{}", host_settings.machine)).await.body;
        if matches!(record["status"].as_str(), Some("provisioning" | "recovering")) {
            self.stack.register(&self.process, host_settings).await;
        }
        let mut heartbeat = heartbeat_of(host_settings);
        if let Some(epoch) = self.epochs.lock().unwrap().get(&host_settings.machine) {
            heartbeat["epoch"] = epoch.clone();
        }
        if let Some(response) =
            self.stack.try_send_heartbeat(&self.process.base, host_settings, &heartbeat).await
        {
            let epoch = response["epoch"].clone();
            if epoch.is_u64() {
                self.epochs.lock().unwrap().insert(host_settings.machine.clone(), epoch);
            }
        }
    }

    /// Starts a machine with no host responding at its address.
    async fn start_machine(&self) -> UserDataSettings {
        self.stack.start_machine(&self.process, USER).await
    }

    /// Starts a machine whose host responds to every internal call with `status`.
    async fn start_machine_with_host(&self, status: StatusCode) -> (UserDataSettings, FakeHost) {
        let provisioned = self.stack.provision(&self.process, USER).await;
        let host_settings = self
            .stack
            .wait_for_host_settings(&self.process, provisioned["machineId"].as_str().unwrap())
            .await;
        let server = self.stack.provider.server_by_name(&format!("svc-{}", host_settings.machine)).unwrap();
        let identity = tls::generate_self_signed(&["host".to_owned()]).unwrap();
        let mut body = registration(&host_settings.machine, 1);
        body["tlsSpkiSha256"] = json!(identity.pin().unwrap().to_string());
        let response = self.stack.register_as(&self.process, &host_settings.registration_token, &body).await;
        assert_eq!(response.status, 200, "{response:?}");
        let listener = TcpListener::bind((server.ipv4, self.stack.provider.https_port())).await.unwrap();
        let stop = CancellationToken::new();
        let router = axum::Router::new().fallback(move || async move { status });
        let tls = Some(Arc::new(identity.server_config().unwrap()));
        tokio::spawn(serve(listener, tls, router, ListenerLimits::default(), stop.clone()));
        (host_settings, FakeHost(stop))
    }

    fn has_server(&self, machine: &str) -> bool {
        self.stack.provider.server_by_name(&format!("svc-{machine}")).is_some()
    }

    async fn wait_for_server_deletion(&self, machine: &str) {
        let is_deleted = || async { (!self.has_server(machine)).then_some(()) };
        self.stack.eventually("the server is deleted", is_deleted).await;
    }
}

/// A running host that stops when dropped.
struct FakeHost(CancellationToken);

impl Drop for FakeHost {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

fn assert_contains(output: &str, parts: &[&str]) {
    for part in parts {
        assert!(output.contains(part), "no {part:?} in {output}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_with_unreachable_host_can_be_undeleted_and_discarded() {
    let operator = Operator::start(&[]).await;
    let host_settings = operator.start_machine().await;
    let id = host_settings.machine.as_str();
    operator.stack.store_snapshot(USER);

    let output = operator.run(0, &["delete", HANDLE, "--yes"]).await;
    assert_contains(
        &output,
        &[
            "status        deleted",
            "snapshot      2026-01-02 03:04:05 UTC",
            &format!("undo          `svcctl undelete {id}` until"),
        ],
    );
    let output = operator.run(0, &["undelete", HANDLE, "--wait=60"]).await;
    assert_contains(&output, &["status       running", "epoch        2", "live server"]);
    let repeated = operator.run(0, &["undelete", HANDLE]).await;
    assert_contains(
        &repeated,
        &["the deletion had already been undone; nothing was changed", "status        running"],
    );

    // The host is unreachable, so data written since the machine registered exists only on its server.
    let response = operator.json(&["delete", HANDLE, "--yes"]).await;
    assert!(
        response["undeleteUntil"].is_string() && response["newestSnapshotSource"] == "store",
        "{response}"
    );
    let operation = response["operationId"].as_str().unwrap();
    operator.stack.wait_until_ended(&operator.process, operation).await;
    let unsaved =
        format!("of changes that are in no snapshot; kept until `svcctl discard {id} --accept-loss`");
    assert_contains(
        &operator.run(0, &["status", id]).await,
        &["status       deleted", "kept server", &unsaved],
    );
    assert_contains(
        &operator.run(0, &["fleet"]).await,
        &[
            HANDLE,
            "deleted",
            "unsaved_changes",
            &format!("svcctl status {id}"),
            &format!("svcctl undelete {id}"),
        ],
    );
    let output = operator.run(65, &["discard", HANDLE, "--yes"]).await;
    assert_contains(
        &output,
        &["invalid_state", "No snapshot contains", &format!("`svcctl discard {id} --accept-loss`")],
    );
    assert!(operator.has_server(id), "the rejected discard deleted the server");

    operator.run(0, &["discard", HANDLE, "--accept-loss", "--yes"]).await;
    operator.wait_for_server_deletion(id).await;
    let output = operator.run(65, &["undelete", id]).await;
    assert_contains(&output, &["invalid_state", "The machine's server has been deleted", "next: "]);
    assert_contains(
        &operator.run(65, &["undelete", HANDLE]).await,
        &["h-user-1 has no kept server", "next: "],
    );
    assert_contains(&operator.run(0, &["fleet"]).await, &["no machine needs attention"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_waits_without_final_backup_and_can_be_abandoned() {
    let operator = Operator::start(&[("LAST_BACKUP_STALL_SECONDS", "1")]).await;
    let (host_settings, _host) = operator.start_machine_with_host(StatusCode::INTERNAL_SERVER_ERROR).await;
    operator.stack.store_snapshot(USER);
    let output = operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    assert_contains(
        &output,
        &[
            "the recovery is waiting for your decision",
            "the host returned 500",
            "svcctl operation continue",
            "svcctl operation abandon",
        ],
    );

    let status = operator.run(0, &["status", HANDLE]).await;
    assert_contains(
        &status,
        &[
            "recover  waiting  at last_backup",
            "question: ",
            "--accept-loss`: the operation continues",
            "kept server",
        ],
    );
    assert_contains(&operator.run(0, &["fleet"]).await, &["operation_waiting", "svcctl operation show "]);
    let machine = operator.json(&["status", HANDLE]).await;
    let operation = machine["operations"][0]["operationId"].as_str().unwrap().to_owned();
    let output = operator.run(75, &["operation", "continue", &operation, "--wait=60"]).await;
    assert_contains(&output, &["the recovery is waiting for your decision", "the final backup is retried"]);
    // With `--json`, the question is part of the error, and the exit code indicates that the operation has not ended.
    let output = operator.run(75, &["--json", "operation", &operation, "--wait=5"]).await;
    let failure: Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    assert_eq!(failure["exit"], 75, "{failure}");
    assert!(failure["next"].as_str().unwrap().contains("svcctl operation abandon"), "{failure}");

    assert_contains(
        &operator.run(0, &["operation", "abandon", &operation]).await,
        &["recover  failed  abandoned"],
    );
    let output = operator.run(69, &["operation", "show", &operation, "--wait=60"]).await;
    assert_contains(
        &output,
        &[
            "recovery failed (abandoned)",
            &format!("machine {} is now serving the slot", host_settings.machine),
        ],
    );
    let output = operator.run(0, &["status", HANDLE]).await;
    assert_contains(&output, &[&host_settings.machine, "status       running", "epoch        3"]);
    let output = operator.run(65, &["operation", "abandon", &operation]).await;
    assert_contains(&output, &["invalid_state", "The recovery failed (abandoned) at "]);
    assert!(!output.contains("svcctl recover"), "{output}");
}

/// Loses a machine's server after an outage session has stored a snapshot newer than the one that the pointer names.
/// Returns the machine and the newer snapshot's key.
async fn lose_server_after_outage(operator: &Operator) -> (UserDataSettings, String) {
    let host_settings = operator.start_machine().await;
    let (old, new) = ("2026-01-02T03:45:03.000Z", "2026-01-02T04:00:15.000Z");
    for taken_at in [new, old] {
        operator.stack.store_snapshot_by(USER, &host_settings.machine, taken_at);
    }
    let server = format!("svc-{}", host_settings.machine);
    operator.stack.provider.lose_server(&server).await.unwrap();
    let has_failed = || async {
        (operator.stack.status(&operator.process, &host_settings.machine).await == "failed").then_some(())
    };
    operator.stack.eventually("the machine fails", has_failed).await;
    (host_settings, "system/db/snapshots/2026-01-02T04-00-15.000Z-1.dump".to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_waits_for_snapshot_choice_after_an_outage() {
    let operator = Operator::start(&[]).await;
    let (host_settings, newer) = lose_server_after_outage(&operator).await;
    assert_contains(&operator.run(0, &["status", HANDLE]).await, &["newer snapshot", &newer]);
    let output = operator.run(75, &["recover", USER, "--accept-loss", "--yes", "--wait=60"]).await;
    let command = |operation: &str| format!("`svcctl operation continue {operation} --snapshot {newer}`");
    let machine = operator.json(&["status", HANDLE]).await;
    let operation = machine["operations"][0]["operationId"].as_str().unwrap().to_owned();
    assert_contains(
        &output,
        &[&format!("note: {newer}"), "the recovery is waiting for your decision", &command(&operation)],
    );
    assert_contains(
        &output,
        &["2026-01-02T04:00:15.000Z", "the latest is the snapshot taken at 2026-01-02T03:45:03.000Z"],
    );

    let missing = "system/db/snapshots/2026-01-02T05-00-00.000Z-1.dump";
    let output = operator.run(65, &["operation", "continue", &operation, "--snapshot", missing]).await;
    assert_contains(&output, &["snapshot_unusable", "the object is missing"]);
    operator.run(0, &["operation", "continue", &operation, "--snapshot", &newer, "--wait=60"]).await;
    let output = operator.run(0, &["operation", &operation]).await;
    assert_contains(
        &output,
        &[
            "the newest copy is the snapshot taken at 2026-01-02T04:00:15.000Z",
            "the new machine is restored from",
        ],
    );
    let server = operator.stack.provider.servers().pop().unwrap();
    assert!(server.user_data.contains(&newer), "{}", server.user_data);
    assert_ne!(server.name, format!("svc-{}", host_settings.machine));
    let status = operator.run(0, &["status", HANDLE]).await;
    assert!(!status.contains("unrestored"), "{status}");
    assert_eq!(operator.stack.pointer(USER)["snapshot"]["takenAt"], "2026-01-02T03:45:03.000Z");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_the_newer_snapshot_that_was_not_restored() {
    let operator = Operator::start(&[]).await;
    let (_, newer) = lose_server_after_outage(&operator).await;
    operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    let machine = operator.json(&["status", HANDLE]).await;
    let operation = machine["operations"][0]["operationId"].as_str().unwrap().to_owned();
    // Nothing has changed, so the recovery waits again.
    operator.run(75, &["operation", "continue", &operation, "--wait=60"]).await;
    operator.run(0, &["operation", "continue", &operation, "--accept-loss", "--wait=60"]).await;
    assert_contains(&operator.run(0, &["operation", &operation]).await, &[&newer, "is not restored"]);
    let status = operator.run(0, &["status", HANDLE]).await;
    assert_contains(
        &status,
        &["status       running", "unrestored", "2026-01-02 04:00:15 UTC", &format!("--snapshot {newer}`")],
    );

    // The new machine is lost before its first backup: a recovery waits for a snapshot choice again.
    let server = operator.stack.provider.servers().pop().unwrap();
    operator.stack.provider.lose_server(&server.name).await.unwrap();
    let output = operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    assert_contains(&output, &[&format!("--snapshot {newer}`")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_during_recovery_names_both_machines() {
    let operator = Operator::start(&[("LAST_BACKUP_STALL_SECONDS", "1")]).await;
    let (host_settings, _host) = operator.start_machine_with_host(StatusCode::INTERNAL_SERVER_ERROR).await;
    let old = host_settings.machine.as_str();
    operator.stack.store_snapshot(USER);
    operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    let new = operator.json(&["status", HANDLE]).await["machineId"].as_str().unwrap().to_owned();

    let output = operator.run(0, &["delete", "user_1/primary", "--yes"]).await;
    let predecessor = format!("also deleted  machine {old}, which was to be replaced");
    let undo = format!("undo          `svcctl undelete {old}` until");
    assert_contains(
        &output,
        &[
            "slot          h-user-1, slot primary of user_1",
            &format!("machine       {new}"),
            &predecessor,
            &undo,
        ],
    );
    assert!(!output.contains("operation abandon"), "{output}");
    let output = operator.run(75, &["delete", &new, "--yes", "--wait=60"]).await;
    assert_contains(
        &output,
        &[
            "the deletion is waiting for your decision",
            &format!("No final backup of {old}"),
            "the deletion is undone",
        ],
    );
    assert_contains(
        &operator.run(0, &["undelete", HANDLE, "--wait=60"]).await,
        &[old, "status       running"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_loss_continues_recovery_and_keeps_old_server() {
    let operator = Operator::start(&[("LAST_BACKUP_STALL_SECONDS", "1")]).await;
    let (host_settings, _host) = operator.start_machine_with_host(StatusCode::INTERNAL_SERVER_ERROR).await;
    operator.stack.store_snapshot(USER);
    operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    let machine = operator.json(&["status", HANDLE]).await;
    let operation = machine["operations"][0]["operationId"].as_str().unwrap();
    let output = operator.run(0, &["operation", "continue", operation, "--accept-loss", "--wait=60"]).await;
    assert_contains(&output, &["recover  succeeded", "the operator accepted the loss"]);
    let status = operator.run(0, &["status", HANDLE]).await;
    assert_contains(
        &status,
        &["status       running", &format!("of replaced machine {}: kept until ", host_settings.machine)],
    );
    assert!(operator.has_server(&host_settings.machine));
    operator.run(0, &["discard", &host_settings.machine, "--yes"]).await;
    operator.wait_for_server_deletion(&host_settings.machine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_recovery_names_machine_that_has_the_slot() {
    let operator = Operator::start(&[]).await;
    let host_settings = operator.start_machine().await;
    operator.stack.store_snapshot(USER);
    let recovery =
        operator.json(&["recover", USER, "--server-type", "cpx32", "--location", "hel1", "--yes"]).await;
    let new = operator
        .stack
        .wait_for_host_settings(&operator.process, recovery["machineId"].as_str().unwrap())
        .await;
    let record = operator.stack.get(&operator.process, &format!("/vps/{}", new.machine)).await.body;
    assert_eq!((&record["serverType"], &record["location"]), (&json!("cpx32"), &json!("hel1")));
    let path = format!("/vps/{}/boot-failure", new.machine);
    let failure = operator.stack.request(&operator.process, http::Method::POST, &path);
    let failure =
        failure.bearer_auth(&new.registration_token).json(&json!({"stage": "restore", "message": "no room"}));
    assert_eq!(operator.stack.send(failure).await.status, 202);
    let operation = recovery["operationId"].as_str().unwrap();
    let output = operator.run(69, &["operation", "show", operation, "--wait=60"]).await;
    assert_contains(
        &output,
        &["boot_reported at restore: no room", &format!("machine {} ", host_settings.machine), "next: "],
    );
    assert_contains(&output, &["`svcctl backup list ", "--snapshot KEY`", "--server-type TYPE`"]);
    let is_serving = || async {
        let output = operator.run(0, &["status", HANDLE]).await;
        (output.contains("status       running") && output.contains(&host_settings.machine)).then_some(())
    };
    operator.stack.eventually("the old machine serves again", is_serving).await;
    operator.wait_for_server_deletion(&new.machine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_undoes_a_mistaken_fail() {
    let operator = Operator::start(&[]).await;
    let host_settings = operator.start_machine().await;
    operator.send_heartbeat(&host_settings).await;
    let output = operator.run(0, &["fail", HANDLE, "--reason", "a false alarm", "--yes"]).await;
    assert_contains(&output, &["status       failed", &format!("svcctl resume {}", host_settings.machine)]);
    assert_contains(&operator.run(0, &["resume", HANDLE]).await, &["status       running"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshot_too_large_for_disk_advises_server_type() {
    let operator = Operator::start(&[]).await;
    operator.start_machine().await;
    let key = format!("{}.json", operator.stack.store_snapshot(USER));
    let mut sidecar: Value =
        serde_json::from_slice(&operator.stack.store.read(BUCKET, &key).unwrap()).unwrap();
    sidecar["database"] = json!({"owner": null, "sizeBytes": 500_u64 << 30, "grants": null, "settings": []});
    operator.stack.store.write(BUCKET, &key, sidecar.to_string());
    let output = operator.run(65, &["recover", USER, "--yes"]).await;
    assert_contains(&output, &["disk_too_small", "next: ", "--server-type"]);
    assert_contains(&operator.run(0, &["status", HANDLE]).await, &["status       running"]);
}

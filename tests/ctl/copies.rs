//! `svcctl` against a real platform when data is at risk: its output about copies, the questions of operations, and
//! every way to undo. Servers are records of the simulator; the test plays their hosts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::StatusCode;
use kit::provider::Power;
use serde_json::{Value, json};
use svc::http::server::{Limits, serve};
use svc::http::tls;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::svcctl;
use crate::platform::stack::{BUCKET, Guest, Process, SECRET, Stack, beat_of, registration};

const USER: &str = "user_1";
const HANDLE: &str = "h-user-1";

struct Operator {
    stack: Stack,
    process: Process,
    /// The latest epoch that each machine received.
    epochs: Mutex<BTreeMap<String, Value>>,
}

impl Operator {
    async fn start(settings: &[(&str, &str)]) -> Self {
        let stack = Stack::start().await;
        let quick = [
            ("RESIZE_SHUTDOWN_SECONDS", "0"),
            ("LAST_BACKUP_DEADLINE_SECONDS", "1"),
            ("PREDECESSOR_KEEP_SECONDS", "86400"),
            ("DELETE_GRACE_SECONDS", "86400"),
        ];
        let settings: Vec<_> = quick.iter().chain(settings).copied().collect();
        let process = stack.platform_with(&settings);
        Self { stack, process, epochs: Mutex::default() }
    }

    /// Runs `svcctl` while hosts respond, and returns both of its output streams. It must exit with `code`.
    async fn run(&self, code: i32, args: &[&str]) -> String {
        let env = [("PLATFORM_PUBLIC_URL", self.process.base.as_str()), ("PLATFORM_SECRET", SECRET)];
        let output = tokio::select! {
            output = svcctl(args, &env) => output,
            () = self.run_hosts() => unreachable!("the hosts never stop"),
        };
        let said =
            format!("{}{}", String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}\n{}", self.stack.log());
        said
    }

    async fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        serde_json::from_str(&self.run(0, &args).await).unwrap()
    }

    /// Every running server registers, and sends heartbeats under its latest epoch.
    async fn run_hosts(&self) {
        loop {
            for server in self.stack.provider.servers() {
                if server.status == Power::Running {
                    self.send_heartbeat(&Guest::of(&server)).await;
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn send_heartbeat(&self, guest: &Guest) {
        let record = self.stack.get(&self.process, &format!("/vps/{}", guest.machine)).await.body;
        if matches!(record["status"].as_str(), Some("provisioning" | "recovering")) {
            self.stack.register(&self.process, guest).await;
        }
        let mut beat = beat_of(guest);
        if let Some(epoch) = self.epochs.lock().unwrap().get(&guest.machine) {
            beat["epoch"] = epoch.clone();
        }
        if let Some(answer) = self.stack.try_beat(&self.process.base, guest, &beat).await {
            let epoch = answer["epoch"].clone();
            if epoch.is_u64() {
                self.epochs.lock().unwrap().insert(guest.machine.clone(), epoch);
            }
        }
    }

    /// A running machine; no host responds at its address.
    async fn running(&self) -> Guest {
        self.stack.running(&self.process, USER).await
    }

    /// A running machine whose host responds to every internal call with `status`.
    async fn running_with_host(&self, status: StatusCode) -> (Guest, PlayedHost) {
        let made = self.stack.provision(&self.process, USER).await;
        let guest = self.stack.guest(&self.process, made["machineId"].as_str().unwrap()).await;
        let server = self.stack.provider.server_by_name(&format!("svc-{}", guest.machine)).unwrap();
        let identity = tls::self_signed(&["host".to_owned()]).unwrap();
        let mut body = registration(&guest.machine, 1);
        body["tlsSpkiSha256"] = json!(identity.pin().unwrap().to_string());
        let answer = self.stack.register_as(&self.process, &guest.registration_token, &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let listener = TcpListener::bind((server.ipv4, self.stack.provider.https_port())).await.unwrap();
        let stop = CancellationToken::new();
        let router = axum::Router::new().fallback(move || async move { status });
        let tls = Some(Arc::new(identity.server_config().unwrap()));
        tokio::spawn(serve(listener, tls, router, Limits::default(), stop.clone()));
        (guest, PlayedHost(stop))
    }

    fn has_server(&self, machine: &str) -> bool {
        self.stack.provider.server_by_name(&format!("svc-{machine}")).is_some()
    }

    async fn wait_for_server_deletion(&self, machine: &str) {
        let gone = || async { (!self.has_server(machine)).then_some(()) };
        self.stack.eventually("its server is deleted", gone).await;
    }
}

struct PlayedHost(CancellationToken);

impl Drop for PlayedHost {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

fn has(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_of_silent_host_can_be_undone_and_discarded() {
    let operator = Operator::start(&[]).await;
    let guest = operator.running().await;
    let id = guest.machine.as_str();
    operator.stack.snapshot(USER);

    let said = operator.run(0, &["delete", HANDLE, "--yes"]).await;
    has(
        &said,
        &[
            "status     deleted",
            "snapshot   2026-01-02 03:04:05 UTC",
            &format!("undo       `svcctl undelete {id}` until"),
        ],
    );
    let said = operator.run(0, &["undelete", HANDLE, "--wait=60"]).await;
    has(&said, &["status       running", "epoch        2", "live server"]);
    let again = operator.run(0, &["undelete", HANDLE]).await;
    has(&again, &["the deletion had already been undone; nothing was changed", "status     running"]);

    // Its host is unreachable: the data written since its registration exists only on its server.
    let answer = operator.json(&["delete", HANDLE, "--yes"]).await;
    assert!(answer["undeletableUntil"].is_string() && answer["newestSnapshotSource"] == "store", "{answer}");
    let operation = answer["operationId"].as_str().unwrap();
    operator.stack.ended(&operator.process, operation).await;
    let held = format!("of changes that no snapshot has; kept until `svcctl discard {id} --accept-loss`");
    has(&operator.run(0, &["status", id]).await, &["status       deleted", "kept server", &held]);
    has(
        &operator.run(0, &["fleet"]).await,
        &[
            HANDLE,
            "deleted",
            "unsaved_changes",
            &format!("svcctl status {id}"),
            &format!("svcctl undelete {id}"),
        ],
    );
    let said = operator.run(65, &["discard", HANDLE, "--yes"]).await;
    has(&said, &["invalid_state", "No snapshot contains", &format!("`svcctl discard {id} --accept-loss`")]);
    assert!(operator.has_server(id), "a refusal deletes nothing");

    operator.run(0, &["discard", HANDLE, "--accept-loss", "--yes"]).await;
    operator.wait_for_server_deletion(id).await;
    let said = operator.run(65, &["undelete", id]).await;
    has(&said, &["invalid_state", "Its server is deleted", "next: "]);
    has(&operator.run(65, &["undelete", HANDLE]).await, &["h-user-1 has no kept server", "next: "]);
    has(&operator.run(0, &["fleet"]).await, &["no machine needs attention"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_without_backup_asks_and_abandon_keeps_old_machine() {
    let operator = Operator::start(&[("LAST_BACKUP_STALL_SECONDS", "1")]).await;
    let (guest, _host) = operator.running_with_host(StatusCode::INTERNAL_SERVER_ERROR).await;
    operator.stack.snapshot(USER);
    let said = operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    has(
        &said,
        &[
            "the recovery waits for your decision",
            "the host answers 500",
            "svcctl operation continue",
            "svcctl operation abandon",
        ],
    );

    let status = operator.run(0, &["status", HANDLE]).await;
    has(
        &status,
        &["recover  waiting  at last_backup", "question: ", "--accept-loss`: it goes ahead", "kept server"],
    );
    has(&operator.run(0, &["fleet"]).await, &["operation_waiting", "svcctl operation show "]);
    let machine = operator.json(&["status", HANDLE]).await;
    let operation = machine["operations"][0]["operationId"].as_str().unwrap().to_owned();
    let said = operator.run(75, &["operation", "continue", &operation, "--wait=60"]).await;
    has(&said, &["the recovery waits for your decision", "the last backup is retried"]);
    // For programs the question is part of the failure, and the exit code says that the operation is not over.
    let shown = operator.run(75, &["--json", "operation", &operation, "--wait=5"]).await;
    let shown: Value = serde_json::from_str(shown.lines().last().unwrap()).unwrap();
    assert_eq!(shown["exit"], 75, "{shown}");
    assert!(shown["next"].as_str().unwrap().contains("svcctl operation abandon"), "{shown}");

    has(&operator.run(0, &["operation", "abandon", &operation]).await, &["recover  failed  abandoned"]);
    let said = operator.run(69, &["operation", "show", &operation, "--wait=60"]).await;
    has(&said, &["recovery failed (abandoned)", &format!("machine {} serves the slot now", guest.machine)]);
    let said = operator.run(0, &["status", HANDLE]).await;
    has(&said, &[&guest.machine, "status       running", "epoch        3"]);
    let said = operator.run(65, &["operation", "abandon", &operation]).await;
    has(
        &said,
        &["invalid_state", "The recovery has ended, and nothing was changed: it failed (abandoned) at "],
    );
    assert!(!said.contains("svcctl recover"), "{said}");
}

/// A machine whose server is lost. An outage session stored a snapshot that no pointer names.
async fn lost_after_outage(operator: &Operator) -> (Guest, String) {
    let guest = operator.running().await;
    let (old, new) = ("2026-01-02T03:45:03.000Z", "2026-01-02T04:00:15.000Z");
    for at in [new, old] {
        operator.stack.snapshot_by(USER, &guest.machine, at);
    }
    let server = format!("svc-{}", guest.machine);
    operator.stack.provider.vanish_server(&server).await.unwrap();
    let fails = || async {
        (operator.stack.status(&operator.process, &guest.machine).await == "failed").then_some(())
    };
    operator.stack.eventually("it fails", fails).await;
    (guest, "system/db/snapshots/2026-01-02T04-00-15.000Z-1.dump".to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_asks_which_snapshot_after_an_outage_session() {
    let operator = Operator::start(&[]).await;
    let (guest, newer) = lost_after_outage(&operator).await;
    has(&operator.run(0, &["status", HANDLE]).await, &["newer one", &newer]);
    let said = operator.run(75, &["recover", USER, "--accept-loss", "--yes", "--wait=60"]).await;
    let restores = |operation: &str| format!("`svcctl operation continue {operation} --snapshot {newer}`");
    let machine = operator.json(&["status", HANDLE]).await;
    let operation = machine["operations"][0]["operationId"].as_str().unwrap().to_owned();
    has(&said, &[&format!("note: {newer}"), "the recovery waits for your decision", &restores(&operation)]);
    has(&said, &["2026-01-02T04:00:15.000Z", "the latest is the snapshot of 2026-01-02T03:45:03.000Z"]);

    let other = "system/db/snapshots/2026-01-02T05-00-00.000Z-1.dump";
    let said = operator.run(65, &["operation", "continue", &operation, "--snapshot", other]).await;
    has(&said, &["snapshot_unusable", "the object is missing"]);
    operator.run(0, &["operation", "continue", &operation, "--snapshot", &newer, "--wait=60"]).await;
    let shown = operator.run(0, &["operation", &operation]).await;
    has(
        &shown,
        &["the newest copy is the snapshot of 2026-01-02T04:00:15.000Z", "the new machine begins with"],
    );
    let server = operator.stack.provider.servers().pop().unwrap();
    assert!(server.user_data.contains(&newer), "{}", server.user_data);
    assert_ne!(server.name, format!("svc-{}", guest.machine));
    let status = operator.run(0, &["status", HANDLE]).await;
    assert!(!status.contains("unrestored"), "{status}");
    assert_eq!(operator.stack.pointer(USER)["snapshot"]["takenAt"], "2026-01-02T03:45:03.000Z");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_the_newer_snapshot_that_was_not_restored() {
    let operator = Operator::start(&[]).await;
    let (_, newer) = lost_after_outage(&operator).await;
    operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    let machine = operator.json(&["status", HANDLE]).await;
    let operation = machine["operations"][0]["operationId"].as_str().unwrap().to_owned();
    // Nothing has changed, so it asks again.
    operator.run(75, &["operation", "continue", &operation, "--wait=60"]).await;
    operator.run(0, &["operation", "continue", &operation, "--accept-loss", "--wait=60"]).await;
    has(&operator.run(0, &["operation", &operation]).await, &[&newer, "is not restored"]);
    let status = operator.run(0, &["status", HANDLE]).await;
    has(
        &status,
        &["status       running", "unrestored", "2026-01-02 04:00:15 UTC", &format!("--snapshot {newer}`")],
    );

    // Lost before its first backup: it asks again about the snapshot that was not restored.
    let server = operator.stack.provider.servers().pop().unwrap();
    operator.stack.provider.vanish_server(&server.name).await.unwrap();
    let said = operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    has(&said, &[&format!("--snapshot {newer}`")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_during_recovery_names_both_machines_and_asks() {
    let operator = Operator::start(&[("LAST_BACKUP_STALL_SECONDS", "1")]).await;
    let (guest, _host) = operator.running_with_host(StatusCode::INTERNAL_SERVER_ERROR).await;
    let old = guest.machine.as_str();
    operator.stack.snapshot(USER);
    operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    let new = operator.json(&["status", HANDLE]).await["machineId"].as_str().unwrap().to_owned();

    let said = operator.run(0, &["delete", "user_1/primary", "--yes"]).await;
    let along = format!("with it    machine {old}, which was to be replaced");
    let undo = format!("undo       `svcctl undelete {old}` until");
    has(&said, &["slot       h-user-1, slot primary of user_1", &format!("machine    {new}"), &along, &undo]);
    assert!(!said.contains("operation abandon"), "{said}");
    let said = operator.run(75, &["delete", &new, "--yes", "--wait=60"]).await;
    has(
        &said,
        &[
            "the deletion waits for your decision",
            &format!("No last backup of {old}"),
            "the deletion is undone",
        ],
    );
    has(&operator.run(0, &["undelete", HANDLE, "--wait=60"]).await, &[old, "status       running"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_loss_continues_recovery_and_keeps_old_server() {
    let operator = Operator::start(&[("LAST_BACKUP_STALL_SECONDS", "1")]).await;
    let (guest, _host) = operator.running_with_host(StatusCode::INTERNAL_SERVER_ERROR).await;
    operator.stack.snapshot(USER);
    operator.run(75, &["recover", USER, "--yes", "--wait=60"]).await;
    let machine = operator.json(&["status", HANDLE]).await;
    let operation = machine["operations"][0]["operationId"].as_str().unwrap();
    let said = operator.run(0, &["operation", "continue", operation, "--accept-loss", "--wait=60"]).await;
    has(&said, &["recover  succeeded", "the operator accepted the loss"]);
    let status = operator.run(0, &["status", HANDLE]).await;
    has(&status, &["status       running", &format!("of replaced machine {}: kept until ", guest.machine)]);
    assert!(operator.has_server(&guest.machine));
    operator.run(0, &["discard", &guest.machine, "--yes"]).await;
    operator.wait_for_server_deletion(&guest.machine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_recovery_names_machine_that_has_the_slot() {
    let operator = Operator::start(&[]).await;
    let guest = operator.running().await;
    operator.stack.snapshot(USER);
    let recovery =
        operator.json(&["recover", USER, "--server-type", "cpx32", "--location", "hel1", "--yes"]).await;
    let new = operator.stack.guest(&operator.process, recovery["machineId"].as_str().unwrap()).await;
    let record = operator.stack.get(&operator.process, &format!("/vps/{}", new.machine)).await.body;
    assert_eq!((&record["serverType"], &record["location"]), (&json!("cpx32"), &json!("hel1")));
    let path = format!("/vps/{}/boot-failure", new.machine);
    let failure = operator.stack.request(&operator.process, http::Method::POST, &path);
    let failure =
        failure.bearer_auth(&new.registration_token).json(&json!({"stage": "restore", "message": "no room"}));
    assert_eq!(operator.stack.send(failure).await.status, 202);
    let operation = recovery["operationId"].as_str().unwrap();
    let said = operator.run(69, &["operation", "show", operation, "--wait=60"]).await;
    has(&said, &["boot_reported at restore: no room", &format!("machine {} ", guest.machine), "next: "]);
    has(&said, &["`svcctl backup list ", "--snapshot KEY`", "--server-type TYPE`"]);
    let serves = || async {
        let said = operator.run(0, &["status", HANDLE]).await;
        (said.contains("status       running") && said.contains(&guest.machine)).then_some(())
    };
    operator.stack.eventually("the old machine serves again", serves).await;
    operator.wait_for_server_deletion(&new.machine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_undoes_a_mistaken_fail() {
    let operator = Operator::start(&[]).await;
    let guest = operator.running().await;
    operator.send_heartbeat(&guest).await;
    let said = operator.run(0, &["fail", HANDLE, "--reason", "a wrong alarm", "--yes"]).await;
    has(&said, &["status       failed", &format!("svcctl resume {}", guest.machine)]);
    has(&operator.run(0, &["resume", HANDLE]).await, &["status       running"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshot_too_large_for_disk_advises_a_type() {
    let operator = Operator::start(&[]).await;
    operator.running().await;
    let key = format!("{}.json", operator.stack.snapshot(USER));
    let mut side: Value = serde_json::from_slice(&operator.stack.store.read(BUCKET, &key).unwrap()).unwrap();
    side["database"] = json!({"owner": null, "sizeBytes": 500_u64 << 30, "grants": null, "settings": []});
    operator.stack.store.write(BUCKET, &key, side.to_string());
    let said = operator.run(65, &["recover", USER, "--yes"]).await;
    has(&said, &["disk_too_small", "next: ", "--server-type"]);
    has(&operator.run(0, &["status", HANDLE]).await, &["status       running"]);
}

//! `svcctl` against real components, from publishing the first bundle to deleting a machine.

use std::path::Path;
use std::time::Duration;

use kit::bundle;
use kit::scenario::{CONFIRM_FLAGS, RouterTransport, Stack};
use serde_json::Value;

/// An operator's `svcctl`, with a running stack.
struct Operator(Stack);

impl Operator {
    /// Runs `svcctl` and returns both of its output streams. It must exit with `exit_code`.
    async fn run(&self, exit_code: i32, args: &[&str]) -> String {
        let run = self.0.svcctl(args).await.unwrap();
        let text = format!("{}{}", run.stderr, run.stdout);
        assert_eq!(run.exit_code, Some(exit_code), "{args:?}: {text}");
        assert!(!text.contains('\x1b'), "{args:?} is colored without a terminal: {text:?}");
        text
    }

    async fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        let run = self.0.svcctl(&args).await.unwrap().ensure_success().unwrap();
        serde_json::from_str(&run.stdout).unwrap()
    }
}

fn assert_contains(printed: &str, parts: &[&str]) {
    for part in parts {
        assert!(printed.contains(part), "no {part:?} in {printed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operator_runs_a_machine_from_bundle_to_deletion() {
    let dir = tempfile::Builder::new().prefix("svc-ctl-").tempdir_in("/tmp").unwrap();
    kit::child::remove_on_exit(dir.path());
    let svc = Path::new(env!("CARGO_BIN_EXE_svc"));
    let operator = Operator(Stack::start(svc, dir.path(), RouterTransport::Plain).await.unwrap().0);

    // Each error names the next step, and following these steps leads to a running machine.
    assert_contains(&operator.run(0, &["list"]).await, &["no machines"]);
    let printed = operator.run(65, &["provision", "user_1", "--handle", "ada"]).await;
    assert_contains(&printed, &["subscription_required", "next: run `svcctl slot set"]);
    assert_contains(
        &operator.run(0, &["slot", "set", "user_1", "--plan", "builder"]).await,
        &["builder", "active"],
    );
    let printed = operator.run(65, &["provision", "user_1", "--handle", "ada"]).await;
    assert_contains(&printed, &["bundle_not_found", "next: run `svcctl bundle publish"]);
    let built = bundle::build_minimal(svc, "demo-1", &dir.path().join("out")).unwrap();
    let out = built.dir.to_str().unwrap();
    assert_contains(
        &operator.run(0, &["bundle", "publish", out, "--image-version", "demo-1"]).await,
        &["published"],
    );
    assert_contains(&operator.run(0, &["bundle", "list"]).await, &["demo-1", "MiB", &built.sha256]);

    // Neither cost nor consent is assumed: without a terminal, both options are required, and the cost is shown.
    let printed = operator.run(64, &["provision", "user_1", "--handle", "ada", "--confirm-cost"]).await;
    assert_contains(&printed, &["10.1031 EUR a month (cpx22 in nbg1)", "add --confirm-opt-in"]);
    let printed = operator.run(0, &["provision", "user_1", "--handle", "ada", "--dry-run"]).await;
    assert_contains(
        &printed,
        &["user_1/primary", "builder, active", "10.1031 EUR a month", "0 servers", "never"],
    );
    assert_contains(&operator.run(0, &["list"]).await, &["no machines"]);
    let provision = ["provision", "user_1", "--handle", "ada", "--wait=200"];
    let printed = operator.run(0, &[&provision[..], &CONFIRM_FLAGS].concat()).await;
    assert_contains(&printed, &["warning: a recovery has not been exercised on a test slot"]);
    let audit = operator.json(&["audit", "--action", "provision"]).await;
    let confirmed = &audit["entries"][0]["after"]["confirmed"];
    assert_eq!(*confirmed, serde_json::json!({"monthlyCost": "10.1031 EUR", "optIn": true}), "{audit}");
    let stages =
        ["database", "bundle", "restore", "gateway", "register"].map(|stage| format!("boot: {stage}"));
    let positions: Vec<_> = stages
        .iter()
        .map(|stage| printed.find(stage).unwrap_or_else(|| panic!("{stage}: {printed}")))
        .collect();
    assert!(positions.is_sorted(), "{printed}");
    assert_contains(
        &printed,
        &["create_server  done", "await_registration  succeeded", "status       running"],
    );
    // The first heartbeat arrives shortly after the registration.
    let heartbeat_listed = async || {
        let listed = operator.run(0, &["list", "--status", "running"]).await;
        anyhow::ensure!(listed.contains("ago"), "no heartbeat in {listed}");
        Ok(listed)
    };
    let listed =
        kit::scenario::eventually("a heartbeat is listed", Duration::from_secs(60), heartbeat_listed)
            .await
            .unwrap();
    assert_contains(&listed, &["ada", "user_1", "cpx22", "ago"]);
    assert_contains(
        &operator.run(0, &["status", "ada"]).await,
        &["gateway ok, database ok", "boot ", "register "],
    );

    assert_contains(&operator.run(0, &["backup", "list", "ada"]).await, &["no snapshots"]);
    assert_contains(
        &operator.run(0, &["backup", "now", "ada", "--wait=120"]).await,
        &["system/db/snapshots/", "KiB"],
    );
    assert_contains(&operator.run(0, &["backup", "list", "ada"]).await, &["latest", "system/db/snapshots/"]);
    verify_and_download_snapshot(&operator, dir.path()).await;
    assert_contains(
        &operator.run(0, &["backup", "drill", "ada", "--wait=120"]).await,
        &["drill   success", "key     system/db"],
    );
    drill_damaged_snapshot(&operator).await;

    let printed = operator.run(77, &["resize", "ada", "cpx52", "--yes"]).await;
    assert_contains(&printed, &["server_type_not_allowed", "next: "]);
    assert_contains(&operator.run(64, &["resize", "ada", "cpx32"]).await, &["--yes"]);
    let printed = operator.run(0, &["resize", "ada", "cpx32", "--yes", "--wait=200"]).await;
    assert_contains(&printed, &["change_type  done", "type         cpx32", "status       running"]);
    assert!(!printed.contains("boot: "), "an earlier boot is shown: {printed}");

    let fleet = operator.json(&["fleet"]).await;
    assert_eq!(
        (&fleet["totals"]["machines"], &fleet["totals"]["byStatus"]["running"]),
        (&1.into(), &1.into())
    );
    // A real agent reads the trusted keys from the real updater and sends them in its heartbeat.
    let keys = operator.json(&["bundle", "keys"]).await;
    assert_eq!((&keys["keys"][0]["trusting"], &keys["notReporting"]), (&1.into(), &0.into()), "{keys}");
    let id = keys["keys"][0]["keyId"].as_str().unwrap();
    assert_contains(&operator.run(0, &["bundle", "keys"]).await, &["NOT TRUSTED BY", id, "yes"]);
    let printed = operator.run(0, &["fail", "ada", "--reason", "disk errors", "--yes"]).await;
    assert_contains(&printed, &["status       failed", "disk errors", "svcctl recover user_1"]);
    assert_contains(&operator.run(0, &["fleet"]).await, &["1 failed", "ada", "failed:operator"]);
    let printed = operator.run(65, &["backup", "now", "ada"]).await;
    assert_contains(&printed, &["invalid_state", "but must be running", "next: "]);

    let printed = operator.run(0, &["recover", "user_1", "--yes", "--wait=220"]).await;
    assert_contains(&printed, &["boot: restore", "epoch        2", "status       running"]);
    let machine = operator.json(&["status", "ada"]).await;
    let operation = machine["operations"][0]["operationId"].as_str().unwrap();
    assert_contains(
        &operator.run(0, &["operation", operation]).await,
        &["recover  succeeded", "fence  done"],
    );
    let old = machine["copies"]["kept"][0]["machineId"].as_str().unwrap();
    let kept_server = format!("of replaced machine {old}: kept until ");
    assert_contains(
        &operator.run(0, &["status", "ada"]).await,
        &["live server", &kept_server, "snapshot ", "at risk "],
    );
    assert_contains(
        &operator.run(0, &["discard", old, "--yes"]).await,
        &["status     replaced", "being deleted, with its disk"],
    );
    let printed = operator.run(0, &["delete", "ada", "--yes", "--wait=120"]).await;
    assert_contains(
        &printed,
        &["last_backup  done", "power_off_server  done", "status       deleted", "`svcctl undelete "],
    );
    assert_contains(&operator.run(0, &["list", "--deleted"]).await, &["deleted", "ada"]);
    let printed = operator.run(65, &["status", "ada"]).await;
    assert_contains(&printed, &["ada has no active machine", "svcctl list --deleted --handle ada"]);
    operator.0.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_boot_shows_its_stage_and_the_host_message() {
    let dir = tempfile::Builder::new().prefix("svc-ctl-").tempdir_in("/tmp").unwrap();
    kit::child::remove_on_exit(dir.path());
    let svc = Path::new(env!("CARGO_BIN_EXE_svc"));
    let operator = Operator(Stack::start(svc, dir.path(), RouterTransport::Plain).await.unwrap().0);
    operator.run(0, &["slot", "set", "user_1", "--plan", "starter"]).await;
    let built = bundle::build_minimal(svc, "demo-1", &dir.path().join("out")).unwrap();
    operator.run(0, &["bundle", "publish", built.dir.to_str().unwrap(), "--image-version", "demo-1"]).await;
    let broken = [("FAILPOINTS", "restore.begin=return(error)")];
    operator.0.provider.set_next_server_env(&broken).unwrap();
    let provision = ["provision", "user_1", "--handle", "ada", "--wait=200"];
    let printed = operator.run(69, &[&provision[..], &CONFIRM_FLAGS].concat()).await;
    assert_contains(
        &printed,
        &["boot: restore", "boot_reported at restore", "injected failure at restore.begin", "next: "],
    );
    let printed = operator.run(0, &["status", "ada"]).await;
    assert_contains(
        &printed,
        &["boot_reported at restore", "injected failure at restore.begin", "at restore", "next "],
    );
    operator.0.stop().await;
}

/// Damages the latest snapshot, checks that a drill detects the damage, and repairs the snapshot.
async fn drill_damaged_snapshot(operator: &Operator) {
    let drill = operator.json(&["backup", "drill", "ada", "--wait=120"]).await;
    let object = format!("user_1/primary/{}", drill["key"].as_str().unwrap());
    let dump = operator.0.store.read(kit::scenario::BUCKET, &object).unwrap();
    let mut damaged = dump.clone();
    damaged[100] ^= 1;
    operator.0.store.write(kit::scenario::BUCKET, &object, damaged);
    let printed = operator.run(65, &["backup", "drill", "ada", "--wait=120"]).await;
    assert_contains(&printed, &["drill   error", "SHA-256", "next: run `svcctl backup now"]);
    operator.0.store.write(kit::scenario::BUCKET, &object, dump);
}

/// Verifies a snapshot, downloads it over partial files of another snapshot and of this one, and checks that damage to
/// the object is detected.
async fn verify_and_download_snapshot(operator: &Operator, dir: &Path) {
    let intact = ["system/db/snapshots/", "size and SHA-256 match the sidecar"];
    assert_contains(&operator.run(0, &["backup", "verify", "ada"]).await, &intact);
    let verified = operator.json(&["backup", "verify", "ada"]).await;
    let key = verified["key"].as_str().unwrap();
    let (_, name) = key.rsplit_once('/').unwrap();
    let object = format!("user_1/primary/{key}");
    let dump = operator.0.store.read(kit::scenario::BUCKET, &object).unwrap();

    let file = dir.join("ada.dump");
    let output_path = file.to_str().unwrap();
    let partial = dir.join("ada.dump.partial");
    // The partial files from interrupted downloads of another snapshot and of this one.
    for interrupted in [vec![1; dump.len() / 2], dump[..dump.len() / 2].to_vec()] {
        std::fs::remove_file(&file).ok();
        std::fs::write(&partial, interrupted).unwrap();
        assert_contains(
            &operator.run(0, &["backup", "download", "ada", name, "--output", output_path]).await,
            &["file", output_path],
        );
        assert!(std::fs::read(&file).unwrap() == dump && !partial.exists());
    }
    assert_contains(
        &operator.run(65, &["backup", "download", "ada", "--output", output_path]).await,
        &["already exists"],
    );
    assert_contains(
        &operator.run(65, &["backup", "verify", "ada", "x.dump"]).await,
        &["no snapshot x.dump", "next: run `svcctl backup list"],
    );

    let mut damaged = dump.clone();
    damaged[100] ^= 1;
    for content in [Vec::new(), dump[..dump.len() / 2].to_vec(), damaged] {
        operator.0.store.write(kit::scenario::BUCKET, &object, content);
        let printed = operator.run(65, &["backup", "verify", "ada", key]).await;
        assert_contains(&printed, &["does not match its sidecar", "next: run `svcctl backup now <machine>`"]);
    }
    let damaged_file = dir.join("damaged.dump");
    operator.run(65, &["backup", "download", "ada", "--output", damaged_file.to_str().unwrap()]).await;
    assert!(!damaged_file.exists() && !dir.join("damaged.dump.partial").exists());
    operator.0.store.write(kit::scenario::BUCKET, &object, dump);
}

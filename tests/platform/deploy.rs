//! Rollouts on a real database. The tests send the hosts' heartbeats.

use kit::bundle::{Manifest, SigningKey};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::rollout_order::set_test_slot;
use super::stack::{BUCKET, DIGEST, Process, Stack, UserDataSettings, heartbeat_of};

pub const NEXT_VERSION: &str = "v2";

fn signing_key() -> SigningKey {
    SigningKey::from_pem(include_bytes!("../kit/src/bundle/ed25519-test-only.txt")).unwrap()
}

/// The value of `BUNDLE_PUBLIC_KEYS` in these tests.
pub fn public_key() -> String {
    signing_key().public_key_base64()
}

/// Publishes a bundle whose signed manifest is accepted by hosts that trust [`public_key`].
pub fn publish_signed(stack: &Stack, version: &str) {
    publish(stack, version, "2126-01-02T03:04:05.000Z");
}

fn publish(stack: &Stack, version: &str, expires_at: &str) {
    let (content, sha256) = ("0123456789", DIGEST.to_owned());
    let manifest = Manifest {
        version: 1,
        image_version: version.to_owned(),
        sha256: sha256.clone(),
        size_bytes: content.len() as u64,
        min_version: None,
        created_at: "2026-01-02T03:04:05.000Z".to_owned(),
        expires_at: expires_at.to_owned(),
        trusted_keys: None,
        removes: Vec::new(),
    };
    let manifest = manifest.render().unwrap();
    let put = |suffix: &str, content: &str| {
        let key = format!("system-bundles/{version}/svc-host-bundle.tar.gz{suffix}");
        stack.store.write(BUCKET, &key, content.to_owned());
    };
    put("", content);
    put(".json", &manifest);
    put(".json.sig", &signing_key().signature_line(manifest.as_bytes()));
    put(".sha256", &format!("{sha256}  svc-host-bundle.tar.gz\n"));
}

pub struct Fleet {
    pub stack: Stack,
    pub process: Process,
    pub hosts: Vec<UserDataSettings>,
}

impl Fleet {
    pub async fn start(machines: usize, extra_env: &[(&str, &str)]) -> Self {
        let stack = Stack::start().await;
        publish_signed(&stack, NEXT_VERSION);
        let keys = public_key();
        let env: Vec<_> =
            [("BUNDLE_PUBLIC_KEYS", keys.as_str())].into_iter().chain(extra_env.iter().copied()).collect();
        let process = stack.start_platform_with(&env);
        let mut hosts = Vec::new();
        for n in 0..machines {
            let user = format!("user_{n}");
            let host_settings = stack.start_machine(&process, &user).await;
            // A rollout updates machines in test slots in id order.
            set_test_slot(&stack, &process, &user, true).await;
            stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await;
            hosts.push(host_settings);
        }
        Self { stack, process, hosts }
    }

    /// Starts a rollout, by default without verification, which the simulated hosts could not pass.
    pub async fn deploy(&self, overrides: &Value) -> Value {
        let mut body = json!({"imageVersion": NEXT_VERSION, "verify": false});
        body.as_object_mut().unwrap().extend(overrides.as_object().unwrap().clone());
        let response = self.stack.post(&self.process, "/vps/deploy", &body).await;
        assert_eq!(response.status, 202, "{response:?}");
        response.body
    }

    async fn report_applying(&self, index: usize) {
        let host_settings = &self.hosts[index];
        let mut beat = heartbeat_of(host_settings);
        beat["updating"] = json!(true);
        self.stack.send_heartbeat(&self.process, host_settings, &beat).await;
    }

    /// Sends a heartbeat, and returns the release that the response requests.
    async fn fetch_desired_version(&self, index: usize) -> Value {
        let host_settings = &self.hosts[index];
        let beat = heartbeat_of(host_settings);
        let response = self.stack.send_heartbeat(&self.process, host_settings, &beat).await;
        response.body["desiredImageVersion"].clone()
    }

    pub async fn wait_until_requested(&self, index: usize) {
        self.stack
            .eventually("the update is requested", || async {
                (self.fetch_desired_version(index).await == NEXT_VERSION).then_some(())
            })
            .await;
    }

    pub async fn report_update(&self, index: usize, version: &str, outcome: &str) {
        let host_settings = &self.hosts[index];
        let mut beat = heartbeat_of(host_settings);
        beat["imageVersion"] = json!(version);
        beat["lastUpdate"] = json!({"version": NEXT_VERSION, "outcome": outcome, "stage": "health", "at": "2026-11-21T00:00:00.000Z"});
        self.stack.send_heartbeat(&self.process, host_settings, &beat).await;
    }

    async fn fetch_rollout(&self, rollout: &Value) -> Value {
        let path = format!("/vps/deploy/{}", rollout["rolloutId"].as_str().unwrap());
        self.stack.get(&self.process, &path).await.body
    }

    pub async fn wait_for_state(&self, rollout: &Value, state: &str) -> Value {
        self.stack
            .eventually(state, || async {
                let current = self.fetch_rollout(rollout).await;
                (current["state"] == state).then_some(current)
            })
            .await
    }

    pub async fn post_action(&self, rollout: &Value, action: &str) -> super::stack::ApiResponse {
        let path = format!("/vps/deploy/{}/{action}", rollout["rolloutId"].as_str().unwrap());
        self.stack.post(&self.process, &path, &json!({})).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_updates_the_canary_then_batches() {
    let mut fleet = Fleet::start(4, &[]).await;
    let rollout = fleet.deploy(&json!({"canary": 1, "batchSize": 2})).await;
    assert_eq!(rollout["totals"]["waiting"], 4);
    fleet.wait_until_requested(0).await;
    for index in 1..4 {
        assert_eq!(fleet.fetch_desired_version(index).await, "v1", "only the canary must get the request");
    }
    // A host that is still applying the update does not count as updated, regardless of the version that it reports.
    let mut beat = heartbeat_of(&fleet.hosts[0]);
    (beat["imageVersion"], beat["updating"]) = (json!(NEXT_VERSION), json!(true));
    fleet.stack.send_heartbeat(&fleet.process, &fleet.hosts[0], &beat).await;
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!(fleet.fetch_rollout(&rollout).await["totals"]["updated"], 0);
    fleet.report_update(0, NEXT_VERSION, "updated").await;
    fleet.wait_until_requested(1).await;
    fleet.wait_until_requested(2).await;
    assert_eq!(fleet.fetch_desired_version(3).await, "v1", "the next batch must not get the request yet");
    fleet.report_update(1, NEXT_VERSION, "updated").await;
    // A machine that fails in the meantime does not delay the others.
    let path = format!("/vps/{}/fail", fleet.hosts[2].machine);
    fleet.stack.post(&fleet.process, &path, &json!({"reason": "r"})).await;
    // Another process continues the rollout.
    fleet.process.kill();
    fleet.process = fleet.stack.start_platform_with(&[("BUNDLE_PUBLIC_KEYS", &public_key())]);
    fleet.wait_until_requested(3).await;
    fleet.report_update(3, NEXT_VERSION, "updated").await;
    let ended = fleet.wait_for_state(&rollout, "succeeded").await;
    assert_eq!(ended["totals"], json!({"waiting": 0, "asked": 0, "updated": 3, "failed": 0, "skipped": 1}));
    let record = fleet.stack.get(&fleet.process, &format!("/vps/{}", fleet.hosts[1].machine)).await.body;
    assert_eq!(
        (&record["imageVersion"], &record["lastUpdate"]["outcome"]),
        (&json!(NEXT_VERSION), &json!("updated"))
    );
    // A machine that is already running the release gets no request.
    let again = fleet.deploy(&json!({"handles": [record["handle"]]})).await;
    let ended = fleet.wait_for_state(&again, "succeeded").await;
    assert_eq!(ended["machines"][0]["askedAt"], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_stops_on_canary_failure_or_too_many_failures() {
    let fleet = Fleet::start(4, &[("ROLLOUT_SILENCE_SECONDS", "6")]).await;
    let rollout = fleet.deploy(&json!({"canary": 1, "batchSize": 1})).await;
    fleet.wait_until_requested(0).await;
    fleet.report_update(0, "v1", "rolled_back").await;
    let stopped = fleet.wait_for_state(&rollout, "stopped").await;
    assert_eq!(stopped["why"], "the canary failed");
    assert_eq!(stopped["totals"], json!({"waiting": 3, "asked": 0, "updated": 0, "failed": 1, "skipped": 0}));
    assert_eq!(fleet.fetch_desired_version(1).await, "v1");
    let overview = fleet.stack.get(&fleet.process, "/vps/fleet").await.body;
    let reasons = &overview["attention"].as_array().unwrap()[0]["reasons"];
    assert!(reasons.as_array().unwrap().contains(&json!("update_rolled_back")), "{overview}");
    assert_eq!(fleet.post_action(&rollout, "resume").await.status, 409);

    // A report for an earlier rollout does not count for this one; a silent host counts as failed.
    let rollout = fleet.deploy(&json!({"canary": 0, "batchSize": 2, "maxFailures": 2})).await;
    fleet.wait_until_requested(0).await;
    fleet.wait_until_requested(1).await;
    fleet.report_update(1, NEXT_VERSION, "updated").await;
    let silent = fleet
        .stack
        .eventually("the silent host has failed", || async {
            let current = fleet.fetch_rollout(&rollout).await;
            (current["totals"]["failed"] == 1).then_some(current)
        })
        .await;
    assert!(
        silent["machines"][0]["error"].as_str().unwrap().contains("did not report the update"),
        "{silent}"
    );
    fleet.wait_until_requested(2).await;
    fleet.report_update(2, "v1", "failed").await;
    let stopped = fleet.wait_for_state(&rollout, "stopped").await;
    assert_eq!(stopped["why"], "2 machines failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn applying_host_counts_as_silent_only_after_its_deadline() {
    let fleet = Fleet::start(1, &[("ROLLOUT_SILENCE_SECONDS", "3")]).await;
    let started = std::time::Instant::now();
    let rollout = fleet.deploy(&json!({})).await;
    fleet.wait_until_requested(0).await;
    let requested = std::time::Instant::now();
    let report_and_fetch = async || {
        fleet.report_applying(0).await;
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        fleet.fetch_rollout(&rollout).await
    };
    while requested.elapsed().as_secs() < 5 {
        assert_eq!(report_and_fetch().await["totals"]["asked"], 1, "after {:?}", requested.elapsed());
    }
    // The host has finished but is not healthy yet: its last report still counts.
    let mut beat = heartbeat_of(&fleet.hosts[0]);
    beat["health"]["gateway"] = json!("failing");
    fleet.stack.send_heartbeat(&fleet.process, &fleet.hosts[0], &beat).await;
    tokio::time::sleep(std::time::Duration::from_millis(1000)).await;
    assert_eq!(fleet.fetch_rollout(&rollout).await["totals"]["asked"], 1);
    while fleet.fetch_rollout(&rollout).await["totals"]["failed"] == 0 {
        assert!(started.elapsed().as_secs() < 60, "the platform never gave up on the host");
        report_and_fetch().await;
    }
    // The limit for a host that reports progress is six times `ROLLOUT_SILENCE_SECONDS`.
    assert!(started.elapsed().as_secs() >= 18, "after {:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_rollout_suspends_deadlines() {
    let fleet = Fleet::start(1, &[("ROLLOUT_SILENCE_SECONDS", "6")]).await;
    let rollout = fleet.deploy(&json!({})).await;
    fleet.wait_until_requested(0).await;
    assert_eq!(fleet.post_action(&rollout, "pause").await.body["state"], "paused");
    tokio::time::sleep(std::time::Duration::from_secs(7)).await;
    assert_eq!(fleet.fetch_rollout(&rollout).await["totals"]["asked"], 1);
    assert_eq!(fleet.post_action(&rollout, "resume").await.body["state"], "running");
    tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
    assert_eq!(fleet.fetch_rollout(&rollout).await["totals"]["asked"], 1, "paused time must not count");
    let stopped = fleet.wait_for_state(&rollout, "stopped").await;
    assert_eq!(stopped["why"], "the canary failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn host_receives_the_id_of_the_update_request() {
    let fleet = Fleet::start(1, &[]).await;
    let send_heartbeat = async || {
        let host_settings = &fleet.hosts[0];
        fleet.stack.send_heartbeat(&fleet.process, host_settings, &heartbeat_of(host_settings)).await.body
    };
    assert_eq!(send_heartbeat().await["desiredRequestId"], Value::Null);
    let mut previous_id = Value::Null;
    for _ in 0..2 {
        let rollout = fleet.deploy(&json!({})).await;
        fleet.wait_until_requested(0).await;
        let body = send_heartbeat().await;
        assert_eq!(body["desiredRequestId"], rollout["requestId"]);
        assert_ne!(body["desiredRequestId"], previous_id, "a repeated rollout must be a new request");
        previous_id = body["desiredRequestId"].clone();
        assert_eq!(fleet.post_action(&rollout, "abort").await.status, 200);
        // The request ends with the host's report.
        fleet.report_update(0, "v1", "failed").await;
        fleet
            .stack
            .eventually("the request ends", || async {
                (fleet.fetch_rollout(&rollout).await["totals"]["failed"] == 1).then_some(())
            })
            .await;
        fleet.report_update(0, "v1", "refused").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_can_be_paused_resumed_and_aborted() {
    let fleet = Fleet::start(2, &[]).await;
    let rollout = fleet.deploy(&json!({})).await;
    fleet.wait_until_requested(0).await;
    assert_eq!(fleet.post_action(&rollout, "pause").await.body["state"], "paused");
    assert_eq!(fleet.fetch_desired_version(0).await, "v1", "a paused rollout must send no request");
    fleet.report_update(0, NEXT_VERSION, "updated").await;
    fleet
        .stack
        .eventually("the outstanding request ends", || async {
            (fleet.fetch_rollout(&rollout).await["totals"]["updated"] == 1).then_some(())
        })
        .await;
    assert_eq!(fleet.fetch_rollout(&rollout).await["totals"]["waiting"], 1);
    let open_rollout = fleet.stack.get(&fleet.process, "/vps/fleet").await.body["rollout"].clone();
    assert_eq!(
        (&open_rollout["rolloutId"], &open_rollout["state"], &open_rollout["totals"]["waiting"]),
        (&rollout["rolloutId"], &json!("paused"), &json!(1))
    );
    let refused =
        fleet.stack.post(&fleet.process, "/vps/deploy", &json!({"imageVersion": NEXT_VERSION})).await;
    assert_eq!((refused.status, &refused.body["rolloutId"]), (409, &rollout["rolloutId"]));
    assert_eq!(fleet.post_action(&rollout, "resume").await.body["state"], "running");
    fleet.wait_until_requested(1).await;
    let aborted = fleet.post_action(&rollout, "abort").await;
    assert_eq!((aborted.status, &aborted.body["state"]), (200, &json!("aborted")));
    assert_eq!(fleet.post_action(&rollout, "abort").await.status, 200);
    assert_eq!(fleet.post_action(&rollout, "pause").await.status, 409);
    assert_eq!(fleet.fetch_desired_version(1).await, "v1");
    assert_eq!(fleet.stack.get(&fleet.process, "/vps/fleet").await.body["rollout"], Value::Null);
    let client = fleet.stack.database.connect().await.unwrap();
    let rows = client
        .query("SELECT action FROM operator_audit WHERE action LIKE 'deploy%' ORDER BY at", &[])
        .await
        .unwrap();
    let actions: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(actions, ["deploy", "deploy.pause", "deploy.resume", "deploy.abort"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn newest_rollouts_are_listed() {
    let fleet = Fleet::start(1, &[]).await;
    let list = || async {
        let response = fleet.stack.get(&fleet.process, "/vps/deploy").await;
        assert_eq!(response.status, 200, "{response:?}");
        response.body["rollouts"].as_array().unwrap().clone()
    };
    assert_eq!(list().await, Vec::<Value>::new());
    let mut ids = Vec::new();
    for _ in 0..21 {
        let rollout = fleet.deploy(&json!({})).await;
        assert_eq!(fleet.post_action(&rollout, "abort").await.status, 200);
        ids.insert(0, rollout["rolloutId"].clone());
    }
    let open = fleet.deploy(&json!({})).await;
    ids.insert(0, open["rolloutId"].clone());
    let listed = list().await;
    assert_eq!(listed.iter().map(|rollout| rollout["rolloutId"].clone()).collect::<Vec<_>>(), ids[..20]);
    assert_eq!((&listed[0]["state"], &listed[1]["state"]), (&json!("running"), &json!("aborted")));
    assert_eq!(listed[1]["totals"].as_object().unwrap().values().filter_map(Value::as_u64).sum::<u64>(), 1);
    assert_eq!(listed[0].get("machines"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_rejects_bundles_that_hosts_would_reject() {
    let fleet = Fleet::start(1, &[]).await;
    let deploy = async |body: Value| fleet.stack.post(&fleet.process, "/vps/deploy", &body).await;
    deploy(json!({"imageVersion": "v9"})).await.assert_problem(404, "bundle_not_found");
    let unsigned = deploy(json!({"imageVersion": "v1"})).await;
    assert!(unsigned.body["detail"].as_str().unwrap().contains("without a signed manifest"), "{unsigned:?}");
    unsigned.assert_problem(409, "conflict");
    publish(&fleet.stack, "v3", "2026-01-02T03:04:05.000Z");
    let expired = deploy(json!({"imageVersion": "v3"})).await;
    assert!(expired.body["detail"].as_str().unwrap().contains("the manifest expired at"), "{expired:?}");
    expired.assert_problem(409, "conflict");
    deploy(json!({"imageVersion": NEXT_VERSION, "handles": ["unknown"]}))
        .await
        .assert_problem(404, "machine_not_found");
    for invalid in [
        json!({"handles": []}),
        json!({"handles": ["A B"]}),
        json!({"batchSize": 0}),
        json!({"canary": 1001}),
    ] {
        let mut body = json!({"imageVersion": NEXT_VERSION});
        body.as_object_mut().unwrap().extend(invalid.as_object().unwrap().clone());
        deploy(body).await.assert_problem(400, "invalid_request");
    }
    let without_keys = fleet.stack.start_platform();
    let response =
        fleet.stack.post(&without_keys, "/vps/deploy", &json!({"imageVersion": NEXT_VERSION})).await;
    assert!(response.body["detail"].as_str().unwrap().contains("BUNDLE_PUBLIC_KEYS"), "{response:?}");
    response.assert_problem(409, "conflict");
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_refuses_a_powered_off_machine() {
    let fleet = Fleet::start(1, &[]).await;
    let (stack, process, host_settings) = (&fleet.stack, &fleet.process, &fleet.hosts[0]);
    let client = stack.database.connect().await.unwrap();
    let id: uuid::Uuid = host_settings.machine.parse().unwrap();
    let sql = "UPDATE user_machines SET powered_off_at = now() WHERE machine_id = $1";
    client.execute(sql, &[&id]).await.unwrap();
    let start = async |handle: &str| {
        stack.post(process, "/vps/deploy", &json!({"imageVersion": NEXT_VERSION, "handles": [handle]})).await
    };
    let refused = start("h-user-0").await;
    refused.assert_problem(409, "invalid_state");
    let (detail, next) = (refused.body["detail"].as_str().unwrap(), format!("`svcctl power on {id} --wait`"));
    assert!(detail.contains("is powered off") && detail.contains(&next), "{detail}");
    start("h-user-9").await.assert_problem(404, "machine_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_verification_pauses_rollout_until_operator_decides() {
    let fleet = Fleet::start(2, &[]).await;
    let alarms = async || fleet.stack.get(&fleet.process, "/vps/fleet").await.body["alarms"].clone();
    let rollout = fleet.deploy(&json!({"canary": 1, "verify": true})).await;
    assert_eq!((&rollout["verify"], &rollout["verification"]), (&json!(true), &Value::Null));
    fleet.wait_until_requested(0).await;
    // No host is listening at the machine's address.
    fleet.report_update(0, NEXT_VERSION, "updated").await;
    let paused = fleet.wait_for_state(&rollout, "paused").await;
    let reason = paused["why"].as_str().unwrap();
    assert!(reason.starts_with("the verification failed: h-user-0: shell: "), "{reason}");
    let verification = &paused["verification"];
    assert_eq!((&verification["passed"], &verification["handles"]), (&json!(false), &json!(["h-user-0"])));
    let checks: Vec<_> =
        verification["findings"].as_array().unwrap().iter().map(|finding| &finding["check"]).collect();
    assert_eq!(checks, ["shell", "gateway-health", "bridge-schemas", "legacy-route", "icons"]);
    let alarm = &alarms().await[0];
    assert_eq!((&alarm["alarm"], &alarm["detail"]["finding"]), (&json!("rollout_halted"), &paused["why"]));
    assert!(alarm["next"].as_str().unwrap().contains("svcctl deploy resume"), "{alarm}");
    assert_eq!(fleet.fetch_desired_version(1).await, "v1", "an unverified release must not be requested");
    let client = fleet.stack.database.connect().await.unwrap();
    let sql = "SELECT count(*) FROM operator_audit WHERE action = 'deploy.halted' AND target = $1";
    let id = rollout["rolloutId"].as_str().unwrap();
    assert_eq!(client.query_one(sql, &[&id]).await.unwrap().get::<_, i64>(0), 1);
    // Pausing again keeps the reason.
    assert_eq!(fleet.post_action(&rollout, "pause").await.body["why"], paused["why"]);

    // The rollout verifies again, and fails again, because the cause has not been corrected.
    let resumed = fleet.post_action(&rollout, "resume").await.body;
    assert_eq!((&resumed["state"], &resumed["verification"]), (&json!("running"), &Value::Null));
    assert_eq!(alarms().await, json!([]));
    let again = fleet.wait_for_state(&rollout, "paused").await;
    assert!(again["verification"]["at"].as_str() > verification["at"].as_str(), "{again}");
    assert_eq!(fleet.fetch_desired_version(1).await, "v1");
    assert_eq!(fleet.post_action(&rollout, "abort").await.body["state"], "aborted");
    assert_eq!(alarms().await, json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn verification_by_a_killed_process_is_taken_over() {
    let mut fleet = Fleet::start(1, &[]).await;
    // This host accepts connections but never responds, so the verification takes a long time.
    let server = fleet.stack.provider.servers().remove(0);
    let silent = TcpListener::bind((server.ipv4, fleet.stack.provider.https_port())).await.unwrap();
    let rollout = fleet.deploy(&json!({"canary": 1, "verify": true})).await;
    fleet.wait_until_requested(0).await;
    fleet.report_update(0, NEXT_VERSION, "updated").await;
    let client = fleet.stack.database.connect().await.unwrap();
    let lease_expiry_seconds = async || {
        let sql = "SELECT extract(epoch FROM max(verifying_until) - created_at)::float8 FROM rollouts GROUP BY created_at";
        client.query_one(sql, &[]).await.unwrap().get::<_, Option<f64>>(0)
    };
    let first = fleet.stack.eventually("the verification has a lease", &lease_expiry_seconds).await;
    let renewed = async || lease_expiry_seconds().await.filter(|expiry| *expiry > first);
    fleet.stack.eventually("the lease is renewed", renewed).await;

    fleet.process.kill();
    drop(silent);
    let sql = "UPDATE rollouts SET verifying_until = verifying_until - interval '1 minute'";
    client.execute(sql, &[]).await.unwrap();
    let keys = public_key();
    fleet.process = fleet.stack.start_platform_with(&[("BUNDLE_PUBLIC_KEYS", keys.as_str())]);
    let paused = fleet.wait_for_state(&rollout, "paused").await;
    assert!(
        paused["why"].as_str().unwrap().starts_with("the verification failed: h-user-0: shell: "),
        "{paused}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn verification_covers_only_machines_that_run_the_release() {
    let fleet = Fleet::start(3, &[]).await;
    let rollout = fleet.deploy(&json!({"canary": 2, "verify": true})).await;
    fleet.wait_until_requested(0).await;
    fleet.wait_until_requested(1).await;
    fleet.report_update(0, NEXT_VERSION, "updated").await;
    fleet.report_update(1, NEXT_VERSION, "updated").await;
    let paused = fleet.wait_for_state(&rollout, "paused").await;
    assert_eq!(paused["verification"]["handles"], json!(["h-user-0", "h-user-1"]));
    // One machine is rolled back, so only the other one is verified.
    fleet.report_update(0, "v1", "rolled_back").await;
    assert_eq!(fleet.post_action(&rollout, "resume").await.status, 200);
    let paused = fleet.wait_for_state(&rollout, "paused").await;
    assert_eq!(paused["verification"]["handles"], json!(["h-user-1"]), "{paused}");
    // The other machine is powered off, so no machine can be verified, and the verification fails.
    let client = fleet.stack.database.connect().await.unwrap();
    let id: uuid::Uuid = fleet.hosts[1].machine.parse().unwrap();
    client
        .execute("UPDATE user_machines SET powered_off_at = now() WHERE machine_id = $1", &[&id])
        .await
        .unwrap();
    assert_eq!(fleet.post_action(&rollout, "resume").await.status, 200);
    let paused = fleet.wait_for_state(&rollout, "paused").await;
    let verification = &paused["verification"];
    assert_eq!((&verification["passed"], &verification["handles"]), (&json!(false), &json!([])), "{paused}");
    let reason = paused["why"].as_str().unwrap();
    assert!(reason.contains("none of the first machines still runs v2"), "{reason}");
    assert_eq!(fleet.fetch_desired_version(2).await, "v1", "an unverified release must not be requested");
}

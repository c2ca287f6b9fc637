//! Rotates `PLATFORM_KEY` with running machines, with processes that use either key, and after a kill.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use kit::pg::copy::DatabaseCopy;
use kit::s3::{Fault, FaultRule};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use secrecy::SecretSlice;
use serde_json::{Value, json};
use svc::machine::id::MachineId;
use svc::platform::keys::{OpeningKey, Seal};
use svc::platform::platform_key::KeyId;
use svc::platform::platform_key_rotation::marker;
use svc::platform::tokens::{Generation, Purpose, TokenMint};
use svc::store::key::SlotPrefix;
use tokio_postgres::Client;

use super::fake_host::start_host;
use super::stack::{ApiResponse, BUCKET, Process, SECRET, Stack, UserDataSettings, heartbeat_of};

/// Each test key repeats one of these bytes.
const OLD: u8 = 7;
const NEW: u8 = 8;
/// The lease duration for these processes. A process that has not renewed its row for four lease durations counts
/// as ended.
const LEASE: (&str, &str) = ("PLATFORM_LEASE_SECONDS", "1");

fn key(byte: u8) -> SecretSlice<u8> {
    vec![byte; 32].into()
}

/// Returns the settings for a process with these keys.
fn settings(current: u8, previous: Option<u8>) -> Vec<(&'static str, String)> {
    let to_hex = |byte: u8| hex::encode([byte; 32]);
    let mut settings = vec![("PLATFORM_KEY", to_hex(current)), (LEASE.0, LEASE.1.to_owned())];
    settings.extend(previous.map(|previous| ("PLATFORM_KEY_PREVIOUS", to_hex(previous))));
    settings
}

fn start_process(stack: &Stack, current: u8, previous: Option<u8>, extra_env: &[(&str, &str)]) -> Process {
    let settings = settings(current, previous);
    let mut all: Vec<(&str, &str)> = settings.iter().map(|(name, value)| (*name, value.as_str())).collect();
    all.extend(extra_env);
    stack.start_platform_with(&all)
}

async fn stop(mut process: Process) {
    kill(Pid::from_raw(i32::try_from(process.pid()).unwrap()), Signal::SIGTERM).unwrap();
    assert!(process.wait_for_exit().await.success());
}

/// Starts a process that must reject these keys, and returns its log.
async fn assert_refused(stack: &Stack, current: u8, previous: Option<u8>) -> String {
    let settings = settings(current, previous);
    let all: Vec<(&str, &str)> = settings.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let mut command = stack.command(&all);
    let before = stack.log().len();
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(40);
    let status = tokio::task::block_in_place(|| kit::child::wait_until(&mut child, end));
    child.kill().ok();
    let log = stack.log()[before..].to_owned();
    assert_eq!(status.and_then(|status| status.code()), Some(78), "{log}");
    assert!(!log.contains(&hex::encode([current; 32])), "{log}");
    log
}

/// Runs the doctor and returns its findings about the keys.
async fn run_doctor(stack: &Stack, process: &Process, current: u8, previous: Option<u8>) -> String {
    stack.run_doctor(process, "platform-key", settings(current, previous)).await
}

async fn load_sealed_keys(client: &Client) -> BTreeMap<String, Vec<u8>> {
    let rows = client
        .query(
            "SELECT kid, sealed FROM signing_keys \
             UNION ALL SELECT 'files:' || idp_user_id || '/' || slot, sealed FROM file_keys",
            &[],
        )
        .await
        .unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

async fn are_all_sealed_with(client: &Client, byte: u8) -> bool {
    let (seal, keys) = (Seal::new(&key(byte)), load_sealed_keys(client).await);
    assert!(!keys.is_empty());
    keys.iter().all(|(kid, sealed)| seal.find_opening_key(kid, sealed) == OpeningKey::Current)
}

/// Whether only the new key is still needed.
async fn is_only_new_key_needed(client: &Client) -> bool {
    let sql = "SELECT count(*) FROM platform_keys WHERE key_id = $1 AND sole_since IS NOT NULL";
    let row = client.query_one(sql, &[&KeyId::from_key(&key(NEW)).as_str()]).await.unwrap();
    row.get::<_, i64>(0) == 1
}

/// Whether this key signed the fence for the user's slot.
fn is_fence_signed(stack: &Stack, user: &str, byte: u8) -> bool {
    let pointer: svc::store::pointer::Pointer = serde_json::from_value(stack.pointer(user)).unwrap();
    let slot = SlotPrefix::new(&user.parse().unwrap(), &"primary".parse().unwrap());
    let (machine, proof) = pointer.fence_machine_id.zip(pointer.fence_proof).unwrap();
    TokenMint::new(&key(byte)).is_fence_signed(&slot, pointer.fence_epoch, machine, &proof)
}

/// Returns the id of the process that is running with this key.
async fn find_running_process(stack: &Stack, byte: u8) -> String {
    let client = stack.database.connect().await.unwrap();
    let sql = "SELECT process_id::text FROM platform_processes WHERE key_id = $1";
    client.query_one(sql, &[&KeyId::from_key(&key(byte)).as_str()]).await.unwrap().get(0)
}

async fn send_heartbeat(stack: &Stack, process: &Process, host_settings: &UserDataSettings) -> ApiResponse {
    stack.send_heartbeat(process, host_settings, &heartbeat_of(host_settings)).await
}

/// Stores the token from a response, as a host does.
fn store_next_token(host_settings: &mut UserDataSettings, response: &Value) {
    if let Some(token) = response["nextToken"].as_str() {
        token.clone_into(&mut host_settings.upgrade_token);
    }
}

/// Sends heartbeats until only the new key is needed.
async fn complete_key_rotation(
    stack: &Stack,
    process: &Process,
    client: &Client,
    host_settings: &mut UserDataSettings,
) {
    let end = std::time::Instant::now() + Duration::from_secs(40);
    while !is_only_new_key_needed(client).await {
        let response = send_heartbeat(stack, process, host_settings).await;
        assert_eq!(response.status, 200, "{response:?}");
        store_next_token(host_settings, &response.body);
        assert!(std::time::Instant::now() < end, "the rotation did not complete\n{}", stack.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn add_operator(stack: &Stack, process: &Process) -> ApiResponse {
    let body = json!({"name": "ada", "scopes": ["read"]});
    let request = stack.request(process, Method::POST, "/operators").bearer_auth(SECRET).json(&body);
    stack.send(request.header("idempotency-key", "add-ada")).await
}

async fn who_am_i_status(stack: &Stack, process: &Process, token: &str) -> u16 {
    stack.send(stack.request(process, Method::GET, "/operators/whoami").bearer_auth(token)).await.status
}

#[tokio::test(flavor = "multi_thread")]
async fn key_rotation_completes_with_a_running_machine() {
    let stack = Stack::start().await;
    let client = stack.database.connect().await.unwrap();
    let process = start_process(&stack, OLD, None, &[]);
    let host = start_host(&stack, &process).await;
    let (mut host_settings, usage_path) =
        (host.settings.clone(), format!("/vps/{}/usage", host.settings.machine));
    let ada = add_operator(&stack, &process).await.body["token"].as_str().unwrap().to_owned();
    let (before, public) = (
        load_sealed_keys(&client).await,
        send_heartbeat(&stack, &process, &host_settings).await.body["proofKeys"].clone(),
    );
    assert!(is_fence_signed(&stack, "user_1", OLD));
    assert!(run_doctor(&stack, &process, OLD, None).await.starts_with("\"ok\""));
    stop(process).await;

    let process = start_process(&stack, NEW, Some(OLD), &[]);
    let needed = run_doctor(&stack, &process, NEW, Some(OLD)).await;
    assert!(needed.contains("still needed") && needed.contains("1 machine's token"), "{needed}");
    assert!(needed.contains(&host_settings.machine), "{needed}");
    let early = assert_refused(&stack, NEW, None).await;
    assert!(early.contains("PLATFORM_KEY_PREVIOUS") && early.contains(&host_settings.machine), "{early}");
    assert_eq!(
        add_operator(&stack, &process).await.body["token"],
        json!(ada),
        "a repeated request must get the same response"
    );
    let old_token = host_settings.upgrade_token.clone();
    complete_key_rotation(&stack, &process, &client, &mut host_settings).await;
    let record = stack.get(&process, &format!("/vps/{}", host_settings.machine)).await.body;
    assert_eq!(
        (&record["upgradeToken"]["generation"], old_token == host_settings.upgrade_token),
        (&json!(2), false)
    );
    let after = load_sealed_keys(&client).await;
    assert!(before.keys().eq(after.keys()) && before.iter().all(|(kid, sealed)| after[kid] != *sealed));
    assert!(are_all_sealed_with(&client, NEW).await && is_fence_signed(&stack, "user_1", NEW));
    assert_eq!(stack.pointer("user_1")["fenceEpoch"], 1);
    let safe = run_doctor(&stack, &process, NEW, Some(OLD)).await;
    assert!(safe.contains("can be dropped"), "{safe}");
    stop(process).await;

    let process = start_process(&stack, NEW, None, &[]);
    let response = send_heartbeat(&stack, &process, &host_settings).await;
    assert_eq!((response.status, &response.body["nextToken"]), (200, &Value::Null), "{response:?}");
    assert_eq!(
        response.body["proofKeys"], public,
        "a rotation of PLATFORM_KEY must not change the proof keys"
    );
    let calls_before = host.call_count("GET", "/api/usage");
    stack.get(&process, &usage_path).await;
    assert_eq!(
        host.call_count("GET", "/api/usage"),
        calls_before + 1,
        "the host must accept the platform's proof"
    );
    assert_eq!(who_am_i_status(&stack, &process, &ada).await, 200);
    add_operator(&stack, &process).await.assert_problem(409, "conflict");
    assert!(run_doctor(&stack, &process, NEW, None).await.starts_with("\"ok\""));
    // Simulates a host that was silent when the rotation ended: its token was issued with the old key.
    client.batch_execute("UPDATE user_machines SET upgrade_token_hash = 'x'").await.unwrap();
    let late = run_doctor(&stack, &process, NEW, None).await;
    assert!(late.starts_with("\"warning\"") && late.contains(&host_settings.machine), "{late}");
    stop(process).await;
    stop(start_process(&stack, NEW, None, &[])).await;
    assert!(assert_refused(&stack, OLD, None).await.contains("PLATFORM_KEY_PREVIOUS"));
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_with_both_keys_do_not_conflict() {
    let stack = Stack::start().await;
    let client = stack.database.connect().await.unwrap();
    stop(start_process(&stack, OLD, None, &[])).await;
    let (old, new) = (start_process(&stack, OLD, Some(NEW), &[]), start_process(&stack, NEW, Some(OLD), &[]));
    let prepared = run_doctor(&stack, &old, OLD, Some(NEW)).await;
    assert!(prepared.contains("running process"), "{prepared}");
    let incomplete = run_doctor(&stack, &new, NEW, Some(OLD)).await;
    assert!(incomplete.contains("restart the processes that have a different PLATFORM_KEY"), "{incomplete}");
    let process = find_running_process(&stack, OLD).await;
    let is_start_line = |line: &&str| line.contains(&process) && line.contains(&old.base);
    assert!(
        incomplete.contains(&process) && stack.log().lines().any(|line| is_start_line(&line)),
        "{incomplete}\n{}",
        stack.log()
    );
    let before = load_sealed_keys(&client).await;
    let mut hosts = Vec::new();
    for (user, creator, peer) in [("user_1", &old, &new), ("user_2", &new, &old)] {
        let provisioned = stack.provision(creator, user).await;
        let host_settings =
            stack.wait_for_host_settings(peer, provisioned["machineId"].as_str().unwrap()).await;
        let registered = stack.register(peer, &host_settings).await;
        assert_eq!(registered.status, 200, "{registered:?}\n{}", stack.log());
        hosts.push(host_settings);
    }
    // This takes longer than either process would wait before starting the rotation.
    for _ in 0..12 {
        for (host_settings, process) in
            hosts.iter().flat_map(|host_settings| [(host_settings, &old), (host_settings, &new)])
        {
            let response = send_heartbeat(&stack, process, host_settings).await;
            assert_eq!((response.status, &response.body["nextToken"]), (200, &Value::Null), "{response:?}");
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(
        load_sealed_keys(&client).await,
        before,
        "a key was resealed while both processes were running"
    );
    assert!(assert_refused(&stack, OLD, None).await.contains("PLATFORM_KEY_PREVIOUS"));

    stop(old).await;
    let are_resealed = || async {
        for host_settings in &hosts {
            let response = send_heartbeat(&stack, &new, host_settings).await;
            assert_eq!(response.status, 200, "{response:?}");
        }
        are_all_sealed_with(&client, NEW).await.then_some(())
    };
    stack.eventually("the keys are resealed", are_resealed).await;
    let mut first = hosts[0].clone();
    let mut second = hosts[1].clone();
    let response = send_heartbeat(&stack, &new, &second).await.body;
    store_next_token(&mut second, &response);
    send_heartbeat(&stack, &new, &second).await;
    complete_key_rotation(&stack, &new, &client, &mut first).await;
    assert!(is_fence_signed(&stack, "user_1", NEW) && is_fence_signed(&stack, "user_2", NEW));
}

#[tokio::test(flavor = "multi_thread")]
async fn process_with_incompatible_keys_is_rejected() {
    let stack = Stack::start().await;
    let running = start_process(&stack, OLD, None, &[]);
    let log = assert_refused(&stack, NEW, Some(OLD)).await;
    assert!(log.contains("a platform process with different keys is running"), "{log}");
    stop(running).await;
    // Without the marker, the check of the sealed keys rejects the process.
    assert!(stack.store.remove(BUCKET, marker::MARKER_PATH), "the current key's marker must be in the store");
    let log = assert_refused(&stack, NEW, Some(NEW + 1)).await;
    assert!(log.contains("PLATFORM_KEY and PLATFORM_KEY_PREVIOUS"), "{log}");
    // No rejected process has started a rotation, so the old key is still sufficient.
    drop(start_process(&stack, OLD, None, &[]));
    // A new process waits until a killed process's row has expired.
    let prepared = start_process(&stack, NEW, Some(OLD), &[]);
    assert!(
        stack.log().contains("waiting for platform processes with different keys to end"),
        "{}",
        stack.log()
    );
    stop(prepared).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prepared_key_is_reported_with_its_process_count() {
    let stack = Stack::start().await;
    let (first, second) = (start_process(&stack, OLD, None, &[]), start_process(&stack, OLD, Some(NEW), &[]));
    let partial = run_doctor(&stack, &second, OLD, Some(NEW)).await;
    assert!(partial.contains("is prepared, and active in 1 of 2 running processes"), "{partial}");
    stop(first).await;
    let all = run_doctor(&stack, &second, OLD, Some(NEW)).await;
    assert!(all.contains("active in 1 of 1 running processes"), "{all}");
}

async fn assert_survives_a_kill_at(point: &str) {
    let stack = Stack::start().await;
    let client = stack.database.connect().await.unwrap();
    let process = start_process(&stack, OLD, None, &[]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let path = format!("/vps/{}/files-key", host_settings.machine);
    let request =
        stack.request(&process, reqwest::Method::POST, &path).bearer_auth(&host_settings.upgrade_token);
    assert_eq!(stack.send(request.json(&json!({}))).await.status, 200);
    let host_settings = Arc::new(Mutex::new(host_settings));
    stop(process).await;
    let failpoints = format!("{point}=return(kill)");
    let mut process = start_process(&stack, NEW, Some(OLD), &[("FAILPOINTS", &failpoints)]);
    let send_heartbeat_to = |base: String| {
        let (stack, host_settings) = (&stack, host_settings.clone());
        async move {
            let current = host_settings.lock().unwrap().clone();
            if let Some(response) = stack.try_send_heartbeat(&base, &current, &heartbeat_of(&current)).await {
                store_next_token(&mut host_settings.lock().unwrap(), &response);
            }
        }
    };
    process.wait_until_killed_while(send_heartbeat_to).await;
    let mut host_settings = host_settings.lock().unwrap().clone();

    // The rotation can be reverted, and repeated later.
    let process = start_process(&stack, OLD, Some(NEW), &[]);
    assert_eq!(send_heartbeat(&stack, &process, &host_settings).await.status, 200, "{point}");
    stop(process).await;
    let process = start_process(&stack, NEW, Some(OLD), &[]);
    complete_key_rotation(&stack, &process, &client, &mut host_settings).await;
    stop(process).await;
    let process = start_process(&stack, NEW, None, &[]);
    assert_eq!(send_heartbeat(&stack, &process, &host_settings).await.status, 200, "{point}");
    assert!(are_all_sealed_with(&client, NEW).await && is_fence_signed(&stack, "user_1", NEW), "{point}");
}

#[tokio::test(flavor = "multi_thread")]
async fn key_rotation_survives_a_kill_at_every_fail_point() {
    let mut kills = Vec::new();
    for point in svc::platform::platform_key_rotation::FAILPOINTS {
        kills.push(assert_survives_a_kill_at(point));
    }
    stream::iter(kills).buffer_unordered(3).collect::<Vec<()>>().await;
}

/// The database and the settings are from before the rotation, so they are consistent; only the store is newer.
#[tokio::test(flavor = "multi_thread")]
async fn platform_restored_with_its_settings_is_refused() {
    let stack = Stack::start().await;
    let client = stack.database.connect().await.unwrap();
    let copy = DatabaseCopy::new(&client).await.unwrap();
    let process = start_process(&stack, OLD, None, &[]);
    let mut host_settings = stack.start_machine(&process, "user_1").await;
    stop(process).await;
    copy.save(&client).await.unwrap();
    let process = start_process(&stack, NEW, Some(OLD), &[]);
    complete_key_rotation(&stack, &process, &client, &mut host_settings).await;
    stop(process).await;
    stop(start_process(&stack, NEW, None, &[])).await;

    assert!(copy.restore(&client).await.unwrap());
    let (old_id, new_id) = (KeyId::from_key(&key(OLD)), KeyId::from_key(&key(NEW)));
    let log = assert_refused(&stack, OLD, None).await;
    assert!(log.contains(new_id.as_str()) && log.contains("as PLATFORM_KEY_PREVIOUS"), "{log}");
    assert!(assert_refused(&stack, OLD, Some(NEW + 1)).await.contains(new_id.as_str()));
    let process = start_process(&stack, NEW, Some(OLD), &[]);
    let reported = run_doctor(&stack, &process, OLD, None).await;
    assert!(reported.starts_with("\"problem\"") && reported.contains(new_id.as_str()), "{reported}");
    assert!(reported.contains(old_id.as_str()), "{reported}");
    assert_eq!(
        send_heartbeat(&stack, &process, &host_settings).await.status,
        200,
        "with both keys, the machine's host must be accepted"
    );
}

/// A store that is unavailable at startup delays the rejection.
#[tokio::test(flavor = "multi_thread")]
async fn process_with_outdated_key_stops_once_the_store_recovers() {
    let stack = Stack::start().await;
    stop(start_process(&stack, NEW, None, &[])).await;
    let client = stack.database.connect().await.unwrap();
    client.batch_execute("TRUNCATE platform_keys; DELETE FROM signing_keys").await.unwrap();
    stack.store.add_fault(FaultRule::new(Fault::Status(503)).key("platform-key.json").always());
    let mut process = start_process(&stack, OLD, None, &[]);
    stack.store.heal();
    assert!(!process.wait_for_exit().await.success());
    let log = stack.log();
    assert!(log.contains("the marker of the current platform key rejects this process"), "{log}");
    let marker = stack.store.read(BUCKET, marker::MARKER_PATH).unwrap();
    let marker: Value = serde_json::from_slice(&marker).unwrap();
    assert_eq!(marker["keyId"], KeyId::from_key(&key(NEW)).as_str(), "the marker must not be overwritten");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_previous_key_is_a_doctor_problem() {
    let stack = Stack::start().await;
    stop(start_process(&stack, OLD, None, &[])).await;
    let process = start_process(&stack, NEW, Some(OLD), &[]);
    let reported = run_doctor(&stack, &process, NEW, Some(NEW + 1)).await;
    assert!(reported.starts_with("\"problem\"") && reported.contains("cannot open key"), "{reported}");
    assert!(reported.contains("svc-platform cannot start"), "{reported}");
    // A slot's file key can need the earlier key even if the signing keys no longer do.
    let client = stack.database.connect().await.unwrap();
    let insert =
        "INSERT INTO file_keys (idp_user_id, slot, sealed, key_id) VALUES ('user_1', 'primary', '', $1)";
    client.execute(insert, &[&KeyId::from_key(&key(NEW + 1)).as_str()]).await.unwrap();
    let reported = run_doctor(&stack, &process, NEW, Some(OLD)).await;
    assert!(
        reported.starts_with("\"problem\"") && reported.contains("svc-platform cannot start"),
        "{reported}"
    );
    assert!(reported.contains("cannot open key files:user_1/primary"), "{reported}");
}

#[tokio::test(flavor = "multi_thread")]
async fn host_refused_for_its_token_raises_alarm() {
    let stack = Stack::start().await;
    let process = start_process(&stack, OLD, None, &[]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let machine: MachineId = host_settings.machine.parse().unwrap();
    let token = |byte: u8, generation: u32| {
        let mint = TokenMint::new(&key(byte));
        let token = mint.token(machine, Purpose::Upgrade, Generation(generation));
        secrecy::ExposeSecret::expose_secret(&token).to_owned()
    };
    let report_count = || stack.log().matches("not issued with an active platform key").count();
    let host_settings_with =
        |upgrade_token: String| UserDataSettings { upgrade_token, ..host_settings.clone() };
    // An outdated token that the platform itself issued is not reported.
    set_token_generation(&stack, 3).await;
    assert_eq!(send_heartbeat(&stack, &process, &host_settings_with(token(OLD, 2))).await.status, 401);
    assert_eq!(report_count(), 0, "{}", stack.log());
    for _ in 0..60 {
        assert_eq!(send_heartbeat(&stack, &process, &host_settings_with(token(NEW, 4))).await.status, 401);
    }
    assert!((1..=40).contains(&report_count()), "{} lines", report_count());
    assert!(!stack.log().contains(&token(NEW, 4)));
    let fleet = stack.get(&process, "/vps/fleet").await.body;
    let alarms = fleet["alarms"].as_array().unwrap();
    let alarm = alarms.iter().find(|alarm| alarm["alarm"] == "host_tokens_refused");
    let alarm = alarm.unwrap_or_else(|| panic!("{fleet}"));
    assert!(alarm["detail"].to_string().contains(&host_settings.machine), "{alarm}");
}

async fn set_token_generation(stack: &Stack, generation: i32) {
    let client = stack.database.connect().await.unwrap();
    let sql = "UPDATE user_machines SET upgrade_token_generation = $1";
    client.execute(sql, &[&generation]).await.unwrap();
}

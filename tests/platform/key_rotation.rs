//! Tests key rotation on a running platform: no request is signed with a key that its host lacks, and an old key is
//! removed once no host needs it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::json;
use svc::config::Env;
use svc::http::proof::ProofKeys;
use svc::platform::config::PlatformConfig;

use super::fake_host::{FakeHost, start_host};
use super::stack::{Process, Stack, heartbeat_of};

const FAST_ROTATION: [(&str, &str); 2] =
    [("PROOF_KEY_ROTATE_SECONDS", "4"), ("PROOF_KEY_OVERLAP_SECONDS", "1")];

fn kids(keys: &ProofKeys) -> Vec<String> {
    keys.keys.iter().map(|key| key.kid.clone()).collect()
}

/// Sends a heartbeat that acknowledges the host's keys, and stores the returned keys. Returns their ids.
async fn send_heartbeat(stack: &Stack, process: &Process, host: &FakeHost) -> Vec<String> {
    let acknowledged = kids(&host.keys.lock().unwrap());
    let mut body = heartbeat_of(&host.settings);
    body["proofKids"] = json!(acknowledged);
    let response = stack.send_heartbeat(process, &host.settings, &body).await;
    let received: ProofKeys = serde_json::from_value(response.body["proofKeys"].clone()).unwrap();
    *host.keys.lock().unwrap() = received.clone();
    kids(&received)
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_rotate_without_refused_proofs() {
    let stack = Stack::start().await;
    let processes = (stack.start_platform_with(&FAST_ROTATION), stack.start_platform_with(&FAST_ROTATION));
    let host = start_host(&stack, &processes.0).await;
    let path = format!("/vps/{}/backup", host.settings.machine);
    let first = kids(&host.keys.lock().unwrap()).remove(0);
    let mut received_kids = BTreeSet::from([first.clone()]);
    let deadline = Instant::now() + Duration::from_secs(40);
    let mut requests = 0;
    let mut next_heartbeat = Instant::now();
    // Repeat until three rotations have happened and the first key is retired. The host receives a new key only with
    // its next heartbeat.
    while received_kids.len() < 4 || kids(&host.keys.lock().unwrap()).contains(&first) {
        assert!(Instant::now() < deadline, "{received_kids:?}\n{}", stack.log());
        let process = if requests % 2 == 0 { &processes.0 } else { &processes.1 };
        // Heartbeats are timed, not sent per request: under load, the test sends few requests between two rotations.
        if Instant::now() >= next_heartbeat {
            next_heartbeat = Instant::now() + Duration::from_millis(750);
            let received = send_heartbeat(&stack, process, &host).await;
            assert!((1..=3).contains(&received.len()), "{received:?}");
            received_kids.extend(received);
        }
        let response = stack.post(process, &path, &json!({})).await;
        assert_eq!(response.status, 202, "{response:?}\n{}", stack.log());
        requests += 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(host.proofs.lock().unwrap().len(), requests);
    let client = stack.database.connect().await.unwrap();
    let retired =
        client.query("SELECT kid FROM signing_keys WHERE retired_at IS NOT NULL", &[]).await.unwrap();
    assert!(retired.iter().any(|row| row.get::<_, &str>(0) == first));
}

#[tokio::test(flavor = "multi_thread")]
async fn key_stays_until_every_host_acknowledges_its_successor() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&FAST_ROTATION);
    let host = start_host(&stack, &process).await;
    let first = kids(&host.keys.lock().unwrap()).remove(0);
    let silent = stack.start_machine(&process, "user_2").await;
    let deadline = Instant::now() + Duration::from_secs(40);
    let mut successor_since: Option<Instant> = None;
    // Repeat until the successor has been acknowledged for much longer than the overlap.
    while successor_since.is_none_or(|since| since.elapsed() < Duration::from_secs(4)) {
        assert!(Instant::now() < deadline, "the key got no successor\n{}", stack.log());
        let received = send_heartbeat(&stack, &process, &host).await;
        assert!(received.contains(&first), "{received:?}");
        if received.len() >= 2 {
            successor_since.get_or_insert_with(Instant::now);
        }
        let response =
            stack.post(&process, &format!("/vps/{}/backup", host.settings.machine), &json!({})).await;
        assert_eq!(response.status, 202, "{response:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The last host that needed the key has been deleted, so the key is retired.
    stack.delete(&process, &format!("/vps/{}", silent.machine)).await;
    let has_retired =
        || async { (!send_heartbeat(&stack, &process, &host).await.contains(&first)).then_some(()) };
    stack.eventually("the first key is retired", has_retired).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn app_key_signs_only_after_every_router_has_it() {
    let stack = Stack::start().await;
    let _process = stack.start_platform_with(&FAST_ROTATION);
    let client = stack.database.connect().await.unwrap();
    let list_active_kids = || async {
        let sql =
            "SELECT kid FROM signing_keys WHERE purpose = 'app' AND retired_at IS NULL ORDER BY created_at";
        let rows = client.query(sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>()
    };
    let has_successor = || async { Some(list_active_kids().await).filter(|kids| kids.len() >= 2) };
    let kids = stack.eventually("the key has a successor", has_successor).await;
    let set_key_age = |kid: String, seconds: i32| {
        let sql = "UPDATE signing_keys SET created_at = clock_timestamp() - make_interval(secs => $2) WHERE kid = $1";
        let client = &client;
        async move { client.execute(sql, &[&kid, &f64::from(seconds)]).await.unwrap() }
    };
    // The process may create further keys, but with the overlap of 1000 s below, they are too new to sign.
    set_key_age(kids[0].clone(), 90_000).await;
    set_key_age(kids[1].clone(), 5).await;
    let settings = stack.settings();
    let settings = settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let config = PlatformConfig::read(Env::from_pairs(settings)).expect("valid settings");
    let db = svc::platform::db::Db::new(&config.database, 4).unwrap();
    let seal = svc::platform::keys::Seal::from_keys(&config.keys);
    let load_signing_kid = |overlap: u64| {
        let (db, seal) = (&db, &seal);
        async move {
            let set = svc::platform::keys::load(db, seal, Duration::from_secs(overlap)).await.unwrap();
            assert!(set.app.public.keys.len() >= 2);
            set.app.current.kid().to_owned()
        }
    };
    assert_eq!(load_signing_kid(1000).await, kids[0], "a key that a router may lack must not sign");
    assert_ne!(load_signing_kid(1).await, kids[0]);
    assert!(
        list_active_kids().await.contains(&kids[0]),
        "the first key must stay while tokens that it signed may be valid"
    );
    let has_retired = || async {
        for kid in list_active_kids().await.into_iter().skip(1) {
            set_key_age(kid, 50_000).await;
        }
        (!list_active_kids().await.contains(&kids[0])).then_some(())
    };
    stack.eventually("the first key is retired", has_retired).await;
}

/// The host sends no heartbeats for longer than a rotation waits for it, but keeps serving.
#[tokio::test(flavor = "multi_thread")]
async fn silent_host_keeps_its_key_without_delaying_rotation() {
    let stack = Stack::start().await;
    let process =
        stack.start_platform_with(&[FAST_ROTATION[0], FAST_ROTATION[1], ("PROOF_KEY_SILENCE_SECONDS", "2")]);
    let host = start_host(&stack, &process).await;
    send_heartbeat(&stack, &process, &host).await;
    let first = kids(&host.keys.lock().unwrap()).remove(0);
    let client = stack.database.connect().await.unwrap();
    let is_retired = || async {
        let sql = "SELECT 1 FROM signing_keys WHERE kid = $1 AND retired_at IS NOT NULL";
        (!client.query(sql, &[&first]).await.unwrap().is_empty()).then_some(())
    };
    stack.eventually("the silent host's key is retired", is_retired).await;
    // Until the process reloads the keys, it may sign with the old ones.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let path = format!("/vps/{}/backup", host.settings.machine);
    let request_backup = || async { stack.post(&process, &path, &json!({})).await.status };
    assert_eq!(request_backup().await, 202, "proofs for this host must use the key that it has");
    // The response to the host's next heartbeat adds the new keys and removes no key that still signs for the host.
    let received = send_heartbeat(&stack, &process, &host).await;
    assert!(received.contains(&first) && received.len() >= 2, "{received:?}");
    assert_eq!(request_backup().await, 202);
    send_heartbeat(&stack, &process, &host).await;
    assert_eq!(request_backup().await, 202);
    let received = send_heartbeat(&stack, &process, &host).await;
    assert!(!received.contains(&first), "{received:?}");
    assert_eq!(request_backup().await, 202);
}

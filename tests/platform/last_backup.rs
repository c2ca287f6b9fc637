//! The last backup of a host that is replaced: asked for by a proof that only it accepts, waited for, and not needed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::Request;
use http::StatusCode;
use reqwest::Method;
use serde_json::{Value, json};
use svc::http::proof::{Claims, ProofKeys, Route};
use svc::http::server::{Limits, serve};
use svc::http::tls;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::stack::{BUCKET, Guest, Process, Stack, heartbeat, registration};

/// The part of a host that takes the request; the proofs that came.
pub struct Host {
    pub seen: Arc<Mutex<Vec<Claims>>>,
    pub guest: Guest,
    /// What it verifies proofs with; a proof that fails is answered with 401.
    pub keys: Arc<Mutex<ProofKeys>>,
    stop: CancellationToken,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A running machine of `user_1`, whose host answers on its address with the key that it registered.
pub async fn host(stack: &Stack, process: &Process) -> Host {
    let made = stack.provision(process, "user_1").await;
    let guest = stack.guest(process, made["machineId"].as_str().unwrap()).await;
    let server = stack.provider.server_by_name(&format!("svc-{}", guest.machine)).unwrap();
    let identity = tls::self_signed(&["host".to_owned()]).unwrap();
    let mut body = registration(&guest.machine, 1);
    body["tlsSpkiSha256"] = json!(identity.pin().unwrap().to_string());
    assert_eq!(stack.register_as(process, &guest.registration_token, &body).await.status, 200);

    let beat = stack.request(process, Method::POST, &format!("/vps/{}/heartbeat", guest.machine));
    let beat = stack.send(beat.bearer_auth(&guest.upgrade_token).json(&heartbeat())).await;
    let keys: ProofKeys = serde_json::from_value(beat.body["proofKeys"].clone()).unwrap();
    let keys = Arc::new(Mutex::new(keys));
    let accepted = keys.clone();
    let (machine, seen) = (guest.machine.parse().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let log = seen.clone();
    let router = axum::Router::new().fallback(move |request: Request| async move {
        let Some(proof) = request.headers().get("x-svc-proof") else { return StatusCode::UNAUTHORIZED };
        let keys = accepted.lock().unwrap().clone();
        let Ok(claims) = keys.verify(proof.to_str().unwrap(), machine, jiff::Timestamp::now()) else {
            return StatusCode::UNAUTHORIZED;
        };
        assert_eq!(claims.method.as_deref(), Some(request.method().as_str()));
        assert_eq!(claims.path.as_deref(), Some(request.uri().path()));
        log.lock().unwrap().push(claims);
        StatusCode::ACCEPTED
    });
    let listener = TcpListener::bind((server.ipv4, stack.provider.https_port())).await.unwrap();
    let stop = CancellationToken::new();
    let tls = Some(Arc::new(identity.server_config().unwrap()));
    tokio::spawn(serve(listener, tls, router, Limits::default(), stop.clone()));
    Host { seen, guest, keys, stop }
}

async fn notes(stack: &Stack, process: &Process, recovery: &Value) -> String {
    let operation = stack.ended(process, recovery["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    let lines = operation["log"].as_array().unwrap().clone();
    let ended = lines.iter().find(|line| line["step"] == "last_backup" && line["outcome"] == "done");
    ended.unwrap()["detail"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_old_host_is_asked_and_waited_for_and_not_sent_away_before() {
    let stack = Stack::start().await;
    let process = stack.platform_with(&[("LAST_BACKUP_DEADLINE_SECONDS", "30")]);
    let old = host(&stack, &process).await;
    stack.snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    stack
        .eventually("the host is asked", || async { (!old.seen.lock().unwrap().is_empty()).then_some(()) })
        .await;
    let beat = || {
        let path = format!("/vps/{}/heartbeat", old.guest.machine);
        stack.request(&process, Method::POST, &path).bearer_auth(&old.guest.upgrade_token).json(&heartbeat())
    };
    assert_eq!(stack.send(beat()).await.body["superseded"], false, "it still has to make its backup");
    assert_eq!(stack.pointer("user_1")["fenceEpoch"], 1, "and to be let write it");
    let mut pointer = stack.pointer("user_1");
    pointer["seq"] = json!(8);
    stack.store.write(BUCKET, "user_1/primary/system/db/latest", pointer.to_string());

    assert_eq!(notes(&stack, &process, &recovery).await, "the old host made a last backup");
    assert_eq!(stack.send(beat()).await.body["superseded"], true);
    let seen = old.seen.lock().unwrap().clone();
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0].route, seen[0].path.as_deref()), (Route::Internal, Some("/_svc/internal/backup")));
    assert!(seen[0].jti.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_makes_no_backup_is_not_waited_for_longer_than_the_deadline() {
    let stack = Stack::start().await;
    let process = stack.platform_with(&[("LAST_BACKUP_DEADLINE_SECONDS", "1")]);
    let old = host(&stack, &process).await;
    stack.snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    assert_eq!(notes(&stack, &process, &recovery).await, "no last backup in time");
    drop(old);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_another_key_than_the_registered_one_is_not_asked() {
    let stack = Stack::start().await;
    let process = stack.platform();
    let old = host(&stack, &process).await;
    let client = stack.database.connect().await.unwrap();
    client.execute("UPDATE user_machines SET tls_spki_sha256 = $1", &[&"0".repeat(64)]).await.unwrap();
    stack.snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let note =
        tokio::time::timeout(Duration::from_secs(30), notes(&stack, &process, &recovery)).await.unwrap();
    assert_eq!(note, "the old host could not be asked");
    assert!(old.seen.lock().unwrap().is_empty());
}

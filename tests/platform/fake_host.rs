//! A fake host, which serves the routes that the platform calls, at its machine's address and with its registered TLS
//! key. It accepts only proofs for its machine.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Value, json};
use svc::http::proof::{Claims, ProofKeys};
use svc::http::server::{ListenerLimits, serve};
use svc::http::tls;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::stack::{Process, Stack, UserDataSettings, heartbeat, registration};

const BACKUP: &str = "/_svc/internal/backup";

pub struct FakeHostBehavior {
    /// Whether the host's release supports quiescing.
    pub can_quiesce: bool,
    /// Whether the host's writers stop when requested.
    pub stops_writers: bool,
    /// Whether the host's release reports the state of its backups.
    pub reports_backups: bool,
    /// The reported number of running dispatches.
    pub running_dispatches: u64,
    /// The number that each request to quiesce adds to `running_dispatches`.
    pub added_dispatches: u64,
    /// The reported state of the host's backups.
    pub backup_status: Value,
    /// The response to a usage request.
    pub usage_response: (StatusCode, String),
    /// How long the host takes to respond.
    pub response_delay: Duration,
    /// The response to each request about files.
    pub files_response: (StatusCode, String),
}

pub struct FakeHost {
    /// The claims of the accepted proofs, in the order of the calls.
    pub proofs: Arc<Mutex<Vec<Claims>>>,
    pub settings: UserDataSettings,
    /// The keys that verify proofs; an invalid proof is rejected with 401.
    pub keys: Arc<Mutex<ProofKeys>>,
    pub behavior: Arc<Mutex<FakeHostBehavior>>,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

impl FakeHost {
    /// Stops the host. After this returns, the host accepts no connections, and its open connections are closed.
    pub async fn stop(&mut self) {
        self.stop.cancel();
        (&mut self.serving).await.expect("the host's server must not panic");
    }

    /// Returns the number of calls to a route.
    pub fn call_count(&self, method: &str, path: &str) -> usize {
        let proofs = self.proofs.lock().unwrap();
        let matches = |claims: &&Claims| {
            claims.method.as_deref() == Some(method) && claims.path.as_deref() == Some(path)
        };
        proofs.iter().filter(matches).count()
    }

    pub async fn wait_for_backup_request(&self, stack: &Stack) {
        let is_requested = || async { (self.call_count("POST", BACKUP) > 0).then_some(()) };
        stack.eventually("a backup is requested", is_requested).await;
    }

    /// Stores a snapshot and reports it. Returns its time.
    pub fn store_backup(&self, stack: &Stack, user: &str) -> String {
        let taken_at = svc::clock::rfc3339_ms(jiff::Timestamp::now());
        let key = stack.store_snapshot_by(user, &self.settings.machine, &taken_at);
        self.report_backup(&key, &taken_at);
        taken_at
    }

    /// Reports this snapshot as the result of the last backup.
    pub fn report_backup(&self, key: &str, taken_at: &str) {
        self.behavior.lock().unwrap().backup_status = json!({"running": false,
            "last": {"status": "success", "beganAt": taken_at, "takenAt": taken_at, "key": key}});
    }
}

impl Drop for FakeHost {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn respond(behavior: &mut FakeHostBehavior, now: &str, method: &str, path: &str) -> Response {
    match (method, path) {
        ("POST", "/_svc/internal/quiesce") if !behavior.can_quiesce => StatusCode::NOT_FOUND.into_response(),
        ("POST", "/_svc/internal/quiesce") => {
            behavior.running_dispatches += behavior.added_dispatches;
            let quiesced_at = behavior.stops_writers.then_some(now);
            axum::Json(json!({"operationId": null, "quiescedAt": quiesced_at,
                    "runningDispatches": behavior.running_dispatches}))
            .into_response()
        }
        ("POST", BACKUP) => (StatusCode::ACCEPTED, axum::Json(json!({"requestedAt": now}))).into_response(),
        ("GET", BACKUP) if !behavior.reports_backups => StatusCode::NOT_FOUND.into_response(),
        ("GET", BACKUP) => axum::Json(behavior.backup_status.clone()).into_response(),
        ("GET", "/api/usage") => behavior.usage_response.clone().into_response(),
        (_, path) if path.starts_with("/api/files/") => behavior.files_response.clone().into_response(),
        _ => (StatusCode::ACCEPTED, axum::Json(json!({}))).into_response(),
    }
}

/// Starts a machine for `user_1` with a fake host.
pub async fn start_host(stack: &Stack, process: &Process) -> FakeHost {
    start_host_for(stack, process, "user_1").await
}

/// Starts a machine for a user with a fake host.
pub async fn start_host_for(stack: &Stack, process: &Process, user: &str) -> FakeHost {
    let provisioned = stack.provision(process, user).await;
    let host_settings =
        stack.wait_for_host_settings(process, provisioned["machineId"].as_str().unwrap()).await;
    let server = stack.provider.server_by_name(&format!("svc-{}", host_settings.machine)).unwrap();
    let identity = tls::generate_self_signed(&["host".to_owned()]).unwrap();
    let mut body = registration(&host_settings.machine, 1);
    body["tlsSpkiSha256"] = json!(identity.pin().unwrap().to_string());
    assert_eq!(stack.register_as(process, &host_settings.registration_token, &body).await.status, 200);

    let beat = stack.send_heartbeat(process, &host_settings, &heartbeat()).await;
    let keys: ProofKeys = serde_json::from_value(beat.body["proofKeys"].clone()).unwrap();
    let keys = Arc::new(Mutex::new(keys));
    let behavior = FakeHostBehavior {
        can_quiesce: true,
        stops_writers: true,
        reports_backups: true,
        running_dispatches: 0,
        added_dispatches: 0,
        backup_status: json!({"running": true}),
        usage_response: (StatusCode::FORBIDDEN, String::new()),
        response_delay: Duration::ZERO,
        files_response: (StatusCode::NOT_FOUND, String::new()),
    };
    let behavior = Arc::new(Mutex::new(behavior));
    let (accepted_keys, current_behavior) = (keys.clone(), behavior.clone());
    let (machine, proofs) = (host_settings.machine.parse().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let received_proofs = proofs.clone();
    let router = axum::Router::new().fallback(move |request: Request| async move {
        let unauthorized = || StatusCode::UNAUTHORIZED.into_response();
        let Some(proof) = request.headers().get("x-svc-proof") else { return unauthorized() };
        let keys = accepted_keys.lock().unwrap().clone();
        let Ok(claims) = keys.verify(proof.to_str().unwrap(), machine, jiff::Timestamp::now()) else {
            return unauthorized();
        };
        assert_eq!(claims.method.as_deref(), Some(request.method().as_str()));
        assert_eq!(claims.path.as_deref(), Some(request.uri().path()));
        // The time is read before the call is counted, so a snapshot that a test stores after seeing the call is later.
        let now = svc::clock::rfc3339_ms(jiff::Timestamp::now());
        received_proofs.lock().unwrap().push(claims);
        let delay = current_behavior.lock().unwrap().response_delay;
        tokio::time::sleep(delay).await;
        let mut behavior = current_behavior.lock().unwrap();
        respond(&mut behavior, &now, request.method().as_str(), request.uri().path())
    });
    let listener = TcpListener::bind((server.ipv4, stack.provider.https_port())).await.unwrap();
    let stop = CancellationToken::new();
    let tls = Some(Arc::new(identity.server_config().unwrap()));
    let serving = tokio::spawn(serve(listener, tls, router, ListenerLimits::default(), stop.clone()));
    FakeHost { proofs, settings: host_settings, keys, behavior, stop, serving }
}

//! Every declared code is provoked in one world: by a wrong call, by a conflicting state, or by an outage behind the
//! platform.

use http::StatusCode;
use kit::provider::{Fault, FaultRule};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use svc::http::openapi::Operation;

use super::super::internal_host;
use super::super::stack::{BUCKET, Process, SECRET, Stack, provision_body};
use super::{World, ids, operations};
use crate::contract::{Side, assert_refuses_wrong_calls, valid_call};

/// Codes that need more than one request, with the test that covers them or the reason why none does.
const EXCUSED: [(&str, &str); 3] = [
    // Every operator may query their own identity.
    ("whoAmI", "forbidden"),
    // An internal error that no request can cause.
    ("*", "internal"),
    // A store of files: see platform::credentials.
    ("renewStorageCredentials", "disabled"),
];

/// Codes that depend on a race.
const SELDOM: [(&str, &str); 6] = [
    // Two overlapping requests.
    ("provision", "unavailable"),
    ("recover", "unavailable"),
    ("resize", "unavailable"),
    ("resume", "unavailable"),
    // A host that is faster than the response to its own creation: see platform::registration.
    ("register", "unavailable"),
    ("register", "invalid_state"),
];

struct Rows<'w> {
    world: &'w World,
}

impl Rows<'_> {
    async fn row(&mut self, request: RequestBuilder, status: u16, code: &str) {
        self.world.send(request).await.assert_problem(status, code);
    }

    async fn post(&mut self, path: &str, body: &Value, status: u16, code: &str) {
        self.row(self.world.operator_call(Method::POST, path, body), status, code).await;
    }

    async fn post_to(&mut self, process: &Process, path: &str, body: &Value, status: u16, code: &str) {
        let request = self.world.stack.request(process, Method::POST, path);
        self.row(request.bearer_auth(SECRET).json(body), status, code).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_documented_error_code_is_provoked() {
    let database = super::own_database().await;
    let world = World::start(&[("PLATFORM_DATABASE_URL", &database.url("svc"))]).await;
    for operation in operations() {
        assert_refuses_wrong_calls(&world, operation).await;
        ids(&world, operation).await;
    }
    let mut rows = Rows { world: &world };
    let settings = [("PLATFORM_DATABASE_URL", database.url("svc"))];
    provisioning(&mut rows, &settings).await;
    lives(&mut rows, &settings).await;
    keys(&mut rows).await;
    bundles(&mut rows).await;
    rollouts(&mut rows).await;
    operators(&mut rows).await;
    usage(&mut rows).await;
    rates(&mut rows, &settings).await;

    world.stack.store.down();
    super::without_store(&world).await;
    world.stack.store.up().unwrap();
    database.kill9().await.unwrap();
    super::without_database(&world).await;
    let world = World::start(&[KEPT_SERVERS]).await;
    ends(&mut Rows { world: &world }).await;

    let all: Vec<&'static Operation> = operations().collect();
    let unseen = world.contract().unseen(&all, &EXCUSED, &SELDOM);
    assert!(unseen.is_empty(), "{unseen:#?}");
}

fn process(stack: &Stack, settings: &[(&str, String)], more: &[(&str, &str)]) -> Process {
    let settings = settings.iter().map(|(name, value)| (*name, value.as_str()));
    stack.start_platform_with(&settings.chain(more.iter().copied()).collect::<Vec<_>>())
}

async fn provisioning(rows: &mut Rows<'_>, settings: &[(&str, String)]) {
    for path in ["/vps/provision", "/vps/provision/quote"] {
        refused_provisions(rows, settings, path).await;
    }
    let (world, path) = (rows.world, "/vps/provision");
    let mut body = provision_body("user_small");
    (body["confirmedMonthlyCost"], body["confirmedOptIn"]) = (json!("1.00 EUR"), json!(true));
    rows.post(path, &body, 409, "price_changed").await;
    let confirming = process(&world.stack, settings, &[("PROVISION_CONFIRMATION", "true")]);
    rows.post_to(&confirming, path, &provision_body("user_small"), 428, "confirmation_required").await;
    let down = Fault::Status { status: 503, code: "unavailable".to_owned(), reset_in_seconds: None };
    world.stack.provider.fault(FaultRule::times(1000, "GET", "/pricing", down));
    // The other process has read the prices before.
    let quote = "/vps/provision/quote";
    rows.post_to(&confirming, quote, &provision_body("user_small"), 503, "unavailable").await;
    world.stack.provider.clear_faults();
}

async fn refused_provisions(rows: &mut Rows<'_>, settings: &[(&str, String)], path: &str) {
    let world = rows.world;
    let with = |user: &str, more: &Value| {
        let mut body = provision_body(user);
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    rows.post(path, &provision_body("user_none"), 402, "subscription_required").await;
    let starter = json!({"idpUserId": "user_small", "plan": "starter", "status": "active"});
    world.send(world.operator_call(Method::PUT, "/vps/slots", &starter)).await;
    let large = with("user_small", &json!({"serverType": "cpx52"}));
    rows.post(path, &large, 403, "server_type_not_allowed").await;
    rows.post(path, &with("user_small", &json!({"imageVersion": "v9"})), 404, "bundle_not_found").await;
    rows.post(path, &with("user_small", &json!({"handle": "h-user-1"})), 409, "handle_taken").await;
    let off = process(&world.stack, settings, &[("CUSTOMER_VPS_ENABLED", "false")]);
    rows.post_to(&off, path, &provision_body("user_small"), 503, "disabled").await;
    let none = process(&world.stack, settings, &[("PREVIEW_MAX_PER_OWNER", "0")]);
    let preview = with("user_small", &json!({"kind": "preview"}));
    rows.post_to(&none, path, &preview, 429, "preview_limit_reached").await;
    let full = process(&world.stack, settings, &[("PROVIDER_SERVER_LIMIT", "1")]);
    rows.post_to(&full, path, &provision_body("user_small"), 409, "server_limit_reached").await;
    let other_kind = with("user_1", &json!({"kind": "preview", "handle": "h-user-1"}));
    rows.post(path, &other_kind, 409, "invalid_state").await;
    world.stack.subscribe(&world.process, "user_damaged").await;
    world.stack.store.write(BUCKET, "user_damaged/primary/system/db/latest", "{not json");
    rows.post(path, &with("user_damaged", &json!({"handle": "damaged"})), 409, "snapshot_unusable").await;
    world.stack.subscribe(&world.process, "user_large").await;
    world.stack.snapshot_of_size("user_large", 1 << 40);
    rows.post(path, &with("user_large", &json!({"handle": "large"})), 409, "disk_too_small").await;
}

async fn lives(rows: &mut Rows<'_>, settings: &[(&str, String)]) {
    let world = rows.world;
    let (runs, waits) = (&world.runs.machine, &world.waits.machine);
    let of = |machine: &str, what: &str| format!("/vps/{machine}/{what}");
    let to = |server_type: &str| json!({ "serverType": server_type });
    rows.post("/vps/recover", &json!({"idpUserId": "user_none"}), 404, "machine_not_found").await;
    rows.post("/vps/recover", &json!({"idpUserId": "user_1"}), 409, "snapshot_unusable").await;
    let rebuild = "/vps/slots/pointer/rebuild";
    rows.post(rebuild, &json!({"idpUserId": "user_1"}), 409, "conflict").await;
    let key = "system/db/snapshots/x.dump";
    let named = json!({"idpUserId": "user_1", "snapshotKey": key, "force": true});
    rows.post(rebuild, &named, 409, "snapshot_unusable").await;
    let show = format!("/vps/slots/pointer?idpUserId=user_1&snapshotKey={key}");
    rows.row(world.operator_call(Method::GET, &show, &Value::Null), 409, "snapshot_unusable").await;
    let unknown = "/vps/slots/pointer?idpUserId=user_none";
    rows.row(world.operator_call(Method::GET, unknown, &Value::Null), 404, "not_found").await;
    rows.post(rebuild, &json!({"idpUserId": "user_none"}), 404, "not_found").await;
    rows.post(&of(waits, "resize"), &to("cpx32"), 409, "invalid_state").await;
    let mut beat = super::super::stack::heartbeat_of(&world.runs);
    beat["attention"] = json!([{"code": "snapshot_held", "detail": "two rows instead of 400"}]);
    assert_eq!(world.stack.send_heartbeat(&world.process, &world.runs, &beat).await.status, 200);
    for what in ["backup", "drill", "backup-accept"] {
        rows.post(&of(waits, what), &json!({}), 409, "invalid_state").await;
        rows.post(&of(runs, what), &json!({}), 502, "host_unreachable").await;
    }
    for what in ["undelete", "discard", "resume"] {
        rows.post(&of(waits, what), &json!({}), 409, "invalid_state").await;
    }
    rows.post(&of(waits, "power"), &json!({"action": "off"}), 409, "invalid_state").await;
    let operation = |what: &str| format!("/vps/operations/{}/{what}", world.operation);
    rows.post(&operation("continue"), &json!({"acceptLoss": true}), 409, "invalid_state").await;
    let restore = |name: &str| json!({"snapshotKey": format!("system/db/snapshots/{name}-1.dump")});
    let unknown = restore("2026-01-01T00-00-00.000Z");
    rows.post(&operation("continue"), &unknown, 409, "snapshot_unusable").await;
    world.stack.snapshot_of_size("user_2", 1 << 40);
    let large = restore("2026-01-02T03-04-05.678Z");
    rows.post(&operation("continue"), &large, 409, "disk_too_small").await;
    rows.row(world.operator_call(Method::GET, "/vps/fleet?x=1", &Value::Null), 400, "invalid_request").await;
    rows.post(&of(runs, "resize"), &to("cpx62"), 403, "server_type_not_allowed").await;
    let free = process(&world.stack, settings, &[("BILLING_ENFORCEMENT", "off")]);
    rows.post_to(&free, &of(runs, "resize"), &to("cpx12"), 409, "disk_would_shrink").await;
    rows.post_to(&free, &of(runs, "resize"), &to("none9"), 400, "invalid_request").await;
    let provider = &world.stack.provider;
    for fault in [
        Fault::LostRequest,
        Fault::Status { status: 503, code: "scripted_secret".into(), reset_in_seconds: None },
        Fault::Status { status: 403, code: "scripted_secret".into(), reset_in_seconds: None },
    ] {
        let everything =
            FaultRule { method: None, path_contains: String::new(), skip: 0, times: 10_000, fault };
        provider.fault(everything);
        rows.post(&of(runs, "resize"), &to("cpx32"), 502, "provisioning_error").await;
        provider.clear_faults();
    }
    let plan = |plan: &str, status: &str| json!({"idpUserId": "user_1", "plan": plan, "status": status});
    let slots = "/vps/slots";
    world.send(world.operator_call(Method::PUT, slots, &plan("starter", "active"))).await;
    rows.post(&of(runs, "resize"), &to("cpx32"), 403, "server_type_not_allowed").await;
    let larger = json!({"idpUserId": "user_1", "serverType": "cpx32"});
    rows.post("/vps/recover", &larger, 403, "server_type_not_allowed").await;
    let ended = plan("max", "inactive");
    let response = world.send(world.operator_call(Method::PUT, slots, &ended)).await;
    assert_eq!(response.status, 200, "{response:?}");
    rows.post(&of(runs, "resize"), &to("cpx32"), 402, "subscription_required").await;
    rows.post("/vps/recover", &larger, 402, "subscription_required").await;
    world.send(world.operator_call(Method::PUT, slots, &plan("max", "active"))).await;
}

/// The same idempotency key with another body, on every route that accepts one.
async fn keys(rows: &mut Rows<'_>) {
    let world = rows.world;
    for operation in operations().filter(|one| one.parameters.iter().any(|p| p.name == "Idempotency-Key")) {
        let key = format!("key-{}", operation.id);
        // Used by a call of another route.
        let first = json!({"idpUserId": "user_keys", "plan": "starter", "status": "active"});
        let first = world.operator_call(Method::PUT, "/vps/slots", &first).header("idempotency-key", &key);
        assert_eq!(world.send(first).await.status, 200);
        let other = match operation.id {
            "putSubscription" => {
                let other = json!({"idpUserId": "user_keys", "plan": "max", "status": "active"});
                world.operator_call(Method::PUT, "/vps/slots", &other)
            }
            _ => valid_call(world, operation),
        };
        rows.row(other.header("idempotency-key", &key), 422, "idempotency_mismatch").await;
        for bad in ["", &"x".repeat(256), "a\tb"] {
            let call = valid_call(world, operation).header("idempotency-key", bad);
            rows.row(call, 400, "invalid_request").await;
        }
    }
}

async fn rollouts(rows: &mut Rows<'_>) {
    let (path, world) = ("/vps/deploy", rows.world);
    let of = |word: &str| format!("/vps/deploy/{}/{word}", world.rollout);
    rows.post(path, &json!({"imageVersion": "v9"}), 404, "bundle_not_found").await;
    let release = |alarm: &str| format!("/vps/fleet/alarms/{alarm}/release");
    rows.post(&release("servers_missing"), &json!({}), 404, "not_found").await;
    rows.post(&release("database_behind_store"), &json!({}), 409, "invalid_state").await;
    rows.row(world.operator_call(Method::GET, &format!("{path}?x=1"), &Value::Null), 400, "invalid_request")
        .await;
    world.send(world.operator_call(Method::POST, &of("abort"), &json!({}))).await;
    let nobody = json!({"imageVersion": "v1", "handles": ["nobody"]});
    rows.post(path, &nobody, 404, "machine_not_found").await;
    let waits = json!({"imageVersion": "v1", "handles": ["h-user-2"]});
    rows.post(path, &waits, 409, "invalid_state").await;
    let open = json!({"imageVersion": "v1", "handles": ["h-user-1"], "canary": 0});
    let first = world.send(world.operator_call(Method::POST, path, &open)).await;
    assert_eq!(first.status, 202, "{first:?}");
    rows.post(path, &open, 409, "conflict").await;
    let first = first.body["rolloutId"].as_str().unwrap().to_owned();
    world.send(world.operator_call(Method::POST, &format!("/vps/deploy/{first}/abort"), &json!({}))).await;
    for word in ["pause", "resume"] {
        rows.post(&of(word), &json!({}), 409, "conflict").await;
    }
    // Only a rollout that has ended cannot be aborted.
    let mut done = open;
    done["verify"] = json!(false);
    let beat = super::super::stack::heartbeat_of(&world.runs);
    world.stack.send_heartbeat(&world.process, &world.runs, &beat).await;
    let done = world.send(world.operator_call(Method::POST, path, &done)).await;
    let done = done.body["rolloutId"].as_str().unwrap().to_owned();
    let check = || async {
        let now = world.stack.get(&world.process, &format!("/vps/deploy/{done}")).await.body;
        (now["state"] == "succeeded").then_some(())
    };
    world.stack.eventually("the installed release ends it", check).await;
    rows.post(&format!("/vps/deploy/{done}/abort"), &json!({}), 409, "conflict").await;
}

async fn operators(rows: &mut Rows<'_>) {
    let world = rows.world;
    let get = |path: &str| world.operator_call(Method::GET, path, &Value::Null);
    for path in ["/operators?x=1", "/operators/whoami?x=1"] {
        rows.row(get(path), 400, "invalid_request").await;
    }
    let taken = json!({"name": "only-read", "scopes": ["read"]});
    rows.post("/operators", &taken, 409, "conflict").await;
    for what in ["rotate", "revoke"] {
        rows.post(&format!("/operators/nobody/{what}"), &json!({}), 404, "not_found").await;
        rows.post(&format!("/operators/Nobody/{what}"), &json!({}), 400, "invalid_request").await;
    }
    let gone = json!({"name": "gone", "scopes": ["read"]});
    world.send(world.operator_call(Method::POST, "/operators", &gone)).await;
    world.send(world.operator_call(Method::POST, "/operators/gone/revoke", &json!({}))).await;
    rows.post("/operators/gone/rotate", &json!({}), 409, "conflict").await;
}

async fn usage(rows: &mut Rows<'_>) {
    let world = rows.world;
    let of = |machine: &str| world.operator_call(Method::GET, &format!("/vps/{machine}/usage"), &Value::Null);
    rows.row(of(&world.waits.machine), 409, "invalid_state").await;
    rows.row(of(&world.runs.machine), 502, "host_unreachable").await;
    let host = internal_host::host_of(&world.stack, &world.process, "user_usage").await;
    for (status, body, refused, code) in [
        (403, "", 502, "host_refused"),
        (503, "", 503, "unavailable"),
        (200, "<html>", 502, "host_answer_invalid"),
    ] {
        host.script.lock().unwrap().usage = (StatusCode::from_u16(status).unwrap(), body.to_owned());
        rows.row(of(&host.guest.machine), refused, code).await;
    }
}

/// An address that has sent too many wrong tokens.
async fn rates(rows: &mut Rows<'_>, settings: &[(&str, String)]) {
    let world = rows.world;
    let limited = process(&world.stack, settings, &[("PLATFORM_ADDRESS_CHECKS_PER_SECOND", "1")]);
    let with_wrong_token = |method: &Method, path: &str| {
        world.stack.request(&limited, method.clone(), path).bearer_auth("wrong")
    };
    for operation in operations().filter(|operation| !operation.credentials.is_empty()) {
        let path = world.path(operation);
        // If this process is stalled for a second, one more token is admitted.
        for attempt in 1.. {
            for _ in 0..12 {
                world.send(with_wrong_token(&Method::GET, "/vps/fleet")).await;
            }
            let response = world.send(with_wrong_token(&operation.method, &path)).await;
            if response.status == 429 || attempt == 10 {
                response.assert_problem(429, "rate_limited");
                break;
            }
        }
    }
}

async fn bundles(rows: &mut Rows<'_>) {
    let world = rows.world;
    let get = |path: &str| world.operator_call(Method::GET, path, &Value::Null);
    let file = "svc-host-bundle.tar.gz";
    rows.row(get(&format!("/system-bundles/v9/{file}")), 404, "bundle_not_found").await;
    rows.row(get("/system-bundles/v1/other"), 404, "not_found").await;
    rows.row(get("/system-bundles/..%2f..%2fuser_1/x"), 404, "not_found").await;
    rows.row(get("/system-bundles/%ff/x"), 400, "invalid_request").await;
    let beyond = get(&format!("/system-bundles/v1/{file}")).header("range", "bytes=100-");
    rows.row(beyond, 416, "range_not_satisfiable").await;

    let backup = |name: &str| get(&format!("/vps/{}/backups/{name}", world.runs.machine));
    for absent in ["2026-01-01T00-00-00.000Z-2.dump", "x", "..%2f..%2flatest", "x.dump.json"] {
        rows.row(backup(absent), 404, "not_found").await;
    }
    rows.row(backup(super::DUMP).header("range", "bytes=100-"), 416, "range_not_satisfiable").await;
}

/// A replaced server stays, so that another replacement in a full project is refused.
const KEPT_SERVERS: (&str, &str) = ("PREDECESSOR_KEEP_SECONDS", "3600");

/// The results of a machine's end: revoked tokens, and a deleted machine.
async fn ends(rows: &mut Rows<'_>) {
    let world = rows.world;
    let (stack, runs) = (&world.stack, &world.runs.machine);
    stack.snapshot_of_size("user_1", 1 << 40);
    rows.post("/vps/recover", &json!({"idpUserId": "user_1"}), 409, "disk_too_small").await;
    let snapshot = stack.snapshot("user_1");
    world
        .send(world.operator_call(Method::POST, &format!("/vps/{runs}/fail"), &json!({"reason": "x"})))
        .await;
    stack.send_heartbeat(&world.process, &world.runs, &super::super::stack::heartbeat_of(&world.runs)).await;
    let fault = Fault::Status { status: 503, code: "scripted".into(), reset_in_seconds: None };
    stack.provider.fault(FaultRule::times(1000, "GET", "/servers/", fault));
    rows.post(&format!("/vps/{runs}/resume"), &json!({}), 502, "provisioning_error").await;
    stack.provider.clear_faults();
    let key = "system-bundles/v1/svc-host-bundle.tar.gz.sha256";
    let digest = stack.store.read(BUCKET, key).unwrap();
    stack.store.remove(BUCKET, key);
    rows.post("/vps/recover", &json!({"idpUserId": "user_1"}), 404, "bundle_not_found").await;
    stack.store.write(BUCKET, key, digest);
    let recovered = world.operator_call(Method::POST, "/vps/recover", &json!({"idpUserId": "user_1"}));
    let recovered = world.send(recovered).await;
    assert_eq!(recovered.status, 202, "{snapshot}: {recovered:?}");
    let other = json!({"idpUserId": "user_1", "replaceFirst": true});
    rows.post("/vps/recover", &other, 409, "invalid_state").await;
    let operation = recovered.body["operationId"].as_str().unwrap();
    stack.wait_until_ended(&world.process, operation).await;
    let full = stack.start_platform_with(&[KEPT_SERVERS, ("PROVIDER_SERVER_LIMIT", "1")]);
    rows.post_to(&full, "/vps/recover", &json!({"idpUserId": "user_1"}), 409, "server_limit_reached").await;
    drop(full);
    rows.post(&format!("/vps/operations/{operation}/abandon"), &json!({}), 409, "invalid_state").await;
    let replaced = |method, path: &str| {
        stack.request(&world.process, method, path).bearer_auth(&world.runs.upgrade_token)
    };
    rows.row(replaced(Method::GET, "/system-bundles/v1/svc-host-bundle.tar.gz"), 403, "superseded").await;
    rows.row(replaced(Method::POST, &format!("/vps/{runs}/storage-credentials")), 403, "superseded").await;
    for what in ["fail", "resize", "backup", "drill", "rotate-token"] {
        let body = match what {
            "fail" => json!({"reason": "x"}),
            "resize" => json!({"serverType": "cpx32"}),
            _ => json!({}),
        };
        rows.post(&format!("/vps/{runs}/{what}"), &body, 409, "invalid_state").await;
    }
    rows.row(
        world.operator_call(Method::DELETE, &format!("/vps/{runs}"), &Value::Null),
        409,
        "invalid_state",
    )
    .await;
    let failure = operations().find(|operation| operation.id == "reportBootFailure").unwrap();
    rows.row(valid_call(world, failure), 409, "invalid_state").await;
}

//! Only a slot's current machine gets credentials for the object store. They are limited to the slot, cannot delete,
//! and expire.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt;
use jiff::Timestamp;
use kit::s3::{Fault, FaultRule, SessionInfo};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use reqwest::Method;
use serde_json::{Value, json};
use svc::config::{Env, parse_env_file};
use svc::machine::epoch::Epoch;
use svc::machine::name::Slot;
use svc::store::bucket::{Condition, StoreError};
use svc::store::config::StoreConfig;
use svc::store::key::{self, SlotPrefix};
use svc::store::snapshot::Sidecar;
use svc::store::upload::{PartLayout, Upload};
use svc::store::{Bucket, pointer_io, snapshot, snapshots};

use super::super::pointer::actors::sidecar;
use super::stack::{ApiResponse, BUCKET, Process, SECRET, Stack, UserDataSettings};

async fn request_credentials(
    stack: &Stack,
    process: &Process,
    host_settings: &UserDataSettings,
) -> ApiResponse {
    request_credentials_as(stack, process, &host_settings.machine, &host_settings.upgrade_token).await
}

async fn request_credentials_as(stack: &Stack, process: &Process, machine: &str, token: &str) -> ApiResponse {
    let path = format!("/vps/{machine}/storage-credentials");
    stack.send(stack.request(process, Method::POST, &path).bearer_auth(token)).await
}

/// Opens the store as a host does, with the credentials from the response.
fn open_store(response: &ApiResponse) -> Bucket {
    assert_eq!(response.status, 200, "{response:?}");
    let text = |name: &str| response.body[name].as_str().unwrap_or_default().to_owned();
    let vars = [
        ("OBJECT_STORE_URL", format!("s3://{}", text("bucket"))),
        ("OBJECT_STORE_ENDPOINT", text("endpoint")),
        ("AWS_REGION", text("region")),
        ("AWS_ACCESS_KEY_ID", text("accessKeyId")),
        ("AWS_SECRET_ACCESS_KEY", text("secretAccessKey")),
        ("AWS_SESSION_TOKEN", text("sessionToken")),
    ];
    open_with_vars(vars.iter().map(|(name, value)| (*name, value.as_str())))
}

fn open_with_vars<'a>(vars: impl IntoIterator<Item = (&'a str, &'a str)>) -> Bucket {
    StoreConfig::read(&mut Env::from_pairs(vars)).unwrap().open().unwrap()
}

/// Parses the `r2.env` in a server's user-data.
fn parse_store_env(host_settings: &UserDataSettings) -> BTreeMap<String, String> {
    let config: Value =
        serde_json::from_str(host_settings.user_data.strip_prefix("#cloud-config\n").unwrap()).unwrap();
    let files = config["write_files"].as_array().unwrap();
    let file = files.iter().find(|file| file["path"] == "/opt/svc/env/r2.env").unwrap();
    parse_env_file(file["content"].as_str().unwrap()).unwrap().into_iter().collect()
}

fn list_sessions(stack: &Stack, machine: &str) -> Vec<SessionInfo> {
    let name = format!("svc-{machine}");
    stack.store.sessions().into_iter().filter(|session| session.name == name).collect()
}

/// Asserts that nothing outside the slot can be read, written or listed, and that nothing can be deleted.
async fn assert_confined(stack: &Stack, bucket: &Bucket, own_slot: &str, foreign: &[&str]) {
    let store = bucket.raw();
    let key = Path::from(format!("{own_slot}/system/probe"));
    store.put(&key, "own".into()).await.unwrap();
    assert_eq!(store.get(&key).await.unwrap().bytes().await.unwrap(), "own");
    let listed: Vec<_> = store.list(Some(&Path::from(own_slot))).try_collect().await.unwrap();
    assert!(listed.iter().any(|meta| meta.location == key));
    let before = list_objects(stack);
    let assert_denied = |result: Result<(), object_store::Error>, action: &str| {
        let error = result.expect_err(action);
        // `object_store` does not map a denied list request to `PermissionDenied`.
        let text = format!("{error:?}");
        let is_denied = matches!(error, object_store::Error::PermissionDenied { .. });
        assert!(is_denied || text.contains("<Code>AccessDenied</Code>"), "{action}: {text}");
    };
    assert_denied(store.delete(&key).await, "delete");
    for prefix in foreign {
        let foreign_key = Path::from(format!("{prefix}/system/db/latest"));
        assert_denied(store.get(&foreign_key).await.map(drop), "get");
        assert_denied(store.head(&foreign_key).await.map(drop), "head");
        assert_denied(store.put(&foreign_key, "x".into()).await.map(drop), "put");
        assert_denied(store.put_multipart(&foreign_key).await.map(drop), "upload");
        assert_denied(store.copy(&foreign_key, &key).await, "copy from");
        assert_denied(store.copy(&key, &foreign_key).await, "copy to");
        assert_denied(store.delete(&foreign_key).await, "delete");
        assert_denied(store.list(Some(&Path::from(*prefix))).try_collect::<Vec<_>>().await.map(drop), "list");
    }
    assert_denied(store.list(None).try_collect::<Vec<_>>().await.map(drop), "list all");
    assert_eq!(list_objects(stack), before, "an object was written or removed");
    for request in stack.store.requests().iter().filter(|request| request.method == "DELETE") {
        assert_eq!(request.status, Some(403), "{request:?}");
    }
}

fn list_objects(stack: &Stack) -> Vec<(String, String)> {
    stack.store.objects(BUCKET, "").into_iter().map(|object| (object.key, object.etag)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn host_credentials_reach_only_their_own_slot() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.start_machine(&process, "user_2").await;
    stack.store_snapshot("user_2");
    stack.store.write(BUCKET, "user_1/primary2/system/db/latest", "a slot with a longer name");
    stack.store.write(BUCKET, "user_1/second/system/db/latest", "another slot of the same user");
    let foreign =
        ["user_2/primary", "user_1/primary2", "user_1/second", "user_1", "system-bundles/v1", "user_10"];

    let env = parse_store_env(&host_settings);
    let initial = open_with_vars(env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    assert_confined(&stack, &initial, "user_1/primary", &foreign).await;
    let response = request_credentials(&stack, &process, &host_settings).await;
    assert_eq!(response.body["prefix"], "user_1/primary/");
    assert_eq!(response.headers["cache-control"], "no-store");
    assert!(
        response.body["expiresAt"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap()
            > jiff::Timestamp::now()
    );
    assert_confined(&stack, &open_store(&response), "user_1/primary", &foreign).await;

    for secret in [stack.store.secret_key(), stack.store.access_key()] {
        assert!(
            !host_settings.user_data.contains(secret) && !response.text.contains(secret),
            "the platform's own credentials were disclosed"
        );
    }
    assert_eq!(list_sessions(&stack, &host_settings.machine).len(), 2);
    for session in list_sessions(&stack, &host_settings.machine) {
        assert_eq!(session.requested_lifetime, Duration::from_secs(900), "{session:?}");
    }
    for secret in [&env["AWS_SECRET_ACCESS_KEY"], &env["AWS_SESSION_TOKEN"]] {
        assert!(!stack.log().contains(secret.as_str()), "the log contains a credential");
    }
}

/// Opens the store with the outage session from a response.
fn open_store_in_outage(response: &ApiResponse) -> Bucket {
    let mut response = response.clone();
    for name in ["accessKeyId", "secretAccessKey", "sessionToken"] {
        response.body[name] = response.body["outage"][name].clone();
    }
    open_store(&response)
}

#[tokio::test(flavor = "multi_thread")]
async fn outage_session_adds_only_snapshots_of_its_epoch() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    stack.store_snapshot("user_2");
    let response = request_credentials(&stack, &process, &host_settings).await;
    let name = format!("svc-outage-{}", host_settings.machine);
    let sessions = stack.store.sessions();
    let outage_sessions: Vec<_> = sessions.iter().filter(|session| session.name == name).collect();
    assert_eq!(outage_sessions.len(), 1);
    assert_eq!(outage_sessions[0].requested_lifetime, Duration::from_secs(43_200));

    let bucket = open_store_in_outage(&response);
    let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
    let snapshot_of = |epoch| slot.snapshot(&key::snapshot_key(Timestamp::now(), Epoch(epoch))).unwrap();
    bucket.put(&snapshot_of(1), &b"dump"[..]).await.unwrap();
    assert!(pointer_io::read(&bucket, &slot).await.unwrap().is_some(), "the pointer must be readable");
    for refused in [snapshot_of(2), slot.pointer(), slot.pointer_entry(9), slot.vps_meta()] {
        let error = bucket.put_if(&refused, &b"x"[..], Condition::Absent).await.unwrap_err();
        assert!(matches!(error, StoreError::Denied { .. }), "{refused}: {error:?}");
    }
    let foreign_pointer = Path::from("user_2/primary/system/db/latest");
    stack.store.write(BUCKET, slot.vps_meta().as_ref(), "{}");
    let later_snapshot = snapshot_of(2);
    stack.store.write(BUCKET, later_snapshot.as_ref(), "a dump of another epoch");
    for refused in [&foreign_pointer, &slot.vps_meta(), &later_snapshot] {
        let error = bucket.get(refused, 1000).await.expect_err(refused.as_ref());
        assert!(matches!(error, StoreError::Denied { .. }), "{refused}: {error:?}");
    }

    // The minimum lifetime disables outage sessions.
    let process = stack.start_platform_with(&[("STS_DURATION_SECONDS", "900")]);
    let response = request_credentials(&stack, &process, &host_settings).await;
    assert_eq!((response.status, &response.body["outage"]), (200, &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_object_in_own_slot_is_reported_as_missing() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let bucket = open_store(&request_credentials(&stack, &process, &host_settings).await);
    let raw = bucket.raw().get(&Path::from("user_1/primary/system/none")).await.unwrap_err();
    assert!(
        matches!(raw, object_store::Error::PermissionDenied { .. }),
        "the store must deny a read of a missing object, as S3 does: {raw:?}"
    );
    for name in ["none", "db/latest-but-not-quite", "db/snapshots/x.dump"] {
        let key = Path::from(format!("user_1/primary/system/{name}"));
        assert!(bucket.get(&key, 10).await.unwrap().is_none(), "{name}");
        assert!(bucket.head(&key).await.unwrap().is_none(), "{name}");
    }
    assert!(bucket.head(&Path::from("user_1/primary/system/db/latest")).await.unwrap().is_some());
    let foreign = Path::from("user_2/primary/system/db/latest");
    let error = bucket.get(&foreign, 10).await.expect_err("a read in another slot must be denied");
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_current_machine_gets_credentials() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    let other_host_settings = stack.start_machine(&process, "user_2").await;
    request_credentials_as(&stack, &process, &old.machine, "nonsense")
        .await
        .assert_problem(401, "unauthorized");
    request_credentials_as(&stack, &process, &old.machine, SECRET).await.assert_problem(401, "unauthorized");
    request_credentials_as(&stack, &process, &old.machine, &old.registration_token)
        .await
        .assert_problem(401, "unauthorized");
    request_credentials_as(&stack, &process, &old.machine, &other_host_settings.upgrade_token)
        .await
        .assert_problem(403, "forbidden");
    request_credentials_as(&stack, &process, "x", &old.upgrade_token)
        .await
        .assert_problem(400, "invalid_request");
    let path = format!("/vps/{}/storage-credentials", old.machine);
    let request = stack.request(&process, Method::POST, &path).bearer_auth(&old.upgrade_token);
    let response = stack.send(request.json(&json!({"prefix": "user_2/primary"}))).await;
    assert_eq!(response.status, 200, "unknown fields from a newer host must be ignored: {response:?}");

    stack.store_snapshot("user_1");
    let recovery =
        stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1", "acceptLoss": true})).await;
    assert_eq!(recovery.status, 202, "{recovery:?}");
    stack.wait_until_ended(&process, recovery.body["operationId"].as_str().unwrap()).await;
    let session_count = stack.store.sessions().len();
    request_credentials(&stack, &process, &old).await.assert_problem(403, "superseded");
    assert_eq!(stack.store.sessions().len(), session_count, "a replaced machine must get no session");
    let new = stack.wait_for_host_settings(&process, recovery.body["machineId"].as_str().unwrap()).await;
    assert_eq!(request_credentials(&stack, &process, &new).await.status, 200);

    let deleted = stack.delete(&process, &format!("/vps/{}?acceptLoss=true", new.machine)).await;
    assert_eq!(deleted.status, 202, "{deleted:?}");
    stack.assert_only_server(&other_host_settings.machine);
    request_credentials(&stack, &process, &new).await.assert_problem(401, "unauthorized");
}

#[tokio::test(flavor = "multi_thread")]
async fn sts_outage_returns_503_and_delays_provisioning() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    for kind in [Fault::Status(503), Fault::Status(403), Fault::Disconnect] {
        let fault = stack.store.add_fault(FaultRule::new(kind.clone()).sts().always());
        let response = request_credentials(&stack, &process, &host_settings).await;
        response.assert_problem(503, "store_unavailable");
        assert!(fault.hits() > 0);
        stack.store.heal();
    }
    let fault = stack.store.add_fault(FaultRule::new(Fault::Status(503)).sts().always());
    let provisioned = stack.provision(&process, "user_2").await;
    stack
        .eventually("credentials are requested repeatedly", || async { (fault.hits() >= 4).then_some(()) })
        .await;
    assert_eq!(stack.provider.servers().len(), 1, "a server was created without credentials");
    stack.store.heal();
    let operation = stack.wait_until_ended(&process, provisioned["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
    // A lost response costs one additional session, and has no other effect.
    let lost = stack.store.add_fault(FaultRule::new(Fault::LostReply).sts());
    assert_eq!(request_credentials(&stack, &process, &host_settings).await.status, 200);
    assert_eq!(lost.hits(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn user_with_special_characters_is_confined() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let user = "auth0|a:b@c+d";
    stack.subscribe(&process, user).await;
    let body = json!({"idpUserId": user, "handle": "special"});
    let provisioned = stack.post(&process, "/vps/provision", &body).await;
    let host_settings =
        stack.wait_for_host_settings(&process, provisioned.body["machineId"].as_str().unwrap()).await;
    let response = request_credentials(&stack, &process, &host_settings).await;
    let prefix = response.body["prefix"].as_str().unwrap().trim_end_matches('/').to_owned();
    let bucket = open_store(&response);
    let key = Path::parse(format!("{prefix}/system/db/latest")).unwrap();
    assert!(
        bucket.head(&key).await.unwrap().is_some(),
        "the platform's fence is missing: {:?}",
        list_objects(&stack)
    );
    bucket.put(&Path::parse(format!("{prefix}/x")).unwrap(), "own").await.unwrap();
    let slot = SlotPrefix::new(&user.parse().unwrap(), &Slot::primary());
    let sidecar = sidecar(Epoch(1), Timestamp::UNIX_EPOCH);
    bucket.put(&slot.snapshot(&sidecar.key).unwrap(), "dump").await.unwrap();
    snapshot::write_sidecar(&bucket, &slot, &sidecar, None).await.unwrap();
    assert_eq!(snapshots::list_keys(&bucket, &slot).await.unwrap(), [sidecar.key]);
    let error = bucket.put(&Path::from("auth0/primary/x"), "foreign").await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn static_mode_returns_the_platform_credentials() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("STORE_HOST_CREDENTIALS", "static")]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let env = parse_store_env(&host_settings);
    assert_eq!(env["AWS_SECRET_ACCESS_KEY"], stack.store.secret_key());
    assert!(!env.contains_key("AWS_CREDENTIAL_EXPIRATION"), "static credentials must not expire");
    let response = request_credentials(&stack, &process, &host_settings).await;
    assert_eq!(response.body["secretAccessKey"], stack.store.secret_key(), "the route must return them, too");
    assert!(stack.store.sessions().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_taking_final_backup_still_gets_credentials() {
    let stack = Stack::start().await;
    let long_timeouts = [("LAST_BACKUP_DEADLINE_SECONDS", "30"), ("LAST_BACKUP_STALL_SECONDS", "30")];
    let process = stack.start_platform_with(&long_timeouts);
    let old = super::fake_host::start_host(&stack, &process).await;
    stack.store_snapshot("user_1");
    let recovery = stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let is_called = || async { (!old.proofs.lock().unwrap().is_empty()).then_some(()) };
    stack.eventually("the platform calls the host", is_called).await;
    let response = request_credentials(&stack, &process, &old.settings).await;
    open_store(&response).put(&Path::from("user_1/primary/system/db/snapshots/x.dump"), "x").await.unwrap();
    let session = list_sessions(&stack, &old.settings.machine)
        .into_iter()
        .find(|session| session.access_key == response.body["accessKeyId"]);
    assert_eq!(
        session.unwrap().requested_lifetime,
        Duration::from_secs(900),
        "the lifetime must be the minimum that STS allows"
    );
    assert_eq!(response.body["outage"], Value::Null, "there must be no outage session");
    let is_requested = || async { (old.call_count("POST", "/_svc/internal/backup") > 0).then_some(()) };
    stack.eventually("a backup is requested", is_requested).await;
    old.store_backup(&stack, "user_1");
    let ended = stack.wait_until_ended(&process, recovery["operationId"].as_str().unwrap()).await;
    assert_eq!(ended["state"], "succeeded", "{ended}");
    request_credentials(&stack, &process, &old.settings).await.assert_problem(403, "superseded");
}

#[tokio::test(flavor = "multi_thread")]
async fn host_credentials_cannot_overwrite_a_snapshot() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("STORE_WRITE_ONCE", "on")]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let bucket = open_store(&request_credentials(&stack, &process, &host_settings).await);
    let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());

    // Back up as the host does.
    let sidecar = sidecar(Epoch(1), Timestamp::UNIX_EPOCH);
    let sidecar = Sidecar { machine_id: host_settings.machine.parse().unwrap(), ..sidecar };
    let dump = slot.snapshot(&sidecar.key).unwrap();
    let upload = async |content: &'static [u8]| {
        let mut upload = Upload::begin(&bucket, &dump, PartLayout::for_max_bytes(1 << 20)).await.unwrap();
        upload.push(Bytes::from_static(content)).await.unwrap();
        upload.complete().await
    };
    upload(b"dump").await.unwrap();
    let recorded = snapshot::write_sidecar(&bucket, &slot, &sidecar, None).await.unwrap();
    pointer_io::advance(&bucket, &slot, &recorded).await.unwrap();
    assert_eq!(snapshot::find_latest(&bucket, &slot).await.unwrap().key, sidecar.key);

    // Overwrite as an attacker with the host's credentials would.
    let entry = slot.pointer_entry(stack.pointer("user_1")["seq"].as_u64().unwrap());
    for key in [&dump, &slot.sidecar(&sidecar.key).unwrap(), &entry] {
        let refused = bucket.put(key, &b"garbage"[..]).await.unwrap_err();
        assert!(matches!(refused, StoreError::Denied { .. }), "{key}: {refused:?}");
        let refused = bucket.put_if(key, &b"garbage"[..], Condition::Absent).await.unwrap_err();
        assert!(matches!(refused, StoreError::Precondition { .. }), "{key}: {refused:?}");
    }
    upload(b"other garbage").await.unwrap_err();
    assert_eq!(bucket.get(&dump, 100).await.unwrap().unwrap().value, "dump");
    bucket.put(&slot.vps_meta(), &b"{}"[..]).await.unwrap();
}

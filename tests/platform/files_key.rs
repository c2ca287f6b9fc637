//! The key of a slot's file backups. Each slot has one key, which only its current machine and operators with the scope
//! `admin` can get. The key survives the loss of a machine and the restore of an older database. With the key, the
//! platform prunes the slot's file backups.

use reqwest::Method;
use serde_json::json;
use svc::config::Env;
use svc::machine::epoch::Epoch;
use svc::machine::id::MachineId;
use svc::store::Bucket;
use svc::store::config::StoreConfig;
use svc::store::files_pointer::{self, FilesSnapshotRef};
use svc::store::key::SlotPrefix;

use svc_files::save::{SaveOptions, Saver};
use svc_files::{Cache, Id, Repository, SnapshotOrigin};

use super::stack::{ApiResponse, Process, Stack, UserDataSettings};

async fn request_key(
    stack: &Stack,
    process: &Process,
    host_settings: &UserDataSettings,
    body: serde_json::Value,
) -> ApiResponse {
    let path = format!("/vps/{}/files-key", host_settings.machine);
    stack
        .send(
            stack.request(process, Method::POST, &path).bearer_auth(&host_settings.upgrade_token).json(&body),
        )
        .await
}

fn slot() -> SlotPrefix {
    SlotPrefix::new(&"user_1".parse().unwrap(), &"primary".parse().unwrap())
}

/// Opens the store with the platform's credentials.
pub fn open_bucket(stack: &Stack) -> Bucket {
    let settings = stack.settings();
    let settings = settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    StoreConfig::read(&mut Env::from_pairs(settings)).unwrap().open().unwrap()
}

fn extract_key(response: &ApiResponse) -> String {
    assert_eq!(response.status, 200, "{response:?}");
    response.body["key"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_has_one_key_for_all_its_machines() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let old = stack.start_machine(&process, "user_1").await;
    let other_host_settings = stack.start_machine(&process, "user_2").await;
    let operator_path = "/vps/slots/files-key?idpUserId=user_1";
    stack.get(&process, operator_path).await.assert_problem(404, "not_found");

    let key = extract_key(&request_key(&stack, &process, &old, json!({})).await);
    assert_eq!(key.len(), 43, "{key}");
    assert_eq!(extract_key(&request_key(&stack, &process, &old, json!({})).await), key);
    assert_ne!(extract_key(&request_key(&stack, &process, &other_host_settings, json!({})).await), key);
    let impostor =
        UserDataSettings { upgrade_token: other_host_settings.upgrade_token.clone(), ..old.clone() };
    request_key(&stack, &process, &impostor, json!({})).await.assert_problem(403, "forbidden");
    let offered = "A".repeat(43);
    assert_eq!(
        extract_key(&request_key(&stack, &process, &old, json!({"key": offered})).await),
        key,
        "the platform's key must take precedence"
    );
    request_key(&stack, &process, &old, json!({"key": "short"})).await.assert_problem(400, "invalid_request");

    let operator_response = stack.get(&process, operator_path).await;
    assert_eq!(extract_key(&operator_response), key);
    let repository = operator_response.body["repository"].as_str().unwrap();
    assert!(
        repository.starts_with("s3:http") && repository.ends_with("/user_1/primary/files"),
        "{operator_response:?}"
    );
    let audit = stack.get(&process, "/audit").await;
    let text = audit.body.to_string();
    assert!(text.contains("files.key") && text.contains("user_1/primary"), "{text}");
    assert!(!text.contains(&key) && !stack.log().contains(&key), "the key was disclosed");

    // After a recovery, the fence names the successor, which gets the same key.
    let slot = slot();
    let bucket = open_bucket(&stack);
    let read_fence = async || {
        let pointer = files_pointer::read(&bucket, &slot).await.unwrap().unwrap().value;
        (pointer.fence_epoch.0, pointer.fence_machine_id.unwrap().to_string())
    };
    assert_eq!(read_fence().await, (1, old.machine.clone()));
    stack.store_snapshot("user_1");
    let recovery =
        stack.post(&process, "/vps/recover", &json!({"idpUserId": "user_1", "acceptLoss": true})).await;
    stack.wait_until_ended(&process, recovery.body["operationId"].as_str().unwrap()).await;
    request_key(&stack, &process, &old, json!({})).await.assert_problem(403, "superseded");
    let new = stack.wait_for_host_settings(&process, recovery.body["machineId"].as_str().unwrap()).await;
    assert_eq!(extract_key(&request_key(&stack, &process, &new, json!({})).await), key);
    assert_eq!(read_fence().await, (2, new.machine.clone()));
}

/// After the platform's database has been restored from a copy older than the key, only the host has the key.
#[tokio::test(flavor = "multi_thread")]
async fn key_lost_with_the_database_is_restored_from_the_host() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let key = extract_key(&request_key(&stack, &process, &host_settings, json!({})).await);
    let client = stack.database.connect().await.unwrap();
    client.batch_execute("TRUNCATE file_keys").await.unwrap();
    assert_eq!(extract_key(&request_key(&stack, &process, &host_settings, json!({"key": key})).await), key);
    assert_eq!(extract_key(&request_key(&stack, &process, &host_settings, json!({})).await), key);
    let sealed: Vec<u8> = client.query_one("SELECT sealed FROM file_keys", &[]).await.unwrap().get(0);
    assert!(!sealed.windows(key.len()).any(|part| part == key.as_bytes()), "the key is stored in clear text");
}

/// Requests the slot's key and creates its repository, as a host does before its first save.
pub async fn create_repository(stack: &Stack, process: &Process, host_settings: &UserDataSettings) {
    let key = extract_key(&request_key(stack, process, host_settings, json!({})).await).parse().unwrap();
    Repository::open_or_create(open_bucket(stack), slot().files(), &key, Cache::none()).await.unwrap();
}

/// Saves two states of a directory as a host does, and returns the ids of their snapshots.
async fn save_twice(bucket: &Bucket, slot: &SlotPrefix, key: &str, machine: MachineId) -> Vec<Id> {
    let key = key.parse().unwrap();
    let repository =
        Repository::open_or_create(bucket.clone(), slot.files(), &key, Cache::none()).await.unwrap();
    let home = tempfile::tempdir().unwrap();
    let origin = SnapshotOrigin { machine, epoch: Epoch(1) };
    let mut saver = Saver::new(repository, SaveOptions::new(home.path().to_owned(), origin));
    let mut ids = Vec::new();
    let mut parent = None;
    for text in ["first", "second"] {
        std::fs::write(home.path().join("file"), text).unwrap();
        let saved = saver.save(parent).await.unwrap();
        let snapshot = FilesSnapshotRef {
            id: saved.id.to_string(),
            machine_id: origin.machine,
            epoch: Epoch(1),
            taken_at: saved.snapshot.time,
        };
        files_pointer::advance(bucket, slot, &snapshot).await.unwrap();
        ids.push(saved.id);
        parent = Some((saved.id, saved.snapshot));
    }
    ids
}

#[tokio::test(flavor = "multi_thread")]
async fn platform_prunes_repositories_and_reports_failures() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("FILES_PRUNE_SECONDS", "1")]);
    let host_settings = stack.start_machine(&process, "user_1").await;
    let key = extract_key(&request_key(&stack, &process, &host_settings, json!({})).await);
    let slot = slot();
    let bucket = open_bucket(&stack);
    let ids = save_twice(&bucket, &slot, &key, host_settings.machine.parse().unwrap()).await;
    let plan = stack.get(&process, "/vps/slots/files-prune?idpUserId=user_1").await;
    assert_eq!((plan.status, &plan.body["keptSnapshots"]), (200, &json!(2)), "{plan:?}");

    let first_snapshot = slot.files().join("snapshots").join(ids[0].to_string());
    let client = stack.database.connect().await.unwrap();
    let is_pruned = || async {
        let row =
            client.query_one("SELECT pruned_at > created_at, prune_error FROM file_keys", &[]).await.unwrap();
        assert_eq!(row.get::<_, Option<String>>(1), None);
        row.get::<_, bool>(0).then_some(())
    };
    stack.eventually("the repository is pruned", is_pruned).await;
    assert!(
        bucket.get(&first_snapshot, 1 << 20).await.unwrap().is_some(),
        "all snapshots of the last day must be kept"
    );
    stack
        .post(&process, "/vps/slots/files-prune", &json!({"idpUserId": "user_none"}))
        .await
        .assert_problem(404, "not_found");
    let requested = stack.post(&process, "/vps/slots/files-prune", &json!({"idpUserId": "user_1"})).await;
    assert_eq!(requested.status, 202, "{requested:?}");

    let usage = stack.get(&process, "/vps/slots/files-usage?idpUserId=user_1").await;
    let counts = (&usage.body["snapshots"], &usage.body["packs"], &usage.body["pruneError"]);
    assert_eq!(counts, (&json!(2), &json!(4), &json!(null)), "{usage:?}");
    assert!(usage.body["totalBytes"].as_u64() > usage.body["packBytes"].as_u64(), "{usage:?}");

    // A corrupt repository is reported.
    let config = slot.files().join("config");
    bucket.put(&config, b"damaged".to_vec()).await.unwrap();
    let has_failed = || async {
        let row = client.query_one("SELECT prune_error FROM file_keys", &[]).await.unwrap();
        row.get::<_, Option<String>>(0).filter(|error| error.contains("cannot decrypt"))
    };
    stack.eventually("the failure is recorded", has_failed).await;
    let refused = stack.get(&process, "/vps/slots/files-prune?idpUserId=user_1").await;
    refused.assert_problem(409, "conflict");
    assert!(refused.body["detail"].as_str().unwrap().contains("cannot decrypt"), "{refused:?}");
    let findings = stack.run_doctor(&process, "file-pruning", []).await;
    let start = "\"warning\": \"the file backups of user_1/";
    assert!(findings.starts_with(start) && findings.contains("cannot decrypt"), "{findings}");
    let metrics = stack.get(&process, "/metrics").await.text;
    assert!(metrics.contains("\nsvc_files_prunings_failed 1\n"), "{metrics}");
    // If regular prunes are disabled, a failure sets `pruned_at` back by years.
    let set_back = "UPDATE file_keys SET pruned_at = created_at - interval '20 years'";
    client.execute(set_back, &[]).await.unwrap();
    let usage = stack.get(&process, "/vps/slots/files-usage?idpUserId=user_1").await;
    assert!(usage.body["prunedAt"].is_string() && usage.body["pruneError"].is_string(), "{usage:?}");

    client.execute("ALTER TABLE file_keys DROP COLUMN prune_ended_at", &[]).await.unwrap();
    let earlier_schema = stack.run_doctor(&process, "file-pruning", []).await;
    assert!(earlier_schema.starts_with("\"skipped\""), "{earlier_schema}");
}

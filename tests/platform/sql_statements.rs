//! Tests individual SQL statements on a real database.

use std::time::Duration;

use deadpool_postgres::Object;
use kit::pg::{TestDatabase, test_database_from};
use secrecy::SecretSlice;
use serde_json::Value;
use svc::machine::id::{MachineId, OperationId};
use svc::machine::name::ImageVersion;
use svc::platform::db::{self, Db, files_keys, slots, upgrade_token};
use svc::platform::keys::Seal;
use svc::platform::platform_key_rotation::dependents::KeyDependents;
use svc::platform::tokens::Generation;

use super::stack::Stack;

async fn start_database() -> (TestDatabase, Object) {
    let database =
        test_database_from(
            "platform",
            |url| async move { svc::platform::db::migrate::run(&url.parse()?).await },
        );
    let database = database.await.unwrap();
    let db = Db::new(&database.url().parse().unwrap(), 1).unwrap();
    let session = db.session().await.unwrap();
    (database, session)
}

async fn insert_machine(session: &Object) -> MachineId {
    let machine = MachineId::new();
    let insert = format!(
        "INSERT INTO handles VALUES ('ada', 'user_1'); \
         INSERT INTO user_machines (machine_id, idp_user_id, slot, handle, kind, status, epoch, restore_mode, \
         server_type, location, image_version, bundle_sha256, https_port, registration_token_hash, upgrade_token_hash) \
         VALUES ('{machine}', 'user_1', 'primary', 'ada', 'customer', 'running', 1, 'empty', 'cpx22', 'nbg1', 'v1', \
         'x', 443, 'x', 'x')"
    );
    session.batch_execute(&insert).await.unwrap();
    machine
}

#[tokio::test]
async fn later_token_is_recorded_once() {
    let (_database, mut session) = start_database().await;
    let machine = insert_machine(&session).await;
    let tx = db::begin(&mut session).await.unwrap();
    for expected in [true, false] {
        let advanced =
            upgrade_token::advance(&tx, machine, Generation(7), b"hash", Duration::from_secs(60)).await;
        assert_eq!(advanced.unwrap(), expected);
    }
}

/// The operation that creates a machine powers off the server of its predecessor.
#[tokio::test]
async fn creation_of_a_machine_does_not_shut_it_down() {
    let (_database, session) = start_database().await;
    let machine = insert_machine(&session).await;
    for (kind, expected) in [("recover", false), ("power_off", true)] {
        let id = uuid::Uuid::now_v7();
        let insert = format!(
            "INSERT INTO operations (operation_id, machine_id, kind, state, step) \
             VALUES ('{id}', '{machine}', '{kind}', 'running', 'power_off_server'); \
             INSERT INTO operation_log (operation_id, step, outcome) VALUES ('{id}', 'power_off_server', 'begun')"
        );
        session.batch_execute(&insert).await.unwrap();
        let operation = db::operations::get(&session, OperationId(id)).await.unwrap().unwrap();
        let minute = Duration::from_secs(60);
        let may_have_pending_shutdown =
            db::slot_operations::may_have_pending_shutdown(&session, machine, &operation, minute).await;
        assert_eq!(may_have_pending_shutdown.unwrap(), expected, "{kind}");
    }
}

#[tokio::test]
async fn requested_prune_survives_running_and_killed_prunes() {
    let (_database, session) = start_database().await;
    let insert = "INSERT INTO file_keys (idp_user_id, slot, key_id, sealed, pruned_at) \
                  VALUES ('user_1', 'primary', 'x', 'x', 'epoch')";
    session.batch_execute(insert).await.unwrap();
    let year = Duration::from_secs(365 * 24 * 3600);
    let claim_after = async |retry_delay, ttl| {
        let (retry_delay, ttl) = (Duration::from_secs(retry_delay), Duration::from_secs(ttl));
        files_keys::claim_prune(&session, year, retry_delay, ttl).await.unwrap().is_some()
    };
    let claim = async |ttl| claim_after(3600, ttl).await;
    let record = async || {
        files_keys::record_prune(&session, ("user_1", "primary"), None, Duration::ZERO).await.unwrap();
    };
    assert!(claim(3600).await);
    assert!(files_keys::request_prune(&session, "user_1", "primary").await.unwrap());
    assert!(!claim(3600).await, "the slot must still be claimed");
    record().await;
    // This claim expires immediately, as if its process had been killed long ago.
    assert!(claim(0).await, "the request must still be pending");
    assert!(!claim(3600).await, "the interrupted prune must not be repeated at once");
    assert!(claim_after(0, 0).await, "the interrupted prune must be repeated after the retry delay");
    assert!(files_keys::request_prune(&session, "user_1", "primary").await.unwrap());
    assert!(claim(3600).await, "a request must not wait for the retry delay");
    files_keys::release_prune_claim(&session, "user_1", "primary").await.unwrap();
    assert!(claim(3600).await, "the released slot must be due");
    record().await;
    assert!(!claim(3600).await, "the slot must not be due after a completed prune");
    assert!(files_keys::request_prune(&session, "user_1", "primary").await.unwrap());
    assert!(claim(3600).await);
    files_keys::record_unfinished_prune(&session, "user_1", "primary").await.unwrap();
    assert!(!claim(3600).await, "an unfinished prune must not be due at once");
    assert!(claim_after(0, 3600).await, "an unfinished prune must be due after the retry delay");
}

#[tokio::test]
async fn set_release_for_machine_keeps_time_of_unchanged_release() {
    let (_database, session) = start_database().await;
    let machine = insert_machine(&session).await;
    let set_to = async |version: &str| -> (String, jiff::Timestamp) {
        let version: ImageVersion = version.parse().unwrap();
        slots::set_release_for_machine(&session, machine, &version).await.unwrap();
        let sql = "SELECT image_version, extract(epoch FROM set_at)::float8 FROM slot_releases";
        let row = session.query_one(sql, &[]).await.unwrap();
        let set_at: f64 = row.get(1);
        (row.get(0), jiff::Timestamp::from_microsecond((set_at * 1e6) as i64).unwrap())
    };
    let first = set_to("v1").await;
    assert_eq!(set_to("v1").await, first);
    let later = set_to("v2").await;
    assert!(later.0 == "v2" && later.1 > first.1, "{later:?} after {first:?}");
}

#[tokio::test]
async fn key_dependents_include_every_signing_key() {
    let (_database, session) = start_database().await;
    let keys = "INSERT INTO signing_keys (kid, purpose, public_key, sealed) \
                SELECT 'proof-' || n, 'proof', 'x', '\\x00' FROM generate_series(1, 10050) n";
    session.batch_execute(keys).await.unwrap();
    let seal = Seal::new(&SecretSlice::from(vec![7_u8; 32]));
    let dependents = KeyDependents::find_signing_key_dependents(&session, &seal).await.unwrap();
    assert!(dependents.to_string().starts_with("10050 sealed signing keys ("), "{dependents}");
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriptions_are_listed_in_pages() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let client = stack.database.connect().await.unwrap();
    let fill = "INSERT INTO slots (idp_user_id, slot, plan, status) \
                SELECT 'user_' || n % 3, 's' || n, 'max', 'active' FROM generate_series(1, 1003) n";
    client.batch_execute(fill).await.unwrap();
    let slot_names = |page: &Value| -> Vec<String> {
        let slots = page["slots"].as_array().unwrap().iter();
        slots
            .map(|slot| format!("{}/{}", slot["idpUserId"].as_str().unwrap(), slot["slot"].as_str().unwrap()))
            .collect()
    };
    let first = stack.get(&process, "/vps/slots").await.body;
    let cursor = first["nextCursor"].as_str().unwrap();
    let mut all = slot_names(&first);
    assert_eq!((all.len(), cursor), (1000, all.last().unwrap().as_str()));
    let cursor: String = url::form_urlencoded::byte_serialize(cursor.as_bytes()).collect();
    let second = stack.get(&process, &format!("/vps/slots?cursor={cursor}")).await.body;
    assert!(second["nextCursor"].is_null(), "{second}");
    all.extend(slot_names(&second));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 1003);
    let user_page = stack.get(&process, "/vps/slots?idpUserId=user_1&cursor=user_1%2Fs1").await.body;
    assert!(
        slot_names(&user_page).iter().all(|name| name.starts_with("user_1/"))
            && slot_names(&user_page).len() == 334
    );
    assert_eq!(stack.get(&process, "/vps/slots?cursor=x").await.status, 400);
}

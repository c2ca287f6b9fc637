//! SQL statements that read many rows, and one that must not write an unchanged value.

use deadpool_postgres::Object;
use kit::pg::{TestDatabase, test_database_from};
use secrecy::SecretSlice;
use serde_json::Value;
use svc::machine::id::MachineId;
use svc::machine::name::ImageVersion;
use svc::platform::db::{Db, slots};
use svc::platform::key_change::need::KeyNeed;
use svc::platform::keys::Seal;

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

#[tokio::test]
async fn set_release_for_machine_keeps_time_of_unchanged_release() {
    let (_database, session) = start_database().await;
    let machine = MachineId::new();
    let insert = format!(
        "INSERT INTO handles VALUES ('ada', 'user_1'); \
         INSERT INTO user_machines (machine_id, idp_user_id, slot, handle, kind, status, epoch, restore_mode, \
         server_type, location, image_version, bundle_sha256, https_port, registration_token_hash, upgrade_token_hash) \
         VALUES ('{machine}', 'user_1', 'primary', 'ada', 'customer', 'running', 1, 'empty', 'cpx22', 'nbg1', 'v1', \
         'x', 443, 'x', 'x')"
    );
    session.batch_execute(&insert).await.unwrap();
    let set_to = async |version: &str| -> (String, jiff::Timestamp) {
        let version: ImageVersion = version.parse().unwrap();
        slots::set_release_for_machine(&session, machine, &version).await.unwrap();
        let sql = "SELECT image_version, extract(epoch FROM set_at)::float8 FROM slot_releases";
        let row = session.query_one(sql, &[]).await.unwrap();
        let at: f64 = row.get(1);
        (row.get(0), jiff::Timestamp::from_microsecond((at * 1e6) as i64).unwrap())
    };
    let first = set_to("v1").await;
    assert_eq!(set_to("v1").await, first);
    let later = set_to("v2").await;
    assert!(later.0 == "v2" && later.1 > first.1, "{later:?} after {first:?}");
}

#[tokio::test]
async fn key_need_counts_every_signing_key() {
    let (_database, session) = start_database().await;
    let keys = "INSERT INTO signing_keys (kid, purpose, public_key, sealed) \
                SELECT 'proof-' || n, 'proof', 'x', '\\x00' FROM generate_series(1, 10050) n";
    session.batch_execute(keys).await.unwrap();
    let seal = Seal::new(&SecretSlice::from(vec![7_u8; 32]));
    let need = KeyNeed::find_for_signing_keys(&session, &seal).await.unwrap();
    assert!(need.to_string().starts_with("10050 sealed signing keys ("), "{need}");
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
    let of_user = stack.get(&process, "/vps/slots?idpUserId=user_1&cursor=user_1%2Fs1").await.body;
    assert!(
        slot_names(&of_user).iter().all(|name| name.starts_with("user_1/"))
            && slot_names(&of_user).len() == 334
    );
    assert_eq!(stack.get(&process, "/vps/slots?cursor=x").await.status, 400);
}

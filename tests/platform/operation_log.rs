//! The log of an operation with many retries stays bounded in the database and in responses, and shows the correct step
//! age.

use std::time::Duration;

use deadpool_postgres::Object;
use kit::pg::{TestDatabase, test_database_from};
use svc::machine::id::OperationId;
use svc::platform::db::{Db, operation_log, operations};
use uuid::Uuid;

const FILL: &str = "
    INSERT INTO handles VALUES ('user-1', 'user_1');
    INSERT INTO user_machines (machine_id, idp_user_id, slot, handle, kind, status, epoch, restore_mode, server_type,
        location, image_version, bundle_sha256, https_port, registration_token_hash, upgrade_token_hash)
        VALUES (gen_random_uuid(), 'user_1', 'primary', 'user-1', 'customer', 'running', 1, 'empty', 'cpx22', 'nbg1',
        'v1', 'x', 443, 'x', 'x');
    INSERT INTO operations (operation_id, machine_id, kind, state, step)
        SELECT gen_random_uuid(), machine_id, 'delete', 'running', 'last_backup' FROM user_machines;
    INSERT INTO operation_log (operation_id, step, outcome, at)
        SELECT operation_id, 'last_backup', 'begun', now() - interval '30 days' FROM operations";

/// Starts a database with one running operation, whose step started 30 days ago.
pub async fn start_with_operation() -> (TestDatabase, Object, OperationId) {
    let database =
        test_database_from(
            "platform",
            |url| async move { svc::platform::db::migrate::run(&url.parse()?).await },
        );
    let database = database.await.expect("the test database must start");
    let session = Db::new(&database.url().parse().unwrap(), 1).unwrap().session().await.unwrap();
    session.batch_execute(FILL).await.unwrap();
    let id: Uuid = session.query_one("SELECT operation_id FROM operations", &[]).await.unwrap().get(0);
    (database, session, OperationId(id))
}

#[tokio::test(flavor = "multi_thread")]
async fn month_of_retries_leaves_a_bounded_log() {
    let (_database, session, id) = start_with_operation().await;
    let newest = || async { operation_log::load_newest_lines(&session, id).await.unwrap() };

    // An earlier release added a line for each retry.
    let old = "INSERT INTO operation_log (operation_id, step, outcome, detail) \
               SELECT operation_id, 'last_backup', 'retry', 'silent' FROM operations, generate_series(1, 5000)";
    session.batch_execute(old).await.unwrap();
    let many = newest().await;
    assert_eq!((many.lines.len(), many.omitted), (200, 4801));

    for _ in 0..300 {
        operation_log::log_retry(&session, id, "last_backup", Some("silent")).await.unwrap();
    }
    let counted = newest().await;
    assert_eq!(counted.omitted, 4801, "a repeated failure must add no line");
    let last = counted.lines.last().unwrap();
    assert_eq!((last.detail.as_deref(), last.repeats), (Some("silent"), 300), "{last:?}");
    assert!(last.repeated_at.is_some(), "{last:?}");

    for n in 0..300 {
        operation_log::log_retry(&session, id, "last_backup", Some(&format!("failure {n}"))).await.unwrap();
    }
    let bounded = newest().await;
    assert_eq!((bounded.lines.len(), bounded.omitted), (200, 1), "only the first line must be omitted");
    let details: Vec<_> = bounded.lines.iter().map(|line| line.detail.as_deref()).collect();
    assert_eq!((details[0], details[199]), (Some("failure 100"), Some("failure 299")));
    assert!(bounded.lines.iter().all(|line| line.repeated_at.is_none()));

    let age = operations::load_step_age(&session, id, "last_backup").await.unwrap();
    assert!(age > Duration::from_secs(29 * 86_400), "{age:?}");
    session
        .batch_execute("SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off")
        .await
        .unwrap();
    let plan = "EXPLAIN SELECT min(at) FROM operation_log WHERE operation_id = gen_random_uuid() AND step = 'x' \
                AND outcome = 'begun'";
    let plan: Vec<String> = session.query(plan, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert!(plan.join("\n").contains("operation_log_begun"), "{plan:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn location_changes_leave_a_bounded_log() {
    let (_database, session, id) = start_with_operation().await;
    for n in 0..300 {
        let detail = format!("round {n}");
        operation_log::log_location_change(&session, id, "create_server", &detail).await.unwrap();
        operation_log::log_retry(&session, id, "create_server", Some(&detail)).await.unwrap();
    }
    let newest = operation_log::load_newest_lines(&session, id).await.unwrap();
    assert_eq!(
        (newest.lines.len(), newest.omitted),
        (200, 201),
        "the log must keep 200 lines of each outcome, and the first line"
    );
    assert!(operation_log::has_outcome(&session, id, operation_log::LOCATION_CHANGE).await.unwrap());
}

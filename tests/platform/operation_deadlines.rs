//! Tests when an operation's deadlines start and when they are reset.

use std::time::Duration;

use deadpool_postgres::Object;
use serde_json::{Value, json};
use svc::machine::id::OperationId;
use svc::platform::db::operations::{self, OperationUpdate, PROVIDER_ACCOUNT_BLOCKED};
use uuid::Uuid;

use super::operation_log::start_with_operation;

const STEP: &str = "last_backup";
const HOUR: Duration = Duration::from_secs(3600);

async fn lease(session: &Object) -> Uuid {
    let owner = Uuid::new_v4();
    let sql = "UPDATE operations SET lease_owner = $1, lease_until = now() + interval '1 hour'";
    session.execute(sql, &[&owner]).await.unwrap();
    owner
}

async fn advance(session: &Object, id: OperationId, owner: Uuid, attempts: i32, error_code: Option<&str>) {
    let facts = json!({});
    let (due_in, lease) = (Duration::ZERO, Some(HOUR));
    let update =
        OperationUpdate { state: "running", step: STEP, facts: &facts, attempts, error_code, due_in, lease };
    assert!(operations::advance(session, id, owner, &update).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn failure_age_starts_at_first_consecutive_failure() {
    let (_database, session, id) = start_with_operation().await;
    let owner = lease(&session).await;
    let failure_age = async || operations::load_failure_age(&session, id).await.unwrap();
    let age_failure = "UPDATE operations SET failing_since = failing_since - interval '2 hours'";

    advance(&session, id, owner, 1, None).await;
    assert!(failure_age().await < HOUR, "the failure age must not include the time before the failure");
    session.execute(age_failure, &[]).await.unwrap();
    advance(&session, id, owner, 2, None).await;
    assert!(failure_age().await > HOUR);
    // A step that is waiting has not failed.
    advance(&session, id, owner, 0, None).await;
    assert_eq!(failure_age().await, Duration::ZERO);

    advance(&session, id, owner, 1, None).await;
    session.execute(age_failure, &[]).await.unwrap();
    advance(&session, id, owner, 2, Some(PROVIDER_ACCOUNT_BLOCKED)).await;
    assert_eq!(failure_age().await, Duration::ZERO);
    advance(&session, id, owner, 3, None).await;
    assert!(failure_age().await < HOUR);
}

#[tokio::test(flavor = "multi_thread")]
async fn unblocked_step_age_starts_when_the_account_block_ends() {
    let (_database, session, id) = start_with_operation().await;
    let owner = lease(&session).await;
    let step_age = async || operations::load_unblocked_step_age(&session, id, STEP).await.unwrap();
    assert!(step_age().await > 24 * HOUR);
    advance(&session, id, owner, 1, Some(PROVIDER_ACCOUNT_BLOCKED)).await;
    assert_eq!(step_age().await, Duration::ZERO);
    advance(&session, id, owner, 0, None).await;
    assert!(step_age().await < HOUR);
    session
        .execute("UPDATE operations SET account_unblocked_at = now() - interval '40 days'", &[])
        .await
        .unwrap();
    let days = step_age().await.as_secs() / 86_400;
    assert_eq!(days, 30, "the age of a step that started after the block must not be shortened");
}

#[tokio::test(flavor = "multi_thread")]
async fn suspended_operation_has_no_error_code() {
    let (_database, session, id) = start_with_operation().await;
    let owner = lease(&session).await;
    advance(&session, id, owner, 1, Some(PROVIDER_ACCOUNT_BLOCKED)).await;
    let question = json!({"code": "last_backup_missing", "detail": "x"});
    assert!(operations::suspend(&session, id, owner, &question, &Value::Null).await.unwrap());
    let suspended = operations::get(&session, id).await.unwrap().unwrap();
    assert_eq!((suspended.question, suspended.error_code), (Some(question), None));
}

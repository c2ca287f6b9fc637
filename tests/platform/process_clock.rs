//! Compares a platform process's clock with the database's.

use serde_json::json;

use super::stack::Stack;

#[tokio::test(flavor = "multi_thread")]
async fn clock_skew_from_database_is_reported() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let in_sync = stack.get(&process, "/readyz/control").await;
    assert_eq!((in_sync.status, &in_sync.body["clock"]), (200, &json!("ok")), "{in_sync:?}");
    assert!(in_sync.body["clockSkewMs"].as_i64().unwrap().abs() < 2000, "{in_sync:?}");
    drop(process);

    // Every new session sees a database clock that is a minute ahead.
    let client = stack.database.connect().await.unwrap();
    let skew_clock = "CREATE SCHEMA skewed; \
         CREATE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE \
             AS $$ SELECT pg_catalog.clock_timestamp() + interval '1 minute' $$; \
         DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = public, skewed, pg_catalog', \
             current_database()); END $$";
    client.batch_execute(skew_clock).await.unwrap();
    let process = stack.start_platform();
    let skewed = stack.get(&process, "/readyz/control").await;
    assert_eq!((skewed.status, &skewed.body["clock"]), (503, &json!("failing")), "{skewed:?}");
    let skew = skewed.body["clockSkewMs"].as_i64().unwrap();
    assert!((-61_000..=-58_000).contains(&skew), "{skewed:?}");
    let metrics = stack.get(&process, "/metrics").await.text;
    let gauge = metrics
        .lines()
        .find_map(|line| line.strip_prefix("svc_clock_skew_seconds "))
        .expect("the gauge must exist");
    assert!((-61.0..=-58.0).contains(&gauge.parse::<f64>().unwrap()), "{gauge}");
    assert!(stack.log().contains("differs from the database's"), "{}", stack.log());
}

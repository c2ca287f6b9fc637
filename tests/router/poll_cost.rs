//! The database cost of the router's poll does not grow with irrelevant rows.

use std::time::{Duration, Instant};

use anyhow::Result;
use http::StatusCode;
use tokio_postgres::Client;

use super::test_router::TestRouter;

const OLD_SESSIONS: i64 = 100_000;

/// Returns the number of rows read by sequential scans of the table, and the number of its index scans.
async fn read_scan_counts(sql: &Client, table: &str) -> Result<(i64, i64)> {
    let query = "SELECT seq_tup_read, coalesce(idx_scan, 0) FROM pg_stat_user_tables WHERE relname = $1";
    sql.batch_execute("SELECT pg_stat_clear_snapshot()").await?;
    let row = sql.query_one(query, &[&table]).await?;
    Ok((row.get(0), row.get(1)))
}

#[tokio::test(flavor = "multi_thread")]
async fn session_poll_uses_index() -> Result<()> {
    let router = TestRouter::start().await?;
    let fill = format!(
        "INSERT INTO sessions (token_hash, host, idp_user_id, expires_at, changed_at) \
         SELECT decode(lpad(to_hex(n), 64, '0'), 'hex'), 'app', 'user_' || n % 1000, \
         now() + interval '1 hour', now() - interval '1 day' FROM generate_series(1, {OLD_SESSIONS}) AS n; \
         ANALYZE sessions"
    );
    router.sql.batch_execute(&fill).await?;
    let (rows_read_before, index_scans_before) = read_scan_counts(&router.sql, "sessions").await?;
    // A backend publishes its statistics at most once a second.
    let started = Instant::now();
    loop {
        let (rows_read, index_scans) = read_scan_counts(&router.sql, "sessions").await?;
        assert!(rows_read - rows_read_before < OLD_SESSIONS, "the poll reads the whole table");
        if index_scans - index_scans_before >= 4 {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(20), "the poll uses no index");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn poll_does_not_read_deleted_machines() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let deleted_machines = 20_000;
    let fill = format!(
        "INSERT INTO user_machines (machine_id, idp_user_id, slot, handle, kind, status, epoch, restore_mode, \
         server_type, location, image_version, bundle_sha256, https_port, registration_token_hash, \
         upgrade_token_hash, deleted_at) SELECT gen_random_uuid(), 'user_1', 'primary', 'user-1', 'customer', \
         'failed', n + 1, 'empty', 'cpx22', 'nbg1', 'v1', 'x', 443, 'x', 'x', now() \
         FROM generate_series(1, {deleted_machines}) AS n; ANALYZE user_machines"
    );
    router.sql.batch_execute(&fill).await?;
    // Counting starts after a pause, because the poll gets a new plan only when it next runs after ANALYZE.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let (before, _) = read_scan_counts(&router.sql, "user_machines").await?;
    tokio::time::sleep(Duration::from_millis(3000)).await;
    let (after, _) = read_scan_counts(&router.sql, "user_machines").await?;
    assert!(after - before < deleted_machines, "{} rows read by sequential scans", after - before);
    router.set_status(&machine, "failed").await?;
    router.wait_for_status("user_1", StatusCode::SERVICE_UNAVAILABLE).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn key_acknowledgement_does_not_reload_routes() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let change_seq = || async {
        let sql = "SELECT change_seq FROM user_machines WHERE idp_user_id = 'user_1'";
        anyhow::Ok(router.sql.query_one(sql, &[]).await?.get::<_, i64>(0))
    };
    let before = change_seq().await?;
    router.sql.batch_execute("UPDATE user_machines SET proof_kids = '{k1,k2}'").await?;
    assert_eq!(change_seq().await?, before, "the acknowledgement makes every router reload every route");
    Ok(())
}

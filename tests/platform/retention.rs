//! Expired rows are deleted in batches; rows that are still needed remain.

use super::stack::Stack;

#[tokio::test(flavor = "multi_thread")]
async fn expired_rows_are_deleted_and_live_ones_kept() {
    let stack = Stack::start().await;
    let client = stack.database.connect().await.unwrap();
    // The sessions fill more than one batch.
    let fill = "INSERT INTO sessions (token_hash, host, idp_user_id, expires_at) \
        SELECT decode(lpad(to_hex(n), 64, '0'), 'hex'), 'app', 'user_1', now() - interval '2 hours' \
        FROM generate_series(1, 2500) AS n; \
        INSERT INTO sessions (token_hash, host, idp_user_id, expires_at) VALUES \
            ('live', 'app', 'user_1', now() + interval '1 minute'), \
            ('ended', 'app', 'user_1', now() - interval '1 minute'); \
        INSERT INTO session_codes (code_hash, idp_user_id, return_to, expires_at, used_at) VALUES \
            ('old', 'user_1', '/', now() - interval '2 hours', NULL), \
            ('used', 'user_1', '/', now() - interval '2 hours', now() - interval '2 hours'), \
            ('live', 'user_1', '/', now() + interval '1 minute', NULL); \
        INSERT INTO operator_audit (audit_id, at, actor, action, target, request_id) VALUES \
            (gen_random_uuid(), now() - interval '11 years', 'a', 'old', 't', 'r'), \
            (gen_random_uuid(), now() - interval '9 years', 'a', 'kept', 't', 'r'); \
        INSERT INTO idempotency_keys VALUES \
            ('a', 'old', 'r', 'x', 200, '{}', now() - interval '8 days'), \
            ('a', 'kept', 'r', 'x', 200, '{}', now() - interval '6 days'); \
        INSERT INTO operators (name, scopes, token_id, token_hash, expires_at, created_by, revoked_at, \
            previous_expires_at) \
        SELECT 'ada-' || n, '{read}', gen_random_uuid(), 'x', now() + make_interval(days => expires), 'operator', \
            now() + make_interval(days => revoked), now() + make_interval(days => previous) \
        FROM (VALUES (1, -4000, NULL, NULL), (2, -3000, NULL, NULL), (3, 10, -4000, NULL), (4, 10, -3000, NULL), \
            (5, 10, NULL, NULL), (6, -4000, -3000, NULL), (7, -4000, NULL, -3000)) \
            AS v (n, expires, revoked, previous)";
    client.batch_execute(fill).await.unwrap();
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let machine: uuid::Uuid = host_settings.machine.parse().unwrap();
    let old = uuid::Uuid::now_v7();
    // One statement, because the platform may delete the operation as soon as it is committed.
    let sql = "WITH old AS (INSERT INTO operations (operation_id, machine_id, kind, state, step, ended_at) \
                   VALUES ($1, $2, 'delete', 'succeeded', 'delete_server', now() - interval '401 days') \
                   RETURNING operation_id, step) \
               INSERT INTO operation_log (operation_id, step, outcome) SELECT operation_id, step, 'done' FROM old";
    client.execute(sql, &[&old, &machine]).await.unwrap();

    let only_live_remain = || async {
        let sql = "SELECT (SELECT count(*) FROM sessions), (SELECT count(*) FROM session_codes), \
            (SELECT count(*) FROM operator_audit WHERE action IN ('old', 'kept')), \
            (SELECT count(*) FROM idempotency_keys WHERE key IN ('old', 'kept')), \
            (SELECT count(*) FROM operations), (SELECT count(*) FROM operators)";
        let row = client.query_one(sql, &[]).await.unwrap();
        let counts: Vec<i64> = (0..6).map(|column| row.get(column)).collect();
        (counts == [2, 1, 1, 1, 1, 5]).then_some(())
    };
    stack.eventually("expired rows are deleted", only_live_remain).await;
    // A deletion is counted after it has been committed.
    let are_counted = || async {
        let metrics = stack.get(&process, "/metrics").await.text;
        let expected = [r#"{table="sessions"} 2500"#, r#"{table="operations"} 1"#];
        let is_shown = |labels: &str| metrics.contains(&format!("svc_retention_deleted_total{labels}"));
        expected.into_iter().all(is_shown).then_some(())
    };
    stack.eventually("the deleted rows are counted", are_counted).await;
}

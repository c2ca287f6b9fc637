//! Tests how many rows statements read, as counted by the database, and which indexes they use.

use deadpool_postgres::Object;
use kit::pg::{TestDatabase, test_database_from};
use svc::machine::id::MachineId;
use svc::machine::name::Handle;
use svc::platform::db::machines::{self, MachineFilter};
use svc::platform::db::{Db, fleet, former_machines, servers};
use svc::router::watch;
use uuid::Uuid;

const ACTIVE_MACHINES: i64 = 2_000;
/// Number of active machines that are booting.
const BOOTING_MACHINES: i64 = 300;
const ENDED_MACHINES: i64 = 20_000;
/// Number of ended machines whose servers may still exist.
const KEPT_SERVERS: i64 = 500;
const RUNNING_OPERATIONS: i64 = 400;
/// Maximum number of rows read by a statement that returns a few rows.
const MAX_ROWS_READ: i64 = 60;

/// A database with many machines and operations.
struct FilledDatabase {
    session: Object,
    _database: TestDatabase,
}

impl FilledDatabase {
    async fn start() -> Self {
        let database = test_database_from("platform", |url| async move {
            svc::platform::db::migrate::run(&url.parse()?).await
        });
        let database = database.await.expect("the test database must start");
        let db = Db::new(&database.url().parse().expect("the URL must be valid"), 1)
            .expect("the pool must be created");
        let session = db.session().await.expect("the database must accept a connection");
        session.batch_execute(&fill_sql()).await.expect("the rows must be inserted");
        session.batch_execute("VACUUM ANALYZE user_machines, operations, handles").await.unwrap();
        // PostgreSQL switches to generic plans after a prepared statement has run several times.
        session.batch_execute("SET plan_cache_mode = force_generic_plan").await.unwrap();
        Self { session, _database: database }
    }

    /// Returns the number of a table's rows that sequential and index scans have read so far.
    async fn count_rows_read(&self, table: &str) -> i64 {
        self.session.query_one("SELECT pg_stat_force_next_flush()", &[]).await.unwrap();
        self.session.batch_execute("SELECT pg_stat_clear_snapshot()").await.unwrap();
        let sql = "SELECT (seq_tup_read + (SELECT coalesce(sum(idx_tup_read), 0) FROM pg_stat_user_indexes i \
                   WHERE i.relname = $1))::int8 FROM pg_stat_user_tables t WHERE t.relname = $1";
        self.session.query_one(sql, &[&table]).await.unwrap().get(0)
    }

    async fn find_machine(&self, condition: &str) -> MachineId {
        let sql =
            format!("SELECT machine_id FROM user_machines WHERE {condition} ORDER BY machine_id LIMIT 1");
        MachineId(self.session.query_one(&sql, &[]).await.unwrap().get(0))
    }
}

fn fill_sql() -> String {
    let columns = "machine_id, idp_user_id, slot, handle, kind, status, epoch, restore_mode, server_type, location, \
                   image_version, bundle_sha256, https_port, registration_token_hash, upgrade_token_hash, \
                   provider_server_id, registration_expires_at, preview_expires_at, backup_taken_at, \
                   retired_at, deleted_at, server_deleted_at, replaced_by";
    let rest = "'empty', 'cpx22', 'nbg1', 'v1', 'x', 443, 'x', 'x'";
    format!(
        "SET statement_timeout = '60s';
         INSERT INTO handles SELECT 'user-' || n, 'user_' || n FROM generate_series(1, {ACTIVE_MACHINES}) n;
         INSERT INTO user_machines ({columns}) SELECT gen_random_uuid(), 'user_' || n, 'primary', 'user-' || n,
             CASE WHEN n % 10 = 0 THEN 'preview' ELSE 'customer' END,
             CASE WHEN n <= {BOOTING_MACHINES} THEN 'provisioning' ELSE 'running' END, 1000, {rest}, n,
             now() + interval '1 hour', now() + interval '1 hour', now(), NULL, NULL, NULL, NULL
             FROM generate_series(1, {ACTIVE_MACHINES}) n;
         INSERT INTO user_machines ({columns}) SELECT gen_random_uuid(), 'user_' || n % {ACTIVE_MACHINES} + 1,
             'primary', 'user-' || n % {ACTIVE_MACHINES} + 1,
             CASE WHEN n % 10 = 0 THEN 'preview' ELSE 'customer' END, 'provisioning',
             n / {ACTIVE_MACHINES} + 1, {rest}, {ACTIVE_MACHINES} + n, now() - interval '1 day',
             now() - interval '1 day', now() - interval '1 day', NULL, now(),
             CASE WHEN n > {KEPT_SERVERS} THEN now() END, NULL
             FROM generate_series(1, {ENDED_MACHINES}) n;
         UPDATE user_machines SET registration_expires_at = now() - interval '1 second'
             WHERE provider_server_id IN (1, 2);
         UPDATE user_machines SET preview_expires_at = now() - interval '1 second'
             WHERE provider_server_id IN (10, 20);
         UPDATE user_machines SET server_missing_since = now()
             WHERE provider_server_id IN (5, 6, {ACTIVE_MACHINES} + 7);
         UPDATE user_machines old SET deleted_at = NULL, retired_at = now(), replaced_by = new.machine_id
             FROM user_machines new
             WHERE old.provider_server_id = {ACTIVE_MACHINES} + 1 AND new.provider_server_id = 2;
         INSERT INTO operations (operation_id, machine_id, kind, state, step)
             SELECT gen_random_uuid(), machine_id, 'provision', 'succeeded', 'await_registration'
             FROM user_machines, generate_series(1, 2);
         INSERT INTO operations (operation_id, machine_id, kind, state, step, question)
             SELECT gen_random_uuid(), machine_id, 'power_off', 'running', 'stop_server',
                 CASE WHEN provider_server_id % 2 = 0 THEN '{{\"code\": \"x\"}}'::jsonb END
             FROM user_machines WHERE provider_server_id <= {RUNNING_OPERATIONS} / 2
                 OR provider_server_id
                     BETWEEN {ACTIVE_MACHINES} + 1 AND {ACTIVE_MACHINES} + {RUNNING_OPERATIONS} / 2"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_report_does_not_scan_ended_operations() {
    let database = FilledDatabase::start().await;
    let (operation_rows, machine_rows) =
        (database.count_rows_read("operations").await, database.count_rows_read("user_machines").await);
    let active = fleet::list_active_machines(&database.session).await.unwrap();
    let ended = former_machines::list_needing_attention(&database.session).await.unwrap();
    let operation_rows = database.count_rows_read("operations").await - operation_rows;
    let machine_rows = database.count_rows_read("user_machines").await - machine_rows;
    assert!(operation_rows <= 3 * RUNNING_OPERATIONS, "{operation_rows} operation rows read");
    assert!(machine_rows <= 2 * (ACTIVE_MACHINES + ENDED_MACHINES), "{machine_rows} machine rows read");
    let (half, quarter) =
        (usize::try_from(RUNNING_OPERATIONS / 2).unwrap(), usize::try_from(RUNNING_OPERATIONS / 4).unwrap());
    let count = |has: fn(&fleet::FleetRow) -> bool| active.iter().filter(|row| has(row)).count();
    assert_eq!(active.len(), usize::try_from(ACTIVE_MACHINES).unwrap());
    assert_eq!(count(|row| row.operation_age.is_some()), half);
    assert_eq!(count(|row| row.waiting_operation.is_some()), quarter);
    assert_eq!(count(|row| row.backup_age.is_some_and(|age| age < 3600.0)), active.len());
    assert_eq!(ended.iter().filter(|row| row.waiting_operation.is_some()).count(), quarter);
}

#[tokio::test(flavor = "multi_thread")]
async fn rare_rows_are_read_through_an_index() {
    let database = FilledDatabase::start().await;
    let session = &database.session;
    let before = database.count_rows_read("user_machines").await;
    assert_eq!(machines::list_expired_registrations(session).await.unwrap().len(), 2);
    let expired = database.count_rows_read("user_machines").await;
    assert!(expired - before <= MAX_ROWS_READ, "{} rows read for expired registrations", expired - before);

    assert_eq!(machines::list_expired_previews(session).await.unwrap().len(), 2);
    let previews = database.count_rows_read("user_machines").await;
    assert!(previews - expired <= MAX_ROWS_READ, "{} rows read for expired previews", previews - expired);

    let listed: Vec<i64> = (1..=ACTIVE_MACHINES).collect();
    servers::record_seen(session, &listed).await.unwrap();
    let recorded = database.count_rows_read("user_machines").await;
    assert!(recorded - previews <= MAX_ROWS_READ, "{} rows read for listed servers", recorded - previews);
    assert_eq!(
        database.find_machine("server_missing_since IS NOT NULL").await,
        database.find_machine(&format!("provider_server_id = {ACTIVE_MACHINES} + 7")).await
    );

    let successor = database.find_machine("provider_server_id = 2").await;
    let before = database.count_rows_read("user_machines").await;
    assert!(machines::find_predecessor(session, successor).await.unwrap().is_some());
    let replaced = database.count_rows_read("user_machines").await;
    assert!(replaced - before <= MAX_ROWS_READ, "{} rows read for the replaced machine", replaced - before);
}

#[tokio::test(flavor = "multi_thread")]
async fn list_by_handle_reads_only_that_users_machines() {
    let database = FilledDatabase::start().await;
    let handle = |text: &str| Some(text.parse::<Handle>().unwrap());
    let before = database.count_rows_read("user_machines").await;
    let filter = MachineFilter { handle: handle("user-7"), ..MachineFilter::default() };
    let listed = machines::list(&database.session, &filter, 50).await.unwrap();
    assert_eq!(listed.iter().map(|row| row.handle.as_str()).collect::<Vec<_>>(), ["user-7"]);
    let rows_read = database.count_rows_read("user_machines").await - before;
    assert!(rows_read <= MAX_ROWS_READ, "{rows_read} rows read");
    let below = MachineFilter {
        handle: handle("user-7"),
        before: Some(MachineId(Uuid::nil())),
        ..MachineFilter::default()
    };
    assert!(machines::list(&database.session, &below, 50).await.unwrap().is_empty());
    let unknown = MachineFilter { handle: handle("unknown"), ..MachineFilter::default() };
    assert!(machines::list(&database.session, &unknown, 50).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn router_poll_digest_uses_an_index_only_scan() {
    let database = FilledDatabase::start().await;
    let sql = format!("EXPLAIN {}", watch::digest_query());
    let plan: Vec<String> =
        database.session.query(&sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert!(plan.join("\n").contains("Index Only Scan using user_machines_routed"), "{plan:#?}");
}

/// With an index on a column that heartbeats write, each heartbeat would update every index.
#[tokio::test(flavor = "multi_thread")]
async fn no_index_contains_a_heartbeat_column() {
    let database = FilledDatabase::start().await;
    let sql = "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'user_machines'::regclass \
               AND pg_get_indexdef(indexrelid) ~ \
               '(heartbeat_at|image_version|health|last_backup|backup_taken_at|last_update|updating|checks|attention\
               |bundle_keys_sequence|bundle_key_ids|certificate|files)'";
    let indexes: Vec<String> =
        database.session.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(indexes, Vec::<String>::new());
}

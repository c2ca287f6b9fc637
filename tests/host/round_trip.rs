//! A restore reproduces the state at the time of the backup: the plain dumps are identical.

use anyhow::{Context, Result};
use kit::child;
use svc::store::pointer::Fence;
use svc::store::pointer_io;
use svc::store::snapshot::Sidecar;

use super::machine::{self, BUCKET, Machine, USER, slot};

/// Creates two apps with their own schemas and roles, sequences, a partitioned table, a large table, privileges and
/// settings.
const CREATE_CONTENT: &str = r#"
CREATE ROLE "app_notes" LOGIN PASSWORD 'x';
CREATE ROLE "app_To do" LOGIN PASSWORD 'y';
CREATE ROLE reader NOLOGIN;
CREATE SCHEMA app_notes AUTHORIZATION "app_notes";
CREATE SCHEMA "app_To do" AUTHORIZATION "app_To do";
CREATE TABLE app_notes.notes (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), n bigserial, body jsonb, at timestamptz DEFAULT now());
ALTER TABLE app_notes.notes OWNER TO "app_notes";
CREATE INDEX ON app_notes.notes USING gin (body);
INSERT INTO app_notes.notes (body) SELECT jsonb_build_object('n', n, 'text', 'it''s ' || n) FROM generate_series(1, 5000) n;
SELECT setval('app_notes.notes_n_seq', 70000);
CREATE TABLE "app_To do"."It""em" (id int PRIMARY KEY, done boolean, price numeric(20,5));
ALTER TABLE "app_To do"."It""em" OWNER TO "app_To do";
INSERT INTO "app_To do"."It""em" SELECT n, n % 2 = 0, n / 3.0 FROM generate_series(1, 300) n;
GRANT SELECT ON "app_To do"."It""em" TO reader;
CREATE VIEW app_notes.recent AS SELECT id, at FROM app_notes.notes ORDER BY n DESC LIMIT 10;
CREATE TABLE public.events (at date NOT NULL, what text) PARTITION BY RANGE (at);
CREATE TABLE public.events_2025 PARTITION OF public.events FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
CREATE TABLE public.events_2026 PARTITION OF public.events FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');
INSERT INTO public.events SELECT '2025-12-01'::date + n, 'e' || n FROM generate_series(1, 60) n;
CREATE TABLE public.empty (id int);
CREATE TABLE public.parent (id int); CREATE TABLE public.child () INHERITS (public.parent);
INSERT INTO public.parent VALUES (1); INSERT INTO public.child VALUES (2), (3);
CREATE TABLE public.big (id int, noise bytea);
INSERT INTO public.big SELECT n, decode(string_agg(md5(n::text || '-' || m), ''), 'hex') FROM generate_series(1, 1000) n, generate_series(1, 1000) m GROUP BY n;
REVOKE ALL ON DATABASE svc FROM PUBLIC;
GRANT CONNECT ON DATABASE svc TO "app_notes", reader;
ALTER DATABASE svc SET search_path = app_notes, "app_To do", public;
ALTER DATABASE svc SET statement_timeout = '31s';
ALTER DATABASE svc SET app.name = 'it''s \ here';
ALTER ROLE reader IN DATABASE svc SET work_mem = '7MB';
"#;

/// Lists the database's privileges and settings, which a dump of the content does not contain.
const LIST_DATABASE_ATTRIBUTES: &str = "\
     SELECT coalesce((SELECT string_agg(coalesce(r.rolname, 'PUBLIC') || ' ' || a.privilege_type, ',' \
     ORDER BY r.rolname, a.privilege_type) FROM aclexplode(d.datacl) a LEFT JOIN pg_roles r ON r.oid = a.grantee), '-') \
     || ' | ' || (SELECT string_agg(coalesce(r.rolname, '*') || ' ' || c, ' ; ' ORDER BY r.rolname, c) \
     FROM pg_db_role_setting s CROSS JOIN unnest(s.setconfig) c LEFT JOIN pg_roles r ON r.oid = s.setrole \
     WHERE s.setdatabase = d.oid AND c NOT LIKE 'svc.restore_id=%') \
     FROM pg_database d WHERE datname = 'svc'";

fn plain_dump(machine: &Machine) -> Result<String> {
    let mut dump = machine.postgres().binaries().client_command("pg_dump");
    dump.arg(machine.postgres().url("svc"));
    let text = child::run(dump, std::time::Duration::from_secs(60))?;
    // Leaves out the `\restrict` lines, whose key is random.
    Ok(text
        .lines()
        .filter(|line| !line.starts_with("\\restrict") && !line.starts_with("\\unrestrict"))
        .fold(String::new(), |text, line| text + line + "\n"))
}

async fn database_attributes(machine: &Machine) -> Result<String> {
    Ok(machine.postgres().connect("postgres").await?.query_one(LIST_DATABASE_ATTRIBUTES, &[]).await?.get(0))
}

#[tokio::test]
async fn restored_database_equals_the_backed_up_one() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    old.client().await?.batch_execute(CREATE_CONTENT).await?;
    old.run(&["svc-db-backup"])?.expect(0);

    let pointer = machine::read_pointer(&store).await?.context("there is no pointer")?;
    let snapshot = pointer.snapshot.context("the pointer names no snapshot")?;
    assert_eq!((pointer.fence_epoch, pointer.seq, snapshot.epoch), (old.epoch, 1, old.epoch));
    let object = format!("{USER}/primary/{}", snapshot.key);
    let dump = store.read(BUCKET, &object).context("the object is missing")?;
    assert_eq!(dump.len() as u64, snapshot.size_bytes);
    assert!(dump.len() > 11 << 20, "{} bytes: the upload must need three parts", dump.len());
    let parts: Vec<_> =
        store.requests().into_iter().filter(|request| request.query.contains("partNumber=")).collect();
    assert!(parts.len() >= 3, "{parts:?}");

    let sidecar: Sidecar = serde_json::from_slice(
        &store.read(BUCKET, &format!("{object}.json")).context("the sidecar is missing")?,
    )?;
    assert_eq!(sidecar.roles, ["app_To do", "app_notes", "reader"]);
    let rows = |name: &str| sidecar.tables.iter().find(|table| table.name == name).map(|table| table.rows);
    assert_eq!(rows("app_notes.notes"), Some(5000));
    assert_eq!(rows("\"app_To do\".\"It\"\"em\""), Some(300));
    assert_eq!((rows("public.parent"), rows("public.child")), (Some(1), Some(2)));
    assert_eq!(rows("public.events"), None, "a partitioned table's rows must be counted in its partitions");

    let record = &old.backup_records()?[0];
    assert_eq!(record["status"], "success");
    assert_eq!(record["sha256"], snapshot.sha256.as_str());

    let new = Machine::new(&store, 2).await?;
    pointer_io::fence(&machine::bucket(&store)?, &slot(), &Fence::unsigned(new.epoch, new.id)).await?;
    new.client().await?.batch_execute("CREATE TABLE created_before_restore (id int)").await?;
    new.run(&["svc-restore"])?.expect(0);
    assert!(new.has_marker());
    assert_eq!(plain_dump(&new)?, plain_dump(&old)?);

    assert_eq!(database_attributes(&new).await?, database_attributes(&old).await?);
    let logins = "SELECT count(*) FROM pg_roles WHERE rolcanlogin AND rolname ~ '^app_'";
    assert_eq!(new.client().await?.query_one(logins, &[]).await?.get::<_, i64>(0), 0);
    let remaining = new.databases().await?;
    assert!(
        remaining.iter().any(|name| name.starts_with("svc_before_")),
        "the old database must be kept: {remaining:?}"
    );
    assert!(!remaining.iter().any(|name| name.starts_with("svc_restore_")), "{remaining:?}");
    assert_eq!(
        std::fs::read_dir(new.path("var/lib/svc/restore"))?.count(),
        1,
        "only the lock file may remain"
    );

    new.run(&["svc-db-backup"])?.expect(0);
    assert!(!new.databases().await?.iter().any(|name| name.starts_with("svc_before_")));
    assert_eq!(store.objects(BUCKET, &format!("{USER}/primary/system/db/snapshots/")).len(), 4);
    Ok(())
}

/// Settings that would make the load or the row counts fail if they applied to the session, and a list of names, one of
/// which needs quotes.
const RESTRICTIVE_SETTINGS: &str = "
    CREATE ROLE team NOLOGIN; CREATE ROLE reader NOLOGIN;
    ALTER ROLE reader IN DATABASE svc SET default_transaction_read_only = on;
    ALTER ROLE reader IN DATABASE svc SET role = 'team';
    ALTER ROLE reader IN DATABASE svc SET session_preload_libraries = 'auto_explain', 'other library';
    ALTER DATABASE svc SET default_transaction_read_only = on";

#[tokio::test]
async fn load_keeps_settings_that_restrict_sessions() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    old.client().await?.batch_execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)").await?;
    // The first backup adopts the database, which is not possible once it is read-only.
    old.run(&["svc-db-backup"])?.expect(0);
    old.client().await?.batch_execute(RESTRICTIVE_SETTINGS).await?;
    old.run(&["svc-db-backup"])?.expect(0);
    old.run(&["svc-db-backup", "drill"])?.expect(0);
    old.run(&["svc-db-backup", "side", "open"])?.expect(0);

    let new = Machine::new(&store, 2).await?;
    new.run(&["svc-restore"])?.expect(0);
    let restored = database_attributes(&new).await?;
    assert_eq!(restored, database_attributes(&old).await?);
    assert!(
        restored.contains("reader session_preload_libraries=auto_explain, \"other library\""),
        "{restored}"
    );
    new.run(&["svc-db-backup"])?.expect(0);
    Ok(())
}

#[tokio::test]
async fn stock_pg_restore_reads_the_object() -> Result<()> {
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    machine.client().await?.batch_execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)").await?;
    machine.run(&["svc-db-backup", "run"])?.expect(0);
    let snapshot = machine::read_pointer(&store)
        .await?
        .and_then(|p| p.snapshot)
        .context("the pointer names no snapshot")?;
    let dump = tempfile::NamedTempFile::new()?;
    std::fs::write(
        dump.path(),
        store.read(BUCKET, &format!("{USER}/primary/{}", snapshot.key)).context("the object is missing")?,
    )?;
    let mut list = machine.postgres().binaries().client_command("pg_restore");
    list.arg("-l").arg(dump.path());
    let contents = child::run(list, std::time::Duration::from_secs(20))?;
    assert!(contents.contains("TABLE DATA public t"), "{contents}");
    Ok(())
}

/// Concurrent writes cannot make the dump and the row counts differ, because both use the same snapshot. The writer
/// needs its own thread, because the test's thread waits for the backup.
#[tokio::test(flavor = "multi_thread")]
async fn database_in_use_is_backed_up_consistently() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    let client = old.client().await?;
    client.batch_execute("CREATE TABLE a (id bigserial); CREATE TABLE b (id bigserial)").await?;
    let writer = tokio::spawn(async move {
        while client
            .batch_execute("BEGIN; INSERT INTO a DEFAULT VALUES; INSERT INTO b DEFAULT VALUES; COMMIT")
            .await
            .is_ok()
        {}
    });
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    old.run_with(
        &["svc-db-backup"],
        &[("FAILPOINTS", "backup.snapshot=sleep(300);backup.streaming=sleep(100)")],
    )?
    .expect(0);
    writer.abort();
    let count = "SELECT (SELECT count(*) FROM a), (SELECT count(*) FROM b)";
    let written: i64 = old.client().await?.query_one(count, &[]).await?.get(0);
    let new = Machine::new(&store, 2).await?;
    new.run(&["svc-restore"])?.expect(0);
    let row = new.client().await?.query_one(count, &[]).await?;
    let (a, b): (i64, i64) = (row.get(0), row.get(1));
    assert!(a > 0 && a == b, "{a} and {b}");
    assert!(written > a, "{written} rows written and {a} restored: nothing was written during the backup");
    Ok(())
}

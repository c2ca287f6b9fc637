//! The SQL in archives from an untrusted author runs without privileges and leaves no code behind, and memory use does
//! not depend on the sizes that the archives claim.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kit::s3::S3Server;
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};
use svc::host::snapshots::archive::{ArchiveEntry, sha256};
use svc::host::system::tar_reader::EntryKind;

use super::machine::{self, Machine, RunResult};

/// The start of the statement that a hostile one replaces: a comment, which `pg_restore` sends exactly as in the dump.
const COMMENT: &str = "COMMENT ON TABLE app_notes.notes IS '";
const MAX_STATEMENT_BYTES: usize = 1200;
/// Maximum memory for a process that reads an archive; the program itself needs about 50 MiB.
const MAX_RESIDENT_BYTES: u64 = 160 << 20;

/// The entries of a valid archive, on which hostile ones are based.
struct ValidArchive {
    info: Vec<u8>,
    dump: Vec<u8>,
    sidecar: Value,
}

impl ValidArchive {
    async fn export(store: &S3Server) -> Result<Self> {
        let machine = Machine::in_use(store, 1).await?;
        let comment = "x".repeat(MAX_STATEMENT_BYTES);
        let sql = format!(
            "CREATE ROLE app_notes NOLOGIN; CREATE SCHEMA app_notes AUTHORIZATION app_notes;
             CREATE TABLE app_notes.notes (id int PRIMARY KEY, body text DEFAULT 'x' CHECK (body <> ''));
             ALTER TABLE app_notes.notes OWNER TO app_notes; GRANT SELECT ON app_notes.notes TO PUBLIC;
             INSERT INTO app_notes.notes SELECT n, md5(n::text) FROM generate_series(1, 50) n; {COMMENT}{comment}'"
        );
        machine.client().await?.batch_execute(&sql).await?;
        let archive = machine.path("ada.tar");
        machine
            .run(&[
                "svc-db-backup",
                "export",
                "--output",
                archive.to_str().context("the path is not UTF-8")?,
            ])?
            .expect(0);
        let mut valid = Self { info: Vec::new(), dump: Vec::new(), sidecar: Value::Null };
        for entry in tar::Archive::new(File::open(&archive)?).entries()? {
            let mut entry = entry?;
            let (path, mut body) = (entry.path()?.into_owned(), Vec::new());
            std::io::Read::read_to_end(&mut entry, &mut body)?;
            match path.to_str() {
                Some("export.json") => valid.info = body,
                Some("database.dump") => valid.dump = body,
                Some("database.json") => valid.sidecar = serde_json::from_slice(&body)?,
                _ => {}
            }
        }
        Ok(valid)
    }

    /// Writes the archive with the given statement in its dump and matching digests.
    fn write_with(&self, statement: &str, to: &Path) -> Result<()> {
        assert!(statement.len() <= MAX_STATEMENT_BYTES, "{statement}");
        let mut dump = self.dump.clone();
        let begin = dump
            .windows(COMMENT.len())
            .position(|part| part == COMMENT.as_bytes())
            .context("no comment in the dump")?;
        let end = begin + COMMENT.len() + MAX_STATEMENT_BYTES + "';".len();
        assert_eq!(&dump[end - 3..end], b"x';");
        dump[begin..end].fill(b' ');
        dump[begin..begin + statement.len()].copy_from_slice(statement.as_bytes());
        let mut sidecar = self.sidecar.clone();
        sidecar["sha256"] = json!(sha256(&dump));
        let sidecar = serde_json::to_vec(&sidecar)?;
        let mut entries =
            vec![("export.json", self.info.clone()), ("database.dump", dump), ("database.json", sidecar)];
        let manifest_entries: Vec<ArchiveEntry> = entries
            .iter()
            .map(|(path, body)| ArchiveEntry {
                path: (*path).to_owned(),
                kind: EntryKind::File,
                size_bytes: body.len() as u64,
                sha256: Some(sha256(body)),
            })
            .collect();
        let manifest = json!({"version": 1, "entries": manifest_entries, "leftOut": []});
        entries.push(("manifest.json", serde_json::to_vec(&manifest)?));
        let mut tar = tar::Builder::new(File::create(to)?);
        for (path, body) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_size(body.len() as u64);
            header.set_mode(0o600);
            tar.append_data(&mut header, path, body.as_slice())?;
        }
        Ok(tar.finish()?)
    }
}

fn run_import(machine: &Machine, archive: &Path) -> Result<RunResult> {
    machine.run(&["svc-restore", "import", archive.to_str().context("the path is not UTF-8")?, "--no-backup"])
}

/// Lists what a refused import must not leave behind: databases, roles, memberships and settings.
async fn list_traces(machine: &Machine) -> Result<Vec<String>> {
    let client = machine.postgres().connect("postgres").await?;
    let sql = "SELECT 'database ' || datname FROM pg_database WHERE datname LIKE 'svc\\_%'
         UNION ALL SELECT 'role ' || rolname || ' ' || rolsuper FROM pg_roles WHERE rolname !~ '^(pg_|postgres$)'
         UNION ALL SELECT 'member of ' || roleid::regrole FROM pg_auth_members WHERE member >= 16384
         UNION ALL SELECT 'setting ' || c FROM pg_db_role_setting CROSS JOIN unnest(setconfig) c WHERE c NOT LIKE 'svc.%'
         UNION ALL SELECT 'changed ' || name FROM pg_file_settings WHERE sourcefile LIKE '%postgresql.auto.conf'";
    Ok(client.query(sql, &[]).await?.iter().map(|row| row.get(0)).collect())
}

#[tokio::test]
async fn import_runs_archive_sql_without_privileges() -> Result<()> {
    let store = machine::start_store()?;
    let valid = ValidArchive::export(&store).await?;
    let machine = Machine::in_use(&store, 2).await?;
    machine.client().await?.batch_execute("CREATE TABLE public.before (a int)").await?;
    let (archive, planted) = (machine.path("hostile.tar"), machine.path("planted"));
    let planted_at = planted.display();
    let definer = "CREATE FUNCTION app_notes.f(text) RETURNS text IMMUTABLE SECURITY DEFINER LANGUAGE plpgsql AS \
        'BEGIN BEGIN CREATE ROLE planted SUPERUSER; EXCEPTION WHEN insufficient_privilege THEN NULL; END; RETURN $1; END'; ";
    let cases = [
        // Statements that the role may not run.
        format!("COPY (SELECT 1) TO PROGRAM 'touch {planted_at}'"),
        format!("COPY (SELECT 1) TO '{planted_at}'"),
        "COPY app_notes.notes (body) FROM '/etc/passwd'".to_owned(),
        "ALTER SYSTEM SET log_connections = on".to_owned(),
        "SET ROLE postgres".to_owned(),
        "RESET ROLE; SET SESSION AUTHORIZATION postgres".to_owned(),
        "CREATE ROLE planted SUPERUSER".to_owned(),
        "GRANT pg_execute_server_program TO CURRENT_USER".to_owned(),
        "CREATE FUNCTION app_notes.f() RETURNS int LANGUAGE c AS 'libc', 'system'".to_owned(),
        "CREATE FUNCTION app_notes.e() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'; \
         CREATE EVENT TRIGGER planted ON ddl_command_start EXECUTE FUNCTION app_notes.e()"
            .to_owned(),
        // Statements that the role may run, but that create objects or privileges that the import must refuse.
        format!("{definer} CREATE INDEX ON app_notes.notes (app_notes.f(body))"),
        format!("{definer} ALTER TABLE app_notes.notes ADD CHECK (app_notes.f(body) <> '')"),
        "ALTER TABLE app_notes.notes ALTER body SET DEFAULT pg_catalog.pg_read_file('/etc/passwd')"
            .to_owned(),
        "ALTER TABLE app_notes.notes ADD CHECK (pg_catalog.set_config('role', 'x', false) <> body) NOT VALID"
            .to_owned(),
        "CREATE VIEW public.planted AS SELECT * FROM pg_catalog.pg_authid".to_owned(),
        "CREATE MATERIALIZED VIEW public.planted AS SELECT * FROM pg_catalog.pg_authid WITH NO DATA"
            .to_owned(),
        "CREATE RULE planted AS ON INSERT TO app_notes.notes DO ALSO DELETE FROM app_notes.notes".to_owned(),
        "GRANT SELECT ON app_notes.notes TO PUBLIC".to_owned(),
        "GRANT UPDATE (body) ON app_notes.notes TO PUBLIC".to_owned(),
        "GRANT CREATE ON SCHEMA public TO PUBLIC".to_owned(),
        "ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC".to_owned(),
        "CREATE POLICY planted ON app_notes.notes USING (true)".to_owned(),
        "DO 'BEGIN EXECUTE \
         format(''GRANT CREATE, TEMPORARY ON DATABASE %I TO pg_monitor'', current_database()); END'"
            .to_owned(),
        // Objects created after initdb have OIDs from 16384, except large objects, whose creator may choose the OID.
        "SELECT pg_catalog.lo_create(5000)".to_owned(),
    ];
    for statement in &cases {
        valid.write_with(statement, &archive)?;
        let result = run_import(&machine, &archive)?;
        assert_eq!(result.exit_code, Some(65), "{statement}: {}", result.stderr);
        assert!(!planted.exists(), "{statement}");
        assert_eq!(list_traces(&machine).await?, Vec::<String>::new(), "{statement}");
        machine.client().await?.batch_execute("SELECT FROM public.before").await?;
    }
    Ok(())
}

/// No setting in the archive is imported; owners and privileges are those that an import sets.
#[tokio::test]
async fn import_drops_settings_and_owners_from_the_archive() -> Result<()> {
    let store = machine::start_store()?;
    let mut valid = ValidArchive::export(&store).await?;
    valid.sidecar["database"]["settings"] =
        json!([{"role": null, "name": "session_preload_libraries", "value": "x"}]);
    valid.sidecar["database"]["owner"] = json!("app_notes");
    valid.sidecar["database"]["roles"] = json!([{"name": "app_notes", "createRole": true, "settings": [],
        "memberOf": [{"role": "pg_execute_server_program", "admin": true, "inherit": true, "set": true}]}]);
    let machine = Machine::in_use(&store, 2).await?;
    let archive = machine.path("settings.tar");
    let statement = "DO 'BEGIN \
         EXECUTE format(''ALTER DATABASE %I SET search_path = app_notes'', current_database()); \
         EXECUTE format(''ALTER DATABASE %I CONNECTION LIMIT 7'', current_database()); \
         EXECUTE format(''ALTER ROLE %I IN DATABASE %I SET role = none'', current_user, current_database()); END'";
    valid.write_with(statement, &archive)?;
    run_import(&machine, &archive)?.expect(0);
    let remaining: Vec<String> = list_traces(&machine)
        .await?
        .into_iter()
        .filter(|trace| !trace.starts_with("database svc_before_"))
        .collect();
    assert_eq!(remaining, Vec::<String>::new());
    let client = machine.client().await?;
    let sql = "SELECT c.relowner::regrole::text, c.relacl IS NULL, n.nspowner::regrole::text, d.datdba::regrole::text,
                      d.datconnlimit
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                 JOIN pg_database d ON d.datname = current_database() WHERE c.relname = 'notes'";
    let row = client.query_one(sql, &[]).await?;
    let owners: [&str; 3] = [row.get(0), row.get(2), row.get(3)];
    assert_eq!(owners, ["postgres"; 3]);
    assert!(row.get::<_, bool>(1), "no privilege from the archive may be kept");
    assert_eq!(row.get::<_, i32>(4), -1);
    let rows: i64 = client.query_one("SELECT count(*) FROM app_notes.notes", &[]).await?.get(0);
    assert_eq!(rows, 50);
    Ok(())
}

/// The cleanup must not depend on the connection that the import opened before the load.
#[tokio::test]
async fn import_that_loses_its_connection_leaves_no_traces() -> Result<()> {
    let store = machine::start_store()?;
    let valid = ValidArchive::export(&store).await?;
    let machine = Machine::in_use(&store, 2).await?;
    let archive = machine.path("valid.tar");
    valid.write_with("SELECT 1", &archive)?;
    let import = ["svc-restore", "import", machine::path_str(&archive), "--no-backup"];
    let import = machine.spawn(&import, &[("FAILPOINTS", "import.settings_reset=sleep(5000)")])?;
    let admin = machine.postgres().connect("postgres").await?;
    // The connection is idle during this fail point; its last statement has reset the settings of the database.
    let end_session = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity
         WHERE application_name = 'svc-restore' AND datname = 'postgres'
           AND query LIKE '%IS_TEMPLATE false%' AND state = 'idle'";
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while admin.query_one(end_session, &[]).await?.get::<_, i64>(0) == 0 {
        anyhow::ensure!(std::time::Instant::now() < deadline, "the import did not reach the fail point");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    import.wait()?.expect(69);
    assert_eq!(list_traces(&machine).await?, Vec::<String>::new());
    Ok(())
}

/// Returns a tar header with the claimed size, without a body.
fn header(kind: u8, path: &str, size: u64) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_mode(0o600);
    header.set_mtime(0);
    header.set_size(size);
    header.set_cksum();
    header.as_bytes().to_vec()
}

/// Creates a sparse file, which needs no disk space.
fn create_sparse_file(path: PathBuf, head: &[u8], size: u64) -> Result<PathBuf> {
    let file = File::create(&path)?;
    file.write_all_at(head, 0)?;
    file.set_len(512 + size.next_multiple_of(512) + 1024)?;
    Ok(path)
}

#[tokio::test]
async fn import_check_does_not_trust_claimed_sizes() -> Result<()> {
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    let gib = 1 << 30;
    let mut cases = Vec::new();
    for (name, kind, path) in [
        ("long-name", b'L', "././@LongLink"),
        ("long-link", b'K', "././@LongLink"),
        ("attributes", b'x', "pax"),
        ("global", b'g', "pax"),
        ("info", b'0', "export.json"),
        ("side", b'0', "database.json"),
    ] {
        cases.push(create_sparse_file(machine.path(name), &header(kind, path, 2 * gib), 2 * gib)?);
    }
    cases.push(create_sparse_file(
        machine.path("manifest"),
        &header(b'0', "manifest.json", 500 << 20),
        500 << 20,
    )?);
    // Parsed into strings, this text would take many times its size in memory.
    let text = format!("{{\"version\":1,\"entries\":[],\"leftOut\":[{}\"\"]}}", "\"\",".repeat(20_000_000));
    let mut tar = header(b'0', "manifest.json", text.len() as u64);
    tar.extend(text.as_bytes());
    tar.resize(tar.len().next_multiple_of(512) + 1024, 0);
    fs::write(machine.path("texts"), tar)?;
    cases.push(machine.path("texts"));
    for archive in cases {
        let result = machine.run(&[
            "svc-restore",
            "import",
            archive.to_str().context("the path is not UTF-8")?,
            "--check",
        ])?;
        assert_eq!(result.exit_code, Some(65), "{}: {}", archive.display(), result.stderr);
        // The kernel reports the maximum, in KiB, over all child processes that have ended.
        let resident = u64::try_from(getrusage(UsageWho::RUSAGE_CHILDREN)?.max_rss())? * 1024;
        assert!(resident < MAX_RESIDENT_BYTES, "{}: {resident} bytes", archive.display());
    }
    Ok(())
}

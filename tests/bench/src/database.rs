//! A reproducible database the size of a busy owner's: pgbench's tables, and documents with a GIN index. The database
//! with scale factor [`SCALE`] is cached under `target/bench`; others are created for each run and deleted with the
//! run's directory.

use std::fs;
use std::future::Future;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::statvfs::statvfs;

use kit::child;
use kit::fetch::target_dir;
use kit::pg::{Durability, PgBinaries, PgOptions, PgServer};

/// Name of the owner's database, as on a machine.
pub const NAME: &str = "svc";
/// pgbench scale of the cached database: 1.9 GB.
pub const SCALE: u32 = 100;
const DOCUMENTS_PER_SCALE: u32 = 6_000;
const FILL_TIMEOUT: Duration = Duration::from_secs(3600);

/// Creates documents of about 350 bytes. About half of each document cannot be compressed.
const DOCUMENTS_SQL: &str = "\
    CREATE FUNCTION pg_temp.noise(bigint, text) RETURNS text LANGUAGE sql IMMUTABLE AS \
      $$SELECT encode(sha256(convert_to($1 || $2, 'UTF8')), 'base64')$$; \
    CREATE TABLE documents (id bigint PRIMARY KEY, body jsonb NOT NULL); \
    INSERT INTO documents SELECT n, jsonb_build_object('title', 'document ' || n, 'done', n % 3 = 0, \
      'rank', n % 1000, 'tags', jsonb_build_array('tag-' || n % 97, 'tag-' || n % 1009), 'author', \
      'user_' || n % 5003, 'text', pg_temp.noise(n, 'a') || pg_temp.noise(n, 'b') || pg_temp.noise(n, 'c') || \
      pg_temp.noise(n, 'd') || pg_temp.noise(n, 'e')) \
      FROM generate_series(1::bigint, $ROWS) n; \
    SET maintenance_work_mem = '256MB'; CREATE INDEX ON documents USING gin (body)";

/// Settings from `svc-postgres.service`.
const SETTINGS: [(&str, &str); 2] = [("shared_buffers", "256MB"), ("effective_cache_size", "1GB")];

/// Starts a new server configured as on a machine, without the owner's database; its data is under `dir`.
pub async fn start(dir: &Path) -> Result<PgServer> {
    PgServer::start(&binaries()?, options(dir.join("data"), &[])).await
}

/// Starts a server with a new database of this scale.
pub async fn create(dir: &Path, scale: u32) -> Result<PgServer> {
    let data = dir.join("data");
    let bulk = start_bulk(&data).await?;
    fill(&bulk, scale).await?;
    bulk.stop().await?;
    open(data, bulk.password().to_owned()).await
}

/// Opens the cached database. Creates it first if it is missing, or if the statements that fill it have changed.
pub async fn open_cached(dir: &Path) -> Result<PgServer> {
    let (cache, recipe) = (dir.join("postgresql"), format!("scale {SCALE}: {DOCUMENTS_SQL}"));
    if fs::read_to_string(cache.join("recipe")).ok().as_ref() != Some(&recipe) {
        println!("  creating a database of scale {SCALE} (only once); it is cached in {}", cache.display());
        let partial = dir.join(".postgresql");
        for old in [&cache, &partial] {
            fs::remove_dir_all(old).ok();
        }
        // The directory contains the superuser's password.
        fs::DirBuilder::new().mode(0o700).create(&partial)?;
        let bulk = start_bulk(&partial.join("data")).await?;
        fill(&bulk, SCALE).await?;
        bulk.stop().await?;
        fs::write(partial.join("password"), bulk.password())?;
        fs::write(partial.join("recipe"), recipe)?;
        fs::rename(&partial, &cache)?;
    }
    open(cache.join("data"), fs::read_to_string(cache.join("password"))?).await
}

fn binaries() -> Result<PgBinaries> {
    PgBinaries::locate_or_fetch(&target_dir())
}

fn options(data: PathBuf, extra: &[(&str, &str)]) -> PgOptions {
    let settings =
        SETTINGS.iter().chain(extra).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    PgOptions {
        data_dir: Some(data),
        durability: Durability::FsyncOn,
        settings: settings.collect(),
        ..PgOptions::default()
    }
}

async fn open(data: PathBuf, password: String) -> Result<PgServer> {
    PgServer::open_with(&binaries()?, PgOptions { password: Some(password), ..options(data, &[]) }).await
}

/// Starts a server for loading, with minimal WAL: loading is faster, and the data directory contains less WAL.
async fn start_bulk(data: &Path) -> Result<PgServer> {
    let bulk = [("wal_level", "minimal"), ("max_wal_senders", "0")];
    let server = PgServer::start(&binaries()?, options(data.to_owned(), &bulk)).await?;
    server.create_database(NAME).await?;
    Ok(server)
}

async fn fill(server: &PgServer, scale: u32) -> Result<()> {
    let mut pgbench = server.binaries().client_command("pgbench");
    pgbench.args(["--initialize", "--quiet", "--scale", &scale.to_string(), NAME]);
    set_connection_env(&mut pgbench, server);
    child::run(pgbench, FILL_TIMEOUT)?;
    let client = server.connect(NAME).await?;
    let rows = scale * DOCUMENTS_PER_SCALE;
    for statement in
        [&*DOCUMENTS_SQL.replace("$ROWS", &rows.to_string()), "VACUUM (FREEZE, ANALYZE)", "CHECKPOINT"]
    {
        with_timeout(client.batch_execute(statement))
            .await
            .with_context(|| format!("cannot fill the database: {statement}"))?;
    }
    Ok(())
}

async fn with_timeout<T>(work: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T> {
    Ok(tokio::time::timeout(FILL_TIMEOUT, work).await.context("PostgreSQL timed out")??)
}

/// Sets a PostgreSQL client's connection parameters.
pub fn set_connection_env(command: &mut Command, server: &PgServer) {
    command.envs([
        ("PGHOST", "127.0.0.1"),
        ("PGPORT", &server.port().to_string()),
        ("PGUSER", "postgres"),
        ("PGPASSWORD", server.password()),
    ]);
}

/// Returns the tables in a database of this scale, with their row counts.
pub fn tables(scale: u32) -> [(&'static str, u64); 5] {
    let scale = u64::from(scale);
    [
        ("public.documents", scale * u64::from(DOCUMENTS_PER_SCALE)),
        ("public.pgbench_accounts", scale * 100_000),
        ("public.pgbench_branches", scale),
        ("public.pgbench_history", 0),
        ("public.pgbench_tellers", scale * 10),
    ]
}

/// Verifies the row counts.
pub async fn check_rows(server: &PgServer, scale: u32) -> Result<()> {
    let client = server.connect(NAME).await?;
    for (table, rows) in tables(scale) {
        let row = with_timeout(client.query_one(&format!("SELECT count(*) FROM {table}"), &[])).await?;
        let actual: i64 = row.try_get(0)?;
        ensure!(actual.unsigned_abs() == rows, "{table} has {actual} rows instead of {rows}");
    }
    Ok(())
}

/// Returns the database's size on disk.
pub async fn size_bytes(server: &PgServer) -> Result<u64> {
    let client = server.connect(NAME).await?;
    let size: i64 = with_timeout(client.query_one("SELECT pg_database_size(current_database())", &[]))
        .await?
        .try_get(0)?;
    Ok(size.unsigned_abs())
}

/// Creates a temporary directory under `out`. The disk must have more than `min_free_bytes` of free space.
pub fn create_run_dir(out: &Path, min_free_bytes: u64) -> Result<tempfile::TempDir> {
    fs::create_dir_all(out)?;
    let stats = statvfs(out).with_context(|| format!("cannot read the file system of {}", out.display()))?;
    let free = stats.blocks_available() * stats.fragment_size();
    ensure!(
        free > min_free_bytes,
        "{} has {} GiB free, but {} GiB are needed",
        out.display(),
        free >> 30,
        min_free_bytes >> 30
    );
    let dir = tempfile::Builder::new().prefix("run-").tempdir_in(out)?;
    child::remove_on_exit(dir.path());
    Ok(dir)
}

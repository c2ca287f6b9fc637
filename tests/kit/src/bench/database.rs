//! A database as large as a busy owner's: pgbench's tables, and documents with a GIN index; the same rows in every run.
//!
//! The one of [`SCALE`] is kept below `target/bench`; others are made for a run and go with their server.

use std::fs;
use std::future::Future;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::statvfs::statvfs;

use crate::child;
use crate::fetch::target_dir;
use crate::pg::{Durability, PgBinaries, PgOptions, PgServer};

/// The owner's database, as on a machine.
pub const NAME: &str = "svc";
/// pgbench's scale of the database that is kept: 1.9 GB.
pub const SCALE: u32 = 100;
const DOCUMENTS_PER_SCALE: u32 = 6_000;
const MAKING: Duration = Duration::from_secs(3600);

/// Documents of about 350 bytes, half of which no compression makes smaller.
const DOCUMENTS: &str = "\
    CREATE FUNCTION pg_temp.noise(bigint, text) RETURNS text LANGUAGE sql IMMUTABLE AS \
      $$SELECT encode(sha256(convert_to($1 || $2, 'UTF8')), 'base64')$$; \
    CREATE TABLE documents (id bigint PRIMARY KEY, body jsonb NOT NULL); \
    INSERT INTO documents SELECT n, jsonb_build_object('title', 'document ' || n, 'done', n % 3 = 0, \
      'rank', n % 1000, 'tags', jsonb_build_array('tag-' || n % 97, 'tag-' || n % 1009), 'author', \
      'user_' || n % 5003, 'text', pg_temp.noise(n, 'a') || pg_temp.noise(n, 'b') || pg_temp.noise(n, 'c') || \
      pg_temp.noise(n, 'd') || pg_temp.noise(n, 'e')) \
      FROM generate_series(1::bigint, $ROWS) n; \
    SET maintenance_work_mem = '256MB'; CREATE INDEX ON documents USING gin (body)";

/// What `svc-postgres.service` sets.
const SETTINGS: [(&str, &str); 2] = [("shared_buffers", "256MB"), ("effective_cache_size", "1GB")];

/// A new server as on a machine, without the owner's database; its data lies below `dir` and goes with it.
pub async fn server(dir: &Path) -> Result<PgServer> {
    PgServer::start(&binaries()?, options(dir.join("data"), &[])).await
}

/// A server with a database of this scale, made for one run.
pub async fn made(dir: &Path, scale: u32) -> Result<PgServer> {
    let data = dir.join("data");
    let making = making(&data).await?;
    fill(&making, scale).await?;
    making.stop().await?;
    open(data, making.password().to_owned()).await
}

/// The database that is kept, made where it is not there yet, or was made otherwise.
pub async fn kept(dir: &Path) -> Result<PgServer> {
    let (place, recipe) = (dir.join("postgresql"), format!("scale {SCALE}: {DOCUMENTS}"));
    if fs::read_to_string(place.join("recipe")).ok().as_ref() != Some(&recipe) {
        println!("  making a database of scale {SCALE}, once; it stays in {}", place.display());
        let partial = dir.join(".postgresql");
        for old in [&place, &partial] {
            fs::remove_dir_all(old).ok();
        }
        // The superuser's password lies in it.
        fs::DirBuilder::new().mode(0o700).create(&partial)?;
        let making = making(&partial.join("data")).await?;
        fill(&making, SCALE).await?;
        making.stop().await?;
        fs::write(partial.join("password"), making.password())?;
        fs::write(partial.join("recipe"), recipe)?;
        fs::rename(&partial, &place)?;
    }
    open(place.join("data"), fs::read_to_string(place.join("password"))?).await
}

fn binaries() -> Result<PgBinaries> {
    PgBinaries::locate_or_fetch(&target_dir())
}

fn options(data: PathBuf, further: &[(&str, &str)]) -> PgOptions {
    let settings =
        SETTINGS.iter().chain(further).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
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

/// A server that logs next to nothing of what it loads: it is quicker, and no log is kept beside the data.
async fn making(data: &Path) -> Result<PgServer> {
    let bulk = [("wal_level", "minimal"), ("max_wal_senders", "0")];
    let server = PgServer::start(&binaries()?, options(data.to_owned(), &bulk)).await?;
    server.create_database(NAME).await?;
    Ok(server)
}

async fn fill(server: &PgServer, scale: u32) -> Result<()> {
    let mut pgbench = server.binaries().client("pgbench");
    pgbench.args(["--initialize", "--quiet", "--scale", &scale.to_string(), NAME]);
    connected(&mut pgbench, server);
    child::run(pgbench, MAKING)?;
    let client = server.connect(NAME).await?;
    let rows = scale * DOCUMENTS_PER_SCALE;
    for statement in
        [&*DOCUMENTS.replace("$ROWS", &rows.to_string()), "VACUUM (FREEZE, ANALYZE)", "CHECKPOINT"]
    {
        in_time(client.batch_execute(statement))
            .await
            .with_context(|| format!("fill a database: {statement}"))?;
    }
    Ok(())
}

async fn in_time<T>(work: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T> {
    Ok(tokio::time::timeout(MAKING, work).await.context("PostgreSQL takes too long")??)
}

/// Where a program of PostgreSQL's finds the server.
pub fn connected(command: &mut Command, server: &PgServer) {
    command.envs([
        ("PGHOST", "127.0.0.1"),
        ("PGPORT", &server.port().to_string()),
        ("PGUSER", "postgres"),
        ("PGPASSWORD", server.password()),
    ]);
}

/// The tables of a database of this scale, and their rows.
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

/// That every row is there.
pub async fn check(server: &PgServer, scale: u32) -> Result<()> {
    let client = server.connect(NAME).await?;
    for (table, rows) in tables(scale) {
        let counted = in_time(client.query_one(&format!("SELECT count(*) FROM {table}"), &[])).await?;
        let found: i64 = counted.try_get(0)?;
        ensure!(found.unsigned_abs() == rows, "{table} has {found} rows instead of {rows}");
    }
    Ok(())
}

/// Of the database on disk.
pub async fn bytes(server: &PgServer) -> Result<u64> {
    let client = server.connect(NAME).await?;
    let size: i64 =
        in_time(client.query_one("SELECT pg_database_size(current_database())", &[])).await?.try_get(0)?;
    Ok(size.unsigned_abs())
}

/// A directory below `out` that goes with the run, on a disk that has this much room.
pub fn place(out: &Path, room: u64) -> Result<tempfile::TempDir> {
    fs::create_dir_all(out)?;
    let stats = statvfs(out).with_context(|| format!("look at {}", out.display()))?;
    let free = stats.blocks_available() * stats.fragment_size();
    ensure!(free > room, "{} has {} GiB free, {} are needed", out.display(), free >> 30, room >> 30);
    let dir = tempfile::Builder::new().prefix("run-").tempdir_in(out)?;
    child::remove_on_exit(dir.path());
    Ok(dir)
}

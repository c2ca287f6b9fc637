//! If a disk lacks space for both the database and the dump, a restore streams the dump from the store, and swaps in
//! the new database only if the dump's SHA-256 and the row counts match the sidecar. An import on a disk without space
//! for the owner's files is refused.

use std::fs;

use anyhow::{Context, Result};
use kit::disk::SmallDisk;
use kit::s3::{Fault, FaultRule, S3Server};
use serde_json::Value;

use super::gate::{assert_untouched, dump_key, is_restored, new_machine_after_loss};
use super::machine::{self, BUCKET, Machine, USER};

const MIB: u64 = 1 << 20;
/// The space that a restore keeps free.
const FREE_SPACE_MARGIN_BYTES: u64 = 64 * MIB;
const DISK_MIB: u64 = 256;

/// Creates a new machine whose disk has space for the database and for the given percentage of its dump.
async fn machine_with_tight_disk(percent: u64) -> Result<Option<(S3Server, Machine, SmallDisk)>> {
    let (store, new) = new_machine_after_loss().await?;
    let Some(disk) = SmallDisk::mount(new.path("var/lib/svc"), DISK_MIB)? else { return Ok(None) };
    let sidecar =
        store.read(BUCKET, &format!("{}.json", dump_key(&store))).context("the sidecar is missing")?;
    let sidecar: Value = serde_json::from_slice(&sidecar)?;
    let size = |value: &Value| value.as_u64().context("not a size");
    let (dump, database) = (size(&sidecar["sizeBytes"])?, size(&sidecar["database"]["sizeBytes"])?);
    disk.fill(database + FREE_SPACE_MARGIN_BYTES + dump * percent / 100)?;
    Ok(Some((store, new, disk)))
}

fn count_dumps(machine: &Machine) -> usize {
    let entries = fs::read_dir(machine.path("var/lib/svc/restore")).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().ends_with(".dump")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_streams_dump_that_does_not_fit_on_disk() -> Result<()> {
    let Some((store, new, _disk)) = machine_with_tight_disk(50).await? else { return Ok(()) };
    // The transfer is interrupted and resumed twice.
    let hits = store
        .add_fault(FaultRule::new(Fault::TruncateBody(300_000)).method("GET").key_suffix(".dump").times(2));
    let result = new.run(&["svc-restore"])?.expect(0);
    assert!(result.stderr.contains("streaming it from the object store"), "{}", result.stderr);
    assert_eq!(hits.hits(), 2);
    assert!(new.has_marker() && is_restored(&new).await?);
    assert_eq!(count_dumps(&new), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_restore_refuses_a_changed_dump() -> Result<()> {
    let Some((store, new, _disk)) = machine_with_tight_disk(50).await? else { return Ok(()) };
    let key = dump_key(&store);
    let good = store.read(BUCKET, &key).context("the dump is missing")?;
    // The sidecar and the pointer state a digest that differs from the dump's. pg_restore would accept the dump.
    let sidecar_key = format!("{key}.json");
    let text = String::from_utf8(store.read(BUCKET, &sidecar_key).context("the sidecar is missing")?)?;
    let sidecar: Value = serde_json::from_str(&text)?;
    let sha256 = sidecar["sha256"].as_str().context("the sidecar has no digest")?;
    let wrong_digest = "0".repeat(64);
    store.write(BUCKET, &sidecar_key, text.replace(sha256, &wrong_digest));
    let pointer_key = format!("{USER}/primary/system/db/latest");
    let latest = String::from_utf8(store.read(BUCKET, &pointer_key).context("there is no pointer")?)?;
    // The pointer's log entry must match, or it would take precedence.
    let seq = machine::read_pointer(&store).await?.context("there is no pointer")?.seq;
    let entry_key = format!("{USER}/primary/system/db/pointer-log/{seq:016}.json");
    let write_pointer = |text: &str| {
        for key in [&entry_key, &pointer_key] {
            store.write(BUCKET, key, text.to_owned());
        }
    };
    write_pointer(&latest.replace(sha256, &wrong_digest));
    let result = new.run(&["svc-restore"])?.expect(70);
    assert!(result.stderr.contains("SHA-256"), "{}", result.stderr);
    assert_untouched(&new, "a different digest").await?;

    // The stored bytes are not a valid dump.
    store.write(BUCKET, &sidecar_key, text.clone());
    write_pointer(&latest);
    let mut damaged = good.clone();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 64].fill(0);
    store.write(BUCKET, &key, damaged);
    new.run(&["svc-restore"])?.expect(70);
    assert_untouched(&new, "damaged").await?;

    store.write(BUCKET, &key, good);
    new.run(&["svc-restore"])?.expect(0);
    assert!(new.has_marker() && is_restored(&new).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_without_space_for_the_database_is_refused() -> Result<()> {
    let Some((_store, new, disk)) = machine_with_tight_disk(0).await? else { return Ok(()) };
    disk.fill(FREE_SPACE_MARGIN_BYTES)?;
    let result = new.run(&["svc-restore"])?.expect(70);
    for expected in ["bytes are free and", "are needed", "--server-type", "(code no_space)\n"] {
        assert!(result.stderr.contains(expected), "{}", result.stderr);
    }
    assert_untouched(&new, "no space").await?;
    disk.delete_filler()?;
    new.run(&["svc-restore"])?.expect(0);
    assert!(is_restored(&new).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn import_without_space_for_the_files_is_refused() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    old.client().await?.batch_execute("CREATE TABLE t AS SELECT 1 AS id").await?;
    fs::create_dir_all(old.path("home/svc/home"))?;
    fs::write(old.path("home/svc/home/large"), vec![7; 32 << 20])?;
    let archive = old.path("ada.tar");
    old.run(&["svc-db-backup", "export", "--output", machine::path_str(&archive)])?.expect(0);
    let new = Machine::in_use(&store, 2).await?;
    let home = new.path("home/svc/home");
    let Some(disk) = SmallDisk::mount(home.clone(), DISK_MIB)? else { return Ok(()) };
    disk.fill(FREE_SPACE_MARGIN_BYTES + 16 * MIB)?;
    let import = ["svc-restore", "import", machine::path_str(&archive)];
    let result = new.run(&import)?.expect(65);
    assert!(result.stderr.contains("bytes are free and"), "{}", result.stderr);
    let names: Vec<_> = fs::read_dir(&home)?.flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(names, ["filler"], "the staging directory must be removed");
    disk.delete_filler()?;
    new.run(&import)?.expect(0);
    assert!(home.join("large").exists());
    Ok(())
}

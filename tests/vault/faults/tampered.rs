//! Tampered objects of every kind: the restore rejects inconsistent ones and leaves the machine unchanged, and a backup
//! loses nothing. `gate` covers damaged, missing and truncated objects.

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;
use kit::s3::S3Server;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use svc::machine::epoch::Epoch;
use svc::store::pointer::Fence;
use svc::store::pointer_io;

use super::super::gate::{assert_untouched, dump_key, is_restored, old_and_new_machines, reset};
use super::super::machine::{self, BUCKET, Machine, USER};
use super::snapshot_checker::SnapshotChecker;

/// The three original objects of a snapshot, and their replacements.
struct Objects<'a> {
    store: &'a S3Server,
    key: String,
    pointer: Value,
    side: Value,
    dump: Vec<u8>,
}

impl<'a> Objects<'a> {
    fn read(store: &'a S3Server) -> Result<Self> {
        let path = dump_key(store);
        let read = |path: &str| store.read(BUCKET, path).with_context(|| path.to_owned());
        Ok(Self {
            store,
            pointer: serde_json::from_slice(&read(&pointer_key())?)?,
            side: serde_json::from_slice(&read(&format!("{path}.json"))?)?,
            dump: read(&path)?,
            key: path.strip_prefix(&format!("{USER}/primary/")).context("no key")?.to_owned(),
        })
    }

    fn put(&self, pointer: &Value, side: &Value, dump: &[u8]) {
        let log = format!("{USER}/primary/system/db/pointer-log");
        let entry = |seq: u64| format!("{log}/{seq:016}.json");
        // A later entry in the log would take precedence over this pointer.
        let seq = pointer["seq"].as_u64().unwrap_or_default();
        for key in self
            .store
            .objects(BUCKET, &log)
            .into_iter()
            .map(|object| object.key)
            .filter(|key| *key > entry(seq))
        {
            self.store.remove(BUCKET, &key);
        }
        self.store.write(BUCKET, &entry(seq.min(1 << 53)), pointer.to_string());
        self.store.write(BUCKET, &pointer_key(), pointer.to_string());
        self.store.write(BUCKET, &self.path(".json"), side.to_string());
        self.store.write(BUCKET, &self.path(""), dump.to_vec());
    }

    fn path(&self, end: &str) -> String {
        format!("{USER}/primary/{}{end}", self.key)
    }

    fn heal(&self) {
        self.put(&self.pointer, &self.side, &self.dump);
    }

    fn with_pointer(&self, change: impl FnOnce(&mut Value)) {
        let mut pointer = self.pointer.clone();
        change(&mut pointer);
        self.put(&pointer, &self.side, &self.dump);
    }

    fn with_side(&self, change: impl FnOnce(&mut Value)) {
        let mut side = self.side.clone();
        change(&mut side);
        self.put(&self.pointer, &side, &self.dump);
    }

    /// Stores a different dump with a matching record and pointer, so that only its content reveals the change.
    fn with_dump(&self, dump: &[u8]) {
        self.put_forged(dump, &hex::encode(Sha256::digest(dump)));
    }

    fn put_forged(&self, dump: &[u8], sha256: &str) {
        let (mut pointer, mut side) = (self.pointer.clone(), self.side.clone());
        for record in [&mut pointer["snapshot"], &mut side] {
            record["sha256"] = sha256.into();
            record["sizeBytes"] = dump.len().into();
        }
        self.put(&pointer, &side, dump);
    }
}

fn pointer_key() -> String {
    format!("{USER}/primary/system/db/latest")
}

type Tamper = fn(&Objects<'_>);

/// Returns each manipulation's name, part of the resulting message, and the manipulation itself.
fn table() -> Vec<(&'static str, &'static str, Tamper)> {
    vec![
        ("the pointer names another slot's snapshot", "not a snapshot key", |objects| {
            let there = format!("user_2/primary/{}", objects.key);
            objects.store.write(BUCKET, &there, objects.dump.clone());
            objects.store.write(BUCKET, &format!("{there}.json"), objects.side.to_string());
            objects.with_pointer(|pointer| pointer["snapshot"]["key"] = format!("../../{there}").into());
        }),
        ("the pointer names a missing object", "the object is missing", |objects| {
            objects.with_pointer(|pointer| pointer["snapshot"]["key"] = "system/db/snapshots/x.dump".into());
        }),
        ("a different size in the pointer", "does not match", |objects| {
            objects.with_pointer(|pointer| pointer["snapshot"]["sizeBytes"] = 7.into());
        }),
        ("a different digest in the pointer", "does not match", |objects| {
            objects.with_pointer(|pointer| pointer["snapshot"]["sha256"] = "ab".repeat(32).into());
        }),
        ("a sequence that cannot increase", "is above the maximum", |objects| {
            objects.with_pointer(|pointer| pointer["seq"] = u64::MAX.into());
        }),
        ("a digest that leads to another file", "no valid SHA-256", |objects| {
            objects.put_forged(&objects.dump, "../../../../outside");
        }),
        ("a sidecar that is not JSON", "its sidecar", |objects| {
            objects.store.write(BUCKET, &objects.path(".json"), "{\"version\":1,");
        }),
        ("a sidecar of another format", "an unexpected format or key", |objects| {
            objects.with_side(|side| side["version"] = 2.into());
        }),
        ("a sidecar of another snapshot", "an unexpected format or key", |objects| {
            objects.with_side(|side| side["key"] = "system/db/snapshots/x.dump".into());
        }),
        ("a sidecar with a different size", "bytes instead of", |objects| {
            objects.with_side(|side| side["sizeBytes"] = 1.into());
        }),
        ("a table is missing from the record", "public.noise: 200 rows restored", |objects| {
            objects.with_side(|side| {
                let tables = side["tables"].as_array_mut().expect("tables is a list");
                tables.retain(|table| table["name"] != "public.noise");
            });
        }),
        ("an additional table in the record", "public.more: no table restored", |objects| {
            objects.with_side(|side| {
                let tables = side["tables"].as_array_mut().expect("tables is a list");
                tables.push(json!({"name": "public.more", "rows": 0}));
            });
        }),
        ("a role whose name no server accepts", "role", |objects| {
            objects.with_side(|side| side["roles"] = json!(["a\0b"]));
        }),
        ("the bytes of another snapshot with the same size", "the SHA-256 of", |objects| {
            let mut other = objects.dump.clone();
            other.rotate_left(4096);
            objects.store.write(BUCKET, &objects.path(""), other);
        }),
        ("an empty dump, with a matching record", "pg_restore exited with", |objects| {
            objects.with_dump(b"");
        }),
        ("text instead of a dump, with a matching record", "pg_restore exited with", |objects| {
            objects.with_dump(b"DROP DATABASE svc;\n");
        }),
        ("only the header of a dump, with a matching record", "pg_restore exited with", |objects| {
            objects.with_dump(&objects.dump[..200]);
        }),
        ("a dump truncated in the middle, with a matching record", "pg_restore exited with", |objects| {
            objects.with_dump(&objects.dump[..objects.dump.len() / 2]);
        }),
        ("damage in the middle, with a matching record", "pg_restore exited with", |objects| {
            let mut dump = objects.dump.clone();
            let middle = dump.len() / 2;
            dump[middle..middle + 4000].fill(0);
            objects.with_dump(&dump);
        }),
    ]
}

#[tokio::test]
async fn every_tampered_object_is_refused() -> Result<()> {
    let (store, _old, new) = old_and_new_machines().await?;
    let objects = Objects::read(&store)?;
    let table = table();
    let rows = table.len() as u64;
    for (name, expected_error, tamper) in table {
        tamper(&objects);
        // A complete download from an earlier run would not need the store.
        let fetched = find(&new.path("var/lib/svc/restore"), "").unwrap_or_default();
        fetched.iter().try_for_each(|path| svc::fsx::remove_if_exists(path))?;
        let result = new.run(&["svc-restore"]).context(name)?;
        assert_eq!(result.code, Some(70), "{name}: {}", result.stderr);
        ensure!(result.stderr.contains(expected_error), "{name}: {}", result.stderr);
        assert_untouched(&new, name).await?;
        let outside = find(new.root.path(), "outside")?;
        ensure!(outside.is_empty(), "{name}: {outside:?}");
        objects.heal();
    }
    new.run(&["svc-restore"])?.expect(0);
    assert!(new.has_marker() && is_restored(&new).await?);
    Figures { faults_tried: rows, ..Figures::new("tampered objects") }.record()
}

/// Returns the files below a directory whose names have the given prefix.
fn find(dir: &std::path::Path, prefix: &str) -> Result<Vec<std::path::PathBuf>> {
    let (mut found, mut pending_dirs) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = pending_dirs.pop() {
        for entry in std::fs::read_dir(&dir)?.flatten() {
            if entry.file_type()?.is_dir() {
                pending_dirs.push(entry.path());
            } else if entry.file_name().to_string_lossy().starts_with(prefix) {
                found.push(entry.path());
            }
        }
    }
    Ok(found)
}

/// Names and values that would be SQL statements if they were not quoted.
#[tokio::test]
async fn record_text_is_never_executed_as_sql() -> Result<()> {
    let (store, _old, new) = old_and_new_machines().await?;
    let objects = Objects::read(&store)?;
    let hostile = "x\"; DROP DATABASE svc WITH (FORCE); CREATE ROLE intruder SUPERUSER; --";
    let literal = "x'; DROP TABLE kept; CREATE ROLE intruder SUPERUSER; --";
    type Change = fn(&mut Value, &str);
    let changes: [(&str, Change); 4] = [
        ("a role", |side, text| side["roles"] = json!([text])),
        ("the owner", |side, text| side["database"]["owner"] = text.into()),
        ("a right", |side, text| {
            side["database"]["grants"] = json!([{"grantee": null, "privilege": text, "grantable": false}]);
        }),
        ("a setting", |side, text| {
            side["database"]["settings"] = json!([
                {"role": null, "name": format!("my.{}", text.len()), "value": text},
                {"role": null, "name": "application_name", "value": text},
            ]);
        }),
    ];
    for (name, change) in changes {
        for text in [hostile, literal] {
            objects.with_side(|side| change(side, text));
            let result = new.run(&["svc-restore"])?;
            let admin = new.postgres().connect("postgres").await?;
            let roles = admin.query("SELECT FROM pg_roles WHERE rolname = 'intruder'", &[]).await?;
            assert!(roles.is_empty(), "{name}: {text} was executed");
            match result.code {
                Some(0) => {
                    assert!(new.has_marker() && is_restored(&new).await?, "{name}: {}", result.stderr);
                    reset(&new).await?;
                }
                Some(70) => assert_untouched(&new, name).await?,
                other => anyhow::bail!("{name}: {other:?}: {}", result.stderr),
            }
        }
    }
    Ok(())
}

/// An earlier pointer, with a lower fence, replaces the current one. Its snapshot is complete; the next write raises
/// the fence again.
#[tokio::test]
async fn lowered_fence_is_raised_by_the_next_write() -> Result<()> {
    let (store, old, new) = old_and_new_machines().await?;
    let objects = Objects::read(&store)?;
    pointer_io::fence(&machine::bucket(&store)?, &machine::slot(), &Fence::unsigned(Epoch(2), new.id))
        .await?;
    old.run(&["svc-db-backup"])?.expect(77);
    objects.heal();
    new.run(&["svc-restore"])?.expect(0);
    assert!(is_restored(&new).await?);
    new.run(&["svc-db-backup"])?.expect(0);
    let pointer = machine::pointer(&store).await?.context("there is no pointer")?;
    assert_eq!((pointer.fence_epoch, pointer.seq), (Epoch(2), 2));
    old.run(&["svc-db-backup"])?.expect(77);
    assert_eq!(machine::pointer(&store).await?, Some(pointer));
    Ok(())
}

/// A backup checks the pointer and the record first: it never overwrites an unreadable pointer, and it replaces a
/// snapshot that cannot be restored.
#[tokio::test]
async fn backup_next_to_tampered_objects_loses_nothing() -> Result<()> {
    let (store, old, _new) = old_and_new_machines().await?;
    let objects = Objects::read(&store)?;
    let assert_backup_fails =
        |machine: &Machine, code: i32, expected_error: &str, name: &str| -> Result<()> {
            let before = store.read(BUCKET, &pointer_key());
            let result = machine.run(&["svc-db-backup"])?;
            assert_eq!(result.code, Some(code), "{name}: {}", result.stderr);
            let line = machine.backup_records()?.pop().context("no record")?;
            let error = line["error"].as_str().unwrap_or_default();
            ensure!(error.contains(expected_error) && line["stage"] == "gate", "{name}: {line}");
            ensure!(store.read(BUCKET, &pointer_key()) == before, "{name}: the pointer was overwritten");
            Ok(())
        };
    for (name, expected_error, text) in [
        ("no JSON", "is not readable", "{".to_owned()),
        (
            "another format",
            "format version 9",
            objects.pointer.to_string().replace("\"version\":1", "\"version\":9"),
        ),
        ("nothing", "is not readable", String::new()),
    ] {
        store.write(BUCKET, &pointer_key(), text);
        assert_backup_fails(&old, 70, expected_error, name)?;
    }
    objects.with_pointer(|pointer| pointer["seq"] = u64::MAX.into());
    assert_backup_fails(&old, 70, "is above the maximum", "a sequence that cannot increase")?;
    for (name, side) in [
        ("no record", None),
        ("no JSON", Some("{".to_owned())),
        ("row counts that overflow", {
            let mut side = objects.side.clone();
            side["tables"] = json!([{"name": "a", "rows": u64::MAX}, {"name": "b", "rows": u64::MAX}]);
            Some(side.to_string())
        }),
    ] {
        objects.heal();
        if let Some(side) = side {
            store.write(BUCKET, &objects.path(".json"), side);
        } else {
            store.remove(BUCKET, &objects.path(".json"));
        }
        // A record of rows that never existed makes the new snapshot look like a loss: it is stored, and held.
        let is_held = name == "row counts that overflow";
        old.run(&["svc-db-backup"])?.expect(if is_held { 65 } else { 0 });
        let latest = machine::pointer(&store)
            .await?
            .and_then(|pointer| pointer.snapshot)
            .context("the pointer names no snapshot")?;
        assert_eq!(latest.key == objects.key, is_held, "{name}");
    }
    objects.heal();
    SnapshotChecker::new(&store).check()
}

//! A restore rejects inconsistent pointers, sidecars and dumps, and leaves the machine unchanged. A backup never
//! overwrites an unreadable pointer. `gate` covers corrupt, missing and truncated objects.

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;
use kit::s3::S3Server;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use svc::machine::epoch::Epoch;
use svc::store::pointer::Fence;
use svc::store::pointer_io;

use super::super::gate::{assert_untouched, dump_key, is_restored, old_and_new_machines, reset_machine};
use super::super::machine::{self, BUCKET, Machine, USER};
use super::snapshot_checker::SnapshotChecker;

/// The three original objects of a snapshot; the methods replace and restore them in the store.
struct SnapshotObjects<'a> {
    store: &'a S3Server,
    key: String,
    pointer: Value,
    sidecar: Value,
    dump: Vec<u8>,
}

impl<'a> SnapshotObjects<'a> {
    fn read(store: &'a S3Server) -> Result<Self> {
        let path = dump_key(store);
        let read = |path: &str| store.read(BUCKET, path).with_context(|| path.to_owned());
        Ok(Self {
            store,
            pointer: serde_json::from_slice(&read(&pointer_key())?)?,
            sidecar: serde_json::from_slice(&read(&format!("{path}.json"))?)?,
            dump: read(&path)?,
            key: path.strip_prefix(&format!("{USER}/primary/")).context("not a key of the slot")?.to_owned(),
        })
    }

    fn put(&self, pointer: &Value, sidecar: &Value, dump: &[u8]) {
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
        self.store.write(BUCKET, &self.path(".json"), sidecar.to_string());
        self.store.write(BUCKET, &self.path(""), dump.to_vec());
    }

    fn path(&self, suffix: &str) -> String {
        format!("{USER}/primary/{}{suffix}", self.key)
    }

    fn restore_originals(&self) {
        self.put(&self.pointer, &self.sidecar, &self.dump);
    }

    fn change_pointer(&self, change: impl FnOnce(&mut Value)) {
        let mut pointer = self.pointer.clone();
        change(&mut pointer);
        self.put(&pointer, &self.sidecar, &self.dump);
    }

    fn change_sidecar(&self, change: impl FnOnce(&mut Value)) {
        let mut sidecar = self.sidecar.clone();
        change(&mut sidecar);
        self.put(&self.pointer, &sidecar, &self.dump);
    }

    /// Stores a different dump with a matching sidecar and pointer; only the dump's content reveals the change.
    fn replace_dump(&self, dump: &[u8]) {
        self.put_forged(dump, &hex::encode(Sha256::digest(dump)));
    }

    fn put_forged(&self, dump: &[u8], sha256: &str) {
        let (mut pointer, mut sidecar) = (self.pointer.clone(), self.sidecar.clone());
        for record in [&mut pointer["snapshot"], &mut sidecar] {
            record["sha256"] = sha256.into();
            record["sizeBytes"] = dump.len().into();
        }
        self.put(&pointer, &sidecar, dump);
    }
}

fn pointer_key() -> String {
    format!("{USER}/primary/system/db/latest")
}

type Tamper = fn(&SnapshotObjects<'_>);

/// Returns the name of each manipulation, a part of the expected error, and the manipulation.
fn tamper_cases() -> Vec<(&'static str, &'static str, Tamper)> {
    vec![
        ("the pointer names another slot's snapshot", "not a snapshot key", |objects| {
            let foreign = format!("user_2/primary/{}", objects.key);
            objects.store.write(BUCKET, &foreign, objects.dump.clone());
            objects.store.write(BUCKET, &format!("{foreign}.json"), objects.sidecar.to_string());
            objects.change_pointer(|pointer| pointer["snapshot"]["key"] = format!("../../{foreign}").into());
        }),
        ("the pointer names a missing object", "the object is missing", |objects| {
            objects
                .change_pointer(|pointer| pointer["snapshot"]["key"] = "system/db/snapshots/x.dump".into());
        }),
        ("a different size in the pointer", "does not match", |objects| {
            objects.change_pointer(|pointer| pointer["snapshot"]["sizeBytes"] = 7.into());
        }),
        ("a different digest in the pointer", "does not match", |objects| {
            objects.change_pointer(|pointer| pointer["snapshot"]["sha256"] = "ab".repeat(32).into());
        }),
        ("a sequence that cannot increase", "is above the maximum", |objects| {
            objects.change_pointer(|pointer| pointer["seq"] = u64::MAX.into());
        }),
        ("a digest that is a path to another file", "no valid SHA-256", |objects| {
            objects.put_forged(&objects.dump, "../../../../outside");
        }),
        ("a sidecar that is not JSON", "its sidecar", |objects| {
            objects.store.write(BUCKET, &objects.path(".json"), "{\"version\":1,");
        }),
        ("a sidecar of another format", "an unexpected format or key", |objects| {
            objects.change_sidecar(|sidecar| sidecar["version"] = 2.into());
        }),
        ("a sidecar of another snapshot", "an unexpected format or key", |objects| {
            objects.change_sidecar(|sidecar| sidecar["key"] = "system/db/snapshots/x.dump".into());
        }),
        ("a sidecar with a different size", "bytes instead of", |objects| {
            objects.change_sidecar(|sidecar| sidecar["sizeBytes"] = 1.into());
        }),
        ("a table is missing from the sidecar", "public.noise: 200 rows restored", |objects| {
            objects.change_sidecar(|sidecar| {
                let tables = sidecar["tables"].as_array_mut().expect("tables is a list");
                tables.retain(|table| table["name"] != "public.noise");
            });
        }),
        ("an additional table in the sidecar", "public.more: no table restored", |objects| {
            objects.change_sidecar(|sidecar| {
                let tables = sidecar["tables"].as_array_mut().expect("tables is a list");
                tables.push(json!({"name": "public.more", "rows": 0}));
            });
        }),
        ("a role whose name no server accepts", "role", |objects| {
            objects.change_sidecar(|sidecar| sidecar["roles"] = json!(["a\0b"]));
        }),
        ("different bytes with the same size", "the SHA-256 of", |objects| {
            let mut rotated = objects.dump.clone();
            rotated.rotate_left(4096);
            objects.store.write(BUCKET, &objects.path(""), rotated);
        }),
        ("an empty dump, with a matching sidecar", "pg_restore exited with", |objects| {
            objects.replace_dump(b"");
        }),
        ("text instead of a dump, with a matching sidecar", "pg_restore exited with", |objects| {
            objects.replace_dump(b"DROP DATABASE svc;\n");
        }),
        ("only the header of a dump, with a matching sidecar", "pg_restore exited with", |objects| {
            objects.replace_dump(&objects.dump[..200]);
        }),
        ("a dump truncated in the middle, with a matching sidecar", "pg_restore exited with", |objects| {
            objects.replace_dump(&objects.dump[..objects.dump.len() / 2]);
        }),
        ("corruption in the middle, with a matching sidecar", "pg_restore exited with", |objects| {
            let mut dump = objects.dump.clone();
            let middle = dump.len() / 2;
            dump[middle..middle + 4000].fill(0);
            objects.replace_dump(&dump);
        }),
    ]
}

#[tokio::test]
async fn every_tampered_object_is_refused() -> Result<()> {
    let (store, _old, new) = old_and_new_machines().await?;
    let objects = SnapshotObjects::read(&store)?;
    let cases = tamper_cases();
    let case_count = cases.len() as u64;
    for (name, expected_error, tamper) in cases {
        tamper(&objects);
        // If the complete download of an earlier run remained, the restore would not download the dump.
        let fetched = find_files(&new.path("var/lib/svc/restore"), "").unwrap_or_default();
        fetched.iter().try_for_each(|path| svc::fsx::remove_if_exists(path))?;
        let result = new.run(&["svc-restore"]).context(name)?;
        assert_eq!(result.exit_code, Some(70), "{name}: {}", result.stderr);
        ensure!(result.stderr.contains(expected_error), "{name}: {}", result.stderr);
        assert_untouched(&new, name).await?;
        let outside = find_files(new.root.path(), "outside")?;
        ensure!(outside.is_empty(), "{name}: {outside:?}");
        objects.restore_originals();
    }
    new.run(&["svc-restore"])?.expect(0);
    assert!(new.has_marker() && is_restored(&new).await?);
    Figures { faults_injected: case_count, ..Figures::new("tampered objects") }.record()
}

/// Returns the files under a directory whose names have the given prefix.
fn find_files(dir: &std::path::Path, prefix: &str) -> Result<Vec<std::path::PathBuf>> {
    let (mut files, mut pending_dirs) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = pending_dirs.pop() {
        for entry in std::fs::read_dir(&dir)?.flatten() {
            if entry.file_type()?.is_dir() {
                pending_dirs.push(entry.path());
            } else if entry.file_name().to_string_lossy().starts_with(prefix) {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

/// Without quoting, the names and values in these sidecars would run as SQL statements.
#[tokio::test]
async fn sidecar_text_is_never_executed_as_sql() -> Result<()> {
    let (store, _old, new) = old_and_new_machines().await?;
    let objects = SnapshotObjects::read(&store)?;
    let identifier_injection = "x\"; DROP DATABASE svc WITH (FORCE); CREATE ROLE intruder SUPERUSER; --";
    let literal_injection = "x'; DROP TABLE kept; CREATE ROLE intruder SUPERUSER; --";
    type Change = fn(&mut Value, &str);
    let changes: [(&str, Change); 4] = [
        ("a role", |sidecar, text| sidecar["roles"] = json!([text])),
        ("the owner", |sidecar, text| sidecar["database"]["owner"] = text.into()),
        ("a privilege", |sidecar, text| {
            sidecar["database"]["grants"] = json!([{"grantee": null, "privilege": text, "grantable": false}]);
        }),
        ("a setting", |sidecar, text| {
            sidecar["database"]["settings"] = json!([
                {"role": null, "name": format!("my.{}", text.len()), "value": text},
                {"role": null, "name": "application_name", "value": text},
            ]);
        }),
    ];
    for (name, change) in changes {
        for text in [identifier_injection, literal_injection] {
            objects.change_sidecar(|sidecar| change(sidecar, text));
            let result = new.run(&["svc-restore"])?;
            let admin = new.postgres().connect("postgres").await?;
            let roles = admin.query("SELECT FROM pg_roles WHERE rolname = 'intruder'", &[]).await?;
            assert!(roles.is_empty(), "{name}: {text} was executed");
            match result.exit_code {
                Some(0) => {
                    assert!(new.has_marker() && is_restored(&new).await?, "{name}: {}", result.stderr);
                    reset_machine(&new).await?;
                }
                Some(70) => assert_untouched(&new, name).await?,
                exit_code => anyhow::bail!("{name}: {exit_code:?}: {}", result.stderr),
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
    let objects = SnapshotObjects::read(&store)?;
    pointer_io::fence(&machine::bucket(&store)?, &machine::slot(), &Fence::unsigned(Epoch(2), new.id))
        .await?;
    old.run(&["svc-db-backup"])?.expect(77);
    objects.restore_originals();
    new.run(&["svc-restore"])?.expect(0);
    assert!(is_restored(&new).await?);
    new.run(&["svc-db-backup"])?.expect(0);
    let pointer = machine::read_pointer(&store).await?.context("there is no pointer")?;
    assert_eq!((pointer.fence_epoch, pointer.seq), (Epoch(2), 2));
    old.run(&["svc-db-backup"])?.expect(77);
    assert_eq!(machine::read_pointer(&store).await?, Some(pointer));
    Ok(())
}

/// A backup checks the pointer and the sidecar first: it never overwrites an unreadable pointer, and it replaces a
/// snapshot without a usable sidecar.
#[tokio::test]
async fn backup_refuses_bad_pointer_and_replaces_bad_snapshot() -> Result<()> {
    let (store, old, _new) = old_and_new_machines().await?;
    let objects = SnapshotObjects::read(&store)?;
    let assert_backup_fails =
        |machine: &Machine, exit_code: i32, expected_error: &str, name: &str| -> Result<()> {
            let before = store.read(BUCKET, &pointer_key());
            let result = machine.run(&["svc-db-backup"])?;
            assert_eq!(result.exit_code, Some(exit_code), "{name}: {}", result.stderr);
            let line = machine.backup_records()?.pop().context("backup.jsonl is empty")?;
            let error = line["error"].as_str().unwrap_or_default();
            ensure!(error.contains(expected_error) && line["stage"] == "gate", "{name}: {line}");
            ensure!(store.read(BUCKET, &pointer_key()) == before, "{name}: the pointer was overwritten");
            Ok(())
        };
    for (name, expected_error, text) in [
        ("not JSON", "is not readable", "{".to_owned()),
        (
            "another format",
            "format version 9",
            objects.pointer.to_string().replace("\"version\":1", "\"version\":9"),
        ),
        ("an empty pointer", "is not readable", String::new()),
    ] {
        store.write(BUCKET, &pointer_key(), text);
        assert_backup_fails(&old, 70, expected_error, name)?;
    }
    objects.change_pointer(|pointer| pointer["seq"] = u64::MAX.into());
    assert_backup_fails(&old, 70, "is above the maximum", "a sequence that cannot increase")?;
    for (name, sidecar) in [
        ("no sidecar", None),
        ("not JSON", Some("{".to_owned())),
        ("row counts that overflow", {
            let mut sidecar = objects.sidecar.clone();
            sidecar["tables"] = json!([{"name": "a", "rows": u64::MAX}, {"name": "b", "rows": u64::MAX}]);
            Some(sidecar.to_string())
        }),
    ] {
        objects.restore_originals();
        if let Some(sidecar) = sidecar {
            store.write(BUCKET, &objects.path(".json"), sidecar);
        } else {
            store.remove(BUCKET, &objects.path(".json"));
        }
        // A sidecar with rows that never existed makes the new snapshot look like a loss, so it is held back.
        let is_held = name == "row counts that overflow";
        old.run(&["svc-db-backup"])?.expect(if is_held { 65 } else { 0 });
        let latest = machine::read_pointer(&store)
            .await?
            .and_then(|pointer| pointer.snapshot)
            .context("the pointer names no snapshot")?;
        assert_eq!(latest.key == objects.key, is_held, "{name}");
    }
    objects.restore_originals();
    SnapshotChecker::new(&store).check()
}

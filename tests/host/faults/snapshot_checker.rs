//! Checks a slot's objects independently of the product: no complete snapshot may disappear or change, and the pointer
//! must name a complete snapshot.

use std::collections::BTreeMap;

use kit::s3::S3Server;
use sha2::{Digest, Sha256};
use svc::store::pointer::Pointer;
use svc::store::snapshot::Sidecar;

use super::super::machine::{BUCKET, USER};

/// Records the complete snapshots that a check finds; each later check compares the store with them.
pub struct SnapshotChecker<'a> {
    store: &'a S3Server,
    /// Complete snapshots, by key.
    complete: BTreeMap<String, RecordedSnapshot>,
    seq: u64,
}

struct RecordedSnapshot {
    /// The ETags of the dump and of its sidecar.
    etags: (String, String),
    sidecar: Sidecar,
}

impl<'a> SnapshotChecker<'a> {
    pub fn new(store: &'a S3Server) -> Self {
        Self { store, complete: BTreeMap::new(), seq: 0 }
    }

    /// Returns the number of complete snapshots, that is, dumps with sidecars.
    pub fn complete_count(&self) -> u64 {
        self.complete.len() as u64
    }

    /// Returns the pointer's highest `seq` so far.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Checks the slot's objects against the invariants.
    ///
    /// # Errors
    /// Returns the violated invariant.
    pub fn check(&mut self) -> anyhow::Result<()> {
        self.check_objects().map_err(anyhow::Error::msg)
    }

    fn check_objects(&mut self) -> Result<(), String> {
        let root = format!("{USER}/primary/");
        let objects = self.store.objects(BUCKET, &format!("{root}system/db/snapshots/"));
        let etags: BTreeMap<String, String> = objects
            .into_iter()
            .filter_map(|object| Some((object.key.strip_prefix(&root)?.to_owned(), object.etag)))
            .collect();
        for (key, recorded) in &self.complete {
            let current = (etags.get(key), etags.get(&format!("{key}.json")));
            match current {
                (Some(dump), Some(sidecar)) if (dump, sidecar) == (&recorded.etags.0, &recorded.etags.1) => {}
                (Some(_), Some(_)) => return Err(format!("{key} was overwritten")),
                _ => return Err(format!("{key} has disappeared")),
            }
        }
        for (key, etag) in &etags {
            let sidecar = etags.get(&format!("{key}.json"));
            if let Some(sidecar) = sidecar.filter(|_| !self.complete.contains_key(key)) {
                let recorded = RecordedSnapshot {
                    etags: (etag.clone(), sidecar.clone()),
                    sidecar: self.read_sidecar(&root, key)?,
                };
                self.complete.insert(key.clone(), recorded);
            }
        }
        self.check_pointer(&root)
    }

    /// Reads a dump's sidecar, and checks the dump against it.
    fn read_sidecar(&self, root: &str, key: &str) -> Result<Sidecar, String> {
        let read = |key: &str| self.store.read(BUCKET, &format!("{root}{key}")).unwrap_or_default();
        let sidecar: Sidecar = serde_json::from_slice(&read(&format!("{key}.json")))
            .map_err(|error| format!("cannot read the sidecar of {key}: {error}"))?;
        let dump = read(key);
        let actual = (dump.len() as u64, hex::encode(Sha256::digest(&dump)));
        if sidecar.key != key || (sidecar.size_bytes, &sidecar.sha256) != (actual.0, &actual.1) {
            return Err(format!("{key} has size and SHA-256 {actual:?}, but its sidecar is {sidecar:?}"));
        }
        Ok(sidecar)
    }

    fn check_pointer(&mut self, root: &str) -> Result<(), String> {
        let Some(text) = self.store.read(BUCKET, &format!("{root}system/db/latest")) else {
            return if self.seq == 0 { Ok(()) } else { Err("the pointer has disappeared".to_owned()) };
        };
        let pointer: Pointer =
            serde_json::from_slice(&text).map_err(|error| format!("the pointer is not readable: {error}"))?;
        if pointer.seq < self.seq {
            return Err(format!("the pointer moved back from {} to {}", self.seq, pointer.seq));
        }
        self.seq = pointer.seq;
        let Some(snapshot) = pointer.snapshot else { return Ok(()) };
        let Some(recorded) = self.complete.get(&snapshot.key) else {
            return Err(format!("the pointer names {}, which is not complete", snapshot.key));
        };
        if (snapshot.size_bytes, &snapshot.sha256) != (recorded.sidecar.size_bytes, &recorded.sidecar.sha256)
        {
            return Err(format!(
                "the pointer states {snapshot:?}, but the sidecar is {:?}",
                recorded.sidecar
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use svc::machine::epoch::Epoch;
    use svc::machine::id::MachineId;
    use svc::store::pointer;

    use super::super::super::machine;
    use super::*;

    fn path(key: &str) -> String {
        format!("{USER}/primary/{key}")
    }

    /// Writes a successful backup's objects.
    fn write_snapshot(store: &S3Server, number: u32, current: Option<&Pointer>) -> Pointer {
        let key = format!("system/db/snapshots/2026-01-02T03-04-0{number}.000Z-1.dump");
        let dump = format!("dump {number}").into_bytes();
        let time = format!("2026-01-02T03:04:0{number}Z").parse().expect("the time is valid");
        let sidecar = Sidecar {
            version: 1,
            key: key.clone(),
            size_bytes: dump.len() as u64,
            sha256: hex::encode(Sha256::digest(&dump)),
            pg_version: "16".to_owned(),
            machine_id: MachineId(uuid::Uuid::nil()),
            epoch: Epoch(1),
            taken_at: time,
            verified_at: time,
            roles: Vec::new(),
            tables: Vec::new(),
            database: None,
            database_identity: None,
        };
        store.write(BUCKET, &path(&key), dump);
        store.write(
            BUCKET,
            &path(&format!("{key}.json")),
            serde_json::to_vec(&sidecar).expect("plain fields serialize to JSON"),
        );
        let advanced = pointer::advance(current, &sidecar.snapshot_ref())
            .expect("the slot is not fenced")
            .expect("the pointer should advance");
        store.write(
            BUCKET,
            &path("system/db/latest"),
            serde_json::to_vec(&advanced).expect("plain fields serialize to JSON"),
        );
        advanced
    }

    #[test]
    fn check_detects_every_violation() {
        type Violation = fn(&S3Server, &Pointer);
        fn key(pointer: &Pointer) -> &str {
            pointer.snapshot.as_ref().map_or("", |snapshot| &snapshot.key)
        }
        fn tamper(store: &S3Server, pointer: &Pointer, change: fn(&mut Pointer)) {
            let mut pointer = pointer.clone();
            change(&mut pointer);
            store.write(
                BUCKET,
                &path("system/db/latest"),
                serde_json::to_vec(&pointer).expect("plain fields serialize to JSON"),
            );
        }
        let violations: [(&str, Violation); 9] = [
            ("has disappeared", |store, pointer| {
                store.remove(BUCKET, &path(key(pointer)));
            }),
            ("has disappeared", |store, pointer| {
                store.remove(BUCKET, &path(&format!("{}.json", key(pointer))));
            }),
            ("was overwritten", |store, pointer| store.write(BUCKET, &path(key(pointer)), "dump 9")),
            ("the pointer has disappeared", |store, _| {
                store.remove(BUCKET, &path("system/db/latest"));
            }),
            ("not readable", |store, _| store.write(BUCKET, &path("system/db/latest"), "{")),
            ("moved back", |store, pointer| tamper(store, pointer, |pointer| pointer.seq -= 1)),
            ("which is not complete", |store, pointer| {
                tamper(store, pointer, |pointer| {
                    pointer.snapshot.as_mut().expect("the pointer should name a snapshot").key.push('x');
                });
            }),
            ("the pointer states", |store, pointer| {
                tamper(store, pointer, |pointer| {
                    pointer.snapshot.as_mut().expect("the pointer should name a snapshot").size_bytes += 1;
                });
            }),
            ("but its sidecar is", |store, pointer| {
                write_snapshot(store, 3, Some(pointer));
                store.write(BUCKET, &path("system/db/snapshots/2026-01-02T03-04-03.000Z-1.dump"), "dump 4");
            }),
        ];
        for (number, (expected, violate)) in violations.into_iter().enumerate() {
            let store = machine::start_store().expect("the store should start");
            let mut checker = SnapshotChecker::new(&store);
            checker.check().expect("the slot is empty");
            let first = write_snapshot(&store, 1, None);
            checker.check().expect("the first snapshot is valid");
            let second = write_snapshot(&store, 2, Some(&first));
            checker.check().expect("the second snapshot is valid");
            assert_eq!((checker.complete_count(), checker.seq()), (2, 2));
            violate(&store, &second);
            let error = checker.check().expect_err("the violation should be detected").to_string();
            assert!(error.contains(expected), "{number}: {error}");
        }
    }
}

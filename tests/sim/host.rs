//! Simulates a host at the protocol level: it is configured by its user-data and backs up with the production store
//! code.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use object_store::ObjectStoreExt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use svc::config::parse_env_file;
use svc::machine::epoch::Epoch;
use svc::machine::id::MachineId;
use svc::store::key::{SlotPrefix, snapshot_key};
use svc::store::pointer::{Pointer, SnapshotRef};
use svc::store::snapshot::{self, FORMAT_VERSION, Sidecar, SnapshotUnusable};
use svc::store::upload::{PartLayout, Upload};
use svc::store::{Bucket, pointer_io};

use super::memory_provider::ServerCreation;
use super::rows::Rows;
use super::store::{Store, StoreConnection};
use super::violation::BrokenRule;

/// The digest of the published bundle. It need not match the bundle's content, because no simulated host downloads it.
pub const BUNDLE_SHA256: &str = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8";

#[derive(Debug, Clone)]
pub struct Host {
    pub server: String,
    pub machine: String,
    pub user: String,
    pub slot: String,
    pub epoch: u32,
    pub registration_token: String,
    pub upgrade_token: String,
    pub restore_mode: String,
}

/// The content of a simulated snapshot, in place of a PostgreSQL dump.
#[derive(Debug, Serialize, Deserialize)]
struct Dump {
    machine: String,
    rows: BTreeSet<u32>,
}

impl Host {
    pub fn from_creation(creation: &ServerCreation) -> Self {
        let text =
            creation.user_data.strip_prefix("#cloud-config\n").expect("user-data starts with #cloud-config");
        let config: Value = serde_json::from_str(text).expect("the cloud-config is JSON");
        let mut variables: BTreeMap<String, String> = BTreeMap::new();
        for file in config["write_files"].as_array().expect("write_files is an array") {
            // Not every file is an env file.
            if file["path"].as_str().is_some_and(|path| path.ends_with(".env")) {
                variables.extend(
                    parse_env_file(file["content"].as_str().expect("the content is a string"))
                        .expect("the env file is valid"),
                );
            }
        }
        let variable =
            |name: &str| variables.get(name).cloned().unwrap_or_else(|| panic!("user-data without {name}"));
        Self {
            server: creation.name.clone(),
            machine: variable("SVC_MACHINE_ID"),
            user: variable("SVC_USER_ID"),
            slot: variable("SVC_SLOT"),
            epoch: variable("SVC_EPOCH").parse().expect("the epoch is a number"),
            registration_token: variable("REGISTRATION_TOKEN"),
            upgrade_token: variable("UPGRADE_TOKEN"),
            restore_mode: variable("SVC_RESTORE_MODE"),
        }
    }

    /// Returns a registration body with the given host key. A host keeps its key when it reboots from the same disk.
    pub fn registration_body(&self, host_key: u8) -> Value {
        json!({"machineId": self.machine, "imageVersion": "v1", "bundleSha256": BUNDLE_SHA256,
            "tlsSpkiSha256": format!("{:064x}", u32::from(host_key) + 1), "bootMs": 1234})
    }

    pub fn heartbeat_body(&self, registration: Option<&Value>) -> Value {
        json!({"registration": registration, "imageVersion": "v1", "epoch": self.epoch, "health": {"gateway": "ok", "database": "ok"},
            "lastBackup": null, "disk": {"totalBytes": 10, "freeBytes": 5}, "proofKids": []})
    }

    pub fn prefix(&self) -> String {
        format!("{}/{}", self.user, self.slot)
    }

    /// Restores the slot's latest snapshot, once per disk. If there is none and the restore mode is `empty`, the disk
    /// starts without rows; otherwise, returns `false` if there is no usable snapshot.
    pub async fn boot(&self, store: &Arc<Store>, rows: &Rows) -> anyhow::Result<bool> {
        if rows.rows_on_disk(&self.machine).is_some() {
            return Ok(true);
        }
        let bucket = Bucket::new(Arc::new(StoreConnection { store: Arc::clone(store), switch: None }));
        let slot = SlotPrefix::new(&self.user.parse()?, &self.slot.parse()?);
        let restored = match (snapshot::find_latest(&bucket, &slot).await, self.restore_mode.as_str()) {
            (Ok(latest), _) => {
                let path = slot.snapshot(&latest.key).expect("the key names a snapshot");
                let dump = bucket.raw().get(&path).await?.bytes().await?;
                serde_json::from_slice::<Dump>(&dump)?.rows
            }
            (Err(SnapshotUnusable::Absent), "empty") => BTreeSet::new(),
            (Err(_), _) => return Ok(false),
        };
        rows.add_disk(&self.machine, &self.prefix(), restored);
        Ok(true)
    }

    /// Stores the dump, the sidecar and the pointer, in the same order as the backup job. Stops after the dump if
    /// `stops_after` is 1, and after the sidecar if it is 2.
    pub async fn back_up(
        self,
        store: Arc<Store>,
        rows: Rows,
        stops_after: Option<u8>,
        broken_rule: Option<BrokenRule>,
    ) -> String {
        match self.try_back_up(&store, &rows, stops_after, broken_rule).await {
            Ok(outcome) => outcome.to_owned(),
            Err(error) => format!("{error:#}"),
        }
    }

    async fn try_back_up(
        &self,
        store: &Arc<Store>,
        rows: &Rows,
        stops_after: Option<u8>,
        broken_rule: Option<BrokenRule>,
    ) -> anyhow::Result<&'static str> {
        let bucket = Bucket::new(Arc::new(StoreConnection { store: Arc::clone(store), switch: None }));
        let slot = SlotPrefix::new(&self.user.parse()?, &self.slot.parse()?);
        let (taken_at, epoch) = (svc::clock::now_ms(), Epoch(self.epoch));
        let key = snapshot_key(taken_at, epoch);
        if !self.boot(store, rows).await? {
            return Ok("no data restored yet");
        }
        let dump = Dump {
            machine: self.machine.clone(),
            rows: rows.rows_on_disk(&self.machine).unwrap_or_default(),
        };
        let content = Bytes::from(serde_json::to_vec(&dump)?);
        let path = slot.snapshot(&key).expect("the key names a snapshot");
        let mut upload = Upload::begin(&bucket, &path, PartLayout::for_max_bytes(1 << 20)).await?;
        upload.push(content.clone()).await?;
        let etag = upload.complete().await?.e_tag;
        if stops_after == Some(1) {
            return Ok("stopped after the dump");
        }
        let sidecar = self.sidecar(key, &content, taken_at);
        if broken_rule == Some(BrokenRule::HostDoesNotVerify) {
            write_pointer_unchecked(&bucket, &slot, &snapshot_ref(&sidecar)).await?;
            return Ok("moved the pointer too early");
        }
        let recorded = snapshot::write_sidecar(&bucket, &slot, &sidecar, etag).await?;
        rows.record_snapshot(&self.prefix(), dump.rows);
        if stops_after == Some(2) {
            return Ok("stopped after the sidecar");
        }
        if broken_rule == Some(BrokenRule::HostIgnoresFence) {
            write_pointer_unchecked(&bucket, &slot, recorded.snapshot_ref()).await?;
        } else {
            pointer_io::advance(&bucket, &slot, &recorded).await?;
        }
        Ok("moved the pointer")
    }

    fn sidecar(&self, key: String, content: &Bytes, taken_at: Timestamp) -> Sidecar {
        Sidecar {
            version: FORMAT_VERSION,
            key,
            size_bytes: content.len() as u64,
            sha256: hex::encode(Sha256::digest(content)),
            pg_version: "16".to_owned(),
            machine_id: self.machine.parse::<MachineId>().expect("the machine id is valid"),
            epoch: Epoch(self.epoch),
            taken_at,
            verified_at: taken_at,
            roles: Vec::new(),
            tables: Vec::new(),
            database: None,
            database_identity: None,
        }
    }
}

fn snapshot_ref(sidecar: &Sidecar) -> SnapshotRef {
    SnapshotRef {
        key: sidecar.key.clone(),
        size_bytes: sidecar.size_bytes,
        sha256: sidecar.sha256.clone(),
        etag: None,
        machine_id: sidecar.machine_id,
        epoch: sidecar.epoch,
        taken_at: sidecar.taken_at,
        verified_at: sidecar.verified_at,
    }
}

/// Moves the pointer without following the rules: ignores the fence and requires no sidecar.
async fn write_pointer_unchecked(
    bucket: &Bucket,
    slot: &SlotPrefix,
    snapshot: &SnapshotRef,
) -> anyhow::Result<()> {
    let current = pointer_io::read(bucket, slot).await?;
    let Some(current) = current else { anyhow::bail!("no pointer yet") };
    let condition = current.condition();
    let next = Pointer { seq: current.value.seq + 1, snapshot: Some(snapshot.clone()), ..current.value };
    bucket.put_json_if(&slot.pointer(), &next, condition).await?;
    Ok(())
}

//! Writes snapshots and pointers to the store as hosts do.

use serde_json::{Value, json};

use super::stack::{BUCKET, DIGEST, Stack};

impl Stack {
    /// Stores a complete snapshot for the user's slot, with a pointer to it. Returns the path of the dump.
    pub fn store_snapshot(&self, user: &str) -> String {
        self.store_snapshot_at(user, "2026-01-02T03:04:05.678Z")
    }

    /// Stores a complete snapshot taken at the given time, with a pointer to it. Returns the path of the dump.
    pub fn store_snapshot_at(&self, user: &str, taken_at: &str) -> String {
        self.write_snapshot(user, taken_at, &uuid::Uuid::nil().to_string(), 1)
    }

    fn write_snapshot(&self, user: &str, taken_at: &str, machine: &str, epoch: u64) -> String {
        let key = format!("system/db/snapshots/{}-{epoch}.dump", taken_at.replace(':', "-"));
        let snapshot = json!({"key": key, "sizeBytes": 4, "sha256": DIGEST, "etag": null, "machineId": machine,
            "epoch": epoch, "takenAt": taken_at, "verifiedAt": taken_at});
        let sidecar = json!({"version": 1, "key": key, "sizeBytes": 4, "sha256": DIGEST, "pgVersion": "16",
            "machineId": machine, "epoch": epoch, "takenAt": taken_at, "verifiedAt": taken_at, "roles": [], "tables": []});
        let seq = self.highest_seq(user) + 1;
        let pointer = json!({"version": 1, "fenceEpoch": epoch, "seq": seq, "snapshot": snapshot});
        let prefix = format!("{user}/primary");
        self.store.write(BUCKET, &format!("{prefix}/{key}"), "dump");
        self.store.write(BUCKET, &format!("{prefix}/{key}.json"), sidecar.to_string());
        self.write_pointer(user, &pointer);
        format!("{prefix}/{key}")
    }

    /// Stores a complete snapshot of a database with the given size, with a pointer to it.
    pub fn store_snapshot_of_size(&self, user: &str, bytes: u64) {
        let object = self.store_snapshot(user);
        let sidecar = self.store.read(BUCKET, &format!("{object}.json")).expect("the sidecar must exist");
        let mut sidecar: Value = serde_json::from_slice(&sidecar).expect("the sidecar must be JSON");
        sidecar["database"] = json!({"owner": null, "sizeBytes": bytes, "grants": null, "settings": []});
        self.store.write(BUCKET, &format!("{object}.json"), sidecar.to_string());
    }

    /// Stores a snapshot taken by the given machine at the given time, under the current fence. Returns its key.
    pub fn store_snapshot_by(&self, user: &str, machine: &str, taken_at: &str) -> String {
        let previous = self.pointer(user);
        let epoch = previous["fenceEpoch"].as_u64().unwrap_or(1);
        let object = self.write_snapshot(user, taken_at, machine, epoch);
        let mut pointer = self.pointer(user);
        for name in ["fenceEpoch", "fenceMachineId", "fenceProof"] {
            pointer[name] = previous[name].clone();
        }
        self.write_pointer(user, &pointer);
        object.split_once("/primary/").expect("the key must be in the slot").1.to_owned()
    }

    /// Returns the highest `seq` in the pointer log, which survives the loss of the pointer; 6 if the log is empty.
    fn highest_seq(&self, user: &str) -> u64 {
        let log = self.store.objects(BUCKET, &format!("{user}/primary/system/db/pointer-log/"));
        let parse_seq = |key: &str| key.rsplit('/').next()?.strip_suffix(".json")?.parse::<u64>().ok();
        log.iter().filter_map(|object| parse_seq(&object.key)).max().unwrap_or(6)
    }

    /// Writes the pointer and its log entry.
    pub fn write_pointer(&self, user: &str, pointer: &Value) {
        let entry =
            format!("{user}/primary/system/db/pointer-log/{:016}.json", pointer["seq"].as_u64().unwrap_or(0));
        self.store.write(BUCKET, &entry, pointer.to_string());
        self.store.write(BUCKET, &format!("{user}/primary/system/db/latest"), pointer.to_string());
    }

    pub fn pointer(&self, user: &str) -> Value {
        let bytes = self.store.read(BUCKET, &format!("{user}/primary/system/db/latest"));
        bytes.map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).expect("the pointer must be JSON"))
    }
}

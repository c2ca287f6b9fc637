//! Accesses a slot's objects directly in the store.

use anyhow::{Context, Result};
use serde_json::Value;

use crate::s3::S3Server;

pub const BUCKET: &str = "svc-demo";

/// The objects under `<idpUserId>/<slot>/`.
#[derive(Debug, Clone)]
pub struct SlotObjects {
    prefix: String,
}

impl SlotObjects {
    pub fn primary(user: &str) -> Self {
        Self { prefix: format!("{user}/primary/") }
    }

    pub fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    pub fn read(&self, store: &S3Server, key: &str) -> Result<Vec<u8>> {
        let key = self.key(key);
        store.read(BUCKET, &key).with_context(|| format!("{key} is not in the store"))
    }

    pub fn read_json(&self, store: &S3Server, key: &str) -> Result<Value> {
        serde_json::from_slice(&self.read(store, key)?).with_context(|| format!("{key} is not JSON"))
    }

    pub fn read_pointer(&self, store: &S3Server) -> Result<Value> {
        self.read_json(store, "system/db/latest")
    }

    pub fn write(&self, store: &S3Server, key: &str, value: &Value) {
        store.write(BUCKET, &self.key(key), value.to_string());
    }

    /// Returns the keys of all snapshots, without the slot's prefix.
    pub fn list_snapshots(&self, store: &S3Server) -> Vec<String> {
        let objects = store.objects(BUCKET, &self.key("system/db/snapshots/"));
        let keys = objects.into_iter().map(|object| object.key[self.prefix.len()..].to_owned());
        keys.filter(|key| key.ends_with(".dump")).collect()
    }
}

//! Server types and locations of the simulated provider.

use serde_json::{Value, json};

/// A server type.
#[derive(Debug, PartialEq)]
pub struct CatalogType {
    pub id: i64,
    pub name: &'static str,
    pub cores: u32,
    pub memory_gb: u32,
    pub disk_gb: u32,
}

/// `cpx12` has less disk than the type of any plan, so that a resize to it is refused.
pub const TYPES: [CatalogType; 5] = [
    CatalogType { id: 107, name: "cpx12", cores: 1, memory_gb: 2, disk_gb: 40 },
    CatalogType { id: 108, name: "cpx22", cores: 2, memory_gb: 4, disk_gb: 80 },
    CatalogType { id: 109, name: "cpx32", cores: 4, memory_gb: 8, disk_gb: 160 },
    CatalogType { id: 110, name: "cpx42", cores: 8, memory_gb: 16, disk_gb: 320 },
    CatalogType { id: 111, name: "cpx52", cores: 12, memory_gb: 24, disk_gb: 480 },
];

pub(super) const LOCATIONS: [&str; 6] = ["fsn1", "nbg1", "hel1", "ash", "hil", "sin"];

pub(super) fn by_name(name: &str) -> Option<&'static CatalogType> {
    TYPES.iter().find(|known| known.name == name)
}

impl CatalogType {
    pub(super) fn json(&self) -> Value {
        json!({
            "id": self.id, "name": self.name, "description": self.name.to_uppercase(),
            "cores": self.cores, "memory": f64::from(self.memory_gb), "disk": self.disk_gb,
            "storage_type": "local", "cpu_type": "shared", "architecture": "x86", "deprecated": false,
            "deprecation": null, "prices": [],
        })
    }
}

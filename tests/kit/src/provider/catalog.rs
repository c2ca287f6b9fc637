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
    /// A month without tax in the European locations, in cents.
    cents: u32,
}

/// `cpx12` has less disk than the type of any plan, so that a resize to it is refused.
pub const TYPES: [CatalogType; 5] = [
    CatalogType { id: 107, name: "cpx12", cores: 1, memory_gb: 2, disk_gb: 40, cents: 450 },
    CatalogType { id: 108, name: "cpx22", cores: 2, memory_gb: 4, disk_gb: 80, cents: 799 },
    CatalogType { id: 109, name: "cpx32", cores: 4, memory_gb: 8, disk_gb: 160, cents: 1399 },
    CatalogType { id: 110, name: "cpx42", cores: 8, memory_gb: 16, disk_gb: 320, cents: 2549 },
    CatalogType { id: 111, name: "cpx52", cores: 12, memory_gb: 24, disk_gb: 480, cents: 3649 },
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

const VAT_PERCENT: u32 = 19;
const IPV4_CENTS: u32 = 50;

/// A price as the provider writes it.
fn price(cents: u32) -> Value {
    let decimal = |micros: u64| format!("{}.{:010}", micros / 1_000_000, micros % 1_000_000 * 10_000);
    let net = u64::from(cents) * 10_000;
    json!({"net": decimal(net), "gross": decimal(net * u64::from(100 + VAT_PERCENT) / 100)})
}

/// The price list, with `percent` of the usual prices of servers. Locations outside Europe cost a fifth more.
pub(super) fn pricing(percent: u32) -> Value {
    let prices = |cents: u32| -> Vec<Value> {
        let of = |(at, location): (usize, &&str)| {
            let cents = if at < 3 { cents } else { cents * 6 / 5 };
            json!({"location": location, "price_hourly": price(cents / 730), "price_monthly": price(cents)})
        };
        LOCATIONS.iter().enumerate().map(of).collect()
    };
    let types: Vec<Value> = TYPES
        .iter()
        .map(|known| json!({"id": known.id, "name": known.name, "prices": prices(known.cents * percent / 100)}))
        .collect();
    json!({
        "currency": "EUR", "vat_rate": "19.000000", "server_types": types,
        "primary_ips": [{"type": "ipv4", "prices": prices(IPV4_CENTS)}, {"type": "ipv6", "prices": prices(0)}],
        "volume": {"price_per_gb_month": price(4)}, "server_backup": {"percentage": "20.0000000000"},
    })
}

//! The simulated provider's catalog: server types, locations and system images.

use serde_json::{Value, json};

/// A server type.
#[derive(Debug, PartialEq)]
pub struct ServerType {
    pub id: i64,
    pub name: &'static str,
    pub cores: u32,
    pub memory_gb: u32,
    pub disk_gb: u32,
    /// Net price per month in the European locations.
    monthly_cents: u32,
}

const fn server_type(
    id: i64,
    name: &'static str,
    (cores, memory_gb, disk_gb): (u32, u32, u32),
    monthly_cents: u32,
) -> ServerType {
    ServerType { id, name, cores, memory_gb, disk_gb, monthly_cents }
}

/// `cpx12` has a smaller disk than the types that plans allow, so that changing a server to it is rejected.
pub const SERVER_TYPES: [ServerType; 5] = [
    server_type(107, "cpx12", (1, 2, 40), 450),
    server_type(108, "cpx22", (2, 4, 80), 799),
    server_type(109, "cpx32", (4, 8, 160), 1399),
    server_type(110, "cpx42", (8, 16, 320), 2549),
    server_type(111, "cpx52", (12, 24, 480), 3649),
];

/// A location in which servers run.
#[derive(Debug, PartialEq)]
pub(super) struct Location {
    pub(super) id: i64,
    pub(super) name: &'static str,
    description: &'static str,
    country: &'static str,
    city: &'static str,
    latitude: f64,
    longitude: f64,
    network_zone: &'static str,
}

const fn location(
    id: i64,
    name: &'static str,
    description: &'static str,
    (country, city): (&'static str, &'static str),
    (latitude, longitude): (f64, f64),
    network_zone: &'static str,
) -> Location {
    Location { id, name, description, country, city, latitude, longitude, network_zone }
}

pub(super) const LOCATIONS: [Location; 6] = [
    location(1, "fsn1", "Falkenstein DC Park 1", ("DE", "Falkenstein"), (50.47612, 12.370071), "eu-central"),
    location(2, "nbg1", "Nuremberg DC Park 1", ("DE", "Nuremberg"), (49.452102, 11.076665), "eu-central"),
    location(3, "hel1", "Helsinki DC Park 1", ("FI", "Helsinki"), (60.169855, 24.938379), "eu-central"),
    location(4, "ash", "Ashburn, VA", ("US", "Ashburn, VA"), (39.045821, -77.487073), "us-east"),
    location(5, "hil", "Hillsboro, OR", ("US", "Hillsboro, OR"), (45.54222, -122.951924), "us-west"),
    location(6, "sin", "Singapore", ("SG", "Singapore"), (1.283333, 103.833333), "ap-southeast"),
];

/// A system image.
#[derive(Debug, PartialEq)]
pub(super) struct Image {
    pub(super) id: i64,
    pub(super) name: &'static str,
    description: &'static str,
    os_flavor: &'static str,
    os_version: &'static str,
    created: &'static str,
}

pub(super) const IMAGES: [Image; 3] = [
    Image {
        id: 114_690_387,
        name: "debian-12",
        description: "Debian 12",
        os_flavor: "debian",
        os_version: "12",
        created: "2023-06-13T06:00:00+00:00",
    },
    Image {
        id: 310_557_660,
        name: "debian-13",
        description: "Debian 13",
        os_flavor: "debian",
        os_version: "13",
        created: "2025-08-11T06:00:00+00:00",
    },
    Image {
        id: 161_547_269,
        name: "ubuntu-24.04",
        description: "Ubuntu 24.04",
        os_flavor: "ubuntu",
        os_version: "24.04",
        created: "2024-04-25T13:00:00+00:00",
    },
];

/// A catalog entry, which requests refer to by id or name.
pub(super) trait CatalogEntry: 'static {
    /// The key for a list in responses, and the last segment of the list's path.
    const PLURAL: &'static str;
    /// The key for a single entry in responses.
    const SINGULAR: &'static str;
    fn all() -> &'static [Self]
    where
        Self: Sized;
    fn id(&self) -> i64;
    fn name(&self) -> &'static str;
    fn json(&self) -> Value;
}

/// Finds the entry with this name, or with this id in decimal.
pub(super) fn find<E: CatalogEntry>(id_or_name: &str) -> Option<&'static E> {
    let id = id_or_name.parse();
    E::all().iter().find(|entry| entry.name() == id_or_name || id == Ok(entry.id()))
}

impl CatalogEntry for ServerType {
    const PLURAL: &'static str = "server_types";
    const SINGULAR: &'static str = "server_type";

    fn all() -> &'static [Self] {
        &SERVER_TYPES
    }

    fn id(&self) -> i64 {
        self.id
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn json(&self) -> Value {
        let prices = prices(self.monthly_cents).into_iter().map(|mut location_price| {
            location_price["included_traffic"] = INCLUDED_TRAFFIC_BYTES.into();
            location_price["price_per_tb_traffic"] = price(100);
            location_price
        });
        let locations = LOCATIONS.iter().map(|location| {
            json!({
                "id": location.id, "name": location.name, "deprecation": null,
                "available": true, "recommended": true,
            })
        });
        json!({
            "id": self.id, "name": self.name, "description": self.name.to_uppercase(),
            "category": "Shared vCPU",
            "cores": self.cores, "memory": f64::from(self.memory_gb), "disk": self.disk_gb,
            "storage_type": "local", "cpu_type": "shared", "architecture": "x86",
            "deprecated": false, "deprecation": null,
            "prices": prices.collect::<Vec<_>>(),
            "locations": locations.collect::<Vec<_>>(),
        })
    }
}

const VAT_PERCENT: u32 = 19;
const IPV4_CENTS: u32 = 50;

/// Returns a price in the provider's format.
fn price(cents: u32) -> Value {
    let decimal = |micros: u64| format!("{}.{:010}", micros / 1_000_000, micros % 1_000_000 * 10_000);
    let net = u64::from(cents) * 10_000;
    json!({"net": decimal(net), "gross": decimal(net * u64::from(100 + VAT_PERCENT) / 100)})
}

/// Returns an item's price in each location: `european_cents` per month in Europe, and a fifth more elsewhere.
fn prices(european_cents: u32) -> Vec<Value> {
    let price_in = |location: &Location| {
        let cents =
            if location.network_zone == "eu-central" { european_cents } else { european_cents * 6 / 5 };
        json!({"location": location.name, "price_hourly": price(cents / 730), "price_monthly": price(cents)})
    };
    LOCATIONS.iter().map(price_in).collect()
}

/// Returns the price list, with server prices at `percent` of the catalog's prices.
pub(super) fn pricing(percent: u32) -> Value {
    let types: Vec<Value> = SERVER_TYPES
        .iter()
        .map(|server_type| {
            let prices = prices(server_type.monthly_cents * percent / 100);
            json!({"id": server_type.id, "name": server_type.name, "prices": prices})
        })
        .collect();
    json!({
        "currency": "EUR", "vat_rate": "19.000000", "server_types": types,
        "primary_ips": [{"type": "ipv4", "prices": prices(IPV4_CENTS)}, {"type": "ipv6", "prices": prices(0)}],
        "volume": {"price_per_gb_month": price(4)}, "server_backup": {"percentage": "20.0000000000"},
    })
}

impl CatalogEntry for Location {
    const PLURAL: &'static str = "locations";
    const SINGULAR: &'static str = "location";

    fn all() -> &'static [Self] {
        &LOCATIONS
    }

    fn id(&self) -> i64 {
        self.id
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn json(&self) -> Value {
        json!({
            "id": self.id, "name": self.name, "description": self.description, "country": self.country,
            "city": self.city, "latitude": self.latitude, "longitude": self.longitude,
            "network_zone": self.network_zone,
        })
    }
}

impl CatalogEntry for Image {
    const PLURAL: &'static str = "images";
    const SINGULAR: &'static str = "image";

    fn all() -> &'static [Self] {
        &IMAGES
    }

    fn id(&self) -> i64 {
        self.id
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn json(&self) -> Value {
        json!({
            "id": self.id, "type": "system", "status": "available", "name": self.name,
            "description": self.description, "image_size": null, "disk_size": 5,
            "created": self.created, "created_from": null, "bound_to": null, "os_flavor": self.os_flavor,
            "os_version": self.os_version, "architecture": "x86", "rapid_deploy": true,
            "protection": {"delete": false}, "deleted": null, "deprecation": null, "labels": {},
        })
    }
}

/// The traffic that a server may send per month for free: 20 TiB, which the provider calls 20 TB.
pub(super) const INCLUDED_TRAFFIC_BYTES: u64 = 20 << 40;

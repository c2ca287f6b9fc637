//! JSON representations of the inventory.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::catalog::{CatalogEntry, INCLUDED_TRAFFIC_BYTES};
use super::inventory::{ActionRecord, ServerRecord};

pub(super) fn server_json(record: &ServerRecord, locked: bool) -> Value {
    let net = &record.public_net;
    let ipv4 = net.ipv4_id.map(|id| {
        json!({
            "id": id, "ip": record.ipv4, "blocked": false,
            "dns_ptr": format!("static.{}.clients.your-server.de", record.ipv4),
        })
    });
    let ipv6 = net.ipv6_id.map(|id| {
        // A network in the documentation prefix, because the simulator's servers are reachable only on loopback.
        json!({"id": id, "ip": format!("2001:db8:0:{:x}::/64", id & 0xffff), "blocked": false, "dns_ptr": []})
    });
    json!({
        "id": record.id,
        "name": record.name,
        "status": record.power,
        "created": format_time(record.created),
        "public_net": {"ipv4": ipv4, "ipv6": ipv6, "floating_ips": [], "firewalls": []},
        "private_net": [],
        "server_type": record.server_type.json(),
        "location": record.location.json(),
        "image": record.image.json(),
        "iso": null,
        "rescue_enabled": false,
        "locked": locked,
        "backup_window": null,
        "outgoing_traffic": 0,
        "ingoing_traffic": 0,
        "included_traffic": INCLUDED_TRAFFIC_BYTES,
        "protection": {"delete": record.is_protected, "rebuild": record.is_protected},
        "labels": record.labels,
        "volumes": [],
        "load_balancers": [],
        "primary_disk_size": record.disk_gb,
        "placement_group": null,
    })
}

pub(super) fn action_json(record: &ActionRecord) -> Value {
    let failed = record.end.as_ref().is_some_and(|end| end.failed);
    let error = failed.then(|| json!({"code": "action_failed", "message": "Action failed"}));
    json!({
        "id": record.id,
        "command": record.command,
        "status": record.status(),
        "progress": if record.end.is_some() { 100 } else { 50 },
        "started": format_time(record.started),
        "finished": record.end.as_ref().map(|end| format_time(end.time)),
        "resources": [{"id": record.server, "type": "server"}],
        "error": error,
    })
}

/// The provider's time format: seconds and a numeric offset.
fn format_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S+00:00").to_string()
}

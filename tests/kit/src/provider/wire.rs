//! JSON representations of the inventory.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::inventory::{ActionRecord, ServerRecord};

pub(super) fn server(record: &ServerRecord, locked: bool) -> Value {
    json!({
        "id": record.id,
        "name": record.name,
        "status": record.power,
        "created": format_time(record.created),
        "public_net": {
            "ipv4": {
                "id": record.id, "ip": record.ipv4, "blocked": false,
                "dns_ptr": format!("static.{}.clients.invalid", record.ipv4),
            },
            "ipv6": null,
            "floating_ips": [],
            "firewalls": [],
        },
        "private_net": [],
        "server_type": record.server_type.json(),
        "location": {"name": record.location},
        "image": {"name": record.image, "type": "system"},
        "iso": null,
        "rescue_enabled": false,
        "locked": locked,
        "backup_window": null,
        "protection": {"delete": false, "rebuild": false},
        "labels": record.labels,
        "volumes": [],
        "primary_disk_size": record.disk_gb,
        "placement_group": null,
    })
}

pub(super) fn action(record: &ActionRecord) -> Value {
    let (status, progress, error) = match &record.end {
        None => ("running", 50, Value::Null),
        Some(end) if end.failed => {
            ("error", 100, json!({"code": "action_failed", "message": "Action failed"}))
        }
        Some(_) => ("success", 100, Value::Null),
    };
    json!({
        "id": record.id,
        "command": record.command,
        "status": status,
        "progress": progress,
        "started": format_time(record.started),
        "finished": record.end.as_ref().map(|end| format_time(end.at)),
        "resources": [{"id": record.server, "type": "server"}],
        "error": error,
    })
}

/// `meta.pagination` of page `page` of `total` entries.
pub(super) fn pagination(page: usize, per_page: usize, total: usize) -> Value {
    let last = total.div_ceil(per_page).max(1);
    json!({"pagination": {
        "page": page,
        "per_page": per_page,
        "previous_page": (page > 1).then(|| page - 1),
        "next_page": (page < last).then(|| page + 1),
        "last_page": last,
        "total_entries": total,
    }})
}

/// The provider's time format: seconds and a numeric offset.
fn format_time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%S+00:00").to_string()
}

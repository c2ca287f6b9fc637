//! The part of the provider's JSON that the platform uses, and its conversion into our types.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::super::server::{
    Action, ActionId, ActionStatus, CreatedServer, Server, ServerId, ServerOrder, ServerStatus,
    ServerTypeInfo,
};
use svc_machine::name::ServerType;

#[derive(Serialize)]
pub(super) struct CreateServerRequest<'a> {
    name: &'a str,
    server_type: &'a str,
    image: &'a str,
    location: &'a str,
    labels: &'a BTreeMap<String, String>,
    user_data: &'a str,
    start_after_create: bool,
    public_net: PublicNetOrder,
}

#[derive(Serialize)]
struct PublicNetOrder {
    enable_ipv4: bool,
    enable_ipv6: bool,
}

impl<'a> CreateServerRequest<'a> {
    /// Creates a request. `user_data` is the order's user-data, exposed only for this call.
    pub(super) fn new(order: &'a ServerOrder, user_data: &'a str) -> Self {
        Self {
            name: &order.name,
            server_type: order.server_type.as_str(),
            image: &order.image,
            location: order.location.as_str(),
            labels: &order.labels,
            user_data,
            start_after_create: true,
            public_net: PublicNetOrder { enable_ipv4: true, enable_ipv6: true },
        }
    }
}

/// A request to change a server's type. `upgrade_disk` is always false, so that the disk keeps its size.
#[derive(Serialize)]
pub(super) struct ChangeTypeRequest<'a> {
    server_type: &'a str,
    upgrade_disk: bool,
}

impl<'a> ChangeTypeRequest<'a> {
    pub(super) fn new(server_type: &'a ServerType) -> Self {
        Self { server_type: server_type.as_str(), upgrade_disk: false }
    }
}

#[derive(Deserialize)]
pub(super) struct ServerResponse {
    pub(super) server: WireServer,
}

#[derive(Deserialize)]
pub(super) struct CreateServerResponse {
    server: WireServer,
    action: Option<WireAction>,
    /// The actions that start the server.
    #[serde(default)]
    next_actions: Vec<WireAction>,
}

impl From<CreateServerResponse> for CreatedServer {
    fn from(created: CreateServerResponse) -> Self {
        let actions = created.action.into_iter().chain(created.next_actions);
        let actions = actions.map(|action| Action::from(action).id).collect();
        Self { server: created.server.into(), actions }
    }
}

#[derive(Deserialize)]
pub(super) struct ServersResponse {
    pub(super) servers: Vec<WireServer>,
    #[serde(default)]
    pub(super) meta: Meta,
}

/// A page of servers, of which only the total number of servers is parsed.
#[derive(Deserialize)]
pub(super) struct ServerCountResponse {
    pub(super) meta: CountMeta,
}

#[derive(Deserialize)]
pub(super) struct CountMeta {
    pub(super) pagination: CountPagination,
}

#[derive(Deserialize)]
pub(super) struct CountPagination {
    pub(super) total_entries: u64,
}

#[derive(Deserialize)]
pub(super) struct ServerTypesResponse {
    pub(super) server_types: Vec<WireServerType>,
}

#[derive(Deserialize)]
pub(super) struct LocationsResponse {
    pub(super) locations: Vec<WireLocation>,
}

#[derive(Deserialize)]
pub(super) struct WireLocation {
    pub(super) name: String,
}

#[derive(Deserialize)]
pub(super) struct ActionResponse {
    pub(super) action: WireAction,
}

#[derive(Deserialize, Default)]
pub(super) struct Meta {
    #[serde(default)]
    pub(super) pagination: Pagination,
}

#[derive(Deserialize, Default)]
pub(super) struct Pagination {
    pub(super) next_page: Option<u32>,
}

#[derive(Deserialize)]
pub(super) struct ErrorBody {
    pub(super) error: ErrorDetail,
}

#[derive(Deserialize)]
pub(super) struct ErrorDetail {
    pub(super) code: String,
    #[serde(default)]
    pub(super) message: String,
}

#[derive(Deserialize)]
pub(super) struct WireServer {
    id: i64,
    name: String,
    status: String,
    #[serde(default)]
    locked: bool,
    public_net: PublicNet,
    server_type: WireServerType,
    #[serde(default)]
    primary_disk_size: Option<u32>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct PublicNet {
    ipv4: Option<PublicIpv4>,
}

#[derive(Deserialize)]
struct PublicIpv4 {
    ip: Ipv4Addr,
}

#[derive(Deserialize)]
pub(super) struct WireServerType {
    name: ServerType,
    cores: u32,
    memory: f64,
    disk: u32,
}

#[derive(Deserialize)]
pub(super) struct WireAction {
    id: i64,
    command: String,
    status: String,
    error: Option<ErrorDetail>,
}

impl From<WireServer> for Server {
    fn from(wire: WireServer) -> Self {
        Self {
            id: ServerId(wire.id),
            name: wire.name,
            status: parse_status(&wire.status),
            is_locked: wire.locked,
            public_ipv4: wire.public_net.ipv4.map(|address| address.ip),
            disk_gb: wire.primary_disk_size.unwrap_or(wire.server_type.disk),
            server_type: wire.server_type.name,
            labels: wire.labels,
        }
    }
}

impl From<WireServerType> for ServerTypeInfo {
    fn from(wire: WireServerType) -> Self {
        Self { name: wire.name, cores: wire.cores, memory_gb: wire.memory, disk_gb: wire.disk }
    }
}

impl From<WireAction> for Action {
    fn from(wire: WireAction) -> Self {
        let status = match (wire.status.as_str(), wire.error) {
            ("success", _) => ActionStatus::Success,
            ("error", Some(error)) => ActionStatus::Error { code: error.code, message: error.message },
            ("error", None) => ActionStatus::Error { code: "unknown".to_owned(), message: String::new() },
            _ => ActionStatus::Running,
        };
        Self { id: ActionId(wire.id), command: wire.command, status }
    }
}

fn parse_status(name: &str) -> ServerStatus {
    use ServerStatus::{Deleting, Initializing, Migrating, Off, Rebuilding, Running, Starting, Stopping};
    [Initializing, Starting, Running, Stopping, Off, Deleting, Migrating, Rebuilding]
        .into_iter()
        .find(|status| status.as_str() == name)
        .unwrap_or(ServerStatus::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_has_actual_disk_size() {
        let json = r#"{"id": 42, "name": "svc-x", "status": "running", "primary_disk_size": 80, "labels": {"a": "b"},
            "public_net": {"ipv4": {"ip": "203.0.113.1", "blocked": false}, "ipv6": null},
            "server_type": {"id": 1, "name": "cpx32", "cores": 4, "memory": 8.0, "disk": 160}}"#;
        let server = Server::from(serde_json::from_str::<WireServer>(json).unwrap());
        assert_eq!((server.disk_gb, server.server_type.as_str()), (80, "cpx32"));
        assert_eq!(server.public_ipv4, Some(Ipv4Addr::new(203, 0, 113, 1)));
        assert_eq!(server.labels["a"], "b");
    }

    #[test]
    fn unknown_status_and_missing_address_are_accepted() {
        let json = r#"{"id": 1, "name": "n", "status": "levitating", "public_net": {"ipv4": null},
            "server_type": {"name": "cpx22", "cores": 2, "memory": 4, "disk": 80}}"#;
        let server = Server::from(serde_json::from_str::<WireServer>(json).unwrap());
        assert_eq!((server.status, server.public_ipv4, server.disk_gb), (ServerStatus::Unknown, None, 80));
    }
}

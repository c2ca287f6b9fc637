//! The provider's inventory: servers, actions, and the creation log. The guests are not accessed here.
//!
//! Invariants: names are unique, and a server with a running action accepts no other action.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::address::Addresses;
use super::catalog::{self, Image, LOCATIONS, Location, ServerType};
use super::error_response::ErrorResponse;
use super::labels::{self, Labels};

const MAX_USER_DATA_BYTES: usize = 32 * 1024;

/// A server's power state, as the API names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Power {
    Initializing,
    Starting,
    Running,
    Stopping,
    Off,
}

impl Power {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Initializing => "initializing",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Off => "off",
        }
    }
}

/// A server in the inventory.
#[derive(Debug, Clone)]
pub(super) struct ServerRecord {
    pub(super) id: i64,
    pub(super) name: String,
    pub(super) power: Power,
    pub(super) server_type: &'static ServerType,
    pub(super) disk_gb: u32,
    pub(super) image: &'static Image,
    pub(super) location: &'static Location,
    pub(super) labels: Labels,
    pub(super) user_data: String,
    /// The machine's address, even if it is not public.
    pub(super) ipv4: Ipv4Addr,
    pub(super) public_net: PublicNet,
    pub(super) created: Timestamp,
    /// Whether deletion is rejected. Also reported for rebuild, which the simulator does not support.
    pub(super) is_protected: bool,
    /// Whether the operating system reacts to the power button.
    pub(super) obeys_shutdown: bool,
}

/// The ids of a server's primary addresses.
#[derive(Debug, Clone)]
pub(super) struct PublicNet {
    pub(super) ipv4_id: Option<i64>,
    pub(super) ipv6_id: Option<i64>,
}

/// An action in the inventory.
#[derive(Debug, Clone)]
pub(super) struct ActionRecord {
    pub(super) id: i64,
    pub(super) command: &'static str,
    pub(super) server: i64,
    pub(super) started: Timestamp,
    /// `None` while it is running.
    pub(super) end: Option<ActionEnd>,
}

#[derive(Debug, Clone)]
pub(super) struct ActionEnd {
    pub(super) time: Timestamp,
    pub(super) failed: bool,
}

impl ActionRecord {
    pub(super) fn status(&self) -> &'static str {
        match &self.end {
            None => "running",
            Some(end) if end.failed => "error",
            Some(_) => "success",
        }
    }
}

/// An entry in the creation log, from which tests detect orphaned and duplicate servers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Creation {
    pub id: i64,
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub created: Timestamp,
    /// The time at which the server was deleted or lost.
    pub ended: Option<Timestamp>,
}

/// The supported fields of `POST /servers`.
#[derive(Debug, Deserialize)]
pub(super) struct CreateRequest {
    name: String,
    server_type: IdOrName,
    image: IdOrName,
    #[serde(default)]
    location: Option<IdOrName>,
    #[serde(default)]
    labels: Labels,
    #[serde(default)]
    user_data: Option<String>,
    #[serde(default)]
    public_net: PublicNetRequest,
    #[serde(default)]
    ssh_keys: Vec<IdOrName>,
    #[serde(default = "default_true")]
    pub(super) start_after_create: bool,
}

impl CreateRequest {
    /// Whether the request names SSH keys, so that the server needs no password.
    pub(super) fn has_ssh_keys(&self) -> bool {
        !self.ssh_keys.is_empty()
    }
}

/// A request's reference to a catalog entry.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum IdOrName {
    Id(i64),
    Name(String),
}

impl IdOrName {
    pub(super) fn find<E: catalog::CatalogEntry>(&self) -> Option<&'static E> {
        match self {
            Self::Id(id) => catalog::find(&id.to_string()),
            Self::Name(name) => catalog::find(name),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(default)]
struct PublicNetRequest {
    enable_ipv4: bool,
    enable_ipv6: bool,
}

impl Default for PublicNetRequest {
    fn default() -> Self {
        Self { enable_ipv4: true, enable_ipv6: true }
    }
}

/// The fields of `PUT /servers/{id}`; absent fields are left unchanged.
#[derive(Debug, Deserialize)]
pub(super) struct UpdateRequest {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    labels: Option<Labels>,
}

fn default_true() -> bool {
    true
}

/// The catalog entries that a request names.
struct RequestedEntries {
    server_type: &'static ServerType,
    image: &'static Image,
    location: &'static Location,
}

pub(super) struct Inventory {
    pub(super) servers: BTreeMap<i64, ServerRecord>,
    /// Names of the servers that are hidden from reads, both in listings and by id.
    pub(super) hidden: BTreeSet<String>,
    actions: BTreeMap<i64, ActionRecord>,
    creations: Vec<Creation>,
    addresses: Addresses,
    server_limit: usize,
    /// Server prices, as a percentage of the catalog's prices.
    pub(super) price_percent: u32,
    next_id: i64,
}

impl Inventory {
    pub(super) fn new(addresses: Addresses, server_limit: usize) -> Self {
        Self {
            servers: BTreeMap::new(),
            hidden: BTreeSet::new(),
            actions: BTreeMap::new(),
            creations: Vec::new(),
            addresses,
            server_limit,
            price_percent: 100,
            next_id: 1000,
        }
    }

    pub(super) fn create(
        &mut self,
        request: CreateRequest,
    ) -> Result<(ServerRecord, Vec<ActionRecord>), ErrorResponse> {
        let RequestedEntries { server_type, image, location } = self.validate(&request)?;
        let should_start = request.start_after_create;
        let ipv4_id = request.public_net.enable_ipv4.then(|| self.next_id());
        let ipv6_id = request.public_net.enable_ipv6.then(|| self.next_id());
        let record = ServerRecord {
            id: self.next_id(),
            name: request.name,
            power: Power::Initializing,
            server_type,
            disk_gb: server_type.disk_gb,
            image,
            location,
            labels: request.labels,
            user_data: request.user_data.unwrap_or_default(),
            ipv4: self.addresses.allocate(),
            public_net: PublicNet { ipv4_id, ipv6_id },
            created: Timestamp::now(),
            is_protected: false,
            obeys_shutdown: true,
        };
        self.creations.push(Creation {
            id: record.id,
            name: record.name.clone(),
            labels: record.labels.clone(),
            created: record.created,
            ended: None,
        });
        self.servers.insert(record.id, record.clone());
        let mut actions = vec![self.add_action(record.id, "create_server")];
        if should_start {
            actions.push(self.add_action(record.id, "start_server"));
        }
        Ok((record, actions))
    }

    fn validate(&self, request: &CreateRequest) -> Result<RequestedEntries, ErrorResponse> {
        check_name(&request.name)?;
        let Some(server_type) = request.server_type.find() else {
            return Err(ErrorResponse::invalid("server_type", "server type not found"));
        };
        let Some(image) = request.image.find() else {
            return Err(ErrorResponse::invalid("image", "image not found"));
        };
        let Some(location) = request.location.as_ref().map_or(LOCATIONS.first(), IdOrName::find) else {
            return Err(ErrorResponse::invalid("location", "location not found"));
        };
        labels::validate(&request.labels)?;
        if request.user_data.as_ref().is_some_and(|data| data.len() > MAX_USER_DATA_BYTES) {
            return Err(ErrorResponse::invalid("user_data", "must be at most 32 KiB"));
        }
        if self.has_name(&request.name) {
            return Err(ErrorResponse::name_taken());
        }
        if self.servers.len() >= self.server_limit {
            return Err(ErrorResponse::server_limit());
        }
        Ok(RequestedEntries { server_type, image, location })
    }

    fn has_name(&self, name: &str) -> bool {
        self.servers.values().any(|server| server.name == name)
    }

    /// Changes a server's labels. Guests are registered by name, so a different name is rejected.
    pub(super) fn update(&mut self, id: i64, request: UpdateRequest) -> Result<&ServerRecord, ErrorResponse> {
        let name = &self.server(id)?.name;
        if let Some(new_name) = request.name.as_ref().filter(|new_name| *new_name != name) {
            check_name(new_name)?;
            return Err(if self.has_name(new_name) {
                ErrorResponse::name_taken()
            } else {
                ErrorResponse::invalid("name", "this simulator does not rename servers")
            });
        }
        if let Some(labels) = request.labels {
            labels::validate(&labels)?;
            if let Some(record) = self.servers.get_mut(&id) {
                record.labels = labels;
            }
        }
        self.server(id)
    }

    /// Starts an action on an unlocked server that satisfies `rule`.
    pub(super) fn begin_action(
        &mut self,
        server: i64,
        command: &'static str,
        rule: impl FnOnce(&ServerRecord) -> Result<(), ErrorResponse>,
    ) -> Result<ActionRecord, ErrorResponse> {
        let record = self.server(server)?;
        rule(record)?;
        self.check_unlocked(server)?;
        Ok(self.add_action(server, command))
    }

    /// Ends an action; only the first call has an effect.
    pub(super) fn end_action(&mut self, action: i64, failed: bool) {
        if let Some(action) = self.actions.get_mut(&action).filter(|action| action.end.is_none()) {
            action.end = Some(ActionEnd { time: Timestamp::now(), failed });
        }
    }

    pub(super) fn delete(&mut self, server: i64) -> Result<(ServerRecord, ActionRecord), ErrorResponse> {
        if self.server(server)?.is_protected {
            return Err(ErrorResponse::protected());
        }
        self.check_unlocked(server)?;
        let action = self.add_action(server, "delete_server");
        let record = self.remove(server).expect("the server exists");
        Ok((record, self.action(action.id)?.clone()))
    }

    /// Removes a server from the inventory, even if it is locked.
    pub(super) fn remove(&mut self, server: i64) -> Option<ServerRecord> {
        let record = self.servers.remove(&server)?;
        let now = Timestamp::now();
        for creation in self.creations.iter_mut().filter(|creation| creation.id == server) {
            creation.ended = Some(now);
        }
        for action in
            self.actions.values_mut().filter(|action| action.server == server && action.end.is_none())
        {
            action.end = Some(ActionEnd { time: now, failed: action.command != "delete_server" });
        }
        Some(record)
    }

    pub(super) fn server(&self, id: i64) -> Result<&ServerRecord, ErrorResponse> {
        self.servers.get(&id).ok_or_else(|| ErrorResponse::not_found("server", id))
    }

    pub(super) fn action(&self, id: i64) -> Result<&ActionRecord, ErrorResponse> {
        self.actions.get(&id).ok_or_else(|| ErrorResponse::not_found("action", id))
    }

    pub(super) fn actions(&self) -> impl Iterator<Item = &ActionRecord> {
        self.actions.values()
    }

    pub(super) fn is_locked(&self, server: i64) -> bool {
        self.actions.values().any(|action| action.server == server && action.end.is_none())
    }

    pub(super) fn creations(&self) -> &[Creation] {
        &self.creations
    }

    fn check_unlocked(&self, server: i64) -> Result<(), ErrorResponse> {
        if self.is_locked(server) { Err(ErrorResponse::locked()) } else { Ok(()) }
    }

    fn add_action(&mut self, server: i64, command: &'static str) -> ActionRecord {
        let action =
            ActionRecord { id: self.next_id(), command, server, started: Timestamp::now(), end: None };
        self.actions.insert(action.id, action.clone());
        action
    }

    fn next_id(&mut self) -> i64 {
        self.next_id += 1;
        self.next_id
    }
}

fn check_name(name: &str) -> Result<(), ErrorResponse> {
    let is_valid = (1..=63).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c))
        && name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if is_valid { Ok(()) } else { Err(ErrorResponse::invalid("name", "is not a valid hostname")) }
}

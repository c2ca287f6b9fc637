//! The provider's inventory: servers, actions, and the log of all creations. The rules of the API are implemented here,
//! without I/O.
//!
//! Invariants: names are unique, a server has at most one running action, and a disk never shrinks.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::address::Addresses;
use super::catalog::{self, CatalogType};
use super::labels::{self, Labels};
use super::refusal::Refusal;
use http::StatusCode;

const MAX_USER_DATA_BYTES: usize = 32 * 1024;

/// The state of a server's power, as the API names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Power {
    Initializing,
    Starting,
    Running,
    Stopping,
    Off,
}

/// A server of the inventory.
#[derive(Debug, Clone)]
pub(super) struct ServerRecord {
    pub(super) id: i64,
    pub(super) name: String,
    pub(super) power: Power,
    pub(super) server_type: &'static CatalogType,
    pub(super) disk_gb: u32,
    pub(super) image: String,
    pub(super) location: String,
    pub(super) labels: Labels,
    pub(super) user_data: String,
    pub(super) ipv4: Ipv4Addr,
    pub(super) created: Timestamp,
    /// Whether the operating system reacts to the power button.
    pub(super) obeys_shutdown: bool,
}

/// An action of the inventory.
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
    pub(super) at: Timestamp,
    pub(super) failed: bool,
}

/// A server that was created, with the time of its end; the log reveals orphans and duplicates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Creation {
    pub id: i64,
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub created: Timestamp,
    /// Time of deletion or disappearance.
    pub ended: Option<Timestamp>,
}

/// The relevant fields of `POST /servers`.
#[derive(Debug, Deserialize)]
pub(super) struct CreateRequest {
    name: String,
    server_type: String,
    image: String,
    #[serde(default)]
    location: Option<String>,
    #[serde(default)]
    labels: Labels,
    #[serde(default)]
    user_data: Option<String>,
    #[serde(default = "default_true")]
    pub(super) start_after_create: bool,
}

fn default_true() -> bool {
    true
}

pub(super) struct Inventory {
    pub(super) servers: BTreeMap<i64, ServerRecord>,
    /// Running servers that reads hide, both in listings and by id.
    pub(super) hidden: BTreeSet<String>,
    actions: BTreeMap<i64, ActionRecord>,
    creations: Vec<Creation>,
    addresses: Addresses,
    server_limit: usize,
    /// Prices of servers, in percent of the usual ones.
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
    ) -> Result<(ServerRecord, Vec<ActionRecord>), Refusal> {
        let server_type = self.validate(&request)?;
        let starts = request.start_after_create;
        let record = ServerRecord {
            id: self.next_id(),
            name: request.name,
            power: Power::Initializing,
            server_type,
            disk_gb: server_type.disk_gb,
            image: request.image,
            location: request.location.unwrap_or_else(|| catalog::LOCATIONS[0].to_owned()),
            labels: request.labels,
            user_data: request.user_data.unwrap_or_default(),
            ipv4: self.addresses.next(),
            created: Timestamp::now(),
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
        if starts {
            actions.push(self.add_action(record.id, "start_server"));
        }
        Ok((record, actions))
    }

    fn validate(&self, request: &CreateRequest) -> Result<&'static CatalogType, Refusal> {
        let hostname = |text: &str| {
            (1..=63).contains(&text.len())
                && text.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c))
                && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        };
        if !hostname(&request.name) {
            return Err(Refusal::invalid("name", "is not a valid hostname"));
        }
        let Some(server_type) = catalog::by_name(&request.server_type) else {
            return Err(Refusal::invalid("server_type", "server type not found"));
        };
        if request.image.is_empty() {
            return Err(Refusal::invalid("image", "must not be empty"));
        }
        if request.location.as_deref().is_some_and(|name| !catalog::LOCATIONS.contains(&name)) {
            return Err(Refusal::invalid("location", "location not found"));
        }
        labels::validate(&request.labels)?;
        if request.user_data.as_ref().is_some_and(|data| data.len() > MAX_USER_DATA_BYTES) {
            return Err(Refusal::invalid("user_data", "must be at most 32 KiB"));
        }
        if self.servers.values().any(|server| server.name == request.name) {
            let text = "server name is already used";
            return Err(Refusal::new(StatusCode::CONFLICT, "uniqueness_error", text));
        }
        if self.servers.len() >= self.server_limit {
            let text = "server limit exceeded";
            return Err(Refusal::new(StatusCode::FORBIDDEN, "resource_limit_exceeded", text));
        }
        Ok(server_type)
    }

    /// Starts an action on an unlocked server that satisfies `rule`.
    pub(super) fn begin(
        &mut self,
        server: i64,
        command: &'static str,
        rule: impl FnOnce(&ServerRecord) -> Result<(), Refusal>,
    ) -> Result<ActionRecord, Refusal> {
        let record = self.server(server)?;
        rule(record)?;
        self.check_unlocked(server)?;
        Ok(self.add_action(server, command))
    }

    /// Ends an action; only the first call counts.
    pub(super) fn settle(&mut self, action: i64, failed: bool) {
        if let Some(action) = self.actions.get_mut(&action).filter(|action| action.end.is_none()) {
            action.end = Some(ActionEnd { at: Timestamp::now(), failed });
        }
    }

    pub(super) fn delete(&mut self, server: i64) -> Result<(ServerRecord, ActionRecord), Refusal> {
        self.server(server)?;
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
            action.end = Some(ActionEnd { at: now, failed: action.command != "delete_server" });
        }
        Some(record)
    }

    pub(super) fn server(&self, id: i64) -> Result<&ServerRecord, Refusal> {
        self.servers.get(&id).ok_or_else(|| Refusal::not_found("server", id))
    }

    pub(super) fn action(&self, id: i64) -> Result<&ActionRecord, Refusal> {
        self.actions.get(&id).ok_or_else(|| Refusal::not_found("action", id))
    }

    pub(super) fn is_locked(&self, server: i64) -> bool {
        self.actions.values().any(|action| action.server == server && action.end.is_none())
    }

    pub(super) fn creations(&self) -> &[Creation] {
        &self.creations
    }

    fn check_unlocked(&self, server: i64) -> Result<(), Refusal> {
        if self.is_locked(server) { Err(Refusal::locked()) } else { Ok(()) }
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

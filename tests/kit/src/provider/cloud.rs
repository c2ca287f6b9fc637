//! The provider's behavior: the effects of calls on the inventory, and of completed actions on servers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::catalog::ServerType;
use super::error_response::ErrorResponse;
use super::faults::FaultScript;
use super::guest::Guests;
use super::inventory::{ActionRecord, CreateRequest, IdOrName, Inventory, Power, ServerRecord};
use super::rate::TokenBucket;

/// State shared by all calls.
pub(super) struct Cloud {
    pub(super) inventory: Mutex<Inventory>,
    pub(super) script: Mutex<FaultScript>,
    pub(super) bucket: Mutex<TokenBucket>,
    pub(super) guests: Guests,
    pub(super) token: String,
    pub(super) action_duration: Duration,
}

/// The intended result of an action. The listener sets it if a call's action must fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Success,
    Failure,
}

/// The effect of a successful action on its server.
#[derive(Debug, Clone, Copy)]
enum Effect {
    Boot,
    CutPower,
    ShutDown,
    Reboot,
    Reset,
    ChangeType { to: &'static ServerType, grow_disk: bool },
    Protect(bool),
    NoOp,
}

#[derive(Debug, Deserialize)]
struct ChangeType {
    server_type: IdOrName,
    upgrade_disk: bool,
}

/// Like the provider, the simulator requires both fields to have the same value.
#[derive(Debug, Deserialize)]
struct ChangeProtection {
    delete: Option<bool>,
    rebuild: Option<bool>,
}

/// Parses a request's body. A body that is not a JSON object is a `json_error`; an invalid or missing field is
/// `invalid_input`.
pub(super) fn parse_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, ErrorResponse> {
    let fields: serde_json::Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| ErrorResponse::malformed_json(&error))?;
    serde_json::from_value(Value::Object(fields)).map_err(|error| {
        ErrorResponse::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "invalid_input",
            format!("invalid input: {error}"),
        )
    })
}

impl Cloud {
    pub(super) fn create(
        self: &Arc<Self>,
        request: CreateRequest,
        outcome: Outcome,
    ) -> Result<(ServerRecord, Vec<ActionRecord>), ErrorResponse> {
        let (record, actions) = self.inventory().create(request)?;
        self.guests.create(&record);
        match actions.as_slice() {
            [created, started] => {
                self.run_action(created.id, record.id, Effect::NoOp, Outcome::Success);
                self.run_action(started.id, record.id, Effect::Boot, outcome);
            }
            created => {
                for action in created {
                    self.run_action(action.id, record.id, Effect::CutPower, outcome);
                }
            }
        }
        Ok((record, actions))
    }

    pub(super) async fn delete(&self, id: i64) -> Result<ActionRecord, ErrorResponse> {
        let (record, action) = self.inventory().delete(id)?;
        self.guests.cut_power(&record.name).await;
        Ok(action)
    }

    pub(super) fn start_action(
        self: &Arc<Self>,
        id: i64,
        command: &str,
        body: &[u8],
        outcome: Outcome,
    ) -> Result<ActionRecord, ErrorResponse> {
        let (name, effect) = match command {
            "poweron" => ("start_server", Effect::Boot),
            "poweroff" => ("stop_server", Effect::CutPower),
            "shutdown" => ("shutdown_server", Effect::ShutDown),
            "reboot" => ("reboot_server", Effect::Reboot),
            "reset" => ("reset_server", Effect::Reset),
            "change_type" => return self.change_type(id, body, outcome),
            "change_protection" => return self.change_protection(id, body, outcome),
            _ => return Err(ErrorResponse::new(StatusCode::NOT_FOUND, "not_found", "no such action")),
        };
        let mut power = Power::Off;
        let action = self.inventory().begin_action(id, name, |record| {
            power = record.power;
            Ok(())
        })?;
        // The provider accepts an action that changes nothing.
        let effect = match (effect, power) {
            (Effect::Boot, Power::Running) | (Effect::CutPower | Effect::ShutDown, Power::Off) => {
                Effect::NoOp
            }
            (effect, _) => effect,
        };
        self.run_action(action.id, id, effect, outcome);
        Ok(action)
    }

    fn change_type(
        self: &Arc<Self>,
        id: i64,
        body: &[u8],
        outcome: Outcome,
    ) -> Result<ActionRecord, ErrorResponse> {
        let request: ChangeType = parse_body(body)?;
        let Some(to) = request.server_type.find::<ServerType>() else {
            return Err(ErrorResponse::invalid("server_type", "server type not found"));
        };
        let reject =
            |code: &str, text: &str| Err(ErrorResponse::new(StatusCode::UNPROCESSABLE_ENTITY, code, text));
        let action = self.inventory().begin_action(id, "change_server_type", |record| {
            if record.power != Power::Off {
                return reject("server_not_stopped", "server is not stopped");
            }
            if record.server_type == to {
                return reject("invalid_server_type", "server already has this type");
            }
            if to.disk_gb < record.disk_gb {
                return reject("invalid_server_type", "the type's disk is smaller than the server's");
            }
            Ok(())
        })?;
        self.run_action(action.id, id, Effect::ChangeType { to, grow_disk: request.upgrade_disk }, outcome);
        Ok(action)
    }

    fn change_protection(
        self: &Arc<Self>,
        id: i64,
        body: &[u8],
        outcome: Outcome,
    ) -> Result<ActionRecord, ErrorResponse> {
        let request: ChangeProtection = parse_body(body)?;
        let (Some(protect), true) = (request.delete, request.delete == request.rebuild) else {
            return Err(ErrorResponse::invalid("rebuild", "must have the same value as delete"));
        };
        let action = self.inventory().begin_action(id, "change_protection", |_| Ok(()))?;
        self.run_action(action.id, id, Effect::Protect(protect), outcome);
        Ok(action)
    }

    /// Runs an action in the background: waits for its duration, applies the effect, then records the result.
    fn run_action(self: &Arc<Self>, action: i64, server: i64, effect: Effect, outcome: Outcome) {
        let cloud = Arc::clone(self);
        let work = async move {
            tokio::time::sleep(cloud.action_duration).await;
            match outcome {
                Outcome::Success => cloud.apply(action, server, effect).await,
                Outcome::Failure => cloud.inventory().end_action(action, true),
            }
        };
        crate::runtime::handle().spawn(work);
    }

    async fn apply(self: &Arc<Self>, action: i64, server: i64, effect: Effect) {
        let Ok(name) = self.inventory().server(server).map(|record| record.name.clone()) else {
            return;
        };
        match effect {
            Effect::NoOp => {}
            Effect::Boot => self.boot(server),
            Effect::CutPower => self.cut_power(server, &name).await,
            Effect::Reset => {
                self.cut_power(server, &name).await;
                self.boot(server);
            }
            Effect::Reboot => {
                self.guests.shut_down(&name).await;
                self.boot(server);
            }
            // The action succeeds as soon as the power button is pressed; the guest shuts down later.
            Effect::ShutDown => {
                self.inventory().end_action(action, false);
                if self.inventory().server(server).is_ok_and(|record| record.obeys_shutdown) {
                    self.set_power(server, Power::Stopping);
                    self.guests.shut_down(&name).await;
                    self.set_power(server, Power::Off);
                }
            }
            Effect::Protect(protect) => {
                if let Some(record) = self.inventory().servers.get_mut(&server) {
                    record.is_protected = protect;
                }
            }
            Effect::ChangeType { to, grow_disk } => {
                if let Some(record) = self.inventory().servers.get_mut(&server) {
                    record.server_type = to;
                    record.disk_gb = if grow_disk { to.disk_gb } else { record.disk_gb };
                }
            }
        }
        self.inventory().end_action(action, false);
    }

    /// Boots under the inventory's lock, so that a server that is deleted concurrently is never started.
    pub(super) fn boot(&self, server: i64) {
        let mut inventory = self.inventory();
        if let Some(record) = inventory.servers.get_mut(&server) {
            record.power = Power::Running;
            self.guests.boot(record);
        }
    }

    async fn cut_power(&self, server: i64, name: &str) {
        self.guests.cut_power(name).await;
        self.set_power(server, Power::Off);
    }

    pub(super) fn set_power(&self, server: i64, power: Power) {
        if let Some(record) = self.inventory().servers.get_mut(&server) {
            record.power = power;
        }
    }

    pub(super) fn inventory(&self) -> MutexGuard<'_, Inventory> {
        self.inventory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn script(&self) -> MutexGuard<'_, FaultScript> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn bucket(&self) -> MutexGuard<'_, TokenBucket> {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

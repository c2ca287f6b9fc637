//! Schemas for values that several routes share in their parameters, requests or responses.

use serde_json::{Value, json};

use crate::config::MAX_FALLBACK_LOCATIONS;
use svc_http::openapi::{string_enum, text_matching};
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::plan::Plan;
use svc_machine::state::Status;
use svc_wire::host::ComponentStatus;
use svc_wire::machine::MachineKind;

pub fn status() -> Value {
    string_enum(Status::NAMES)
}

pub fn kind() -> Value {
    string_enum(&MachineKind::ALL.map(MachineKind::as_str))
}

pub fn idp_user_id() -> Value {
    text_matching(IdpUserId::PATTERN)
}

pub fn slot_name() -> Value {
    text_matching(Slot::PATTERN)
}

pub fn handle_name() -> Value {
    text_matching(Handle::PATTERN)
}

pub fn image_version() -> Value {
    text_matching(ImageVersion::PATTERN)
}

pub fn server_type() -> Value {
    text_matching(ServerType::PATTERN)
}

pub fn location() -> Value {
    text_matching(Location::PATTERN)
}

/// Returns the schema for the locations to try, in this order, if the provider has no capacity in the requested one.
pub fn fallback_locations() -> Value {
    json!({ "type": "array", "items": location(), "maxItems": MAX_FALLBACK_LOCATIONS })
}

pub fn sha256() -> Value {
    text_matching("^[0-9A-Fa-f]{64}$")
}

pub fn plan() -> Value {
    string_enum(Plan::NAMES)
}

/// Returns the schema for a component's status in a health route's response.
pub fn component_status() -> Value {
    string_enum(&ComponentStatus::ALL.map(ComponentStatus::as_str))
}

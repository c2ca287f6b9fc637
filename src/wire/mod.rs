//! The JSON in the platform's API, one file for each resource.
//!
//! Each type is defined once and shared: the platform builds its responses from it, `svcctl` and hosts read them with
//! it, hosts build their requests from it, and the OpenAPI document describes it (`svc_http::openapi::schema_of`).
//!
//! Invariant: a reader accepts messages from older and newer releases. Unknown fields are ignored, a field that older
//! platforms omit is optional when deserialized, and [`WireString`](text::WireString) accepts unknown values.

pub mod alarm;
pub mod audit;
pub mod backup;
pub mod change;
pub mod copies;
pub mod files;
pub mod fleet;
pub mod heartbeat;
pub mod host;
pub mod machine;
pub mod operation;
pub mod operator;
pub mod pointer;
pub mod quote;
pub mod registration;
pub mod rollout;
mod secret;
pub mod slot;
pub mod storage;
pub mod text;
pub mod usage;

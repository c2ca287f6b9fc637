//! HTTP code shared by the other crates: problems, the server loop, clients, TLS and pins, and proofs.

pub mod address_limit;
pub mod body;
pub mod buffered_request;
pub mod certificate;
pub mod client;
mod connection;
mod connection_state;
#[cfg(test)]
mod connection_tests;
pub mod fields;
pub mod files;
pub mod idempotency;
pub mod jwt;
pub mod networks;
pub mod observe;
pub mod openapi;
pub mod passthrough;
pub mod path_params;
pub mod problem;
pub mod proof;
pub mod proxy;
pub mod rate_limit;
pub mod request_id;
pub mod resolve;
pub mod server;
pub mod shards;
pub mod tls;
pub mod usage;
pub mod vars;

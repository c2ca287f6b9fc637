//! svc: one VPS for each paying user, kept alive, reachable, backed up and replaceable.
//!
//! `ARCHITECTURE.md` has the map. Host and platform never import each other; their shared code is here.

pub mod accounts;
pub mod applet;
pub mod beneath;
mod chain;
pub mod clock;
pub mod config;
pub mod ctl;
pub mod diagnosis;
pub mod failpoint;
pub mod fsx;
pub mod host;
pub mod http;
mod log_line;
pub mod machine;
mod manual;
pub mod metrics;
pub mod partial;
pub mod platform;
pub mod provider;
mod quantity;
pub mod store;
pub mod telemetry;
pub mod untrusted_text;

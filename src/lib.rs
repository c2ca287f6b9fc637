//! svc: one VPS for each paying user, kept alive, reachable, backed up and replaceable.
//!
//! `ARCHITECTURE.md` has the code map. Each directory next to this file is a separate package, so that the compiler
//! enforces which packages each one may import. This library re-exports all of them except `svc_files` for the program,
//! the tests and the benches.

pub mod applets;

pub use svc_base::{
    accounts, applet, beneath, clock, config, diagnosis, error_chain, failpoint, fsx, log_line, manual,
    metrics, partial_file, quantity, telemetry, untrusted_text, variable, vars,
};
pub use svc_ctl as ctl;
pub use svc_gateway as gateway;
pub use svc_host as host;
pub use svc_http as http;
pub use svc_machine as machine;
pub use svc_platform as platform;
pub use svc_provider as provider;
pub use svc_router as router;
pub use svc_store as store;
pub use svc_verify as verify;
pub use svc_wire as wire;

//! A cloud provider simulator: the Hetzner Cloud API v1 over HTTP on loopback.
//!
//! It implements the API's rules (unique names, one action at a time, power and disk rules, rate limit, pagination) and
//! scripted faults. [`SimulatorKind`] selects what runs behind a server's record.
//!
//! ```no_run
//! # async fn f() -> anyhow::Result<()> {
//! use kit::provider::{Fault, FaultRule, Simulator, SimulatorOptions};
//! let provider = Simulator::start(SimulatorOptions::record()).await?;
//! provider.add_fault(FaultRule::once("POST", "/servers", Fault::LostReplyAfterCommit));
//! // … drive the platform against provider.base_url() with provider.token() …
//! assert_eq!(provider.servers().len(), 1);
//! # Ok(()) }
//! ```
//!
//! With [`SimulatorKind::Process`], a server is a host: its user-data files are written under a directory that serves
//! as its `/`, and a simulated init takes the place of systemd and starts the applets and a PostgreSQL server. Such a
//! server can be killed, lost, and restarted from its disk; individual units can be run on it, as an operator would
//! with `systemctl start`.
//!
//! With [`SimulatorKind::Machine`], a server is a virtual machine that boots a real Debian with its user-data.
//!
//! Faults and most other operations are also available over HTTP, under [`Simulator::control_url`].

mod address;
mod api;
mod catalog;
mod catalog_api;
mod cloud;
mod control;
mod error_response;
mod faults;
mod guest;
mod host;
mod inventory;
mod labels;
mod listener;
mod machines;
mod query;
mod rate;
mod simulator;
#[cfg(test)]
mod tests;
mod view;
mod wire;

pub use self::faults::{CallRecord, Fault, FaultRule};
pub use self::host::{BootState, HostSettings};
pub use self::inventory::{Creation, Power};
pub use self::machines::MachineSettings;
pub use self::rate::RateLimit;
pub use self::simulator::{Simulator, SimulatorKind, SimulatorOptions};
pub use self::view::{HostView, ServerView};

//! A simulator of the cloud provider: the Hetzner Cloud API v1 over HTTP on loopback.
//!
//! It keeps the API's rules (unique names, one action at a time, power and disk rules, rate limit, pages) and plays
//! scripted faults. What a server *is* beyond its record is chosen by [`SimulatorKind`].
//!
//! ```no_run
//! # async fn f() -> anyhow::Result<()> {
//! use kit::provider::{Fault, FaultRule, Simulator, SimulatorOptions};
//! let provider = Simulator::start(SimulatorOptions::record()).await?;
//! provider.fault(FaultRule::once("POST", "/servers", Fault::LostReplyAfterCommit));
//! // … drive the platform against provider.base_url() with provider.token() …
//! assert_eq!(provider.servers().len(), 1);
//! # Ok(()) }
//! ```
//!
//! With [`SimulatorKind::Process`], a server is a host: its user-data's files land below a directory that stands for `/`,
//! and the applets start in the order of the real units, with a PostgreSQL of their own. Such a server can be killed,
//! vanish, and be started again from its disk; single units can be run in it, as an operator would by `systemctl start`.
//!
//! With [`SimulatorKind::Machine`], a server is a virtual machine that boots a real Debian with its user-data.
//!
//! All of it can be had over HTTP as well, below [`Simulator::control_url`].

mod address;
mod api;
mod book;
mod catalog;
mod cloud;
mod control;
mod faults;
mod guest;
mod host;
mod labels;
mod listener;
mod machines;
mod rate;
mod refusal;
mod simulator;
#[cfg(test)]
mod tests;
mod view;
mod wire;

pub use self::book::{Creation, Power};
pub use self::faults::{CallRecord, Fault, FaultRule};
pub use self::host::{BootState, HostSettings};
pub use self::machines::MachineSettings;
pub use self::rate::RateLimit;
pub use self::simulator::{Simulator, SimulatorKind, SimulatorOptions};
pub use self::view::{HostView, ServerView};

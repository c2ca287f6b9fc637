//! Dispatches are prompts for the owner's coding agents. They run concurrently within limits, stream their events, and
//! are recorded.
//!
//! The [`Dispatcher`] accepts a [`request`], queues its dispatches (`queue.rs`), and keeps each one in the journal
//! until its record is durable. `svc-agent` runs the agent as the owner's user; `run.rs` is the gateway side. Events go
//! to an [`event_log`] that any number of clients can read.

mod accept;
mod dispatcher;
pub mod event_log;
mod journal;
mod queue;
mod recover;
pub mod request;
mod retention;
mod run;
pub mod state;

pub use dispatcher::{DispatchTarget, Dispatcher};

//! Dispatches: prompts for the owner's coding agents, run one beside the other within bounds, told as they go on, and
//! recorded.
//!
//! A request ([`request`]) is accepted by the [`Dispatcher`], waits its turn ([`queue`]), is kept in the [`journal`] until
//! its record is durable, and is run by `svc-agent` ([`run`]), which is the owner's user and not this process. What
//! happens is in a [`log`] that any number of listeners read.

mod accept;
mod dispatcher;
mod handler;
mod journal;
mod log;
mod one;
mod queue;
mod recover;
mod request;
mod run;

pub use dispatcher::Dispatcher;
pub use handler::{CANCEL, DISPATCH, FOLLOW, LIST, SHOW, told_dispatch};

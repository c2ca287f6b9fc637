//! The machine's lifecycle, pure: ids, slots, plans, states, events and transitions.
//!
//! Reads no clock, disk or socket, and imports no other module of this crate.

pub mod choice;
pub mod epoch;
pub mod event;
pub mod id;
pub mod name;
pub mod operation;
pub mod plan;
pub mod state;
pub mod transition;

#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod model;

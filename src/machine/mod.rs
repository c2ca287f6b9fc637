//! The machine lifecycle: ids, slots, plans, states, events and transitions.
//!
//! This package is pure: it reads no clock, disk or socket, and depends on no other package in the workspace.

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
mod lifecycle_tests;
#[cfg(test)]
mod model;

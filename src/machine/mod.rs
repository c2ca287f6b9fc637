//! The machine's lifecycle, pure: ids, slots, plans, states, events and what follows from them.
//!
//! Nothing here reads a clock, a disk or a socket, and nothing of ours is imported from outside this folder.

pub mod epoch;
pub mod event;
pub mod id;
pub mod name;
pub mod plan;
pub mod state;
pub mod transition;

#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod model;

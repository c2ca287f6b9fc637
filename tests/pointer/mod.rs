//! The pointer protocol under every order of events: old host, new hosts and platforms write one pointer, calls are
//! lost, late, doubled and stale, and writers die. In one process by a schedule, and against a real server by races.

pub mod actors;
mod explore;
mod history;
mod races;
mod schedule;
mod staged;

//! Tests the pointer protocol under exhaustive and random interleavings. The old host, new hosts and platforms write
//! one pointer; calls are lost, delayed or duplicated, reads are stale, and writers crash. The tests run in one process
//! on a schedule, and as races against third-party servers.

pub mod actors;
mod explore;
mod history;
mod races;
mod schedule;
mod scheduled_store;

//! Fault-injection tests for snapshots, restores, updates and registration: processes are killed at any moment, the
//! store, the database or the disk fails, and objects are tampered with.
//!
//! The invariants are defined once: in [`snapshot_checker`] for a slot's objects, and in `kills` for a machine's state
//! after a kill. The kill tests have a short run for every commit and a long one. `cargo xtask test --long` runs both,
//! and sums the figures that the tests record (`kit::long_tests`). `SVC_FAULT_SEED=n` replays a seed's kills, as far as
//! timing allows.

mod database;
mod disk;
mod kills;
pub mod snapshot_checker;
mod store;
mod tampered;

//! Fault-injection tests of snapshots, restores, updates and registration: processes killed at any moment, all known
//! failures of the store, the database and the disk, and tampered objects.
//!
//! The invariants are written once: [`snapshot_checker`] for the objects of a slot, `kills` for the state of a machine
//! after a kill. Each test has a short run for every commit and a long one (`cargo xtask test --long`), which records
//! its counts (`kit::long_tests`). `SVC_FAULT_SEED=n` replays the kills of a seed, as far as timing allows.

mod database;
mod disk;
mod kills;
pub mod snapshot_checker;
mod store;
mod tampered;

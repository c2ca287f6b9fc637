//! Fault campaigns against snapshots, restores, updates and registration: processes killed at any moment, all known
//! failures of store, database and disk, and tampered objects.
//!
//! The invariants are written once: [`witness`] for the objects of a slot, `kills` for the state of a machine after a
//! kill. Each campaign has a short form for every change and a long one (`cargo xtask test --long`), which records
//! its counts (`kit::long_tests`). `SVC_FAULT_SEED=n` replays the kills of a seed, as far as timing allows.

mod database;
mod disk;
mod kills;
mod store;
mod tampered;
pub mod witness;

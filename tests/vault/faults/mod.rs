//! Campaigns of faults against snapshots, restores, updates and registration: processes that are killed at any moment, a
//! store, a database and a disk that fail in every way we know, and objects that were tampered with.
//!
//! What must hold is written once: [`witness`] for the objects of a slot, `kills` for what a machine is like after a kill.
//! Each campaign has a short form for every change and a long one (`cargo xtask test --long`), which counts what it tried
//! (`kit::long`). `SVC_FAULT_SEED=n` plays the kills of a seed again, as far as time itself allows.

mod database;
mod disk;
mod kills;
mod store;
mod tampered;
pub mod witness;

//! The applets that run on a customer machine. Nothing here depends on the platform's internals.

pub mod agents;
pub mod audit;
pub mod doctor;
pub mod files;
pub mod launch;
pub mod link;
pub mod records;
pub mod retention;
pub mod snapshots;
pub mod system;
pub mod update;

//! The applets of a customer machine. Nothing here knows the platform's inside.

pub mod backup;
pub mod census;
pub mod config;
pub mod doctor;
pub mod gateway;
pub mod heartbeat;
pub mod jsonl;
pub mod launch;
pub mod layout;
pub mod lock;
pub mod patience;
pub mod pgconn;
pub mod pgtools;
pub mod probe;
pub mod progress;
pub mod register;
pub mod release;
pub mod restore;
pub mod store;
pub mod store_credentials;
pub mod sync;
pub mod systemd;
pub mod unix_socket;
pub mod update;
pub mod updated;

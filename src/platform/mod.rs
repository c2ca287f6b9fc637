//! The control plane and router.
pub mod config;
pub mod context;
pub mod db;
pub mod keys;
pub mod lifecycle;
pub mod operations;
pub mod tokens;
pub mod userdata;

//! The applets of a customer machine. Nothing here knows the platform's inside.

pub mod config;
pub mod gateway;
pub mod layout;

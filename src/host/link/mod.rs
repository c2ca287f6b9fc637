//! The host's calls to the platform: its registration at boot ([`register`]), then its heartbeats ([`sync`]).

pub mod register;
pub mod sync;

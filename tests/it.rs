//! The integration tests, in one binary: a module for each part that is tested through its public interface.

#![allow(
    clippy::unwrap_used,
    reason = "the whole crate is test code; clippy recognizes only functions with #[test]"
)]

mod audit;
mod canary;
mod contract;
mod ctl;
mod exposition;
mod files;
mod first_boot;
mod fuzz;
mod gateway;
mod heartbeat;
mod host;
mod incomplete_requests;
mod platform;
mod pointer;
mod provider;
mod records;
mod router;
mod scenario;
mod sim;
mod stores;
mod units;
mod userdata;

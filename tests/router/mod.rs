//! The router between browsers and machines: real PostgreSQL, a real issuer, real TLS to recording machines.
#![allow(clippy::unwrap_used, reason = "what cannot go on in a test is the failure of that test")]

mod access;
mod changes;
mod forwarding;
mod machine;
mod proxy;
mod sessions;
mod streams;
mod world;

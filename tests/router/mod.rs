//! The router between browsers and machines, with a real PostgreSQL, a test identity provider, and TLS to fake machines
//! that record their requests.

mod access;
mod apps;
mod browser_data;
mod changes;
mod described;
mod forwarding;
mod machine;
mod poll_cost;
mod proxy;
mod sessions;
mod sign_out;
mod streams;
mod verification;
mod world;

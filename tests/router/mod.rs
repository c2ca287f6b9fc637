//! Tests the router between browsers and machines, with a real PostgreSQL server, a test identity provider, and TLS to
//! fake machines that record their requests.

mod access;
mod apps;
mod browser_data;
mod changes;
mod forwarding;
mod machine;
mod openapi;
mod poll_cost;
mod proxy;
mod sessions;
mod sign_out;
mod streams;
mod test_router;
mod verification;

//! The integration tests, one binary: each module is named for the behaviour that it tries.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

mod ctl;
mod provider;
mod story;

//! The one integration-test binary: a module for each part that is tried through its public face.

#![allow(clippy::unwrap_used, reason = "what cannot go on in a test is the failure of that test")]

mod ctl;
mod house;
mod provider;
mod router;
mod story;
mod vault;

//! The one integration-test binary: a module for each part that is tried through its public face.

// The lint's own exception covers test functions, not what they share.
#![allow(clippy::unwrap_used)]

mod ctl;
mod house;
mod platform;
mod provider;
mod router;
mod story;

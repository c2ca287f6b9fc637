//! The one integration-test binary: a module for each part that is tried through its public face.

mod ctl;
mod house;
mod provider;
mod story;

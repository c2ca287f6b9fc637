//! The one integration-test binary: a module for each part that is tried through its public face.

mod house;
mod provider;

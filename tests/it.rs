//! The one integration-test binary: a module for each area.

mod router;

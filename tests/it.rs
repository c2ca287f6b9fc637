//! The one binary of integration tests; a module for each area.

mod gateway;

//! `svcctl`: everything that an operator does, through the public API.

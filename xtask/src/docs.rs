//! `cargo xtask docs`: writes the generated sections of the pages. The test program `reference` generates them, because
//! xtask does not link the product.

use std::process::ExitCode;

use anyhow::Result;

use crate::cargo;

/// The test that compares the pages, or writes them if [`REWRITE_VAR`] is set (`tests/reference.rs`).
const PAGES_TEST: &str = "generated_parts_of_pages_are_current";
/// Like [`PAGES_TEST`], but for the table that needs all object stores; `cargo xtask test` compares it.
const STORES_TEST: &str = "stores_table_is_current";
const REWRITE_VAR: &str = "SVC_WRITE_DOCS";

/// Writes the pages, or with `check` reports those that are out of date.
pub fn run(check: bool) -> Result<ExitCode> {
    let mut test = cargo::command(&[
        "test",
        "--quiet",
        "--package",
        "svc",
        "--test",
        "reference",
        "--",
        "--exact",
        PAGES_TEST,
    ]);
    if !check {
        test.args([STORES_TEST, "--nocapture"]).env(REWRITE_VAR, "1");
    }
    cargo::run_checked(test)?;
    Ok(ExitCode::SUCCESS)
}

//! Tests that cannot run here: each prints its reason, and `cargo xtask test` lists them by name at its end.
//!
//! ```no_run
//! # fn is_root() -> bool { true }
//! if !is_root() {
//!     kit::skip::record("only root can act for two users");
//!     return;
//! }
//! ```

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

/// Variable with the path of the file that lists the skipped tests.
pub const REPORT: &str = "SVC_SKIP_REPORT";

/// Records that the current test skips its checks, or some of them, for this reason.
///
/// # Panics
/// If the report cannot be written: a skipped test must not pass silently.
pub fn record(reason: impl Display) {
    let reason = reason.to_string().replace('\n', " ");
    println!("SKIPPED: {reason}");
    let Some(path) = std::env::var_os(REPORT) else { return };
    let line = format!("{}: {reason}\n", current_test());
    let appended = OpenOptions::new().create(true).append(true).open(&path);
    // In a single write, because tests run in parallel.
    let appended = appended.and_then(|mut file| file.write_all(line.as_bytes()));
    appended.unwrap_or_else(|error| panic!("append to {}: {error}", path.display()));
}

/// The name that nextest sets, otherwise the thread's name, which cargo's test runner sets.
fn current_test() -> String {
    std::env::var("NEXTEST_TEST_NAME")
        .unwrap_or_else(|_| std::thread::current().name().unwrap_or("a test").to_owned())
}

//! Tests that cannot run in this environment: each prints its reason, and `cargo xtask test` lists them by name at the
//! end.
//!
//! ```no_run
//! # fn is_root() -> bool { true }
//! if !is_root() {
//!     kit::skip::record("only root can run processes as two users");
//!     return;
//! }
//! ```

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

/// Environment variable that holds the path of the file listing the skipped tests.
pub const SKIP_REPORT_VAR: &str = "SVC_SKIP_REPORT";

/// Records that the current test skips all or some of its checks for this reason.
///
/// # Panics
/// Panics if the report cannot be written, because a skipped test must not pass silently.
pub fn record(reason: impl Display) {
    let reason = reason.to_string().replace('\n', " ");
    println!("SKIPPED: {reason}");
    let Some(path) = std::env::var_os(SKIP_REPORT_VAR) else { return };
    let line = format!("{}: {reason}\n", current_test_name());
    let appended = OpenOptions::new().create(true).append(true).open(&path);
    // In a single write, because tests run in parallel.
    let appended = appended.and_then(|mut file| file.write_all(line.as_bytes()));
    appended.unwrap_or_else(|error| panic!("cannot append to {}: {error}", path.display()));
}

/// Returns the name that nextest sets or, without nextest, the thread's name, which cargo's test runner sets.
fn current_test_name() -> String {
    std::env::var("NEXTEST_TEST_NAME")
        .unwrap_or_else(|_| std::thread::current().name().unwrap_or("a test").to_owned())
}

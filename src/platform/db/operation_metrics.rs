//! Records metrics for ended operations.

use std::time::Duration;

use jiff::Timestamp;

use svc_base::metrics::{OPERATION_DURATION, OPERATIONS, intern_label};

/// Counts an operation that has just ended, and records how long ago it was created. Most callers count within their
/// transaction, because the lifecycle ends operations in many places. If the commit fails, the count is one too high.
pub fn record_end(kind: &str, outcome: &str, created_at: Timestamp) {
    let kind = intern_label(kind);
    OPERATIONS.add_one([kind, intern_label(outcome)]);
    let elapsed = Timestamp::now().duration_since(created_at);
    OPERATION_DURATION.record([kind], Duration::try_from(elapsed).unwrap_or_default());
}

//! Metrics for ended operations.

use std::time::Duration;

use jiff::Timestamp;

use svc_base::metrics::{OPERATION_DURATION, OPERATIONS, intern_label};

/// Counts an operation that has just ended.
pub fn record_end(kind: &str, outcome: &str, since: Timestamp) {
    let kind = intern_label(kind);
    OPERATIONS.add_one([kind, intern_label(outcome)]);
    let elapsed = Timestamp::now().duration_since(since);
    OPERATION_DURATION.record([kind], Duration::try_from(elapsed).unwrap_or_default());
}

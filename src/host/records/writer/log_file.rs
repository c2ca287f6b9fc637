//! The log files that the writer appends to, and the limits of their queues.

use jiff::civil::Date;

use super::file::LineFormat;
use crate::records::log_file_names::{ACTIVITY, AUDIT, INTERACTIONS};

/// Number of queued bytes at which the queued lines are written immediately, without waiting for the next interval.
pub const BATCH_BYTES: usize = 256 << 10;
/// Maximum number of bytes that have been accepted but not yet written.
pub const MAX_QUEUED_BYTES: usize = 16 << 20;

/// A log file that the writer appends to. `Audit` and `Activity` are the current files, which rotations rename.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LogFile {
    /// The interactions attributed to one day.
    Interactions(Date),
    Audit,
    /// Plain text; the others are JSON.
    Activity,
    /// Ordered last, because usage is written after the interactions that it counts.
    Usage,
}

impl LogFile {
    /// Returns the maximum number of queued bytes of this log file's lines. Lines that any program can cause in
    /// large numbers leave room for interactions and usage.
    pub fn max_queued_bytes(self) -> usize {
        match self {
            Self::Audit | Self::Activity => MAX_QUEUED_BYTES / 4,
            Self::Interactions(_) | Self::Usage => MAX_QUEUED_BYTES,
        }
    }

    pub fn line_format(self) -> LineFormat {
        if self == Self::Activity { LineFormat::Text } else { LineFormat::Json }
    }

    pub fn file_name(self) -> String {
        match self {
            Self::Interactions(day) => INTERACTIONS.dated_name(day, 1),
            Self::Audit => AUDIT.current_name(),
            Self::Activity => ACTIVITY.current_name(),
            Self::Usage => "usage.jsonl".to_owned(),
        }
    }
}

/// The line was rejected, because the queue is full or the writer is stopping. Unless the writer stops first, a gap
/// line reports the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("line dropped: the queue is full, or the writer is stopping")]
pub struct LineDropped;

//! Log files the writer appends to, and their queue limits.

use jiff::civil::Date;

use super::file::LineFormat;
use crate::records::log_file_names::{ACTIVITY, AUDIT, INTERACTIONS};

/// Number of queued bytes that triggers a write without waiting for the next interval.
pub const BATCH_BYTES: usize = 256 << 10;
/// Maximum number of accepted but unwritten bytes.
pub const MAX_QUEUED_BYTES: usize = 16 << 20;

/// A log file that the writer appends to. `Audit` and `Activity` are the current files, which rotation renames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LogFile {
    /// Interactions attributed to one day.
    Interactions(Date),
    Audit,
    /// Plain text; the others are JSON.
    Activity,
    /// Ordered last: usage is written after the interactions it counts.
    Usage,
}

impl LogFile {
    /// Returns this log file's limit on queued bytes. Any program can cause audit and activity lines in large numbers,
    /// so these leave room for interactions and usage.
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

/// The line was rejected because the queue is full or the writer is stopping. Unless the writer stops first, a gap line
/// reports the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("line dropped: queue full or writer stopping")]
pub struct LineDropped;

//! The records of the writer, and how much of each is queued.

use jiff::civil::Date;

use super::file::LineFormat;
use crate::records::names::{ACTIVITY, AUDIT, INTERACTIONS};

/// Queued bytes that are written immediately, without waiting for the next interval.
pub const BATCH_BYTES: usize = 256 << 10;
/// Maximum bytes that are accepted and not yet written.
pub const MAX_QUEUED_BYTES: usize = 16 << 20;

/// A record of this writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Record {
    /// Of the day for which a line counts.
    Interactions(Date),
    Audit,
    /// Plain text; the other records are JSON.
    Activity,
    /// Last: usage is written after the interactions that it counts.
    Usage,
}

impl Record {
    /// Maximum queued bytes of this record. Records that any program can flood leave room for those that are billed.
    pub fn max_queued_bytes(self) -> usize {
        match self {
            Self::Audit | Self::Activity => MAX_QUEUED_BYTES / 4,
            Self::Interactions(_) | Self::Usage => MAX_QUEUED_BYTES,
        }
    }

    pub fn form(self) -> LineFormat {
        if self == Self::Activity { LineFormat::Text } else { LineFormat::Json }
    }

    pub fn file_name(self) -> String {
        match self {
            Self::Interactions(day) => INTERACTIONS.dated(day, 1),
            Self::Audit => AUDIT.current(),
            Self::Activity => ACTIVITY.current(),
            Self::Usage => "usage.jsonl".to_owned(),
        }
    }
}

/// The line was refused. A gap before the next line reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("record queue full: the disk accepts no writes")]
pub struct QueueFull;

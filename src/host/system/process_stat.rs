//! `/proc/PID/stat` (proc(5)).

use std::io;

/// Clock ticks per second. Process start times are measured in clock ticks.
pub const TICKS_PER_SECOND: u64 = 100;

/// Subset of the `/proc/PID/stat` fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStat {
    pub is_zombie: bool,
    pub parent_pid: i32,
    /// Start time, in clock ticks since boot.
    pub start_ticks: u64,
}

impl ProcessStat {
    /// # Errors
    /// If the process has exited or is hidden by `/proc`, or its fields don't match proc(5).
    pub fn from_pid(pid: i32) -> io::Result<Self> {
        Self::read(&pid.to_string())
    }

    /// # Errors
    /// Same as [`Self::from_pid`].
    pub fn current() -> io::Result<Self> {
        Self::read("self")
    }

    fn read(process: &str) -> io::Result<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
        Self::parse(&stat)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed /proc/PID/stat"))
    }

    fn parse(stat: &str) -> Option<Self> {
        // The second field is a parenthesized name that may contain anything.
        let (_, rest) = stat.rsplit_once(')')?;
        let mut fields = rest.split_whitespace();
        Some(Self {
            is_zombie: fields.next()? == "Z",
            parent_pid: fields.next()?.parse().ok()?,
            // Field 22; 5 to 21 are skipped.
            start_ticks: fields.nth(17)?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_any_process_name() {
        let stat = |name: &str| {
            ProcessStat::parse(&format!("7 ({name}) S 3 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0"))
        };
        let expected = ProcessStat { is_zombie: false, parent_pid: 3, start_ticks: 4242 };
        for name in ["sh", "a) b", "a) b) (c", ""] {
            assert_eq!(stat(name), Some(expected), "{name}");
        }
        assert!(
            ProcessStat::parse("7 (sh) Z 3 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0").unwrap().is_zombie
        );
        for malformed in ["", "nothing", "7 (sh) S", "7 (sh) S 3 1 1"] {
            assert_eq!(ProcessStat::parse(malformed), None, "{malformed}");
        }
    }

    #[test]
    fn from_pid_reads_this_process() {
        let this = i32::try_from(std::process::id()).unwrap();
        assert_eq!(ProcessStat::from_pid(this).unwrap(), ProcessStat::current().unwrap());
        assert!(ProcessStat::from_pid(i32::MAX).is_err());
    }
}

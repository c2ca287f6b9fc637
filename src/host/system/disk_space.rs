//! Disk space classification.

const GIB: u64 = 1 << 30;

/// How full a disk is, based on both percentage and bytes free, since small disks fill up sooner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskSpace {
    Sufficient,
    /// Less than 2 GiB or 10% is free.
    Low,
    /// Less than 512 MiB or 3% is free.
    Full,
}

impl DiskSpace {
    pub fn classify(total_bytes: u64, free_bytes: u64) -> Self {
        let percent = free_percent(total_bytes, free_bytes);
        if free_bytes < GIB / 2 || percent < 3 {
            Self::Full
        } else if free_bytes < 2 * GIB || percent < 10 {
            Self::Low
        } else {
            Self::Sufficient
        }
    }
}

/// Returns the percentage of free space, or 0 for a zero-sized disk.
pub fn free_percent(total_bytes: u64, free_bytes: u64) -> u64 {
    free_bytes.saturating_mul(100).checked_div(total_bytes).unwrap_or(0)
}

pub fn to_gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classify_considers_percentage_and_free_bytes() {
        for (total, free, expected) in [
            (40 * GIB, 20 * GIB, DiskSpace::Sufficient),
            (40 * GIB, 3 * GIB, DiskSpace::Low),
            (10 * GIB, 2 * GIB - 1, DiskSpace::Low),
            (400 * GIB, 8 * GIB, DiskSpace::Full),
            (10 * GIB, GIB / 4, DiskSpace::Full),
            (0, 0, DiskSpace::Full),
        ] {
            assert_eq!(DiskSpace::classify(total, free), expected, "{free} of {total}");
        }
    }
}

//! Checks free space on the file systems that hold the root, the owner's files and the machine state.

use std::path::{Path, PathBuf};

use crate::system::disk_space::{DiskSpace, free_percent, to_gib};
use crate::system::layout::Layout;
use svc_base::diagnosis::Findings;

/// Assesses free space on one file system.
fn assess(findings: Findings, path: &Path, total_bytes: u64, free_bytes: u64) -> Findings {
    let percent = free_percent(total_bytes, free_bytes);
    let summary = format!("{}: {:.1} GiB free ({percent}%)", path.display(), to_gib(free_bytes));
    let next = "delete files (du -xh --max-depth=2 / | sort -h | tail): no command enlarges this disk in place, and a \
                recovery creates a new disk without the files that are excluded from the file backup";
    match DiskSpace::classify(total_bytes, free_bytes) {
        DiskSpace::Full => findings.problem(summary, next),
        DiskSpace::Low => findings.warning(summary, next),
        DiskSpace::Sufficient => findings.ok(summary),
    }
}

/// Returns a directory on each file system to check: root, owner files and machine state.
fn list_directories(layout: &Layout) -> [PathBuf; 3] {
    [layout.root().to_owned(), layout.home(), layout.update_state()]
}

pub fn check(layout: &Layout) -> Findings {
    let mut findings = Findings::new("disk");
    let mut seen = Vec::new();
    for path in list_directories(layout) {
        use std::os::unix::fs::MetadataExt;
        let Ok(meta) = std::fs::metadata(&path) else { continue };
        if seen.contains(&meta.dev()) {
            continue;
        }
        seen.push(meta.dev());
        match fs4::statvfs(&path) {
            Ok(stats) => findings = assess(findings, &path, stats.total_space(), stats.available_space()),
            Err(error) => findings = findings.skipped(format!("{}: {error}", path.display())),
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn list_directories_returns_root_home_and_state() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        std::fs::create_dir_all(layout.home()).unwrap();
        std::fs::create_dir_all(layout.update_state()).unwrap();
        for path in list_directories(&layout) {
            assert!(path.is_dir(), "{}", path.display());
        }
    }

    #[test]
    fn assess_warns_before_disk_is_full() {
        let summary = |total: u64, free: u64| {
            let findings = assess(Findings::new("disk"), Path::new("/"), total, free);
            format!("{findings:?}")
        };
        assert!(summary(40 * GIB, 20 * GIB).contains("Ok"));
        assert!(summary(40 * GIB, 3 * GIB).contains("Warning"));
        assert!(summary(400 * GIB, 8 * GIB).contains("Problem"));
        assert!(summary(10 * GIB, GIB / 4).contains("Problem"));
        assert!(summary(10 * GIB, GIB / 4).contains("a recovery creates a new disk without the files"));
        assert!(summary(0, 0).contains("Problem"));
    }
}

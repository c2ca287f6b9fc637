//! Checks the free space of the file systems with the owner's files and the machine's state.

use std::path::Path;

use crate::system::layout::Layout;
use svc_base::diagnosis::Findings;

const GIB: u64 = 1 << 30;

/// Rates the free space of one file system.
fn assess(findings: Findings, path: &Path, total: u64, free: u64) -> Findings {
    let percent = (free * 100).checked_div(total).unwrap_or(0);
    let summary = format!("{}: {:.1} GiB free ({percent} %)", path.display(), free as f64 / GIB as f64);
    let next = "free room (du -xh --max-depth=2 / | sort -h | tail): no command enlarges this disk in place, and a \
                recovery makes a new disk without the files that are not in the database";
    if free < GIB / 2 || percent < 3 {
        findings.problem(summary, next)
    } else if free < 2 * GIB || percent < 10 {
        findings.warning(summary, next)
    } else {
        findings.ok(summary)
    }
}

pub fn check(layout: &Layout) -> Findings {
    let mut findings = Findings::new("disk");
    let mut seen = Vec::new();
    let state = layout.tls_key();
    for path in [layout.root().to_owned(), layout.home(), state.join("../..")] {
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
        assert!(summary(10 * GIB, GIB / 4).contains("a recovery makes a new disk without the files"));
        assert!(summary(0, 0).contains("Problem"));
    }
}

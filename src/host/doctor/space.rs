//! Room on the file systems of the owner's files and of the machine's state.

use std::path::Path;

use crate::diagnosis::Findings;
use crate::host::system::layout::Layout;

const GIB: u64 = 1 << 30;

/// What is left of a file system, judged: a database that cannot write is the end of the owner's day.
fn judge(findings: Findings, path: &Path, total: u64, free: u64) -> Findings {
    let percent = (free * 100).checked_div(total).unwrap_or(0);
    let told = format!("{}: {:.1} GiB free ({percent} %)", path.display(), free as f64 / GIB as f64);
    let next = "free room (du -xh --max-depth=2 / | sort -h | tail): no command enlarges this disk in place, and a \
                recovery makes a new disk without the files that are not in the database";
    if free < GIB / 2 || percent < 3 {
        findings.problem(told, next)
    } else if free < 2 * GIB || percent < 10 {
        findings.warning(told, next)
    } else {
        findings.ok(told)
    }
}

pub fn check(layout: &Layout) -> Findings {
    let mut findings = Findings::of("disk");
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
            Ok(stats) => findings = judge(findings, &path, stats.total_space(), stats.available_space()),
            Err(error) => findings = findings.skipped(format!("{}: {error}", path.display())),
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_room_is_told_before_there_is_none() {
        let told = |total: u64, free: u64| {
            let findings = judge(Findings::of("disk"), Path::new("/"), total, free);
            format!("{findings:?}")
        };
        assert!(told(40 * GIB, 20 * GIB).contains("Ok"));
        assert!(told(40 * GIB, 3 * GIB).contains("Warning"));
        assert!(told(400 * GIB, 8 * GIB).contains("Problem"));
        assert!(told(10 * GIB, GIB / 4).contains("Problem"));
        assert!(told(10 * GIB, GIB / 4).contains("a recovery makes a new disk without the files"));
        assert!(told(0, 0).contains("Problem"));
    }
}

//! Records in `activity.log` that the disk with the owner's files is getting full, or that it has room again.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use svc_host::agents::kernel::Kernel;
use svc_host::system::disk_space::{DiskSpace, to_gib};
use svc_host::system::layout::Layout;

const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Checks the disk until `stop` is cancelled.
pub async fn watch_disk(layout: Layout, kernel: Arc<Kernel>, stop: CancellationToken) {
    let mut current = DiskSpace::Sufficient;
    loop {
        if let Ok(disk) = fs4::statvfs(layout.home()) {
            let (total_bytes, free_bytes) = (disk.total_space(), disk.available_space());
            let before = std::mem::replace(&mut current, DiskSpace::classify(total_bytes, free_bytes));
            if let Some(text) = describe_change(before, current, total_bytes, free_bytes) {
                kernel.note(&text);
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
        }
    }
}

fn describe_change(
    before: DiskSpace,
    current: DiskSpace,
    total_bytes: u64,
    free_bytes: u64,
) -> Option<String> {
    if before == current {
        return None;
    }
    let space = format!("{:.1} of {:.1} GiB are free", to_gib(free_bytes), to_gib(total_bytes));
    Some(match current {
        DiskSpace::Sufficient => format!("the disk has room again: {space}"),
        DiskSpace::Low if before == DiskSpace::Full => format!("the disk is no longer almost full: {space}"),
        DiskSpace::Low => format!("the disk is getting full: {space}"),
        DiskSpace::Full => format!("the disk is almost full: {space}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn describe_change_reports_each_change_once() {
        let mut current = DiskSpace::Sufficient;
        let mut check = |free_bytes: u64| {
            let before = std::mem::replace(&mut current, DiskSpace::classify(40 * GIB, free_bytes));
            describe_change(before, current, 40 * GIB, free_bytes)
        };
        assert_eq!(check(20 * GIB), None);
        assert_eq!(check(3 * GIB).unwrap(), "the disk is getting full: 3.0 of 40.0 GiB are free");
        assert_eq!(check(3 * GIB), None);
        assert_eq!(check(GIB / 4).unwrap(), "the disk is almost full: 0.2 of 40.0 GiB are free");
        assert_eq!(check(3 * GIB).unwrap(), "the disk is no longer almost full: 3.0 of 40.0 GiB are free");
        assert_eq!(check(30 * GIB).unwrap(), "the disk has room again: 30.0 of 40.0 GiB are free");
    }
}

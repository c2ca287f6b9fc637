//! Text view of a host's first boot, as reported by the host.

use super::View;
use super::human::{format_ago, format_bytes, seconds_between};
use svc_base::quantity::pluralize;
use svc_wire::machine::{Boot, BootProgress, BootStage};
use svc_wire::text::Time;

/// Formats stage durations as `bundle 0.4 s, database 1.2 s`, preceded by the current stage and its progress until the
/// host has registered.
pub fn summary_line(
    view: &View,
    boot: &Boot,
    registered_at: Option<&Time>,
    progress: Option<&BootProgress>,
) -> String {
    let end_times = boot.stages.iter().skip(1).map(|stage| Some(&stage.at)).chain([registered_at]);
    let format_duration = |stage: &BootStage, end: &Time| {
        Some(format!("{} {:.1} s", stage.stage, seconds_between(&stage.at, end)?.max(0.0)))
    };
    let stages: Vec<_> =
        boot.stages.iter().zip(end_times).filter_map(|(stage, end)| format_duration(stage, end?)).collect();
    let stages = stages.join(", ");
    if registered_at.is_some() {
        return stages;
    }
    let progress = progress.filter(|progress| progress.stage == boot.stage).map(progress_line);
    let progress = progress.map(|line| format!(": {line}")).unwrap_or_default();
    let current = format!("at {}, {}{progress}", boot.stage, format_ago(view.now, &boot.at));
    if stages.is_empty() { current } else { format!("{current}; completed: {stages}") }
}

/// Returns the current phase's percentage. Rows are counted last, so they take precedence over bytes.
pub fn percent(progress: &BootProgress) -> Option<u64> {
    let percent_of = |done: Option<u64>, total: Option<u64>| {
        let (done, total) = done.zip(total).filter(|(_, total)| *total > 0)?;
        Some((u128::from(done) * 100 / u128::from(total)).min(100) as u64)
    };
    percent_of(progress.rows, progress.total_rows)
        .or_else(|| percent_of(progress.bytes, progress.total_bytes))
}

/// Formats progress as `42%, 1.2 GiB of 2.9 GiB, 1200 of 4000 rows counted`.
pub fn progress_line(progress: &BootProgress) -> String {
    let mut parts = Vec::new();
    parts.extend(percent(progress).map(|percent| format!("{percent}%")));
    parts.extend(progress.bytes.map(|bytes| match progress.total_bytes {
        Some(total) => format!("{} of {}", format_bytes(bytes), format_bytes(total)),
        None => format_bytes(bytes),
    }));
    parts.extend(progress.rows.map(|rows| match progress.total_rows {
        Some(total) => format!("{rows} of {} counted", pluralize(total, "row")),
        None => format!("{} counted", pluralize(rows, "row")),
    }));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_uses_last_phase_with_a_total() {
        let progress = |bytes, total_bytes, rows, total_rows| {
            let stage = "restore".to_owned();
            BootProgress { stage, bytes, total_bytes, rows, total_rows }
        };
        let downloading = progress(Some(1 << 30), Some(4 << 30), None, None);
        assert_eq!(progress_line(&downloading), "25%, 1.0 GiB of 4.0 GiB");
        let loading = progress(Some(4096), Some(4096), Some(900), Some(1000));
        assert_eq!(progress_line(&loading), "90%, 4.0 KiB of 4.0 KiB, 900 of 1000 rows counted");
        assert_eq!(percent(&progress(Some(5), Some(0), None, None)), None);
        assert_eq!(percent(&progress(Some(u64::MAX), Some(1), None, None)), Some(100));
        assert_eq!(progress_line(&progress(None, None, Some(7), None)), "7 rows counted");
        assert_eq!(progress_line(&progress(None, None, Some(1), None)), "1 row counted");
        assert_eq!(progress_line(&progress(None, None, Some(1), Some(1))), "100%, 1 of 1 row counted");
    }
}

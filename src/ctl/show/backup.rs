//! Text view of a slot's snapshots.

use std::path::Path;

use super::human::{format_bytes, format_time};
use super::table::{self, Cell};
use super::{Color, View};
use svc_wire::backup::{Backup, BackupPage};

pub fn list(view: &View, page: &BackupPage) -> String {
    if page.backups.is_empty() {
        return "no snapshots\n".to_owned();
    }
    let row = |b: &Backup| {
        let latest = Cell::colored(Some(Color::Good), if b.latest { "latest" } else { "" });
        let taken = format_time(view.now, &b.taken_at);
        vec![
            taken.into(),
            format_bytes(b.size_bytes).into(),
            b.epoch.to_string().into(),
            latest,
            b.key.clone().into(),
        ]
    };
    let rows: Vec<_> = page.backups.iter().map(row).collect();
    let mut text = table::render(view, &["TAKEN", "SIZE", "EPOCH", "", "KEY"], &rows);
    if let Some(cursor) = &page.next_cursor {
        text.push_str(&format!(
            "more snapshots: repeat the command with `--cursor {cursor}`; `--limit` sets the page size\n"
        ));
    }
    text
}

/// Shows one snapshot.
pub fn details(view: &View, backup: &Backup) -> String {
    table::render_pairs(view, &detail_pairs(view, backup))
}

/// Shows one snapshot and the file it was downloaded to.
pub fn downloaded(view: &View, backup: &Backup, file: &Path) -> String {
    let [snapshot, taken, size] = detail_pairs(view, backup);
    table::render_pairs(view, &[snapshot, taken, size, ("file", file.display().to_string().into())])
}

fn detail_pairs(view: &View, backup: &Backup) -> [(&'static str, Cell); 3] {
    [
        ("snapshot", backup.key.clone().into()),
        ("taken", format_time(view.now, &backup.taken_at).into()),
        ("size", format_bytes(backup.size_bytes).into()),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::show::test_data::{from_json, plain_view};

    #[test]
    fn downloaded_aligns_file_with_snapshot_details() {
        let backup: Backup = from_json(json!({"key": "system/db/snapshots/a-1.dump", "sizeBytes": 1_363_148,
            "takenAt": "2026-11-21T11:05:00.000Z"}));
        assert_eq!(
            downloaded(&plain_view(), &backup, Path::new("ada.dump")),
            "snapshot  system/db/snapshots/a-1.dump\n\
             taken     2026-11-21 11:05:00 UTC, 55 min ago\n\
             size      1.3 MiB\n\
             file      ada.dump\n"
        );
    }
}

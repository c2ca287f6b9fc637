//! Text view of a slot's snapshots.

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
    let pairs = [
        ("snapshot", Cell::from(backup.key.clone())),
        ("taken", format_time(view.now, &backup.taken_at).into()),
        ("size", format_bytes(backup.size_bytes).into()),
    ];
    table::render_pairs(view, &pairs)
}

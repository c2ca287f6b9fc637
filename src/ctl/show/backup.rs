//! Text view of a slot's snapshots.

use serde::Deserialize;

use super::human::{size, when};
use super::table::{self, Cell};
use super::{Colour, View};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Backups {
    pub latest: Option<String>,
    pub backups: Vec<Backup>,
    pub next_cursor: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Backup {
    pub key: String,
    pub size_bytes: u64,
    pub sha256: String,
    pub taken_at: String,
    pub epoch: u64,
    #[serde(default)]
    pub latest: bool,
}

impl Backup {
    /// The last part of its key.
    pub fn name(&self) -> &str {
        self.key.rsplit('/').next().unwrap_or_default()
    }
}

pub fn list(view: &View, page: &Backups) -> String {
    if page.backups.is_empty() {
        return "no backups\n".to_owned();
    }
    let row = |b: &Backup| {
        let latest = Cell::painted(Some(Colour::Good), if b.latest { "latest" } else { "" });
        let taken = when(view.now, &b.taken_at);
        vec![
            taken.into(),
            size(b.size_bytes).into(),
            b.epoch.to_string().into(),
            latest,
            b.key.clone().into(),
        ]
    };
    let rows: Vec<_> = page.backups.iter().map(row).collect();
    let mut shown = table::render(view, &["TAKEN", "SIZE", "EPOCH", "", "KEY"], &rows);
    if let Some(cursor) = &page.next_cursor {
        shown.push_str(&format!("more: `--cursor {cursor}` shows the next page; `--limit` sets its size\n"));
    }
    shown
}

/// Shows one snapshot.
pub fn one(view: &View, backup: &Backup) -> String {
    let pairs = [
        ("backup", Cell::from(backup.key.clone())),
        ("taken", when(view.now, &backup.taken_at).into()),
        ("size", size(backup.size_bytes).into()),
    ];
    table::pairs(view, &pairs)
}

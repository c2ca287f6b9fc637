//! Text view of a slot's file backups.

use secrecy::ExposeSecret;

use super::human::{format_bytes, format_time};
use super::table::{self, Cell};
use super::{Colour, View};
use crate::args::SlotTarget;
use svc_base::quantity::pluralize;
use svc_wire::files::{FilesAccess, FilesPrunePlan};
use svc_wire::host::FilesReport;

/// The state of a machine's file backup: `saved 2026-01-01 00:00:00 UTC, 5 s ago; 1234 files, 5 GiB`.
pub fn cell(view: &View, report: &FilesReport) -> Cell {
    let saved = match report.saved_until.as_deref() {
        Some(at) => format!("saved {}", format_time(view.now, at)),
        None => "not saved yet".to_owned(),
    };
    let mut line = format!("{saved}; {} files, {}", report.files, format_bytes(report.bytes));
    if let Some(at) = report.restored_as_of.as_deref() {
        line.push_str(&format!("; restored as of {}", format_time(view.now, at)));
    }
    match &report.error {
        Some(error) => Cell::painted(Some(Colour::Bad), format!("{line}; the last save failed: {error}")),
        None => line.into(),
    }
}

/// Shows the location and the password of the slot's repository, in clear text.
pub fn access(view: &View, slot: &SlotTarget, access: &FilesAccess) -> String {
    let pairs = [
        ("slot", slot.to_string().into()),
        ("repository", access.repository.clone().into()),
        ("password", access.key.key.expose_secret().to_owned().into()),
    ];
    table::render_pairs(view, &pairs)
}

/// Shows what a pruning would do.
pub fn prune_plan(view: &View, slot: &SlotTarget, plan: &FilesPrunePlan) -> String {
    let bytes = format_bytes(plan.reclaimable_bytes);
    let pairs = [
        ("slot", slot.to_string().into()),
        ("snapshots", format!("{} kept, {} removed", plan.kept_snapshots, plan.removed_snapshots).into()),
        ("packs", format!("{} marked for deletion, which frees {bytes}", plan.marked_packs).into()),
        ("deleted now", pluralize(plan.deleted_packs, "pack").into()),
    ];
    table::render_pairs(view, &pairs)
}

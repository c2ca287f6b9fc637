//! Text view of a slot's snapshot pointer, and of the one that a rebuild would write.

use serde::Deserialize;

use super::human::{size, when};
use super::table::{self, Cell};
use super::{Colour, View};
use crate::args::SlotTarget;

#[derive(Debug, Deserialize)]
pub struct Inspection {
    pub state: String,
    pub problem: Option<String>,
    pub snapshots: u64,
    pub current: Option<Pointer>,
    pub rebuilt: Option<Pointer>,
}

#[derive(Debug, Deserialize)]
pub struct Rebuilt {
    pub pointer: Pointer,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pointer {
    pub seq: u64,
    pub fence_epoch: u64,
    pub fence_machine_id: Option<String>,
    pub snapshot: Option<Snapshot>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    pub key: String,
    pub size_bytes: u64,
    pub epoch: u64,
    pub taken_at: String,
}

pub fn inspection(view: &View, slot: &SlotTarget, found: &Inspection) -> String {
    let is_sound = found.state == "sound";
    let colour = if is_sound { Colour::Good } else { Colour::Bad };
    let named = |pointer: &Option<Pointer>| pointer.as_ref().map(|of| line(view, of)).unwrap_or_default();
    let pairs = [
        ("slot", slot.to_string().into()),
        ("pointer", Cell::painted(Some(colour), found.state.clone())),
        ("problem", found.problem.clone().unwrap_or_default().into()),
        ("names now", named(&found.current).into()),
        ("rebuild would name", named(&found.rebuilt).into()),
        ("snapshots", found.snapshots.to_string().into()),
    ];
    let mut shown = table::pairs(view, &pairs);
    if !is_sound {
        shown.push_str(&match &found.rebuilt {
            Some(_) => format!("  next: `svcctl pointer rebuild {}`\n", slot.arguments()),
            None => "  no snapshot is complete: a rebuild is not possible\n".to_owned(),
        });
    }
    shown
}

/// Shows the pointer after a rebuild.
pub fn rebuilt(view: &View, done: &Rebuilt) -> String {
    table::pairs(view, &[("names now", line(view, &done.pointer).into())])
}

fn line(view: &View, pointer: &Pointer) -> String {
    let holder =
        pointer.fence_machine_id.as_ref().map(|machine| format!(" of {machine}")).unwrap_or_default();
    let fence = format!("fence {}{holder}, seq {}", pointer.fence_epoch, pointer.seq);
    let Some(named) = &pointer.snapshot else { return format!("no snapshot ({fence})") };
    let (taken, size) = (when(view.now, &named.taken_at), size(named.size_bytes));
    format!("{}\n  taken {taken}; {size}; epoch {} ({fence})", named.key, named.epoch)
}

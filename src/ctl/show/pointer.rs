//! Text view of a slot's snapshot pointer, and of the pointer that a rebuild would write.

use super::human::{format_bytes, format_time};
use super::table::{self, Cell};
use super::{Color, View};
use crate::args::SlotTarget;
use svc_wire::pointer::{Pointer, PointerInspection, PointerState, RebuiltPointer};

pub fn inspection(view: &View, slot: &SlotTarget, result: &PointerInspection) -> String {
    let is_sound = result.state.is(PointerState::Sound);
    let color = if is_sound { Color::Good } else { Color::Bad };
    let target = |pointer: &Option<Pointer>| {
        pointer.as_ref().map(|pointer| describe_pointer(view, pointer)).unwrap_or_default()
    };
    let pairs = [
        ("slot", slot.to_string().into()),
        ("pointer", Cell::colored(Some(color), result.state.as_str())),
        ("problem", result.problem.clone().unwrap_or_default().into()),
        ("points to", target(&result.current).into()),
        ("after a rebuild", target(&result.rebuilt).into()),
        ("snapshots", result.snapshots.to_string().into()),
    ];
    let mut text = table::render_pairs(view, &pairs);
    if !is_sound {
        text.push_str(&match &result.rebuilt {
            Some(_) => format!("  next: `svcctl pointer rebuild {}`\n", slot.arguments()),
            None => format!(
                "  no complete snapshot was found; run `svcctl pointer rebuild {} --empty` to make the pointer \
                 refer to no snapshot\n",
                slot.arguments()
            ),
        });
    }
    text
}

/// Shows the pointer after a rebuild.
pub fn rebuilt(view: &View, rebuilt: &RebuiltPointer) -> String {
    table::render_pairs(view, &[("points to", describe_pointer(view, &rebuilt.pointer).into())])
}

fn describe_pointer(view: &View, pointer: &Pointer) -> String {
    let holder =
        pointer.fence_machine_id.as_ref().map(|machine| format!(" of {machine}")).unwrap_or_default();
    let fence = format!("fence {}{holder}, seq {}", pointer.fence_epoch, pointer.seq);
    let Some(snapshot) = &pointer.snapshot else { return format!("no snapshot ({fence})") };
    let (taken, size) = (format_time(view.now, &snapshot.taken_at), format_bytes(snapshot.size_bytes));
    format!("{}\n  taken {taken}; {size}; epoch {} ({fence})", snapshot.key, snapshot.epoch)
}

//! Text view of a slot's data copies, and of what losing a server would cost.

use std::collections::BTreeMap;

use super::failure;
use super::human::{format_span, format_time, seconds_between};
use super::table::Cell;
use super::{Color, View};
use svc_wire::copies::{Copies, KeptServer, NewerSnapshot, UnrestoredSnapshot, UnsavedData};
use svc_wire::heartbeat::{FILES_NOT_RESTORED, FILES_UNSAVED};
use svc_wire::machine::{Machine, MachineDetail};
use svc_wire::text::{Time, WireString};

/// Backups run hourly, so two missed ones are flagged.
const MAX_NORMAL_EXPOSURE_SECONDS: u64 = 2 * 3600 + 600;

/// Times at which machines left the slot, by machine id. The API's copies don't include them.
pub type SlotExitTimes = BTreeMap<String, Time>;

/// Returns when a kept server's machine left the slot, if known.
fn left_slot_at<'a>(
    machine: &'a MachineDetail,
    kept: &KeptServer,
    slot_exit_times: &'a SlotExitTimes,
) -> Option<&'a Time> {
    if kept.machine_id == machine.machine_id {
        machine.left_slot_at()
    } else {
        slot_exit_times.get(kept.machine_id.as_str())
    }
}

/// Returns the rows for a machine view.
pub fn rows(
    view: &View,
    copies: &Copies,
    machine: &MachineDetail,
    slot_exit_times: &SlotExitTimes,
) -> Vec<(&'static str, Cell)> {
    let mut rows = vec![("live server", live_cell(view, copies, machine))];
    rows.extend(copies.kept.iter().map(|kept| {
        let name = if kept.deleted_by.is_some() { "old server" } else { "kept server" };
        (name, kept_cell(view, copies, kept, left_slot_at(machine, kept, slot_exit_times)))
    }));
    rows.push(("snapshot", snapshot_cell(view, copies, machine)));
    rows.extend(
        copies.newer_snapshot.as_ref().map(|newer| ("newer snapshot", newer_cell(view, newer, machine))),
    );
    rows.extend(
        copies
            .unrestored_snapshot
            .as_ref()
            .map(|snapshot| ("unrestored", unrestored_cell(view, snapshot, machine))),
    );
    rows.push(("at risk", risk_cell(copies, machine)));
    rows
}

fn live_cell(view: &View, copies: &Copies, machine: &MachineDetail) -> Cell {
    let Some(live) = &copies.live else {
        return Cell::colored(Some(Color::Warning), describe_no_live_server(machine));
    };
    let mut server = format_server_id(live.provider_server_id.as_ref());
    if live.machine_id != machine.machine_id {
        server.push_str(&format!(" of machine {}", live.machine_id));
    }
    if live.machine_id == machine.machine_id && failure::is_slot_held_by_another(machine) {
        let line =
            format!("{server}: not powered on, because the store names another machine as the slot's holder");
        return Cell::colored(Some(Color::Bad), line);
    }
    match &live.missing_since {
        Some(since) => Cell::colored(Some(Color::Bad), format!("{server}: {}", format_missing(view, since))),
        None => server.into(),
    }
}

fn kept_cell(view: &View, copies: &Copies, kept: &KeptServer, left_slot_at: Option<&Time>) -> Cell {
    let id = &kept.machine_id;
    let server =
        format!("{} of {} machine {id}", format_server_id(kept.provider_server_id.as_ref()), kept.reason);
    let bad = |line: String| Cell::colored(Some(Color::Bad), format!("{server}: {line}"));
    let unsaved = kept
        .unsaved_since
        .as_ref()
        .map(|since| format_unsaved(view, since, kept.unsaved_data.as_ref(), left_slot_at));
    if let Some(since) = &kept.missing_since {
        let missing = format_missing(view, since);
        return bad(match unsaved {
            Some(unsaved) => {
                format!(
                    "{missing}, and it held {unsaved}; `svcctl discard {id} --accept-loss` removes it from this list"
                )
            }
            None => format!("{missing}; `svcctl discard {id}` removes it from this list"),
        });
    }
    if let Some(operation) = &kept.deleted_by {
        return bad(format!(
            "deleted as soon as operation {operation} has taken its final backup and powered it off; until then \
             `svcctl operation abandon {operation}` restores its machine"
        ));
    }
    if is_being_deleted(view, kept) {
        return format!("{server}: being deleted").into();
    }
    let undo = if kept.reason == "deleted" && copies.live.is_none() {
        format!("; `svcctl undelete {id}` restores it")
    } else {
        String::new()
    };
    if let Some(unsaved) = unsaved {
        return bad(format!("holds {unsaved}; kept until `svcctl discard {id} --accept-loss`{undo}"));
    }
    if kept.removal_abandoned_at.is_some() {
        return bad(format!("its removal was abandoned; kept until `svcctl discard {id}`{undo}"));
    }
    let Some(until) = &kept.until else {
        return format!("{server}: kept until a new machine is healthy").into();
    };
    format!("{server}: kept until {}{undo}", format_time(view.now, until)).into()
}

fn snapshot_cell(view: &View, copies: &Copies, machine: &MachineDetail) -> Cell {
    let source = copies.newest_snapshot.as_ref();
    let formatted = copies.newest_snapshot_at.as_ref().map(|at| {
        let other = source.filter(|newest| newest.machine_id != machine.machine_id);
        let origin = other.map(|newest| format!(", from machine {}", newest.machine_id)).unwrap_or_default();
        let reported = if source.is_some_and(|newest| newest.source == "reported") {
            ", as reported by its host"
        } else {
            ""
        };
        format!("{}{origin}{reported}", format_time(view.now, at))
    });
    let line = formatted.clone().unwrap_or_else(|| "none known".to_owned());
    match &copies.snapshot_problem {
        Some(problem) => Cell::colored(Some(Color::Bad), format!("{line}; {problem}")),
        None if formatted.is_some() => line.into(),
        None => Cell::colored(copies.live.as_ref().map(|_| Color::Bad), line),
    }
}

fn risk_cell(copies: &Copies, machine: &Machine) -> Cell {
    let Some(exposed_seconds) = copies.exposed_seconds else { return "".into() };
    let are_files_unsaved = copies.live.as_ref().is_some_and(|live| live.machine_id == machine.machine_id)
        && machine
            .attention
            .iter()
            .any(|item| matches!(item.code.as_str(), FILES_NOT_RESTORED | FILES_UNSAVED));
    let is_bad = are_files_unsaved || exposed_seconds > MAX_NORMAL_EXPOSURE_SECONDS;
    let mut line = format!("losing the live server now would cost {}", format_loss(copies, exposed_seconds));
    if are_files_unsaved && copies.newest_snapshot_at.is_some() {
        line.push_str(" to the database, and the files that are not saved");
    }
    Cell::colored(is_bad.then_some(Color::Bad), line)
}

fn format_loss(copies: &Copies, exposed_seconds: u64) -> String {
    match copies.newest_snapshot_at {
        Some(_) => format!("{} of changes", format_span(exposed_seconds)),
        None => format!("all of its data ({} old): there is no snapshot", format_span(exposed_seconds)),
    }
}

/// Describes the risk of losing the live server, as in `its newest snapshot is from 2026-01-01 00:00:00 UTC, 9 min ago:
/// 9 min of changes exist only on its server`.
pub fn describe_risk(view: &View, copies: &Copies) -> String {
    let newest = copies.newest_snapshot_at.as_deref();
    let newest = newest.map_or_else(
        || "it has no snapshot".to_owned(),
        |at| format!("its newest snapshot is from {}", format_time(view.now, at)),
    );
    let problem = copies.snapshot_problem.as_ref();
    let newer = copies.newer_snapshot.as_ref().map(|newer| {
        format!(
            ", and {} from {} is stored but not the latest: if its host cannot take the final backup, a recovery asks \
             which of them to restore",
            newer.key,
            format_time(view.now, &newer.taken_at)
        )
    });
    let problem = problem.map(|problem| format!(" ({problem})")).unwrap_or_default();
    let newest = newest + &problem + &newer.unwrap_or_default();
    match copies.exposed_seconds.filter(|_| copies.newest_snapshot_at.is_some()) {
        Some(exposed_seconds) => {
            format!("{newest}: {} of changes exist only on its server", format_span(exposed_seconds))
        }
        None => newest,
    }
}

/// Whether the kept server's retention has expired, so the platform is deleting it.
pub fn is_being_deleted(view: &View, kept: &KeptServer) -> bool {
    let remaining = kept.until.as_deref().and_then(|until| seconds_between(&view.now.to_string(), until));
    remaining.is_some_and(|remaining| remaining <= 0.0)
}

/// Describes why the slot has no live server.
fn describe_no_live_server(machine: &MachineDetail) -> String {
    let is_gone = machine.is_active() && machine.failure.as_ref().is_some_and(failure::is_server_gone);
    match machine.provider_server_id.as_ref().filter(|_| is_gone) {
        Some(server) => format!("none: the provider no longer has server {server}"),
        None => "none".to_owned(),
    }
}

fn format_missing(view: &View, since: &str) -> String {
    format!("missing at the provider, first noticed {}", format_time(view.now, since))
}

/// Shows a snapshot stored while the platform was unreachable, or held back by the host because its database shrank.
fn newer_cell(view: &View, newer: &NewerSnapshot, machine: &Machine) -> Cell {
    let (user, slot, key) = (&machine.idp_user_id, &machine.slot, &newer.key);
    let line = format!(
        "{}, stored but not the latest; the next backup replaces it, and `svcctl recover {user} --slot {slot} \
         --snapshot {key}` restores it",
        format_time(view.now, &newer.taken_at)
    );
    Cell::colored(Some(Color::Warning), line)
}

/// Shows a snapshot the operator chose not to restore when replacing the previous machine.
fn unrestored_cell(view: &View, snapshot: &UnrestoredSnapshot, machine: &Machine) -> Cell {
    let (user, slot, key) = (&machine.idp_user_id, &machine.slot, &snapshot.key);
    let at = snapshot
        .taken_at
        .as_deref()
        .map_or_else(String::new, |at| format!("{}, ", format_time(view.now, at)));
    let line = format!(
        "{at}from the previous machine: newer than the snapshot that this one restored; `svcctl recover {user} \
         --slot {slot} --snapshot {key}` restores it"
    );
    Cell::colored(Some(Color::Warning), line)
}

/// Formats unsaved changes as `43 min of changes that are in no snapshot`, or with their start time if we don't know
/// when the machine left its slot. If only the owner's files are unsaved, says so instead.
pub fn format_unsaved(
    view: &View,
    since: &str,
    data: Option<&WireString<UnsavedData>>,
    left_slot_at: Option<&Time>,
) -> String {
    if data.is_some_and(|data| data.is(UnsavedData::Files)) {
        return "the owner's files, without which a later machine started".to_owned();
    }
    let seconds =
        left_slot_at.and_then(|left| seconds_between(since, left)).filter(|seconds| *seconds >= 0.0);
    match seconds {
        Some(seconds) => format!("{} of changes that are in no snapshot", format_span(seconds as u64)),
        None => format!("changes since {} that are in no snapshot", format_time(view.now, since)),
    }
}

fn format_server_id(server: Option<&String>) -> String {
    server.cloned().unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::machine;
    use super::super::test_data::{MACHINE, plain_view, running_machine, with_copies};

    #[test]
    fn status_shows_newer_snapshot_and_restore_command() {
        let key = "system/db/snapshots/2026-11-21T11-55-00.000Z-1.dump";
        let copies = json!({"live": null, "kept": [], "newestSnapshotAt": "2026-11-21T09:51:00.000Z", "exposedSeconds": null,
            "newerSnapshot": {"takenAt": "2026-11-21T11:55:00.000Z", "machineId": MACHINE, "key": key}});
        let shown = machine::details(&plain_view(), &with_copies(running_machine(), copies));
        let line = shown.lines().find(|line| line.starts_with("newer snapshot")).unwrap();
        assert!(
            line.contains("stored but not the latest") && line.contains(&format!("--snapshot {key}`")),
            "{line}"
        );
        let copies = json!({"live": null, "kept": [], "newestSnapshotAt": "2026-11-21T09:51:00.000Z", "exposedSeconds": null,
            "newerSnapshot": {"takenAt": "2026-11-21T11:55:00.000Z", "machineId": MACHINE, "key": key}});
        let at_risk = machine::data_at_risk(&plain_view(), &with_copies(running_machine(), copies));
        assert!(
            at_risk.contains(&format!("{key} from ")) && at_risk.contains("asks which of them to restore"),
            "{at_risk}"
        );
    }
}

//! Text views of machines: the list, and a single machine with its operations.

use super::copies::{SlotExitTimes, format_unsaved};
use super::human::{format_ago, format_bytes, format_time, seconds_between};
use super::table::{self, Cell};
use super::{Color, View, boot, certificates, copies, failure, files, operation, or_empty, token};
use crate::args;
use svc_store::bucket::is_unusable_pointer;
use svc_wire::host::{ComponentStatus, LastBackup, LastUpdate, Outcome, SnapshotCheck, UpdateOutcome};
use svc_wire::machine::{Attention, DiscardedMachine, Health, Machine, MachineDetail, MachinePage};
use svc_wire::operation::Operation;
use svc_wire::text::Time;

/// Older heartbeats are highlighted. Hosts send one every 30 s by default.
const MAX_HEARTBEAT_AGE_SECONDS: f64 = 120.0;

fn attention_cell(item: &Attention, handle: &str) -> Cell {
    let next = match item.code.as_str() {
        "snapshot_held" => format!("; if that is intended, run `svcctl backup accept {handle}`"),
        _ => String::new(),
    };
    Cell::colored(Some(Color::Bad), format!("{}: {}{next}", item.code, item.detail))
}

/// Shows a machine whose server is being deleted.
pub fn discarded(view: &View, discarded: &DiscardedMachine) -> String {
    let DiscardedMachine { machine, operation_id, already_ordered } = discarded;
    let id = &machine.machine_id;
    let server = machine.provider_server_id.as_deref().unwrap_or("unknown");
    let operation = operation_id.as_ref().map_or_else(|| {
        format!(
            "not started yet: `svcctl status {id}` shows it once the platform has reconciled its machines with the \
             provider's servers; `svcctl fleet` shows an alarm that blocks it"
        )
    }, ToString::to_string);
    let note = if *already_ordered { "its deletion was already requested; nothing was changed" } else { "" };
    table::render_pairs(
        view,
        &[
            ("machine", id.clone().into()),
            ("slot", format!("{}, slot {} of {}", machine.handle, machine.slot, machine.idp_user_id).into()),
            ("status", Cell::state(state_or_off(machine))),
            ("server", format!("{server}: being deleted, with its disk").into()),
            ("operation", operation.into()),
            ("note", note.into()),
        ],
    )
}

/// Returns the machine's state, or `off` instead of `running` while it is powered off.
pub fn state_or_off(machine: &Machine) -> &str {
    let is_off = machine.powered_off_at.is_some() && machine.display_state() == "running";
    if is_off { "off" } else { machine.display_state() }
}

/// Formats when the machine was powered off, and the command to power it back on.
fn power_cell(view: &View, machine: &Machine) -> Cell {
    let Some(at) = machine.powered_off_at.as_deref().filter(|_| machine.is_active()) else {
        return "".into();
    };
    let line = format!(
        "powered off {}; `svcctl power on {}` powers it on",
        format_time(view.now, at),
        machine.handle
    );
    Cell::colored(Some(Color::Bad), line)
}

/// Describes changes that exist only on the machine's server, if known.
pub fn unsaved_changes(view: &View, machine: &Machine) -> Option<String> {
    let since = machine.unsaved_since.as_deref()?;
    Some(format_unsaved(view, since, machine.unsaved_data.as_ref(), machine.left_slot_at()))
}

/// Whether the last backup failed because the slot's snapshot pointer is unusable.
fn is_pointer_unusable(machine: &Machine) -> bool {
    let backup = machine.last_backup.as_ref().filter(|backup| backup.status.is(Outcome::Error));
    backup.and_then(|backup| backup.error.as_deref()).is_some_and(is_unusable_pointer)
}

/// Returns the operation waiting for a decision, if any.
pub fn waiting_operation(machine: &MachineDetail) -> Option<&Operation> {
    machine.operations.iter().find(|operation| operation.question().is_some())
}

fn heartbeat_cell(view: &View, machine: &Machine, format: fn(jiff::Timestamp, &str) -> String) -> Cell {
    let Some(at) = &machine.heartbeat_at else { return "".into() };
    let is_stale =
        seconds_between(at, &view.now.to_string()).is_some_and(|age| age > MAX_HEARTBEAT_AGE_SECONDS);
    let is_overdue = is_stale && state_or_off(machine) == "running";
    Cell::colored(is_overdue.then_some(Color::Bad), format(view.now, at))
}

/// Advice after a failed update.
pub const UPDATE_ADVICE: &str = "run `svc-update status` on its host to see details; publish another version, then roll it \
    out with `svcctl deploy start`";

fn has_update_failed(update: &LastUpdate) -> bool {
    !update.outcome.is(UpdateOutcome::Updated)
}

/// Formats an update as `2026.11.2 rolled_back at health: not ready; 2026-01-01 00:00:00 UTC, 5 min ago`.
fn update_cell(view: &View, update: &LastUpdate) -> Cell {
    let LastUpdate { version, outcome, stage, error, at } = update;
    let at = format_time(view.now, at);
    if !has_update_failed(update) {
        return format!("{version} {outcome}, {at}").into();
    }
    let error = error.as_deref().map(|error| format!(": {error}")).unwrap_or_default();
    Cell::colored(Some(Color::Bad), format!("{version} {outcome} at {stage}{error}; {at}"))
}

pub fn list(view: &View, page: &MachinePage) -> String {
    if page.machines.is_empty() {
        return "no machines\n".to_owned();
    }
    let row = |m: &Machine| {
        vec![
            m.handle.clone().into(),
            Cell::state(state_or_off(m)),
            m.idp_user_id.clone().into(),
            m.slot.clone().into(),
            m.server_type.clone().into(),
            m.image_version.clone().into(),
            m.epoch.to_string().into(),
            heartbeat_cell(view, m, format_ago),
            backup_cell(view, m.last_backup.as_ref(), format_ago),
            Cell::colored(Some(Color::Faint), m.machine_id.clone()),
        ]
    };
    let rows: Vec<_> = page.machines.iter().map(row).collect();
    let heading =
        ["HANDLE", "STATUS", "USER", "SLOT", "TYPE", "IMAGE", "EPOCH", "HEARTBEAT", "BACKUP", "MACHINE"];
    let mut text = table::render(view, &heading, &rows);
    if let Some(cursor) = &page.next_cursor {
        text.push_str(&format!("more machines: repeat the command with `--cursor {cursor}`\n"));
    }
    text
}

pub fn details(view: &View, m: &MachineDetail) -> String {
    details_with_slot_exit_times(view, m, &SlotExitTimes::new())
}

/// Like [`details`], given the times at which kept servers' machines left the slot.
pub fn details_with_slot_exit_times(
    view: &View,
    m: &MachineDetail,
    slot_exit_times: &SlotExitTimes,
) -> String {
    let time = |at: &Option<Time>| at.as_deref().map(|at| format_time(view.now, at)).unwrap_or_default();
    let failure = m.failure.as_ref();
    let update = m.last_update.as_ref();
    let checks = m.checks.as_ref();
    let next = match failure {
        _ if waiting_operation(m).is_some() => "answer the operation's question, shown below".to_owned(),
        Some(failure) if !m.is_active() => {
            failure::advice_after_reinstatement(failure, m).unwrap_or_default()
        }
        _ if !m.is_active() => String::new(),
        Some(failure) => failure::next_step(failure, m),
        None if is_pointer_unusable(m) => {
            let slot = args::slot_arguments(&m.idp_user_id, &m.slot);
            format!(
                "the snapshot pointer cannot be used: run `svcctl pointer show {slot}` to see what is wrong and what a \
                 rebuild would choose; then run `svcctl pointer rebuild {slot}` and `svcctl backup now {}`",
                m.machine_id
            )
        }
        None if update.is_some_and(has_update_failed) => UPDATE_ADVICE.to_owned(),
        None => String::new(),
    };
    let copies =
        m.copies.as_ref().map(|copies| copies::rows(view, copies, m, slot_exit_times)).unwrap_or_default();
    let mut rows = vec![
        ("machine", m.machine_id.clone().into()),
        ("handle", Cell::colored(Some(Color::Strong), m.handle.clone())),
        ("user", m.idp_user_id.clone().into()),
        ("slot", m.slot.clone().into()),
        ("kind", m.kind.clone().into()),
        ("status", Cell::state(state_or_off(m))),
        ("power", power_cell(view, m)),
        ("failure", Cell::colored(Some(Color::Bad), failure.map(failure::summary_line).unwrap_or_default())),
        ("next", next.into()),
        (
            "boot",
            m.boot
                .as_ref()
                .map(|boot| {
                    boot::summary_line(view, boot, m.registered_at.as_ref(), m.boot_progress.as_ref())
                })
                .unwrap_or_default()
                .into(),
        ),
        ("epoch", m.epoch.to_string().into()),
        ("type", m.server_type.clone().into()),
        ("server", or_empty(m.provider_server_id.as_ref()).into()),
        ("location", m.location.clone().into()),
        ("image", m.image_version.clone().into()),
        ("address", m.public_ipv4.map(|address| address.to_string()).unwrap_or_default().into()),
        ("created", format_time(view.now, &m.created_at).into()),
        ("registered", time(&m.registered_at).into()),
        ("heartbeat", heartbeat_cell(view, m, format_time)),
        ("health", health_cell(m.health.as_ref())),
        ("backup", backup_cell(view, m.last_backup.as_ref(), format_time)),
        ("verify", check_cell(view, checks.and_then(|checks| checks.verify.as_ref()))),
        ("drill", check_cell(view, checks.and_then(|checks| checks.drill.as_ref()))),
        ("files", m.files.as_ref().map_or_else(|| "".into(), |files| files::cell(view, files))),
        ("update", update.map_or_else(|| "".into(), |update| update_cell(view, update))),
        ("certificate", m.certificate.as_ref().map_or("".into(), certificates::machine_cell)),
        ("token", m.upgrade_token.as_ref().map(|token| token::line(view, token)).unwrap_or_default().into()),
        ("replaced by", m.replaced_by.as_deref().unwrap_or_default().into()),
        ("deleted", time(&m.deleted_at).into()),
    ];
    if m.is_active() {
        rows.extend(m.attention.iter().map(|item| ("attention", attention_cell(item, &m.handle))));
    }
    rows.extend(copies);
    let mut text = table::render_pairs(view, &rows);
    for operation in &m.operations {
        text.push('\n');
        text.push_str(&operation::details(view, operation));
    }
    text
}

/// Formats a host's health as `gateway ok, database failing`, plus the free disk space or `disk unknown`.
fn health_cell(health: Option<&Health>) -> Cell {
    let Some(Health { gateway, database, code, disk }) = health else { return "".into() };
    let mut parts = vec![format!("gateway {gateway}"), format!("database {database}")];
    parts.extend(code.as_ref().map(|code| format!("code {code}")));
    parts.push(disk.map_or_else(
        || "disk unknown".to_owned(),
        |disk| format!("{} of {} disk free", format_bytes(disk.free_bytes), format_bytes(disk.total_bytes)),
    ));
    let is_healthy = [gateway, database].into_iter().chain(code).all(|status| status.is(ComponentStatus::Ok));
    Cell::colored(Some(if is_healthy { Color::Good } else { Color::Bad }), parts.join(", "))
}

/// Formats the last backup reported by the host: time and size, or the error.
fn backup_cell(
    view: &View,
    backup: Option<&LastBackup>,
    format: fn(jiff::Timestamp, &str) -> String,
) -> Cell {
    let Some(backup) = backup else { return "".into() };
    if backup.status.is(Outcome::Error) {
        let error = backup.error.as_deref().unwrap_or_default();
        return Cell::colored(Some(Color::Bad), format!("error: {error}"));
    }
    let Some(taken) = &backup.taken_at else { return backup.status.clone().into() };
    let size = backup.size_bytes.map(|bytes| format!(", {}", format_bytes(bytes))).unwrap_or_default();
    format!("{}{size}", format(view.now, taken)).into()
}

/// Formats the last snapshot verification or drill as `success, 2026-01-01 00:00:00 UTC, 5 min ago`, or as `error: …`
/// with the damaged snapshots.
fn check_cell(view: &View, check: Option<&SnapshotCheck>) -> Cell {
    let Some(SnapshotCheck { status, at, damaged, error, .. }) = check else { return "".into() };
    let at = format_time(view.now, at);
    if !status.is(Outcome::Error) {
        return format!("{status}, {at}").into();
    }
    let mut line = format!("error: {}", error.as_deref().unwrap_or_default());
    if !damaged.is_empty() {
        line.push_str(&format!("; damaged: {}", damaged.join(", ")));
    }
    Cell::colored(Some(Color::Bad), format!("{line}; {at}"))
}

/// Describes the machine's state, and what losing its server would cost.
pub fn data_at_risk(view: &View, m: &MachineDetail) -> String {
    let risk = m.copies.as_ref().map(|copies| copies::describe_risk(view, copies));
    // Older platforms don't report copies.
    let last_backup = || {
        let backup = m.last_backup.as_ref().filter(|backup| !backup.status.is(Outcome::Error));
        let taken = backup.and_then(|backup| backup.taken_at.as_ref());
        taken.map_or_else(
            || "the host has reported no successful backup".to_owned(),
            |at| format!("its last backup is from {}", format_time(view.now, at)),
        )
    };
    format!("It is {} as {}; {}.", m.display_state(), m.handle, risk.unwrap_or_else(last_backup))
}

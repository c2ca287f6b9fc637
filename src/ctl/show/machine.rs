//! Text views of machines: a list, and one machine with its operations.

use serde::Deserialize;
use serde_json::Value;

use super::boot::{Boot, BootProgress};
use super::copies::{Copies, NewerSnapshot, unsaved};
use super::failure::MachineFailure;
use super::human::{ago, seconds, size, when};
use super::operation::{self, Operation};
use super::table::{self, Cell};
use super::token::UpgradeToken;
use super::{Colour, View, compact, text};
use crate::args;
use svc_store::bucket::is_unusable_pointer;

/// A heartbeat older than this many seconds is highlighted; hosts send one every half minute.
const MAX_HEARTBEAT_AGE_SECONDS: f64 = 120.0;

/// A machine's record. Unknown fields are ignored.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    pub machine_id: String,
    pub idp_user_id: String,
    pub slot: String,
    pub handle: String,
    pub kind: Option<String>,
    pub status: String,
    pub failure: Option<MachineFailure>,
    pub epoch: u64,
    pub server_type: Option<String>,
    pub location: Option<String>,
    pub image_version: Option<String>,
    pub provider_server_id: Option<String>,
    pub public_ipv4: Option<String>,
    pub registered_at: Option<String>,
    pub heartbeat_at: Option<String>,
    pub health: Option<Value>,
    pub last_backup: Option<Value>,
    /// The last checks of its snapshots, by kind.
    pub checks: Option<Value>,
    pub last_update: Option<Update>,
    pub boot: Option<Boot>,
    pub boot_progress: Option<BootProgress>,
    /// The problems that its host last reported.
    #[serde(default)]
    pub attention: Vec<Attention>,
    /// When an operator powered off its server.
    pub powered_off_at: Option<String>,
    /// Changes since then are in no snapshot.
    pub unsaved_since: Option<String>,
    pub replaced_by: Option<String>,
    pub retired_at: Option<String>,
    pub deleted_at: Option<String>,
    pub created_at: Option<String>,
    /// Older platforms omit it.
    pub upgrade_token: Option<UpgradeToken>,
    #[serde(default)]
    pub operations: Vec<Operation>,
    /// The copies of its slot's data; only in the response for one machine.
    pub copies: Option<Copies>,
}

#[derive(Debug, Deserialize)]
pub struct Attention {
    pub code: String,
    pub detail: String,
}

impl Attention {
    fn cell(&self, handle: &str) -> Cell {
        let next = match self.code.as_str() {
            "snapshot_held" => format!("; if that is intended: `svcctl backup accept {handle}`"),
            _ => String::new(),
        };
        Cell::painted(Some(Colour::Bad), format!("{}: {}{next}", self.code, self.detail))
    }
}

/// The outcome of the last update, as its host reported it.
#[derive(Debug, Deserialize)]
pub struct Update {
    pub version: String,
    pub outcome: String,
    pub stage: String,
    pub error: Option<String>,
    pub at: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Machines {
    pub machines: Vec<Machine>,
    pub next_cursor: Option<String>,
}

/// The response to a call that starts an operation.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Accepted {
    pub machine_id: String,
    pub idp_user_id: Option<String>,
    pub slot: Option<String>,
    pub handle: Option<String>,
    pub registered_at: Option<String>,
    pub status: Option<String>,
    pub server_type: Option<String>,
    pub operation_id: Option<String>,
    pub old_machine_id: Option<String>,
    pub deleted_at: Option<String>,
    pub newest_snapshot_at: Option<String>,
    /// `store`, or `reported` by a host if the store could not be read.
    pub newest_snapshot_source: Option<String>,
    /// The reason why the store's newest snapshot is unknown or cannot be restored.
    pub snapshot_problem: Option<String>,
    pub undeletable_until: Option<String>,
    /// The machine that was deleted together with the one that was to replace it.
    pub also_deleted: Option<AlsoDeleted>,
    /// For an undelete: whether the deletion had already been undone.
    pub already_undone: Option<bool>,
    /// For a recovery: a stored snapshot that is newer than the one that it restores without a last backup.
    pub newer_snapshot: Option<NewerSnapshot>,
    /// For a power command.
    pub action: Option<String>,
}

/// The response to a discard: the machine, and the operation that deletes its server.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Discarded {
    #[serde(flatten)]
    machine: Machine,
    pub operation_id: Option<String>,
    #[serde(default)]
    already_ordered: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AlsoDeleted {
    pub machine_id: String,
    pub operation_id: String,
    pub undeletable_until: Option<String>,
}

impl Discarded {
    pub fn show(&self, view: &View) -> String {
        let Self { machine, operation_id, already_ordered } = self;
        let id = &machine.machine_id;
        let server = machine.provider_server_id.as_deref().unwrap_or("unknown");
        let operation = operation_id.clone().unwrap_or_else(|| {
            format!(
                "not started yet: `svcctl status {id}` shows it once the platform has compared its machines with the \
                 provider's servers; `svcctl fleet` shows an alarm that blocks it"
            )
        });
        let note =
            if *already_ordered { "its deletion was already requested; nothing was changed" } else { "" };
        table::pairs(
            view,
            &[
                ("machine", id.clone().into()),
                (
                    "slot",
                    format!("{}, slot {} of {}", machine.handle, machine.slot, machine.idp_user_id).into(),
                ),
                ("status", Cell::state(machine.shown_state())),
                ("server", format!("{server}: being deleted, with its disk").into()),
                ("operation", operation.into()),
                ("note", note.into()),
            ],
        )
    }
}

impl Accepted {
    /// The note that a repeated command changed nothing, or that a recovery has a newer snapshot.
    pub fn note(&self) -> Option<String> {
        if self.already_undone == Some(true) {
            return Some("the deletion had already been undone; nothing was changed".to_owned());
        }
        if let Some(newer) = &self.newer_snapshot {
            return Some(format!(
                "{} of {} is newer than the snapshot to restore: if the host cannot make a last backup and no snapshot was \
                 named, the recovery asks which one to restore",
                newer.key, newer.taken_at
            ));
        }
        self.is_off_already().then(|| "it had already been powered off; nothing was changed".to_owned())
    }

    /// Whether a power-off found it already off.
    pub fn is_off_already(&self) -> bool {
        self.action.as_deref() == Some("off") && self.operation_id.is_none()
    }

    fn status_word(&self) -> &str {
        let status = self.status.as_deref().unwrap_or_default();
        match (self.action.as_deref(), self.already_undone) {
            _ if self.deleted_at.is_some() => "deleted",
            (Some("off"), _) if self.is_off_already() => "off",
            (Some("off"), _) => "being powered off",
            (Some("on"), _) => "being powered on",
            (Some("reboot"), _) => "being restarted",
            (_, Some(false)) if status == "failed" => {
                "being reinstated: it serves with its next healthy heartbeat"
            }
            _ => status,
        }
    }
}

impl Machine {
    /// The status, or `deleted` or `replaced` after it has left its slot.
    pub fn state_word(&self) -> &str {
        if self.deleted_at.is_some() {
            "deleted"
        } else if self.replaced_by.is_some() {
            "replaced"
        } else {
            &self.status
        }
    }

    /// [`Self::state_word`], or `off` instead of `running` while it is powered off.
    pub fn shown_state(&self) -> &str {
        let is_off = self.powered_off_at.is_some() && self.state_word() == "running";
        if is_off { "off" } else { self.state_word() }
    }

    /// When it was powered off, and the command that powers it on.
    fn power_cell(&self, view: &View) -> Cell {
        let Some(at) = self.powered_off_at.as_deref().filter(|_| self.is_active()) else { return "".into() };
        let line =
            format!("powered off {}; `svcctl power on {}` powers it on", when(view.now, at), self.handle);
        Cell::painted(Some(Colour::Bad), line)
    }

    pub fn is_active(&self) -> bool {
        self.deleted_at.is_none() && self.replaced_by.is_none()
    }

    /// When it left its slot.
    pub fn left_at(&self) -> Option<&String> {
        self.retired_at.as_ref().or(self.deleted_at.as_ref())
    }

    /// The changes that only its server has, if known.
    pub fn unsaved(&self, view: &View) -> Option<String> {
        let since = self.unsaved_since.as_deref()?;
        Some(unsaved(view, since, self.left_at().map(String::as_str)))
    }

    /// Whether its last backup failed because the slot's pointer cannot be used.
    fn is_pointer_unusable(&self) -> bool {
        let backup = self.last_backup.as_ref().filter(|backup| backup["status"] == "error");
        backup.and_then(|backup| backup["error"].as_str()).is_some_and(is_unusable_pointer)
    }

    /// Its operation that waits for a decision.
    pub fn waiting(&self) -> Option<&Operation> {
        self.operations.iter().find(|operation| operation.question().is_some())
    }

    fn heartbeat(&self, view: &View, format: fn(jiff::Timestamp, &str) -> String) -> Cell {
        let Some(at) = &self.heartbeat_at else { return "".into() };
        let quiet = seconds(at, &view.now.to_string()).is_some_and(|age| age > MAX_HEARTBEAT_AGE_SECONDS);
        let late = quiet && self.shown_state() == "running";
        Cell::painted(late.then_some(Colour::Bad), format(view.now, at))
    }
}

impl Update {
    /// The advice after a failed update.
    pub const ADVICE: &str =
        "`svc-update status` on its host shows more; publish another version and `svcctl deploy start` it";

    fn has_failed(&self) -> bool {
        self.outcome != "updated"
    }

    /// `2026.11.2 rolled_back at health: not ready; 2026-01-01 00:00:00 UTC, 5 min ago`.
    fn cell(&self, view: &View) -> Cell {
        let Self { version, outcome, stage, error, at } = self;
        let at = when(view.now, at);
        if !self.has_failed() {
            return format!("{version} {outcome}, {at}").into();
        }
        let error = error.as_deref().map(|error| format!(": {error}")).unwrap_or_default();
        Cell::painted(Some(Colour::Bad), format!("{version} {outcome} at {stage}{error}; {at}"))
    }
}

pub fn list(view: &View, page: &Machines) -> String {
    if page.machines.is_empty() {
        return "no machines\n".to_owned();
    }
    let row = |m: &Machine| {
        vec![
            m.handle.clone().into(),
            Cell::state(m.shown_state()),
            m.idp_user_id.clone().into(),
            m.slot.clone().into(),
            text(m.server_type.as_ref()).into(),
            text(m.image_version.as_ref()).into(),
            m.epoch.to_string().into(),
            m.heartbeat(view, ago),
            backup_cell(view, m.last_backup.as_ref(), ago),
            Cell::painted(Some(Colour::Faint), m.machine_id.clone()),
        ]
    };
    let rows: Vec<_> = page.machines.iter().map(row).collect();
    let heading =
        ["HANDLE", "STATUS", "USER", "SLOT", "TYPE", "IMAGE", "EPOCH", "HEARTBEAT", "BACKUP", "MACHINE"];
    let mut shown = table::render(view, &heading, &rows);
    if let Some(cursor) = &page.next_cursor {
        shown.push_str(&format!("more: --cursor {cursor}\n"));
    }
    shown
}

pub fn one(view: &View, m: &Machine) -> String {
    let time = |at: &Option<String>| at.as_deref().map(|at| when(view.now, at)).unwrap_or_default();
    let failure = m.failure.as_ref();
    let update = m.last_update.as_ref();
    let next = match failure {
        _ if m.waiting().is_some() => "answer the question of its operation below".to_owned(),
        Some(failure) if !m.is_active() => failure.advice_after_return(m).unwrap_or_default(),
        _ if !m.is_active() => String::new(),
        Some(failure) => failure.advice(m),
        None if m.is_pointer_unusable() => {
            let slot = args::slot_arguments(&m.idp_user_id, &m.slot);
            format!(
                "the snapshot pointer cannot be used: `svcctl pointer show {slot}` shows what is wrong and what a rebuild would \
                 choose; `svcctl pointer rebuild {slot}` rebuilds it, then `svcctl backup now {}`",
                m.machine_id
            )
        }
        None if update.is_some_and(Update::has_failed) => Update::ADVICE.to_owned(),
        None => String::new(),
    };
    let copies = m.copies.as_ref().map(|copies| copies.rows(view, m)).unwrap_or_default();
    let mut rows = vec![
        ("machine", m.machine_id.clone().into()),
        ("handle", Cell::painted(Some(Colour::Strong), m.handle.clone())),
        ("user", m.idp_user_id.clone().into()),
        ("slot", m.slot.clone().into()),
        ("kind", text(m.kind.as_ref()).into()),
        ("status", Cell::state(m.shown_state())),
        ("power", m.power_cell(view)),
        ("failure", Cell::painted(Some(Colour::Bad), failure.map(MachineFailure::line).unwrap_or_default())),
        ("next", next.into()),
        (
            "boot",
            m.boot
                .as_ref()
                .map(|boot| boot.line(view, m.registered_at.as_ref(), m.boot_progress.as_ref()))
                .unwrap_or_default()
                .into(),
        ),
        ("epoch", m.epoch.to_string().into()),
        ("type", text(m.server_type.as_ref()).into()),
        ("server", text(m.provider_server_id.as_ref()).into()),
        ("location", text(m.location.as_ref()).into()),
        ("image", text(m.image_version.as_ref()).into()),
        ("address", text(m.public_ipv4.as_ref()).into()),
        ("created", time(&m.created_at).into()),
        ("registered", time(&m.registered_at).into()),
        ("heartbeat", m.heartbeat(view, when)),
        ("health", health_cell(m.health.as_ref())),
        ("backup", backup_cell(view, m.last_backup.as_ref(), when)),
        ("update", update.map_or_else(|| "".into(), |update| update.cell(view))),
        ("token", m.upgrade_token.as_ref().map(|token| token.line(view)).unwrap_or_default().into()),
        ("replaced by", text(m.replaced_by.as_ref()).into()),
        ("deleted", time(&m.deleted_at).into()),
    ];
    if m.is_active() {
        rows.extend(m.attention.iter().map(|item| ("attention", item.cell(&m.handle))));
    }
    rows.extend(copies);
    let mut shown = table::pairs(view, &rows);
    for operation in &m.operations {
        shown.push('\n');
        shown.push_str(&operation::one(view, operation));
    }
    shown
}

pub fn accepted(view: &View, a: &Accepted) -> String {
    let is_reported = a.newest_snapshot_source.as_deref() == Some("reported");
    let source = if is_reported { ", as its host reported" } else { "" };
    let newest = a.newest_snapshot_at.as_deref().map(|at| format!("{}{source}", when(view.now, at)));
    let newest = newest.or_else(|| a.deleted_at.as_ref().map(|_| "none known".to_owned()));
    let problem = a.snapshot_problem.as_ref().map(|problem| format!("; {problem}")).unwrap_or_default();
    let newest = newest.map(|newest| newest + &problem);
    table::pairs(
        view,
        &[
            ("slot", slot_of_deleted(a).into()),
            ("machine", a.machine_id.clone().into()),
            ("with it", a.also_deleted.as_ref().map(also_deleted).unwrap_or_default().into()),
            ("replaces", text(a.old_machine_id.as_ref()).into()),
            ("type", text(a.server_type.as_ref()).into()),
            ("status", Cell::state(a.status_word())),
            ("operation", text(a.operation_id.as_ref()).into()),
            ("snapshot", text(newest.as_ref()).into()),
            ("undo", undo(view, a).into()),
            ("note", a.note().unwrap_or_default().into()),
        ],
    )
}

/// `ada, slot primary of user_1`.
fn slot_of_deleted(a: &Accepted) -> String {
    let named = a.handle.as_ref().zip(a.slot.as_ref()).zip(a.idp_user_id.as_ref());
    let named = named.filter(|_| a.deleted_at.is_some());
    named.map(|((handle, slot), user)| format!("{handle}, slot {slot} of {user}")).unwrap_or_default()
}

/// The fate of the machine that was to be replaced.
fn also_deleted(also: &AlsoDeleted) -> String {
    format!(
        "machine {}, which was to be replaced: operation {} takes its last backup, then its server is powered off and \
         kept",
        also.machine_id, also.operation_id
    )
}

/// The command that undoes the accepted request.
fn undo(view: &View, a: &Accepted) -> String {
    if let Some(also) = &a.also_deleted {
        let until = also.undeletable_until.as_deref();
        let until = until.map(|until| format!(" until {}", when(view.now, until))).unwrap_or_default();
        return format!("`svcctl undelete {}`{until}: that machine serves again", also.machine_id);
    }
    match (&a.deleted_at, &a.undeletable_until, &a.old_machine_id, &a.operation_id) {
        (Some(_), Some(until), _, _) => {
            format!("`svcctl undelete {}` until {}", a.machine_id, when(view.now, until))
        }
        // Older platforms do not report whether the machine ever registered.
        (Some(_), None, _, _) if a.registered_at.is_none() && a.handle.is_some() => {
            let (user, slot) = (text(a.idp_user_id.as_ref()), text(a.slot.as_ref()));
            format!(
                "none: it never served; `svcctl provision {} --handle {}` creates a new machine",
                args::slot_arguments(&user, &slot),
                text(a.handle.as_ref())
            )
        }
        (Some(_), None, _, Some(operation)) => {
            format!(
                "`svcctl operation abandon {operation}` until its server is off; then the server is deleted permanently"
            )
        }
        (None, _, Some(_), Some(operation)) => {
            format!("`svcctl operation abandon {operation}` until the new machine has registered")
        }
        _ => String::new(),
    }
}

/// `gateway ok, database failing`, and the free disk space.
fn health_cell(health: Option<&Value>) -> Cell {
    let Some(parts) = health.and_then(Value::as_object) else { return "".into() };
    let states = || parts.iter().filter_map(|(part, how)| Some((part, how.as_str()?)));
    let mut words: Vec<_> = states().map(|(part, how)| format!("{part} {how}")).collect();
    let disk =
        parts.get("disk").and_then(|disk| Some((disk["freeBytes"].as_u64()?, disk["totalBytes"].as_u64()?)));
    words.extend(disk.map(|(free, total)| format!("{} of {} disk free", size(free), size(total))));
    let well = states().all(|(_, how)| how == "ok");
    Cell::painted(Some(if well { Colour::Good } else { Colour::Bad }), words.join(", "))
}

/// The last backup, as the host reported it.
fn backup_cell(view: &View, backup: Option<&Value>, format: fn(jiff::Timestamp, &str) -> String) -> Cell {
    let Some(backup) = backup.filter(|backup| backup.is_object()) else { return "".into() };
    if backup["status"] == "error" {
        return Cell::painted(Some(Colour::Bad), format!("error: {}", compact(backup.get("error"))));
    }
    let Some(taken) = backup["takenAt"].as_str() else { return compact(Some(backup)).into() };
    let size = backup["sizeBytes"].as_u64().map(|bytes| format!(", {}", size(bytes))).unwrap_or_default();
    format!("{}{size}", format(view.now, taken)).into()
}

/// The data at risk if the machine is replaced or deleted.
pub fn data_at_risk(view: &View, m: &Machine) -> String {
    let known = m.copies.as_ref().map(|copies| copies.stake(view));
    let reported = || {
        let backup = m.last_backup.as_ref().filter(|backup| backup["status"] != "error");
        let taken = backup.and_then(|backup| backup["takenAt"].as_str());
        taken.map_or_else(
            || "the host has reported no successful backup".to_owned(),
            |at| format!("its last backup is from {}", when(view.now, at)),
        )
    };
    format!("It is {} as {}; {}.", m.state_word(), m.handle, known.unwrap_or_else(reported))
}

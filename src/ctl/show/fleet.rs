//! Text view of the fleet, its alarms, and machines needing attention.

use std::collections::BTreeMap;

use serde_json::Value;

use super::human::format_span;
use super::machine::UPDATE_ADVICE;
use super::operation::kind_noun;
use super::table::{self, Cell};
use super::{Color, View, bundle_keys, certificates, compact, deploy, quote};
use crate::args;
use svc_base::diagnosis::Findings;
use svc_base::quantity::pluralize;
use svc_wire::alarm::Alarm;
use svc_wire::fleet::{BackupAges, EndReason, Exercises, Fleet, MachineNeedingAttention, OverdueOperation};
use svc_wire::rollout::RolloutSummary;

/// Formats an alarm as `servers_missing (limit 4, live 6, missing 5) since 2026-…`, followed by when its release ends,
/// if it was released.
pub fn alarm_line(alarm: &Alarm) -> String {
    let (details, figures): (Vec<_>, Vec<_>) =
        alarm.detail.iter().partition(|(_, value)| value.is_array() || value.is_object());
    let figures: Vec<_> = figures.iter().map(|(name, value)| format_figure(name, value)).collect();
    let details =
        details.iter().map(|(name, value)| format!("{}: {}", split_words(name), format_detail(value)));
    let parts: Vec<_> =
        (!figures.is_empty()).then(|| figures.join(", ")).into_iter().chain(details).collect();
    let parts = if parts.is_empty() { String::new() } else { format!(" ({})", parts.join("; ")) };
    let released = match &alarm.released_until {
        Some(last) if alarm.alarm == "unknown_servers" => {
            format!(", released: the last server is deleted at {last}")
        }
        Some(until) => format!(", released until {until}"),
        None => String::new(),
    };
    format!("{}{parts} since {}{released}", alarm.alarm, alarm.since)
}

/// Formats a figure as `missing 5`.
fn format_figure(name: &str, value: &Value) -> String {
    format!("{} {}", split_words(name), compact(Some(value)))
}

/// Formats a detail as `server 4711, machine 019a…, epoch 3`. List items are separated by semicolons.
fn format_detail(value: &Value) -> String {
    match value {
        Value::Array(items) => items.iter().map(format_detail).collect::<Vec<_>>().join("; "),
        Value::Object(members) => {
            let rank = |name: &str| {
                MEMBER_ORDER.iter().position(|first| *first == name).unwrap_or(MEMBER_ORDER.len())
            };
            let mut members: Vec<_> = members.iter().filter(|(_, value)| !value.is_null()).collect();
            members.sort_by_key(|(name, _)| rank(name));
            members.iter().map(|(name, value)| format_figure(name, value)).collect::<Vec<_>>().join(", ")
        }
        scalar => compact(Some(scalar)),
    }
}

/// Detail members to show first, in this order.
const MEMBER_ORDER: [&str; 4] = ["providerServerId", "machineId", "slot", "epoch"];

/// Splits a camel-case name into words: `failedInLastHour` becomes `failed in last hour`. Shortens `providerServerId`
/// and `machineId`, and leaves names that aren't camel case unchanged.
fn split_words(name: &str) -> String {
    match name {
        "providerServerId" => "server".to_owned(),
        "machineId" => "machine".to_owned(),
        name if !name.bytes().all(|byte| byte.is_ascii_alphanumeric()) => name.to_owned(),
        name => name.chars().fold(String::new(), |mut words, letter| {
            if letter.is_ascii_uppercase() {
                words.push(' ');
            }
            words.push(letter.to_ascii_lowercase());
            words
        }),
    }
}

fn overdue_line(overdue: &OverdueOperation) -> String {
    let OverdueOperation { handle, kind, step, .. } = overdue;
    format!(
        "the {} of {handle} has been in progress for {}, and is at step {step}",
        kind_noun(kind),
        format_span(overdue.age_seconds)
    )
}

fn overdue_advice(overdue: &OverdueOperation) -> String {
    format!("run `svcctl operation {}`", overdue.operation_id)
}

/// Summarizes overdue operations beyond the first `named` as `and 2 more operations are overdue`, or returns `None` if
/// there aren't any.
fn omitted_overdue_line(fleet: &Fleet, named: usize) -> Option<String> {
    let total = fleet.overdue_operations_total.max(fleet.overdue_operations.len() as u64);
    let omitted = total.saturating_sub(named as u64);
    let verb = if omitted == 1 { "is" } else { "are" };
    (omitted > 0).then(|| format!("and {} {verb} overdue", pluralize(omitted, "more operation")))
}

pub fn show_released(alarm: &Alarm) -> String {
    format!("{}\n  next: {}\n", alarm_line(alarm), alarm.next)
}

fn attention_state(machine: &MachineNeedingAttention) -> &str {
    machine.ended.as_deref().unwrap_or(&machine.status)
}

/// Returns the operator's next step, given the active alarms. A handle only refers to the active machine, so ids are
/// used for others.
fn next_step(machine: &MachineNeedingAttention, alarms: &[Alarm]) -> String {
    let name = if machine.ended.is_some() { machine.machine_id.as_str() } else { machine.handle.as_str() };
    let is_deleted = machine.ended.as_ref().is_some_and(|ended| ended.is(EndReason::Deleted));
    let has_reason = |name: &str| machine.reasons.iter().any(|reason| reason == name);
    let advice = match machine.reasons.first().map(String::as_str) {
        // The backup fails because its snapshot is held back.
        Some("backup_failing") if has_reason("snapshot_held") => advice("snapshot_held"),
        // Hosts report a mismatch along with a failing database. Recovery would discard the current database, which may
        // be the right one and isn't backed up.
        Some("database_failing") if has_reason("database_mismatch") => advice("database_mismatch"),
        Some("unsaved_changes") if is_deleted => DELETED_WITH_UNSAVED_CHANGES_ADVICE,
        Some("heartbeat_silent") if are_hosts_refused(alarms) => HOSTS_REFUSED_ADVICE,
        Some(reason) => advice(reason),
        None => "run `svcctl status HANDLE`",
    };
    let operation = machine.operation_id.as_deref().unwrap_or("ID");
    let slot = args::slot_arguments(&machine.idp_user_id, &machine.slot);
    advice.replace("HANDLE", name).replace("OPERATION", operation).replace("USER_SLOT", &slot)
}

/// Whether the platform is refusing live hosts, so that a missing heartbeat doesn't mean the host is lost.
fn are_hosts_refused(alarms: &[Alarm]) -> bool {
    alarms.iter().any(|alarm| alarm.alarm == "host_tokens_refused")
}

/// Maximum number of machines, and of overdue operations, named in findings.
const MAX_NAMED: usize = 20;

/// Adds findings for alarms, overdue operations, machines needing attention, release keys and certificates.
pub fn findings(fleet: &Fleet, findings: Findings) -> Findings {
    let findings = fleet
        .alarms
        .iter()
        .fold(findings, |findings, alarm| findings.problem(alarm_line(alarm), alarm.next.clone()));
    let findings =
        fleet.overdue_operations.iter().take(MAX_NAMED).fold(findings, |findings, overdue| {
            findings.warning(overdue_line(overdue), overdue_advice(overdue))
        });
    let findings = match omitted_overdue_line(fleet, MAX_NAMED) {
        Some(line) => findings.warning(line, "run `svcctl fleet`"),
        None => findings,
    };
    let findings = fleet.attention.iter().take(MAX_NAMED).fold(findings, |findings, machine| {
        let reasons = machine.reasons.join(", ");
        let what =
            format!("{} ({}) is {}: {reasons}", machine.handle, machine.slot, attention_state(machine));
        findings.warning(what, next_step(machine, &fleet.alarms))
    });
    let findings = match &fleet.bundle_keys {
        Some(keys) => bundle_keys::findings(keys, findings),
        None => findings,
    };
    let findings = certificates::findings(fleet.certificates.as_ref(), findings);
    let total = fleet.attention_total.max(fleet.attention.len() as u64);
    let omitted = total.saturating_sub(MAX_NAMED as u64);
    let findings = if omitted > 0 {
        let verb = if omitted == 1 { "needs" } else { "need" };
        let line = format!("and {} {verb} attention", pluralize(omitted, "more machine"));
        findings.warning(line, "run `svcctl fleet`")
    } else {
        findings
    };
    findings.or_ok(format!("{}, none needs attention", pluralize(fleet.totals.machines, "machine")))
}

pub fn show(view: &View, fleet: &Fleet) -> String {
    let totals = &fleet.totals;
    let mut text = table::render_pairs(
        view,
        &[
            ("machines", Cell::colored(Some(Color::Strong), totals.machines.to_string())),
            ("status", format_counts(&totals.by_status).into()),
            ("health", format_counts(&totals.by_health).into()),
            ("images", format_counts(&totals.by_image_version).into()),
            ("backups", backups_cell(&fleet.backups)),
            ("certificates", certificates::fleet_cell(fleet.certificates.as_ref())),
            ("rollout", rollout_cell(fleet.rollout.as_ref())),
            ("exercised", exercises_cell(view, fleet.exercises.as_ref())),
        ],
    );
    for alarm in &fleet.alarms {
        let line = view.paint(Some(Color::Bad), &format!("alarm: {}", alarm_line(alarm)));
        text.push_str(&format!("\n{line}\n  next: {}\n", alarm.next));
    }
    for overdue in &fleet.overdue_operations {
        let line = view.paint(Some(Color::Bad), &overdue_line(overdue));
        text.push_str(&format!("\n{line}\n  next: {}\n", overdue_advice(overdue)));
    }
    if let Some(line) = omitted_overdue_line(fleet, fleet.overdue_operations.len()) {
        text.push_str(&format!("\n{}\n", view.paint(Some(Color::Bad), &line)));
    }
    if fleet.attention.is_empty() {
        text.push_str(&format!("\n{}\n", view.paint(Some(Color::Good), "no machine needs attention")));
        return text;
    }
    let row = |a: &MachineNeedingAttention| {
        vec![
            a.handle.clone().into(),
            Cell::state(attention_state(a)),
            a.idp_user_id.clone().into(),
            a.slot.clone().into(),
            Cell::colored(Some(Color::Bad), a.reasons.join(", ")),
            next_step(a, &fleet.alarms).into(),
        ]
    };
    let rows: Vec<_> = fleet.attention.iter().map(row).collect();
    text.push_str(&format!(
        "\n{}",
        table::render(view, &["HANDLE", "STATUS", "USER", "SLOT", "WHY", "NEXT"], &rows)
    ));
    let omitted = fleet.attention_total.saturating_sub(fleet.attention.len() as u64);
    if omitted > 0 {
        text.push_str(&format!("and {omitted} more\n"));
    }
    text
}

/// Formats nonzero counts as `3 running, 1 failed`, largest first.
fn format_counts(counts: &BTreeMap<String, u64>) -> String {
    let mut nonzero: Vec<_> = counts.iter().filter(|(_, count)| **count > 0).collect();
    nonzero.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), name.as_str()));
    nonzero.iter().map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
}

/// Formats the last recovery and rollback on a test slot. Empty for older platforms, which don't report them.
fn exercises_cell(view: &View, exercises: Option<&Exercises>) -> Cell {
    let Some(exercises) = exercises else { return Cell::from("") };
    let are_current = exercises.recovery.is_current && exercises.rollback.is_current;
    let color = if are_current { Color::Good } else { Color::Warning };
    Cell::colored(Some(color), quote::exercises(view, exercises))
}

/// Formats the open rollout and its id.
fn rollout_cell(open: Option<&RolloutSummary>) -> Cell {
    let line =
        open.map(|open| format!("{} ({})", deploy::progress_line(open), open.rollout_id)).unwrap_or_default();
    Cell::colored(Some(Color::Warning), line)
}

fn backups_cell(backups: &BackupAges) -> Cell {
    let mut parts = Vec::new();
    parts.extend(backups.max_age_seconds.map(|age| format!("oldest {}", format_span(age))));
    parts.extend(backups.p50_age_seconds.map(|age| format!("median {}", format_span(age))));
    if backups.never > 0 {
        parts.push(format!("{} without a backup", backups.never));
    }
    parts.join(", ").into()
}

const DELETED_WITH_UNSAVED_CHANGES_ADVICE: &str = "run `svcctl status HANDLE` to see what only its server holds; then run \
    `svcctl undelete HANDLE` to restore it, unless a later machine in its slot has served traffic, or `svcctl discard \
    HANDLE --accept-loss` to delete it";

const HOSTS_REFUSED_ADVICE: &str = "live hosts are refused because of their tokens (alarm host_tokens_refused): resolve that first, then \
    check which hosts are still silent";

fn advice(reason: &str) -> &'static str {
    match reason.split(':').next().unwrap_or_default() {
        _ if reason == "failed:reinstating" => {
            "wait: it runs again after its next healthy heartbeat; if there is none, run `svcctl status HANDLE` to see what \
             to do"
        }
        "operation_waiting" => "run `svcctl operation show OPERATION` to see the question and its answers",
        "snapshot_held" => {
            "run `svcctl status HANDLE` to see which tables lost rows; if that is intended, run `svcctl backup accept \
             HANDLE`"
        }
        "update_waiting" => {
            "run `svcctl status HANDLE` to see what prevents the snapshot; to update without one, run `svc-update \
             apply --version V --without-snapshot` on its host"
        }
        "database_mismatch" => {
            "run `svcctl status HANDLE`; then, on its host, run `svc-restore adopt` or `svc-restore replace`"
        }
        "powered_off" => "run `svcctl power on HANDLE`, or delete it",
        "unsaved_changes" => {
            "run `svcctl status HANDLE` to see what only its server holds; run `svcctl discard HANDLE --accept-loss` \
             to delete it"
        }
        "removal_abandoned" => {
            "run `svcctl discard HANDLE` to delete its server after all, or `svcctl undelete HANDLE` to restore a deleted \
             machine"
        }
        "failed" => "run `svcctl status HANDLE` to see why, and what to do",
        "heartbeat_silent" => "check that its host is reachable; if it is lost, recover the slot",
        "pointer_unusable" => {
            "run `svcctl pointer show USER_SLOT` to see what is wrong and what a rebuild would choose; then run `svcctl \
             pointer rebuild USER_SLOT` and `svcctl backup now HANDLE --wait`"
        }
        "snapshot_damaged" => {
            "run `svcctl status HANDLE` to see the damaged snapshots; run `svcctl backup now HANDLE --wait` to take a \
             new one"
        }
        "drill_failed" => {
            "run `svcctl status HANDLE` to see why; once the cause is fixed, run `svcctl backup drill HANDLE --wait`"
        }
        "backup_overdue" | "backup_failing" => "run `svcctl backup now HANDLE --wait`",
        "gateway_failing" | "database_failing" => "check its logs; if the failure persists, recover the slot",
        "code_failing" => {
            "run `journalctl -u svc-code` on its host to see the error; the owner's settings may be the cause"
        }
        "disk_unknown" => {
            "its host cannot measure its disk: run `journalctl -u svc-sync-agent` there to see the error"
        }
        "update_rolled_back" | "update_failed" => UPDATE_ADVICE,
        "update_refused" => {
            "run `svcctl status HANDLE` to see why its host refuses the release; publish a version that the host accepts, or \
             run `svc-update apply --version V` on the host with the option that the reason names"
        }
        "operation_stuck" => "run `svcctl status HANDLE` to see the step",
        "boot_slow" => "run `svcctl status HANDLE` to see the stage",
        "certificate_missing" => {
            "run `svcctl status HANDLE` to see why; add it to CUSTOMER_VPS_TLS_VERIFY_EXCEPT to keep it reachable in the \
             meantime"
        }
        "certificate_expiring" | "certificate_pending" => {
            "run `svcctl status HANDLE` and, on its host, `svcctl doctor` to see why there is no new certificate"
        }
        "token_not_rotated" => {
            "run `svcctl deploy start` to update its host to a release that rotates tokens"
        }
        _ => "run `svcctl status HANDLE`",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::show::test_data::plain_view;

    const OTHER: &str = "019a0000-0000-7000-8000-000000000002";
    const MACHINE: &str = "019a0000-0000-7000-8000-000000000001";

    fn machine_with_reason(reason: &str) -> MachineNeedingAttention {
        machine_with_reasons(&[reason])
    }

    fn machine_with_reasons(reasons: &[&str]) -> MachineNeedingAttention {
        let machine = json!({"machineId": MACHINE, "idpUserId": "user_1", "slot": "primary", "handle": "ada",
            "status": "running", "reasons": reasons});
        serde_json::from_value(machine).unwrap()
    }

    #[test]
    fn next_step_names_command_for_failed_snapshot_check() {
        for (reason, command) in [
            ("snapshot_damaged", "svcctl backup now ada --wait"),
            ("drill_failed", "svcctl backup drill ada --wait"),
        ] {
            let next = next_step(&machine_with_reason(reason), &[]);
            assert!(next.starts_with("run `svcctl status ada` ") && next.contains(command), "{next}");
        }
    }

    #[test]
    fn next_step_prefers_cause_to_symptom() {
        for (symptom, cause, command) in [
            ("backup_failing", "snapshot_held", "svcctl backup accept ada"),
            ("database_failing", "database_mismatch", "svc-restore adopt"),
        ] {
            let next = next_step(&machine_with_reasons(&[symptom, "gateway_failing", cause]), &[]);
            assert!(next.contains(command) && !next.contains("recover"), "{next}");
            let next = next_step(&machine_with_reason(symptom), &[]);
            assert!(!next.contains(command), "{next}");
        }
    }

    #[test]
    fn next_step_omits_recovery_while_hosts_are_refused() {
        let machine = machine_with_reason("heartbeat_silent");
        let alarm = |name: &str| {
            let alarm = json!({"alarm": name, "since": "T", "seenAt": "T", "detail": {}, "releasedUntil": null, "next": "n"});
            serde_json::from_value::<Alarm>(alarm).unwrap()
        };
        assert!(next_step(&machine, &[alarm("provider_limit")]).contains("recover"));
        let refused = next_step(&machine, &[alarm("provider_limit"), alarm("host_tokens_refused")]);
        assert!(!refused.contains("recover") && refused.contains("host_tokens_refused"), "{refused}");
    }

    #[test]
    fn findings_and_view_count_omitted_overdue_operations() {
        let overdue = json!({"operationId": OTHER, "machineId": MACHINE, "handle": "ada", "kind": "recover",
            "step": "fence", "attempts": 3, "ageSeconds": 99});
        let overdue: Vec<_> = std::iter::repeat_n(overdue, MAX_NAMED + 5).collect();
        let fleet = json!({"totals": {"machines": 200, "byStatus": {}}, "backups": {"never": 0},
            "overdueOperations": overdue, "overdueOperationsTotal": 126});
        let fleet: Fleet = serde_json::from_value(fleet).unwrap();
        let found = findings(&fleet, Findings::new("fleet")).into_list();
        assert_eq!(found.len(), MAX_NAMED + 1);
        assert_eq!(found[MAX_NAMED].what, "and 106 more operations are overdue");
        let text = show(&plain_view(), &fleet);
        assert!(text.contains("\nand 101 more operations are overdue\n"), "{text}");
    }

    #[test]
    fn alarm_line_shows_figures_and_details() {
        let alarm = |name: &str, detail: Value| {
            let alarm = json!({"alarm": name, "since": "T", "seenAt": "T", "detail": detail, "releasedUntil": null, "next": "n"});
            alarm_line(&serde_json::from_value(alarm).unwrap())
        };
        assert_eq!(
            alarm("servers_missing", json!({"missing": 5, "live": 6, "failedInLastHour": 0, "limit": 4})),
            "servers_missing (failed in last hour 0, limit 4, live 6, missing 5) since T"
        );
        assert_eq!(
            alarm("database_behind_store", json!({"user_1/primary": {"machineId": MACHINE, "epoch": 7}})),
            format!("database_behind_store (user_1/primary: machine {MACHINE}, epoch 7) since T")
        );
        let server = |id: &str, slot: Value| json!({"providerServerId": id, "machineId": OTHER, "epoch": "3", "slot": slot});
        let servers = json!([server("1", json!("user_1/primary")), server("2", Value::Null)]);
        assert_eq!(
            alarm("unknown_servers", json!({"unknown": 2, "released": 0, "servers": servers})),
            format!(
                "unknown_servers (released 0, unknown 2; servers: server 1, machine {OTHER}, slot user_1/primary, epoch 3; \
                 server 2, machine {OTHER}, epoch 3) since T"
            )
        );
        assert_eq!(alarm("provider_limit", json!({})), "provider_limit since T");
    }
}

//! Builds the fleet view: totals over all active machines, and the list of machines that need attention.
//!
//! These functions are pure: they do not read the clock, because the rows contain ages instead of times.

use std::collections::BTreeMap;
use std::time::Duration;

use super::certificates;
use super::db::fleet::FleetRow;
use svc_machine::state::Status;
use svc_router::host_trust::HostTrust;
use svc_store::bucket::is_unusable_pointer;
use svc_wire::fleet::{BackupAges, MachineNeedingAttention, Totals};
use svc_wire::text::WireString;

/// A host that has sent no heartbeat for this long counts as silent. Hosts send one every 30 s.
const SILENT_SECONDS: f64 = 120.0;
/// Backups are hourly: at this age, one backup was missed and the next one is late.
const BACKUP_OVERDUE_SECONDS: f64 = 2.0 * 3600.0 + 600.0;
const OPERATION_STUCK_SECONDS: f64 = 1800.0;
const OPERATION_STUCK_ATTEMPTS: i32 = 8;
const BOOT_SLOW_SECONDS: f64 = 600.0;
/// A machine that has been off for longer than this may have been forgotten.
const POWERED_OFF_LONG_SECONDS: f64 = 3600.0;
/// A token counts as not rotated once its rotation has been due for this long. A host normally receives its next token
/// in the response to the first heartbeat after the rotation is due.
const TOKEN_OVERDUE_SECONDS: f64 = 7.0 * 86_400.0;
/// Maximum number of machines listed as needing attention; the total counts all.
pub const MAX_LISTED_MACHINES: usize = 1000;

/// A machine's health, derived from its host's heartbeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Healthy,
    Unhealthy,
    /// The host has sent heartbeats, but none recently.
    Silent,
    /// The host has never sent a heartbeat.
    Unknown,
}

impl Health {
    const ALL: [Self; 4] = [Self::Healthy, Self::Unhealthy, Self::Silent, Self::Unknown];

    fn classify(row: &FleetRow) -> Self {
        match row.heartbeat_age {
            None => Self::Unknown,
            Some(age) if age > SILENT_SECONDS => Self::Silent,
            Some(_) if Self::all_parts_ok(row) => Self::Healthy,
            Some(_) => Self::Unhealthy,
        }
    }

    /// Returns whether the gateway, the database and, if the release has it, code-server are healthy.
    fn all_parts_ok(row: &FleetRow) -> bool {
        is_ok(row.gateway.as_deref())
            && is_ok(row.database.as_deref())
            && row.code.as_deref().is_none_or(|code| code == "ok")
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
            Self::Silent => "silent",
            Self::Unknown => "unknown",
        }
    }
}

fn is_ok(part: Option<&str>) -> bool {
    part == Some("ok")
}

/// The parts of `GET /vps/fleet` that describe machines.
pub struct FleetSummary {
    pub totals: Totals,
    pub backups: BackupAges,
    /// At most [`MAX_LISTED_MACHINES`] machines.
    pub attention: Vec<MachineNeedingAttention>,
    /// Number of machines that need attention, listed or not.
    pub attention_total: u64,
}

/// Summarizes the active machines.
pub fn summarize(rows: &[FleetRow], token_rotation: Duration, trust: &HostTrust) -> FleetSummary {
    let zero = |name: &str| (name.to_owned(), 0);
    let mut by_status: BTreeMap<String, u64> =
        Status::ALL.iter().map(|status| zero(status.as_str())).collect();
    let mut by_image_version: BTreeMap<String, u64> = BTreeMap::new();
    let mut by_health: BTreeMap<String, u64> =
        Health::ALL.iter().map(|health| zero(health.as_str())).collect();
    let mut attention = Vec::new();
    for row in rows {
        *by_status.entry(row.status.clone()).or_default() += 1;
        *by_image_version.entry(row.image_version.clone()).or_default() += 1;
        *by_health.entry(Health::classify(row).as_str().to_owned()).or_default() += 1;
        let reasons = attention_reasons(row, token_rotation, trust);
        if !reasons.is_empty() {
            attention.push(MachineNeedingAttention {
                machine_id: row.machine.into(),
                idp_user_id: WireString::from_stored(&row.user),
                slot: WireString::from_stored(&row.slot),
                handle: WireString::from_stored(&row.handle),
                status: WireString::from_stored(&row.status),
                reasons,
                ended: None,
                operation_id: row.waiting_operation.map(Into::into),
            });
        }
    }
    let attention_total = attention.len() as u64;
    attention.truncate(MAX_LISTED_MACHINES);
    let totals = Totals { machines: rows.len() as u64, by_status, by_image_version, by_health };
    FleetSummary { totals, backups: summarize_backups(rows), attention, attention_total }
}

/// Summarizes the backup ages of machines that hold data: all except booting ones.
fn summarize_backups(rows: &[FleetRow]) -> BackupAges {
    let with_data = || rows.iter().filter(|row| !is_booting(row));
    let mut ages: Vec<f64> = with_data().filter_map(effective_backup_age).collect();
    ages.sort_by(f64::total_cmp);
    let never = with_data().filter(|row| row.backup_age.is_none()).count() as u64;
    let whole_seconds = |age: &f64| age.max(0.0) as u64;
    let median = ages.len().checked_sub(1).and_then(|last| ages.get(last / 2));
    BackupAges {
        max_age_seconds: ages.last().map(whole_seconds),
        p50_age_seconds: median.map(whole_seconds),
        never,
    }
}

/// Returns the time since the slot's last backup, but at most the time since the machine's registration: a machine that
/// has restored an old snapshot is not late with its own first backup.
fn effective_backup_age(row: &FleetRow) -> Option<f64> {
    row.backup_age.map(|age| row.registered_age.map_or(age, |registered| age.min(registered)))
}

fn is_booting(row: &FleetRow) -> bool {
    matches!(row.status.as_str(), "provisioning" | "recovering")
}

/// Returns the reasons a machine needs attention. Those that the platform finds are listed first, roughly in order of
/// severity; the host's own reasons come last.
fn attention_reasons(row: &FleetRow, token_rotation: Duration, trust: &HostTrust) -> Vec<String> {
    // A machine that is powered off is expected to be silent and to make no backups.
    let is_running = row.status == "running" && row.powered_off_age.is_none();
    let is_reporting = matches!(Health::classify(row), Health::Healthy | Health::Unhealthy);
    let failing = |part: Option<&str>| is_reporting && part == Some("failing");
    let backup_age = effective_backup_age(row).unwrap_or(row.age);
    let is_waiting = row.waiting_operation.is_some();
    // A problem with the provider account blocks many machines: it raises an alarm and is not a reason here.
    let is_stuck = !is_waiting
        && !row.is_operation_blocked_by_account
        && (row.operation_age.is_some_and(|age| age > OPERATION_STUCK_SECONDS)
            || row.operation_attempts >= OPERATION_STUCK_ATTEMPTS);
    let is_backup_failing = row.backup_status.as_deref() == Some("error");
    let is_pointer_unusable =
        is_backup_failing && row.backup_error.as_deref().is_some_and(is_unusable_pointer);
    let certificate = certificates::attention_reason(row, trust);
    let mut reasons = Vec::new();
    if row.status == "failed" {
        reasons.push(format!("failed:{}", row.failure_cause.as_deref().unwrap_or("unknown")));
    }
    let is_silent = row.heartbeat_age.unwrap_or(row.age) > SILENT_SECONDS;
    for (applies, reason) in [
        (is_waiting, "operation_waiting"),
        (row.powered_off_age.is_some_and(|age| age > POWERED_OFF_LONG_SECONDS), "powered_off"),
        (is_running && is_silent, "heartbeat_silent"),
        // The machine is unreachable, even if it is healthy.
        (certificate == Some(certificates::CERTIFICATE_MISSING), certificates::CERTIFICATE_MISSING),
        (failing(row.database.as_deref()), "database_failing"),
        (failing(row.gateway.as_deref()), "gateway_failing"),
        (failing(row.code.as_deref()), "code_failing"),
        (is_reporting && row.is_disk_unknown, "disk_unknown"),
        (row.update_outcome.as_deref() == Some("rolled_back"), "update_rolled_back"),
        (row.update_outcome.as_deref() == Some("failed"), "update_failed"),
        (row.update_outcome.as_deref() == Some("refused"), "update_refused"),
        (row.is_snapshot_damaged, "snapshot_damaged"),
        (row.has_drill_failed, "drill_failed"),
        (is_pointer_unusable, "pointer_unusable"),
        (is_backup_failing && !is_pointer_unusable, "backup_failing"),
        (is_running && backup_age > BACKUP_OVERDUE_SECONDS, "backup_overdue"),
        (is_stuck, "operation_stuck"),
        (is_booting(row) && !is_waiting && row.age > BOOT_SLOW_SECONDS, "boot_slow"),
        (is_running && is_token_overdue(row, token_rotation), "token_not_rotated"),
    ] {
        if applies {
            reasons.push(reason.to_owned());
        }
    }
    reasons
        .extend(certificate.filter(|reason| *reason != certificates::CERTIFICATE_MISSING).map(str::to_owned));
    // The host's own reasons count only while its report is recent.
    if is_reporting {
        reasons.extend(row.attention.iter().cloned());
    }
    reasons
}

/// Returns whether the rotation of the host's token has been due for more than [`TOKEN_OVERDUE_SECONDS`]. The host may
/// be silent, or its release may not support rotation.
fn is_token_overdue(row: &FleetRow, rotation: Duration) -> bool {
    let since_due = (row.token_age - rotation.as_secs_f64()).max(row.token_request_age.unwrap_or(0.0));
    since_due > TOKEN_OVERDUE_SECONDS
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;
    use svc_machine::id::{MachineId, OperationId};

    const ROTATION: Duration = Duration::from_secs(10_000);

    pub fn healthy_row() -> FleetRow {
        FleetRow {
            machine: MachineId::new(),
            user: "user_1".to_owned(),
            slot: "primary".to_owned(),
            handle: "ada".to_owned(),
            status: "running".to_owned(),
            failure_cause: None,
            image_version: "v1".to_owned(),
            age: 90_000.0,
            heartbeat_age: Some(3.0),
            gateway: Some("ok".to_owned()),
            database: Some("ok".to_owned()),
            code: Some("ok".to_owned()),
            is_disk_unknown: false,
            backup_age: Some(1800.0),
            backup_status: Some("success".to_owned()),
            backup_error: None,
            update_outcome: Some("updated".to_owned()),
            is_snapshot_damaged: false,
            has_drill_failed: false,
            operation_age: None,
            operation_attempts: 0,
            waiting_operation: None,
            is_operation_blocked_by_account: false,
            powered_off_age: None,
            attention: Vec::new(),
            bundle_keys: None,
            token_age: 9000.0,
            token_request_age: None,
            registered_age: Some(80_000.0),
            certificate: None,
        }
    }

    fn reasons_of(change: impl FnOnce(&mut FleetRow)) -> Vec<String> {
        let mut row = healthy_row();
        change(&mut row);
        attention_reasons(&row, ROTATION, &HostTrust::pin_only())
    }

    #[test]
    fn each_problem_has_its_attention_reason() {
        assert_eq!(reasons_of(|_| ()), Vec::<String>::new());
        let one = |reason: &str| vec![reason.to_owned()];
        assert_eq!(reasons_of(|row| row.heartbeat_age = Some(121.0)), one("heartbeat_silent"));
        assert_eq!(reasons_of(|row| row.heartbeat_age = None), one("heartbeat_silent"));
        assert_eq!(reasons_of(|row| row.database = Some("failing".into())), one("database_failing"));
        assert_eq!(reasons_of(|row| row.gateway = Some("failing".into())), one("gateway_failing"));
        assert_eq!(reasons_of(|row| row.code = Some("failing".into())), one("code_failing"));
        assert_eq!(reasons_of(|row| row.code = None), Vec::<String>::new(), "the release has no editor");
        assert_eq!(reasons_of(|row| row.is_disk_unknown = true), one("disk_unknown"));
        assert_eq!(reasons_of(|row| row.backup_status = Some("error".into())), one("backup_failing"));
        let unreadable = |row: &mut FleetRow| {
            row.backup_status = Some("error".into());
            let error = "user_1/primary/system/db/latest in the object store is not readable: EOF";
            row.backup_error = Some(error.into());
        };
        assert_eq!(reasons_of(unreadable), one("pointer_unusable"), "replaces backup_failing");
        assert_eq!(
            reasons_of(|row| row.update_outcome = Some("rolled_back".into())),
            one("update_rolled_back")
        );
        assert_eq!(reasons_of(|row| row.update_outcome = Some("failed".into())), one("update_failed"));
        assert_eq!(reasons_of(|row| row.update_outcome = Some("refused".into())), one("update_refused"));
        assert_eq!(reasons_of(|row| row.is_snapshot_damaged = true), one("snapshot_damaged"));
        assert_eq!(reasons_of(|row| row.has_drill_failed = true), one("drill_failed"));
        assert_eq!(reasons_of(|row| row.backup_age = Some(9000.0)), one("backup_overdue"));
        assert_eq!(reasons_of(|row| row.backup_age = None), one("backup_overdue"));
        let restored = |row: &mut FleetRow| {
            (row.backup_age, row.registered_age) = (Some(9000.0), Some(60.0));
        };
        assert_eq!(reasons_of(restored), Vec::<String>::new(), "the machine has just restored that snapshot");
        assert_eq!(reasons_of(|row| row.operation_age = Some(1801.0)), one("operation_stuck"));
        assert_eq!(reasons_of(|row| row.operation_attempts = 8), one("operation_stuck"));
        let waiting = |row: &mut FleetRow| {
            row.waiting_operation = Some(OperationId::new());
            row.operation_age = Some(1801.0);
        };
        assert_eq!(
            reasons_of(waiting),
            one("operation_waiting"),
            "an operation that waits for an operator is not stuck"
        );
        assert_eq!(reasons_of(|row| row.attention = one("snapshot_held")), one("snapshot_held"));
        let off = |row: &mut FleetRow| {
            (row.heartbeat_age, row.backup_age, row.powered_off_age) =
                (Some(9000.0), Some(9000.0), Some(3000.0));
        };
        assert_eq!(reasons_of(off), Vec::<String>::new(), "an operator has powered the server off");
        let long = |row: &mut FleetRow| {
            off(row);
            row.powered_off_age = Some(3601.0);
        };
        assert_eq!(reasons_of(long), one("powered_off"));
        let week = 7.0 * 86_400.0;
        let not_rotated = one("token_not_rotated");
        assert_eq!(reasons_of(|row| row.token_age = 10_000.0 + week), Vec::<String>::new());
        assert_eq!(reasons_of(|row| row.token_age = 10_001.0 + week), not_rotated);
        assert_eq!(reasons_of(|row| row.token_request_age = Some(week + 1.0)), not_rotated);
        let slow = |row: &mut FleetRow| {
            (row.status, row.heartbeat_age, row.age) = ("recovering".into(), None, 601.0);
        };
        assert_eq!(reasons_of(slow), one("boot_slow"));
        let failed = |row: &mut FleetRow| {
            row.status = "failed".into();
            row.failure_cause = Some("server_gone".into());
            row.heartbeat_age = Some(5000.0);
        };
        assert_eq!(reasons_of(failed), one("failed:server_gone"));
        // An old report from a silent host is not a reason.
        let stale = |row: &mut FleetRow| {
            row.heartbeat_age = Some(500.0);
            row.database = Some("failing".into());
            row.is_disk_unknown = true;
            row.attention = one("database_mismatch");
        };
        assert_eq!(reasons_of(stale), one("heartbeat_silent"));
    }

    #[test]
    fn totals_count_all_machines_but_ages_only_those_with_data() {
        let mut rows = vec![healthy_row(), healthy_row(), healthy_row(), healthy_row()];
        rows[1].backup_age = Some(100.0);
        rows[2].backup_age = None;
        rows[2].database = Some("failing".into());
        rows[3].status = "provisioning".into();
        rows[3].backup_age = None;
        rows[3].heartbeat_age = None;
        rows[3].age = 5.0;
        let trust = HostTrust::pin_only();
        let summary = summarize(&rows, ROTATION, &trust);
        let totals = &summary.totals;
        assert_eq!((totals.machines, totals.by_status["running"], totals.by_status["failed"]), (4, 3, 0));
        assert_eq!(json!(totals.by_image_version), json!({"v1": 4}));
        assert_eq!(json!(totals.by_health), json!({"healthy": 2, "silent": 0, "unhealthy": 1, "unknown": 1}));
        assert_eq!(json!(summary.backups), json!({"maxAgeSeconds": 1800, "p50AgeSeconds": 100, "never": 1}));
        assert_eq!(summary.attention.len(), 1);
        rows[0].registered_age = Some(60.0);
        let backups = summarize(&rows, ROTATION, &trust).backups;
        assert_eq!(json!(backups), json!({"maxAgeSeconds": 100, "p50AgeSeconds": 60, "never": 1}));
        assert_eq!(
            json!(summarize(&[], ROTATION, &trust).backups),
            json!({"maxAgeSeconds": null, "p50AgeSeconds": null, "never": 0})
        );
    }
}

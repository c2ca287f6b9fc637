//! Checks for failed systemd units, and for units that should be running but aren't.

use std::path::PathBuf;

use tokio::process::Command;

use crate::system::layout::Layout;
use crate::system::systemd;
use svc_base::diagnosis::Findings;

/// Always-on services.
const SERVICES: [&str; 7] = [
    "svc-postgres.service",
    "svc-gateway.service",
    "svc-shell.service",
    "svc-code.service",
    "svc-sync-agent.service",
    "svc-watch.service",
    "svc-files.service",
];
/// Always-active sockets, timers and path units.
const TRIGGER_UNITS: [&str; 13] = [
    "svc-agent.socket",
    "svc-db-backup.timer",
    "svc-db-verify.timer",
    "svc-db-drill.timer",
    "svc-heartbeat.timer",
    "svc-update.path",
    "svc-db-backup-request.path",
    "svc-db-drill-request.path",
    "svc-db-side.path",
    "svc-files-request.path",
    "svc-files-history.socket",
    "svc-files-verify.timer",
    "svc-files-verify.path",
];

/// Returns the path of the optional release component required by a unit, if any.
fn optional_component(layout: &Layout, unit: &str) -> Option<PathBuf> {
    match unit {
        "svc-shell.service" => Some(layout.shell()),
        "svc-code.service" => Some(layout.runtime().join("code-server")),
        _ => None,
    }
}

pub async fn check(layout: &Layout) -> Findings {
    let findings = Findings::new("units");
    let Some(systemctl) = systemd::find_systemctl(layout) else {
        return findings.skipped("systemd is not running here");
    };
    let mut command = Command::new(systemctl);
    command.args(["show", "--no-pager", "--property=Id,LoadState,ActiveState,Result", "--all", "svc-*"]);
    command.args(SERVICES).args(TRIGGER_UNITS).kill_on_drop(true);
    match command.output().await {
        Ok(output) if output.status.success() => {
            assess(findings, &String::from_utf8_lossy(&output.stdout), |unit| {
                optional_component(layout, unit).is_some_and(|component| !component.exists())
            })
        }
        Ok(output) => {
            findings.skipped(format!("systemctl: {}", String::from_utf8_lossy(&output.stderr).trim()))
        }
        Err(error) => findings.skipped(format!("systemctl: {error}")),
    }
}

fn assess(findings: Findings, output: &str, is_missing_component: impl Fn(&str) -> bool) -> Findings {
    let mut findings = findings;
    let mut seen = std::collections::BTreeSet::new();
    for block in output.split("\n\n") {
        let value = |name: &str| {
            block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default()
        };
        let (id, state) = (value("Id"), value("ActiveState"));
        if id.is_empty() || !seen.insert(id.to_owned()) {
            continue;
        }
        let is_always_on = SERVICES.contains(&id) || TRIGGER_UNITS.contains(&id);
        let next = format!("run `systemctl status {id}; journalctl -u {id} -n 50`");
        if is_always_on && value("LoadState") == "not-found" {
            findings = findings
                .problem(format!("{id} is not installed"), "run `svc-update boot` to install the units");
        } else if state == "failed" {
            findings = findings.problem(format!("{id} failed ({})", value("Result")), next);
        } else if state == "inactive" && is_missing_component(id) {
            findings = findings.warning(
                format!("{id} has nothing to run: the release lacks the component that it needs"),
                "publish a bundle that contains the component, unless its absence is intended",
            );
        } else if is_always_on && state != "active" {
            findings = findings.problem(format!("{id} is {state}"), next);
        }
    }
    findings.or_ok(format!("{} units, none failed", seen.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assess_names_failed_and_stopped_units() {
        let output = "Id=svc-gateway.service\nLoadState=loaded\nActiveState=active\nResult=success\n\n\
                     Id=svc-restore.service\nLoadState=loaded\nActiveState=failed\nResult=exit-code\n\n\
                     Id=svc-code.service\nLoadState=not-found\nActiveState=inactive\nResult=success\n\n\
                     Id=svc-db-backup.timer\nLoadState=loaded\nActiveState=inactive\nResult=success\n\n\
                     Id=svc-shell.service\nLoadState=loaded\nActiveState=inactive\nResult=success\n";
        let text =
            format!("{:?}", assess(Findings::new("units"), output, |unit| unit == "svc-shell.service"));
        for part in [
            "svc-restore.service failed (exit-code)",
            "svc-code.service is not installed",
            "timer is inactive",
            "svc-shell.service has nothing to run",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("svc-gateway.service"), "{text}");
    }
}

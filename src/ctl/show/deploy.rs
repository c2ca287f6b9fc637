//! Text view of rollouts.

use super::human::format_ago;
use super::table::{self, Cell};
use super::{Color, View};
use svc_base::untrusted_text::one_line;
use svc_wire::rollout::{
    Rollout, RolloutFinding, RolloutList, RolloutMachine, RolloutSummary, RolloutTotals,
};
use svc_wire::text::WireString;

fn totals_line(totals: &RolloutTotals) -> String {
    let RolloutTotals { waiting, asked, updated, failed, skipped } = totals;
    format!("{updated} updated, {failed} failed, {skipped} skipped, {asked} asked, {waiting} waiting")
}

/// Formats a machine's state as `ada/primary failed: <error>`.
pub fn machine_line(view: &View, machine: &RolloutMachine) -> String {
    let state = view.paint(state_color(&machine.state), &machine.state);
    let error = machine.error.as_deref().map(|error| format!(": {}", one_line(error))).unwrap_or_default();
    format!("{}/{} {state}{error}", machine.handle, machine.slot)
}

/// Formats a rollout's state and its reason, if any.
fn state_cell(rollout: &RolloutSummary) -> Cell {
    let reason = rollout.why.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    Cell::colored(state_color(&rollout.state), format!("{}{reason}", rollout.state))
}

/// Formats the last verification, if any, as `passed 5 min ago on ada`.
fn verification_cell(view: &View, rollout: &RolloutSummary) -> Cell {
    let Some(last) = &rollout.verification else { return Cell::from("") };
    let (result, color) = if last.passed { ("passed", Color::Good) } else { ("failed", Color::Bad) };
    let handles: Vec<_> = last.handles.iter().map(WireString::as_str).collect();
    Cell::colored(
        Some(color),
        format!("{result} {} on {}", format_ago(view.now, &last.at), handles.join(", ")),
    )
}

/// Formats a rollout's progress as `running to 2026.11.2: 1 updated, …`.
pub fn progress_line(rollout: &RolloutSummary) -> String {
    format!("{} to {}: {}", rollout.state, rollout.image_version, totals_line(&rollout.totals))
}

fn state_color(state: &str) -> Option<Color> {
    match state {
        "updated" | "succeeded" => Some(Color::Good),
        "failed" | "stopped" => Some(Color::Bad),
        "asked" | "running" | "paused" => Some(Color::Warning),
        _ => Some(Color::Faint),
    }
}

pub fn list(view: &View, page: &RolloutList) -> String {
    if page.rollouts.is_empty() {
        return "no rollouts\n".to_owned();
    }
    let row = |rollout: &RolloutSummary| {
        vec![
            rollout.image_version.clone().into(),
            state_cell(rollout),
            totals_line(&rollout.totals).into(),
            format_ago(view.now, &rollout.created_at).into(),
            Cell::colored(Some(Color::Faint), rollout.rollout_id.clone()),
        ]
    };
    let rows: Vec<_> = page.rollouts.iter().map(row).collect();
    table::render(view, &["RELEASE", "STATE", "MACHINES", "STARTED", "ROLLOUT"], &rows)
}

pub fn show(view: &View, rollout: &Rollout) -> String {
    let mut text = table::render_pairs(
        view,
        &[
            ("rollout", Cell::from(rollout.rollout_id.clone())),
            ("release", Cell::colored(Some(Color::Strong), rollout.image_version.clone())),
            ("state", state_cell(rollout)),
            ("machines", totals_line(&rollout.totals).into()),
            ("verified", verification_cell(view, rollout)),
            ("started", format_ago(view.now, &rollout.created_at).into()),
        ],
    );
    let findings = rollout.verification.iter().flat_map(|last| &last.findings);
    for RolloutFinding { handle, check, what, next, .. } in findings {
        let line = format!("{handle}: {check}: {}", one_line(what));
        text.push_str(&format!("{}\n", view.paint(Some(Color::Bad), &line)));
        if let Some(next) = next {
            text.push_str(&format!("  next: {}\n", one_line(next)));
        }
    }
    if rollout.machines.is_empty() {
        return text;
    }
    let row = |machine: &RolloutMachine| {
        let batch = if machine.batch == 0 { "canary".to_owned() } else { machine.batch.to_string() };
        vec![
            batch.into(),
            machine.handle.clone().into(),
            machine.slot.clone().into(),
            Cell::colored(state_color(&machine.state), machine.state.as_str()),
            machine.image_version.clone().into(),
            machine.error.clone().unwrap_or_default().into(),
        ]
    };
    let rows: Vec<_> = rollout.machines.iter().map(row).collect();
    text.push('\n');
    text.push_str(&table::render(view, &["BATCH", "HANDLE", "SLOT", "STATE", "RUNS", "WHY"], &rows));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn show_lists_rollout_machines() {
        let rollout: Rollout = serde_json::from_value(serde_json::json!({
            "rolloutId": "r", "imageVersion": "v2", "state": "stopped", "why": "the canary failed",
            "canary": 1, "batchSize": 10, "maxFailures": 1, "updatedAt": "2026-11-21T00:00:30.000Z", "requestId": "q",
            "totals": {"waiting": 1, "asked": 0, "updated": 0, "failed": 1, "skipped": 0},
            "machines": [
                {"machineId": "m1", "handle": "ada", "slot": "primary", "batch": 0, "state": "failed",
                 "error": "rolled_back: x", "imageVersion": "v1"},
                {"machineId": "m2", "handle": "bob", "slot": "primary", "batch": 1, "state": "waiting",
                 "error": null, "imageVersion": "v1"},
            ],
            "createdAt": "2026-11-21T00:00:00.000Z",
        }))
        .unwrap();
        let now = "2026-11-21T00:01:00Z".parse().unwrap();
        let text = show(&View { now, has_colors: false, width: None }, &rollout);
        assert!(text.contains("stopped (the canary failed)"), "{text}");
        assert!(text.contains("canary") && text.contains("rolled_back: x"), "{text}");
        assert!(rollout.has_ended() && rollout.machines[0].has_ended() && !rollout.machines[1].has_ended());
    }
}

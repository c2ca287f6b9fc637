//! Text view of rollouts.

use serde::Deserialize;

use super::human::ago;
use super::table::{self, Cell};
use super::{Colour, View};
use svc_base::untrusted_text::one_line;

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    pub rollout_id: String,
    pub image_version: String,
    pub state: String,
    pub why: Option<String>,
    pub totals: Totals,
    /// Empty in a list.
    #[serde(default)]
    pub machines: Vec<Machine>,
    pub created_at: String,
}

#[derive(Debug, Deserialize)]
pub struct Rollouts {
    pub rollouts: Vec<Rollout>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Totals {
    pub waiting: u64,
    pub asked: u64,
    pub updated: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Totals {
    fn line(&self) -> String {
        let Self { waiting, asked, updated, failed, skipped } = self;
        format!("{updated} updated, {failed} failed, {skipped} skipped, {asked} asked, {waiting} waiting")
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    pub machine_id: String,
    pub handle: String,
    pub slot: String,
    pub batch: u64,
    pub state: String,
    pub error: Option<String>,
    pub image_version: String,
}

impl Machine {
    pub fn has_ended(&self) -> bool {
        !matches!(self.state.as_str(), "waiting" | "asked")
    }

    /// `ada/primary failed: why`.
    pub fn line(&self, view: &View) -> String {
        let state = view.paint(colour(&self.state), &self.state);
        let error = self.error.as_deref().map(|error| format!(": {}", one_line(error))).unwrap_or_default();
        format!("{}/{} {state}{error}", self.handle, self.slot)
    }
}

impl Rollout {
    pub fn has_ended(&self) -> bool {
        !matches!(self.state.as_str(), "running" | "paused")
    }

    /// Its state, with the reason, if any.
    fn state(&self) -> Cell {
        let why = self.why.as_deref().map(|why| format!(" ({why})")).unwrap_or_default();
        Cell::painted(colour(&self.state), format!("{}{why}", self.state))
    }

    /// Its progress, in one line.
    pub fn progress(&self) -> String {
        format!("{} to {}: {}", self.state, self.image_version, self.totals.line())
    }
}

fn colour(state: &str) -> Option<Colour> {
    match state {
        "updated" | "succeeded" => Some(Colour::Good),
        "failed" | "stopped" => Some(Colour::Bad),
        "asked" | "running" | "paused" => Some(Colour::Moving),
        _ => Some(Colour::Faint),
    }
}

pub fn list(view: &View, page: &Rollouts) -> String {
    if page.rollouts.is_empty() {
        return "no rollouts\n".to_owned();
    }
    let row = |rollout: &Rollout| {
        vec![
            rollout.image_version.clone().into(),
            rollout.state(),
            rollout.totals.line().into(),
            ago(view.now, &rollout.created_at).into(),
            Cell::painted(Some(Colour::Faint), rollout.rollout_id.clone()),
        ]
    };
    let rows: Vec<_> = page.rollouts.iter().map(row).collect();
    table::render(view, &["RELEASE", "STATE", "MACHINES", "STARTED", "ROLLOUT"], &rows)
}

pub fn show(view: &View, rollout: &Rollout) -> String {
    let mut shown = table::pairs(
        view,
        &[
            ("rollout", Cell::from(rollout.rollout_id.clone())),
            ("release", Cell::painted(Some(Colour::Strong), rollout.image_version.clone())),
            ("state", rollout.state()),
            ("machines", rollout.totals.line().into()),
            ("started", ago(view.now, &rollout.created_at).into()),
        ],
    );
    if rollout.machines.is_empty() {
        return shown;
    }
    let row = |machine: &Machine| {
        let batch = if machine.batch == 0 { "canary".to_owned() } else { machine.batch.to_string() };
        vec![
            batch.into(),
            machine.handle.clone().into(),
            machine.slot.clone().into(),
            Cell::painted(colour(&machine.state), machine.state.clone()),
            machine.image_version.clone().into(),
            machine.error.clone().unwrap_or_default().into(),
        ]
    };
    let rows: Vec<_> = rollout.machines.iter().map(row).collect();
    shown.push('\n');
    shown.push_str(&table::render(view, &["BATCH", "HANDLE", "SLOT", "STATE", "RUNS", "WHY"], &rows));
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn show_lists_the_machines_of_a_rollout() {
        let rollout: Rollout = serde_json::from_value(serde_json::json!({
            "rolloutId": "r", "imageVersion": "v2", "state": "stopped", "why": "the canary failed",
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
        let text = show(&View { now, colours: false, width: None }, &rollout);
        assert!(text.contains("stopped (the canary failed)"), "{text}");
        assert!(text.contains("canary") && text.contains("rolled_back: x"), "{text}");
        assert!(rollout.has_ended() && rollout.machines[0].has_ended() && !rollout.machines[1].has_ended());
    }
}

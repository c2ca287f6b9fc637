//! Converts rollout rows, with or without their machines, to rollouts in the API.

use deadpool_postgres::GenericClient;

use crate::db::DbError;
use crate::db::rollouts::{self, RolloutMachineRow, RolloutRow};
use svc_wire::rollout::{Rollout, RolloutMachine, RolloutSummary, RolloutTotals};
use svc_wire::text::WireString;

/// Loads rollout summaries: everything except the machines.
pub async fn load_summaries(
    client: &impl GenericClient,
    rows: &[RolloutRow],
) -> Result<Vec<RolloutSummary>, DbError> {
    let counts = rollouts::count_machines(client, rows).await?;
    let totals = |row: &RolloutRow| {
        let mut totals = RolloutTotals::default();
        for (_, state, machines) in counts.iter().filter(|(id, ..)| *id == row.id) {
            totals.add(*state, *machines);
        }
        totals
    };
    Ok(rows.iter().map(|row| to_summary(row, totals(row))).collect())
}

/// Loads a rollout with its machines.
pub async fn load_with_machines(client: &impl GenericClient, row: &RolloutRow) -> Result<Rollout, DbError> {
    let machines = rollouts::list_machines(client, row.id).await?;
    let mut totals = RolloutTotals::default();
    machines.iter().for_each(|machine| totals.add(machine.state, 1));
    Ok(Rollout {
        summary: to_summary(row, totals),
        machines: machines.into_iter().map(RolloutMachine::from).collect(),
    })
}

fn to_summary(row: &RolloutRow, totals: RolloutTotals) -> RolloutSummary {
    RolloutSummary {
        rollout_id: row.id.into(),
        image_version: (&row.image_version).into(),
        state: row.state.into(),
        why: row.why.clone(),
        canary: row.canary.unsigned_abs().into(),
        batch_size: row.batch_size.unsigned_abs().into(),
        max_failures: row.max_failures.unsigned_abs().into(),
        totals,
        created_at: row.created_at.into(),
        updated_at: row.updated_at.into(),
        ended_at: row.ended_at.map(Into::into),
        verify: row.should_verify,
        // A result that a later release wrote in an unknown format is omitted.
        verification: row.verification.clone().and_then(|result| serde_json::from_value(result).ok()),
        request_id: row.request_id.clone(),
    }
}

impl From<RolloutMachineRow> for RolloutMachine {
    fn from(row: RolloutMachineRow) -> Self {
        Self {
            machine_id: row.machine.into(),
            handle: WireString::from_stored(row.handle),
            slot: WireString::from_stored(row.slot),
            batch: row.batch.unsigned_abs().into(),
            state: row.state.into(),
            error: row.error,
            asked_at: row.asked_at.map(Into::into),
            ended_at: row.ended_at.map(Into::into),
            image_version: WireString::from_stored(row.image_version),
        }
    }
}

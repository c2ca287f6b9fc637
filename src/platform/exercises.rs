//! Reports whether recovery and rollback were exercised recently on a test slot.

use deadpool_postgres::GenericClient;
use jiff::{SignedDuration, Timestamp};

use crate::db::DbError;
use crate::db::exercises::{self, ExerciseRow};
use svc_wire::fleet::{Exercise, Exercises};

/// How long an exercise counts as current: releases and operators change within a quarter.
const MAX_EXERCISE_AGE: SignedDuration = SignedDuration::from_hours(90 * 24);

pub async fn load(client: &impl GenericClient) -> Result<Exercises, DbError> {
    let now = Timestamp::now();
    Ok(Exercises {
        recovery: to_exercise(exercises::find_recovery(client).await?, now),
        rollback: to_exercise(exercises::find_rollback(client).await?, now),
    })
}

fn to_exercise(row: Option<ExerciseRow>, now: Timestamp) -> Exercise {
    let Some(row) = row else { return Exercise::default() };
    let is_current = now.duration_since(row.at) <= MAX_EXERCISE_AGE;
    Exercise { last_at: Some(row.at.into()), machine_id: Some(row.machine.into()), is_current }
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_machine::id::MachineId;

    #[test]
    fn exercise_is_current_for_ninety_days() {
        let now: Timestamp = "2026-11-25T00:00:00Z".parse().unwrap();
        let last = |at: &str| Some(ExerciseRow { at: at.parse().unwrap(), machine: MachineId::new() });
        assert!(to_exercise(last("2026-08-27T00:00:00Z"), now).is_current);
        assert!(!to_exercise(last("2026-08-26T23:59:59Z"), now).is_current);
        let never = to_exercise(None, now);
        assert!(never.last_at.is_none() && !never.is_current);
    }
}

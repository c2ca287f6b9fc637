//! Handwritten plans for problems that a review or a seed once found.

use super::plan::{Action, Step};
use super::run::{Backends, RunResult, run_plan};
use super::run_database::RunDatabase;

/// Long enough for any response, because these plans test the order of requests, not their overlap.
const RESPONSE_TIMEOUT_MS: u64 = 5000;

fn step(action: Action, key: Option<u8>) -> Step {
    Step { process_index: 0, action, is_sent_twice: false, key, wait_ms: RESPONSE_TIMEOUT_MS }
}

async fn assert_no_violations(steps: Vec<Step>) {
    let database = RunDatabase::new(None).await.unwrap();
    if let RunResult::Violated { violations, log, .. } =
        run_plan(&database, Backends::InProcess, &steps, None).await.unwrap()
    {
        panic!("{violations:?}:\n{}", log.join("\n"));
    }
}

fn plan_running_machine(slot: usize) -> Vec<Step> {
    let actions = [
        Action::Subscribe { slot },
        Action::Provision { slot, accept_loss: true },
        Action::WaitForOperations,
        Action::Register { host: 0, host_key: 0 },
    ];
    actions.into_iter().map(|action| step(action, None)).collect()
}

/// The response to a request during a recovery is also stored for that request's key.
#[tokio::test(flavor = "multi_thread")]
async fn second_key_does_not_restart_a_recovery() {
    let mut steps = plan_running_machine(0);
    let recover = || Action::Recover { slot: 0, allow_empty: true, accept_loss: true };
    steps.push(step(recover(), Some(0)));
    steps.push(step(recover(), Some(1)));
    steps.push(step(Action::WaitForOperations, None));
    steps.push(step(Action::Register { host: 0, host_key: 0 }, None));
    steps.push(step(recover(), Some(1)));
    assert_no_violations(steps).await;
}

/// The response to a deletion does not change when a later request deletes leftover servers.
#[tokio::test(flavor = "multi_thread")]
async fn repeated_deletion_keeps_its_response() {
    let mut steps = plan_running_machine(0);
    let delete = || Action::Delete { machine: 0, accept_loss: true };
    steps.push(step(delete(), Some(0)));
    steps.push(step(delete(), Some(1)));
    steps.push(step(Action::WaitForOperations, None));
    steps.push(step(delete(), Some(1)));
    steps.push(step(delete(), Some(0)));
    assert_no_violations(steps).await;
}

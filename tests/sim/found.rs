//! Plans written by hand: what reading or a seed has found once, so that it stays found.

use super::plan::{Action, Step};
use super::run::{End, Parts, play};
use super::seat::Seat;

/// Long enough for any answer: these plans are about order, not about overlap.
const PATIENT_MS: u64 = 5000;

fn step(action: Action, key: Option<u8>) -> Step {
    Step { via: 0, action, twice: false, key, wait_ms: PATIENT_MS }
}

async fn holds(steps: Vec<Step>) {
    let seat = Seat::new(None).await.unwrap();
    if let End::Broken { found, log, .. } = play(&seat, Parts::Near, &steps, None).await.unwrap() {
        panic!("{found:?}:\n{}", log.join("\n"));
    }
}

fn running(slot: usize) -> Vec<Step> {
    let actions = [
        Action::Subscribe { slot },
        Action::Provision { slot, accept_loss: true },
        Action::Rest,
        Action::Register { host: 0, body: 0 },
    ];
    actions.into_iter().map(|action| step(action, None)).collect()
}

/// The answer that a recovery is under way is an answer to its key, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_asked_for_twice_is_not_begun_again_by_the_second_key() {
    let mut steps = running(0);
    let recover = || Action::Recover { slot: 0, empty: true, accept_loss: true };
    steps.push(step(recover(), Some(0)));
    steps.push(step(recover(), Some(1)));
    steps.push(step(Action::Rest, None));
    steps.push(step(Action::Register { host: 0, body: 0 }, None));
    steps.push(step(recover(), Some(1)));
    holds(steps).await;
}

/// A deletion's answer stays what it was when the leftovers are deleted once more.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_deletion_keeps_its_answer() {
    let mut steps = running(0);
    let delete = || Action::Delete { machine: 0, accept_loss: true };
    steps.push(step(delete(), Some(0)));
    steps.push(step(delete(), Some(1)));
    steps.push(step(Action::Rest, None));
    steps.push(step(delete(), Some(1)));
    steps.push(step(delete(), Some(0)));
    holds(steps).await;
}

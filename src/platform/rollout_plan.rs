//! Plans the next step of a rollout: maps its machines' states to effects. Pure: reads no clock and no database.
//!
//! Invariants:
//!
//! - At most one batch is updated at a time, the canary first and separately.
//! - A batch starts only when the update of every machine in the previous batch has ended.
//! - Once a machine has the release, no further update is requested before any required verification has passed.
//! - If verification is due and no canary machine has installed the release, the same number of machines from the next
//!   batch take the canary's place.
//! - No update is requested after the canary has failed or the maximum number of failures is reached.
//! - A requested update ends when its host reports a result, when its machine leaves service, or on a timeout.

use svc_machine::id::MachineId;
use svc_wire::rollout::MemberState;

/// The current state of a machine in a rollout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub machine: MachineId,
    pub batch: i32,
    pub state: MemberState,
    /// Whether the machine holds its slot, is running, and has not been powered off.
    pub is_running: bool,
    /// Whether the host reports that it runs this release and is healthy.
    pub is_updated: bool,
    /// Why the update failed, as reported by the host since the request.
    pub failure: Option<String>,
    /// Whether a timeout has expired: the host's last report of an update in progress, or the request, is too old.
    pub is_overdue: bool,
}

/// Whether further updates are requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RolloutPace {
    Running,
    /// Paused, stopped or aborted. Updates that were already requested still complete.
    Halted,
}

/// The state of the release's verification on the first machines that receive it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerificationState {
    /// Not required, or passed.
    Satisfied,
    Due,
    /// A process is running it.
    Running,
}

/// A change to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RolloutEffect {
    /// Record how the machine's update ended.
    EndUpdate {
        machine: MachineId,
        state: MemberState,
        error: Option<String>,
    },
    RequestUpdate {
        machine: MachineId,
    },
    /// Verify the release on the machines that have it.
    Verify,
    Stop {
        reason: String,
    },
    Succeed,
}

/// A rollout's limits.
#[derive(Debug, Clone, Copy)]
pub struct RolloutLimits {
    /// Number of machines that get the release before all others; 0 means that there is no canary.
    pub canary: usize,
    /// Number of failed machines at which the rollout stops.
    pub max_failures: usize,
}

/// Returns the effects that are due now.
pub fn next_effects(
    pace: RolloutPace,
    limits: RolloutLimits,
    verification: VerificationState,
    members: &[Member],
) -> Vec<RolloutEffect> {
    let mut effects = Vec::new();
    let mut states: Vec<(i32, MemberState)> = Vec::new();
    for member in members {
        let ended_state = if member.state == MemberState::Requested { update_result(member) } else { None };
        let state = ended_state.as_ref().map_or(member.state, |(state, _)| *state);
        states.push((member.batch, state));
        if let Some((state, error)) = ended_state {
            effects.push(RolloutEffect::EndUpdate { machine: member.machine, state, error });
        }
    }
    if pace == RolloutPace::Halted {
        return effects;
    }
    let failed = states.iter().filter(|(_, state)| *state == MemberState::Failed).count();
    if states.iter().any(|(batch, state)| *batch == 0 && *state == MemberState::Failed) {
        effects.push(RolloutEffect::Stop { reason: "the canary failed".to_owned() });
        return effects;
    }
    if failed >= limits.max_failures {
        let machines = if failed == 1 { "machine" } else { "machines" };
        effects.push(RolloutEffect::Stop { reason: format!("{failed} {machines} failed") });
        return effects;
    }
    if states.iter().any(|(_, state)| *state == MemberState::Requested) {
        return effects;
    }
    let has_release = states.iter().any(|(_, state)| *state == MemberState::Updated);
    if has_release && verification != VerificationState::Satisfied {
        effects.extend((verification == VerificationState::Due).then_some(RolloutEffect::Verify));
        return effects;
    }
    let next_batch =
        states.iter().filter(|(_, state)| *state == MemberState::Waiting).map(|(batch, _)| *batch).min();
    let Some(next_batch) = next_batch else {
        effects.push(RolloutEffect::Succeed);
        return effects;
    };
    // The canary may not have installed the release, for instance because it was powered off.
    let needs_canary = limits.canary > 0 && verification != VerificationState::Satisfied && !has_release;
    let mut remaining = if needs_canary { limits.canary } else { usize::MAX };
    let is_next = |member: &&Member| member.batch == next_batch && member.state == MemberState::Waiting;
    for member in members.iter().filter(is_next) {
        let machine = member.machine;
        if !member.is_running {
            let error = Some("the machine is not running".to_owned());
            effects.push(RolloutEffect::EndUpdate { machine, state: MemberState::Skipped, error });
            continue;
        }
        if remaining == 0 {
            continue;
        }
        remaining -= 1;
        effects.push(if member.is_updated {
            RolloutEffect::EndUpdate { machine, state: MemberState::Updated, error: None }
        } else {
            RolloutEffect::RequestUpdate { machine }
        });
    }
    effects
}

/// Returns how a requested update ended; `None` while it is in progress.
fn update_result(member: &Member) -> Option<(MemberState, Option<String>)> {
    if !member.is_running {
        return Some((MemberState::Skipped, Some("the machine stopped running".to_owned())));
    }
    if let Some(reason) = &member.failure {
        return Some((MemberState::Failed, Some(reason.clone())));
    }
    if member.is_updated {
        return Some((MemberState::Updated, None));
    }
    member
        .is_overdue
        .then(|| (MemberState::Failed, Some("the host did not report the update in time".to_owned())))
}

/// Assigns each machine to a batch, in order: batch 0 is the canary.
pub fn assign_batches(machines: usize, canary: usize, batch_size: usize) -> impl Iterator<Item = i32> {
    (0..machines).map(move |index| {
        let batch = if index < canary { 0 } else { 1 + (index - canary) / batch_size.max(1) };
        i32::try_from(batch).unwrap_or(i32::MAX)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// How a host reacts to an update request.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Host {
        Updates,
        RollsBack,
        Silent,
        Stops,
        /// The host already had the release before the rollout.
        AlreadyUpdated,
        /// The machine is never running.
        Down,
    }

    fn host() -> impl Strategy<Value = Host> {
        prop_oneof![
            6 => Just(Host::Updates),
            1 => Just(Host::RollsBack),
            1 => Just(Host::Silent),
            1 => Just(Host::Stops),
            1 => Just(Host::AlreadyUpdated),
            1 => Just(Host::Down),
        ]
    }

    fn member(batch: i32, host: Host) -> Member {
        Member {
            machine: MachineId::new(),
            batch,
            state: MemberState::Waiting,
            is_running: host != Host::Down,
            is_updated: host == Host::AlreadyUpdated,
            failure: None,
            is_overdue: false,
        }
    }

    fn react(member: &mut Member, host: Host) {
        match host {
            Host::Updates | Host::AlreadyUpdated => member.is_updated = true,
            Host::RollsBack => member.failure = Some("rolled back".to_owned()),
            Host::Silent => member.is_overdue = true,
            Host::Stops | Host::Down => member.is_running = false,
        }
    }

    proptest! {
        #[test]
        fn rollout_ends_within_its_limits(
            hosts in proptest::collection::vec(host(), 0..24),
            (canary, size, max_failures) in (0_usize..4, 1_usize..6, 1_usize..4),
            order in proptest::collection::vec(any::<prop::sample::Index>(), 400),
            pauses in proptest::collection::vec(any::<bool>(), 400),
            requires_verification in any::<bool>(),
        ) {
            let mut members: Vec<Member> = assign_batches(hosts.len(), canary, size)
                .zip(&hosts)
                .map(|(batch, host)| member(batch, *host))
                .collect();
            let mut ended = None;
            let mut verification = if requires_verification { VerificationState::Due } else { VerificationState::Satisfied };
            let mut verifications = 0;
            for (choice, is_paused) in order.iter().zip(pauses) {
                let pace = if is_paused { RolloutPace::Halted } else { RolloutPace::Running };
                let before = members.clone();
                // A verification takes one step.
                if verification == VerificationState::Running {
                    verification = VerificationState::Satisfied;
                }
                for effect in next_effects(pace, RolloutLimits { canary, max_failures }, verification, &members) {
                    let index_of = |id: MachineId| before.iter().position(|member| member.machine == id).unwrap();
                    match effect {
                        RolloutEffect::EndUpdate { machine, state, error } => {
                            let index = index_of(machine);
                            prop_assert!(matches!(before[index].state, MemberState::Requested | MemberState::Waiting));
                            prop_assert!(!matches!(state, MemberState::Waiting | MemberState::Requested));
                            prop_assert_eq!(error.is_none(), state == MemberState::Updated);
                            members[index].state = state;
                        }
                        RolloutEffect::RequestUpdate { machine } => {
                            prop_assert_eq!(pace, RolloutPace::Running);
                            let index = index_of(machine);
                            prop_assert_eq!(before[index].state, MemberState::Waiting);
                            let has_release = before.iter().any(|member| member.state == MemberState::Updated);
                            prop_assert!(!has_release || verification == VerificationState::Satisfied);
                            members[index].state = MemberState::Requested;
                        }
                        RolloutEffect::Verify => {
                            prop_assert_eq!((pace, verification), (RolloutPace::Running, VerificationState::Due));
                            prop_assert!(members.iter().any(|member| member.state == MemberState::Updated));
                            verification = VerificationState::Running;
                            verifications += 1;
                        }
                        RolloutEffect::Stop { .. } | RolloutEffect::Succeed => {
                            prop_assert_eq!(pace, RolloutPace::Running);
                            ended = Some(effect);
                        }
                    }
                }
                let requested: Vec<_> = members.iter().filter(|member| member.state == MemberState::Requested).collect();
                let batches: BTreeSet<i32> = requested.iter().map(|member| member.batch).collect();
                let has_release = members.iter().any(|member| member.state == MemberState::Updated);
                if canary > 0 && verification != VerificationState::Satisfied && !has_release {
                    prop_assert!(requested.len() <= canary, "a whole batch was requested before any machine had the release");
                }
                prop_assert!(batches.len() <= 1 && requested.len() <= size.max(canary));
                if let Some(batch) = batches.first() {
                    let earlier = members.iter().filter(|member| member.batch < *batch);
                    prop_assert!(earlier.into_iter().all(|member| !matches!(member.state, MemberState::Waiting | MemberState::Requested)));
                    let failed = members.iter().filter(|member| member.batch < *batch && member.state == MemberState::Failed);
                    let failed: Vec<_> = failed.collect();
                    prop_assert!(failed.len() < max_failures && failed.iter().all(|member| member.batch != 0));
                }
                if ended.is_some() {
                    break;
                }
                let requested: Vec<usize> = (0..members.len()).filter(|index| members[*index].state == MemberState::Requested).collect();
                if !requested.is_empty() {
                    let index = requested[choice.index(requested.len())];
                    react(&mut members[index], hosts[index]);
                }
            }
            let failed = members.iter().filter(|member| member.state == MemberState::Failed).count();
            match ended {
                Some(RolloutEffect::Succeed) => {
                    let has_release = members.iter().any(|member| member.state == MemberState::Updated);
                    prop_assert_eq!(verifications, usize::from(requires_verification && has_release));
                    prop_assert!(failed < max_failures);
                    prop_assert!(members.iter().all(|member| !matches!(member.state, MemberState::Waiting | MemberState::Requested)));
                    for (member, host) in members.iter().zip(&hosts) {
                        prop_assert_eq!(member.state == MemberState::Updated, matches!(host, Host::Updates | Host::AlreadyUpdated));
                    }
                }
                Some(RolloutEffect::Stop { .. }) => prop_assert!(failed >= 1),
                other => prop_assert!(false, "the rollout did not end: {:?}", other),
            }
        }
    }

    #[test]
    fn next_batch_replaces_skipped_canary() {
        let mut members: Vec<_> = [0, 1, 1, 1].map(|batch| member(batch, Host::Updates)).to_vec();
        members[0].state = MemberState::Skipped;
        let limits = |canary| RolloutLimits { canary, max_failures: 1 };
        let requests = |canary, verification| {
            next_effects(RolloutPace::Running, limits(canary), verification, &members).len()
        };
        assert_eq!(requests(1, VerificationState::Due), 1);
        assert_eq!(requests(2, VerificationState::Due), 2);
        assert_eq!(requests(0, VerificationState::Due), 3, "without a canary, the whole batch is requested");
        assert_eq!(requests(1, VerificationState::Satisfied), 3, "no verification is required");
        let first = members[1].machine;
        let effects = next_effects(RolloutPace::Running, limits(1), VerificationState::Due, &members);
        assert_eq!(effects, [RolloutEffect::RequestUpdate { machine: first }]);
    }

    #[test]
    fn stop_reason_counts_failed_machines() {
        for (max_failures, reason) in [(1, "1 machine failed"), (2, "2 machines failed")] {
            let mut members = vec![member(1, Host::RollsBack); max_failures];
            members.iter_mut().for_each(|member| member.state = MemberState::Failed);
            let limits = RolloutLimits { canary: 0, max_failures };
            let effects = next_effects(RolloutPace::Running, limits, VerificationState::Satisfied, &members);
            assert_eq!(effects, [RolloutEffect::Stop { reason: reason.to_owned() }]);
        }
    }
}

//! The next step of a rollout, pure: maps the state of its machines to effects.
//!
//! Reads no clock and no database. The invariants: at most one batch is updated at a time, the canary first and
//! separately; a batch starts only when every machine of the previous one has ended; once a machine has the release, no
//! further update is requested before the release is verified; if the canary ended without the release, as many machines
//! of the next batch take its place; no update is requested after the canary failed or the
//! maximum of failures is reached; and a machine whose update was requested ends by its host's report, its own end, or a
//! timeout.

use svc_machine::id::MachineId;
use svc_wire::rollout::MemberState;

/// Current state of a machine in a rollout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub machine: MachineId,
    pub batch: i32,
    pub state: MemberState,
    /// It is running and holds its slot.
    pub is_running: bool,
    /// Its host reports this release, and itself as healthy.
    pub is_updated: bool,
    /// Why the update failed, as its host has reported since the request.
    pub failure: Option<String>,
    /// A timeout has passed: it has been silent, or updating, for too long.
    pub is_overdue: bool,
}

/// Whether updates are requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RolloutPace {
    Running,
    /// Paused, stopped or aborted: requested updates still end.
    Halted,
}

/// The verification of the release on the machines that got it first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verification {
    /// Not required, or passed.
    Settled,
    Due,
    /// A process makes it now.
    Running,
}

/// A change to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    End {
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
        why: String,
    },
    Succeed,
}

/// The limits of a rollout.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Machines that get the release first; 0: the first batch does.
    pub canary: usize,
    pub max_failures: usize,
}

/// The effects that are due now.
pub fn next(
    pace: RolloutPace,
    limits: Limits,
    verification: Verification,
    members: &[Member],
) -> Vec<Effect> {
    let mut effects = Vec::new();
    let mut states: Vec<(i32, MemberState)> = Vec::new();
    for member in members {
        let ended_state = if member.state == MemberState::Requested { end_of_update(member) } else { None };
        let state = ended_state.as_ref().map_or(member.state, |(state, _)| *state);
        states.push((member.batch, state));
        if let Some((state, error)) = ended_state {
            effects.push(Effect::End { machine: member.machine, state, error });
        }
    }
    if pace == RolloutPace::Halted {
        return effects;
    }
    let failed = states.iter().filter(|(_, state)| *state == MemberState::Failed).count();
    if states.iter().any(|(batch, state)| *batch == 0 && *state == MemberState::Failed) {
        effects.push(Effect::Stop { why: "the canary failed".to_owned() });
        return effects;
    }
    if failed >= limits.max_failures {
        effects.push(Effect::Stop { why: format!("{failed} machines failed") });
        return effects;
    }
    if states.iter().any(|(_, state)| *state == MemberState::Requested) {
        return effects;
    }
    let is_running_it = states.iter().any(|(_, state)| *state == MemberState::Updated);
    if is_running_it && verification != Verification::Settled {
        effects.extend((verification == Verification::Due).then_some(Effect::Verify));
        return effects;
    }
    let next =
        states.iter().filter(|(_, state)| *state == MemberState::Waiting).map(|(batch, _)| *batch).min();
    let Some(next) = next else {
        effects.push(Effect::Succeed);
        return effects;
    };
    // A canary that was switched off, for instance, has verified nothing.
    let needs_canary = limits.canary > 0 && verification != Verification::Settled && !is_running_it;
    let mut room = if needs_canary { limits.canary } else { usize::MAX };
    for member in members.iter().filter(|member| member.batch == next && member.state == MemberState::Waiting)
    {
        let machine = member.machine;
        if !member.is_running {
            let error = Some("it is not running".to_owned());
            effects.push(Effect::End { machine, state: MemberState::Skipped, error });
            continue;
        }
        if room == 0 {
            continue;
        }
        room -= 1;
        effects.push(if member.is_updated {
            Effect::End { machine, state: MemberState::Updated, error: None }
        } else {
            Effect::RequestUpdate { machine }
        });
    }
    effects
}

fn end_of_update(member: &Member) -> Option<(MemberState, Option<String>)> {
    if !member.is_running {
        return Some((MemberState::Skipped, Some("it stopped running".to_owned())));
    }
    if let Some(why) = &member.failure {
        return Some((MemberState::Failed, Some(why.clone())));
    }
    if member.is_updated {
        return Some((MemberState::Updated, None));
    }
    member
        .is_overdue
        .then(|| (MemberState::Failed, Some("its host did not report the update in time".to_owned())))
}

/// The batch of each machine, in order: the canary, then batches.
pub fn batches(machines: usize, canary: usize, size: usize) -> impl Iterator<Item = i32> {
    (0..machines).map(move |at| {
        let batch = if at < canary { 0 } else { 1 + (at - canary) / size.max(1) };
        i32::try_from(batch).unwrap_or(i32::MAX)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A machine's reaction to an update request.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Host {
        Updates,
        RollsBack,
        Silent,
        Dies,
        /// It already ran the release.
        AlreadyUpdated,
        /// It was never running.
        Down,
    }

    fn host() -> impl Strategy<Value = Host> {
        prop_oneof![
            6 => Just(Host::Updates),
            1 => Just(Host::RollsBack),
            1 => Just(Host::Silent),
            1 => Just(Host::Dies),
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
            Host::Dies | Host::Down => member.is_running = false,
        }
    }

    proptest! {
        #[test]
        fn rollout_ends_within_its_limits(
            hosts in proptest::collection::vec(host(), 0..24),
            (canary, size, max_failures) in (0_usize..4, 1_usize..6, 1_usize..4),
            order in proptest::collection::vec(any::<prop::sample::Index>(), 400),
            pauses in proptest::collection::vec(any::<bool>(), 400),
            is_verified in any::<bool>(),
        ) {
            let mut members: Vec<Member> = batches(hosts.len(), canary, size)
                .zip(&hosts)
                .map(|(batch, host)| member(batch, *host))
                .collect();
            let mut ended = None;
            let mut verification = if is_verified { Verification::Due } else { Verification::Settled };
            let mut verifications = 0;
            for (which, paused) in order.iter().zip(pauses) {
                let pace = if paused { RolloutPace::Halted } else { RolloutPace::Running };
                let before = members.clone();
                // It takes one step.
                if verification == Verification::Running {
                    verification = Verification::Settled;
                }
                for effect in next(pace, Limits { canary, max_failures }, verification, &members) {
                    let of = |id: MachineId| before.iter().position(|member| member.machine == id).unwrap();
                    match effect {
                        Effect::End { machine, state, error } => {
                            let at = of(machine);
                            prop_assert!(matches!(before[at].state, MemberState::Requested | MemberState::Waiting));
                            prop_assert!(!matches!(state, MemberState::Waiting | MemberState::Requested));
                            prop_assert_eq!(error.is_none(), state == MemberState::Updated);
                            members[at].state = state;
                        }
                        Effect::RequestUpdate { machine } => {
                            prop_assert_eq!(pace, RolloutPace::Running);
                            let at = of(machine);
                            prop_assert_eq!(before[at].state, MemberState::Waiting);
                            let has_release = before.iter().any(|member| member.state == MemberState::Updated);
                            prop_assert!(!has_release || verification == Verification::Settled);
                            members[at].state = MemberState::Requested;
                        }
                        Effect::Verify => {
                            prop_assert_eq!((pace, verification), (RolloutPace::Running, Verification::Due));
                            prop_assert!(members.iter().any(|member| member.state == MemberState::Updated));
                            verification = Verification::Running;
                            verifications += 1;
                        }
                        Effect::Stop { .. } | Effect::Succeed => {
                            prop_assert_eq!(pace, RolloutPace::Running);
                            ended = Some(effect);
                        }
                    }
                }
                let requested: Vec<_> = members.iter().filter(|member| member.state == MemberState::Requested).collect();
                let batches: BTreeSet<i32> = requested.iter().map(|member| member.batch).collect();
                let has_release = members.iter().any(|member| member.state == MemberState::Updated);
                if canary > 0 && verification != Verification::Settled && !has_release {
                    prop_assert!(requested.len() <= canary, "a batch got a release that no machine has proven");
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
                let requested: Vec<usize> = (0..members.len()).filter(|at| members[*at].state == MemberState::Requested).collect();
                if !requested.is_empty() {
                    let at = requested[which.index(requested.len())];
                    react(&mut members[at], hosts[at]);
                }
            }
            let failed = members.iter().filter(|member| member.state == MemberState::Failed).count();
            match ended {
                Some(Effect::Succeed) => {
                    let has_release = members.iter().any(|member| member.state == MemberState::Updated);
                    prop_assert_eq!(verifications, usize::from(is_verified && has_release));
                    prop_assert!(failed < max_failures);
                    prop_assert!(members.iter().all(|member| !matches!(member.state, MemberState::Waiting | MemberState::Requested)));
                    for (member, host) in members.iter().zip(&hosts) {
                        prop_assert_eq!(member.state == MemberState::Updated, matches!(host, Host::Updates | Host::AlreadyUpdated));
                    }
                }
                Some(Effect::Stop { .. }) => prop_assert!(failed >= 1),
                other => prop_assert!(false, "it did not end: {:?}", other),
            }
        }
    }

    #[test]
    fn machines_of_the_next_batch_take_the_place_of_a_skipped_canary() {
        let mut members: Vec<_> = [0, 1, 1, 1].map(|batch| member(batch, Host::Updates)).to_vec();
        members[0].state = MemberState::Skipped;
        let limits = |canary| Limits { canary, max_failures: 1 };
        let requests =
            |canary, verification| next(RolloutPace::Running, limits(canary), verification, &members).len();
        assert_eq!(requests(1, Verification::Due), 1);
        assert_eq!(requests(2, Verification::Due), 2);
        assert_eq!(requests(0, Verification::Due), 3, "without a canary, the first batch has its role");
        assert_eq!(requests(1, Verification::Settled), 3, "no verification is required");
        let first = members[1].machine;
        let effects = next(RolloutPace::Running, limits(1), Verification::Due, &members);
        assert_eq!(effects, [Effect::RequestUpdate { machine: first }]);
    }
}

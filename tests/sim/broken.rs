//! Tests the checks themselves: each invariant is detected as violated when its rule is broken on purpose.

use super::run::find_violation;
use super::violation::{BrokenRule, Violation};

/// Some rules are violated in few plans, and under load in fewer.
const MAX_SEEDS: u64 = 240;

/// Searches all seeds, beginning with one whose plan usually leads to the violation: a seed does not determine how
/// tasks interleave.
async fn detects(broken: BrokenRule, first: u64, violation: Violation, follows: &[Violation]) {
    let seeds = (first..MAX_SEEDS).chain(0..first);
    let seed = find_violation(broken, seeds, violation, follows).await;
    println!("{violation:?} at seed {seed:?}");
    assert!(seed.is_some(), "{violation:?} was not detected in {MAX_SEEDS} seeds");
}

/// The broken rule, the violation to detect, the first seed, and consequences that may be detected first.
macro_rules! detects {
    ($($test:ident: $broken:expr => $violation:ident at $first:literal $(, then $($follows:ident)+)?;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            detects($broken, $first, Violation::$violation, &[$($(Violation::$follows),+)?]).await;
        }
    )*};
}

detects! {
    two_servers_of_one_machine: BrokenRule::NamesRepeat => TwoServersOfOneMachine at 0, then Orphan;
    two_active_machines_of_one_slot: BrokenRule::SLOTS_ARE_SHARED => TwoActiveMachinesOfOneSlot at 0,
        then InternalError;
    route_to_a_stopped_machine: BrokenRule::CHANGES_ARE_SILENT => RoutedWhileNotRunning at 7;
    running_without_registration: BrokenRule::RUNS_AT_ONCE => RunningUnregistered at 0, then OperationNeverEnds;
    second_host_of_one_machine: BrokenRule::REGISTRATION_IS_FORGOTTEN => RegisteredTwice at 11,
        then AuditIncomplete OperationNeverEnds Orphan HostNotTold InternalError;
    epoch_that_does_not_grow: BrokenRule::EPOCH_STAYS => EpochDidNotGrow at 10, then LostRows;
    deleted_machine_that_comes_back: BrokenRule::COMES_BACK => CameBack at 1,
        then TwoActiveMachinesOfOneSlot AuditIncomplete;
    server_before_its_fence: BrokenRule::FenceIsNotWritten => ServerBeforeFence at 0;
    pointer_that_goes_backwards: BrokenRule::Unconditional => PointerWentBack at 56;
    pointer_moved_by_a_replaced_host: BrokenRule::HostIgnoresFence => PointerMovedByFencedHost at 22,
        then ServerBeforeFence;
    pointer_to_an_unverified_snapshot: BrokenRule::HostDoesNotVerify => PointerNamesUnverified at 0,
        then PointerMovedByFencedHost PointerWentBack;
    snapshot_that_is_removed: BrokenRule::StorePrunes => SnapshotRemoved at 5;
    machine_without_an_operation: BrokenRule::WORK_IS_DROPPED => Stuck at 0;
    operation_that_never_ends: BrokenRule::NOTHING_ENDS => OperationNeverEnds at 0, then Orphan;
    operation_that_is_forgotten: BrokenRule::OPERATIONS_ARE_LOST => AcceptedAndForgotten at 12, then Orphan;
    server_that_outlives_its_machine: BrokenRule::NothingIsDeleted => Orphan at 3, then OperationNeverEnds;
    missing_server_that_is_not_noticed: BrokenRule::NOTHING_IS_MISSED => RunsWithoutServer at 39;
    change_without_an_audit_row: BrokenRule::AUDIT_IS_LOST => AuditIncomplete at 0;
    different_response_to_the_same_key: BrokenRule::KEYS_ARE_FORGOTTEN => ReplayDiffers at 1, then AuditIncomplete;
    replaced_host_that_is_not_notified: BrokenRule::OLD_TOKENS_END => HostNotTold at 1;
    lost_rows: BrokenRule::UNSAVED_IS_FORGOTTEN => LostRows at 10, then OperationNeverEnds Orphan;
    unexplained_internal_error: BrokenRule::RAISES => InternalError at 12;
}

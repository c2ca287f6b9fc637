//! Tests the checks themselves: each invariant is detected as violated when its rule is broken on purpose.

use super::run::find_violation;
use super::violation::{BrokenRule, Violation};

/// Some rules are violated in few plans, and under load in fewer.
const MAX_SEEDS: u64 = 240;

async fn detects(broken: BrokenRule, violation: Violation, follows: &[Violation]) {
    let seed = find_violation(broken, MAX_SEEDS, violation, follows).await;
    println!("{violation:?} at seed {seed:?}");
    assert!(seed.is_some(), "{violation:?} was not detected in {MAX_SEEDS} seeds");
}

/// The broken rule, the violation to detect, and consequences that may be detected first.
macro_rules! detects {
    ($($test:ident: $broken:expr => $violation:ident $(, then $($follows:ident)+)?;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            detects($broken, Violation::$violation, &[$($(Violation::$follows),+)?]).await;
        }
    )*};
}

detects! {
    two_servers_of_one_machine: BrokenRule::NamesRepeat => TwoServersOfOneMachine, then Orphan;
    two_active_machines_of_one_slot: BrokenRule::SLOTS_ARE_SHARED => TwoActiveMachinesOfOneSlot, then InternalError;
    route_to_a_stopped_machine: BrokenRule::CHANGES_ARE_SILENT => RoutedWhileNotRunning;
    running_without_registration: BrokenRule::RUNS_AT_ONCE => RunningUnregistered, then OperationNeverEnds;
    second_host_of_one_machine: BrokenRule::REGISTRATION_IS_FORGOTTEN => RegisteredTwice,
        then AuditIncomplete OperationNeverEnds Orphan HostNotTold InternalError;
    epoch_that_does_not_grow: BrokenRule::EPOCH_STAYS => EpochDidNotGrow, then LostRows;
    deleted_machine_that_comes_back: BrokenRule::COMES_BACK => CameBack,
        then TwoActiveMachinesOfOneSlot AuditIncomplete;
    server_before_its_fence: BrokenRule::FenceIsNotWritten => ServerBeforeFence;
    pointer_that_goes_backwards: BrokenRule::Unconditional => PointerWentBack;
    pointer_moved_by_a_replaced_host: BrokenRule::HostIgnoresFence => PointerMovedByFencedHost, then ServerBeforeFence;
    pointer_to_an_unverified_snapshot: BrokenRule::HostDoesNotVerify => PointerNamesUnverified,
        then PointerMovedByFencedHost PointerWentBack;
    snapshot_that_is_removed: BrokenRule::StorePrunes => SnapshotRemoved;
    machine_without_an_operation: BrokenRule::WORK_IS_DROPPED => Stuck;
    operation_that_never_ends: BrokenRule::NOTHING_ENDS => OperationNeverEnds, then Orphan;
    operation_that_is_forgotten: BrokenRule::OPERATIONS_ARE_LOST => AcceptedAndForgotten, then Orphan;
    server_that_outlives_its_machine: BrokenRule::NothingIsDeleted => Orphan, then OperationNeverEnds;
    missing_server_that_is_not_noticed: BrokenRule::NOTHING_IS_MISSED => RunsWithoutServer;
    change_without_an_audit_row: BrokenRule::AUDIT_IS_LOST => AuditIncomplete;
    different_response_to_the_same_key: BrokenRule::KEYS_ARE_FORGOTTEN => ReplayDiffers, then AuditIncomplete;
    replaced_host_that_is_not_notified: BrokenRule::OLD_TOKENS_END => HostNotTold;
    lost_rows: BrokenRule::UNSAVED_IS_FORGOTTEN => LostRows, then OperationNeverEnds Orphan;
    unexplained_internal_error: BrokenRule::RAISES => InternalError;
}

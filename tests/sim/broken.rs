//! Each invariant is noticed when a rule is broken on purpose: the checks are tried themselves.

use super::run::caught;
use super::violation::{Broken, Violation};

/// Some rules show in few plans, and under load in fewer.
const MOST: u64 = 240;

async fn noticed(broken: Broken, violation: Violation, follows: &[Violation]) {
    let seed = caught(broken, MOST, violation, follows).await;
    println!("{violation:?} at seed {seed:?}");
    assert!(seed.is_some(), "{violation:?} was not noticed in {MOST} seeds");
}

/// Which rule is broken, what must be noticed, and what else may be noticed first because it follows.
macro_rules! noticed {
    ($($test:ident: $broken:expr => $violation:ident $(, then $($follows:ident)+)?;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            noticed($broken, Violation::$violation, &[$($(Violation::$follows),+)?]).await;
        }
    )*};
}

noticed! {
    two_servers_of_one_machine: Broken::NamesRepeat => TwoServersOfOneMachine, then Orphan;
    two_active_machines_of_one_slot: Broken::SLOTS_ARE_SHARED => TwoActiveMachinesOfOneSlot, then InternalError;
    a_route_to_a_machine_that_does_not_run: Broken::CHANGES_ARE_SILENT => RoutedWhileNotRunning;
    running_without_a_registration: Broken::RUNS_AT_ONCE => RunningUnregistered, then OperationNeverEnds;
    a_second_host_of_one_machine: Broken::REGISTRATION_IS_FORGOTTEN => RegisteredTwice,
        then AuditIncomplete OperationNeverEnds Orphan HostNotTold InternalError;
    an_epoch_that_does_not_grow: Broken::EPOCH_STAYS => EpochDidNotGrow, then LostRows;
    a_deleted_machine_that_comes_back: Broken::COMES_BACK => CameBack,
        then TwoActiveMachinesOfOneSlot AuditIncomplete;
    a_server_before_its_fence: Broken::FenceIsNotWritten => ServerBeforeFence;
    a_pointer_that_goes_back: Broken::Unconditional => PointerWentBack;
    a_pointer_moved_by_a_replaced_host: Broken::HostIgnoresFence => PointerMovedByFencedHost, then ServerBeforeFence;
    a_pointer_to_what_nobody_verified: Broken::HostDoesNotVerify => PointerNamesUnverified,
        then PointerMovedByFencedHost PointerWentBack;
    a_snapshot_that_is_removed: Broken::StorePrunes => SnapshotRemoved;
    a_machine_that_waits_for_nothing: Broken::WORK_IS_DROPPED => Stuck;
    an_operation_that_never_ends: Broken::NOTHING_ENDS => OperationNeverEnds, then Orphan;
    an_operation_that_is_forgotten: Broken::OPERATIONS_ARE_LOST => AcceptedAndForgotten, then Orphan;
    a_server_that_outlives_its_machine: Broken::NothingIsDeleted => Orphan, then OperationNeverEnds;
    a_server_that_nobody_misses: Broken::NOTHING_IS_MISSED => RunsWithoutServer;
    a_change_without_its_audit_row: Broken::AUDIT_IS_LOST => AuditIncomplete;
    another_answer_to_the_same_key: Broken::KEYS_ARE_FORGOTTEN => ReplayDiffers, then AuditIncomplete;
    a_replaced_host_that_is_not_told: Broken::OLD_TOKENS_END => HostNotTold;
    rows_that_are_lost: Broken::UNSAVED_IS_FORGOTTEN => LostRows, then OperationNeverEnds Orphan;
    an_answer_that_knows_nothing: Broken::RAISES => InternalError;
}

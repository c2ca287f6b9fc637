//! Tests the checks themselves: when a rule is deliberately broken, the violation is detected.

use super::run::find_violation;
use super::violation::{BrokenRule, Violation};

/// Some violations occur in few plans, and under load in even fewer.
const MAX_SEEDS: u64 = 240;

/// How many times the likely seeds are tried before the full sweep. Task interleaving varies between runs of one seed.
const LIKELY_SEED_ATTEMPTS: usize = 4;

/// Searches all seeds, beginning with those whose plans usually lead to the violation.
async fn assert_detects(
    broken_rule: BrokenRule,
    likely_seeds: &[u64],
    violation: Violation,
    consequences: &[Violation],
) {
    let likely_seeds = std::iter::repeat_n(likely_seeds, LIKELY_SEED_ATTEMPTS).flatten().copied();
    let seeds = likely_seeds.chain(0..MAX_SEEDS);
    let seed = find_violation(broken_rule, seeds, violation, consequences).await;
    println!("{violation:?} at seed {seed:?}");
    assert!(seed.is_some(), "{violation:?} was not detected in {MAX_SEEDS} seeds");
}

/// Generates a test for each broken rule, which must lead to the given violation. `at` lists the likely seeds, and
/// `allowing` the consequences that may be detected first.
macro_rules! detects {
    ($($test:ident: $broken:expr => $violation:ident at [$($likely:literal),+] $(, allowing $($follows:ident)+)?;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            assert_detects($broken, &[$($likely),+], Violation::$violation, &[$($(Violation::$follows),+)?]).await;
        }
    )*};
}

detects! {
    detects_two_servers_of_one_machine: BrokenRule::ProviderAcceptsDuplicateNames => DuplicateServer at [0],
        allowing OrphanedServer;
    detects_two_active_machines_in_one_slot: BrokenRule::DUPLICATES_MACHINES => DuplicateActiveMachine at [0],
        allowing InternalError;
    detects_route_to_a_stopped_machine: BrokenRule::HIDES_CHANGES_FROM_ROUTERS => RoutedWhileNotRunning at [28, 39, 50, 51, 52];
    detects_running_without_registration: BrokenRule::RUNS_UNREGISTERED => RunningUnregistered at [0],
        allowing UnfinishedOperation;
    detects_second_host_of_one_machine: BrokenRule::LOSES_REGISTRATIONS => RegisteredTwice at [11, 23, 28, 32, 43],
        allowing AuditIncomplete UnfinishedOperation OrphanedServer HostNotNotified InternalError;
    detects_epoch_that_does_not_increase: BrokenRule::REUSES_EPOCHS => EpochDidNotIncrease at [10],
        allowing LostRows;
    detects_deleted_machine_that_becomes_active: BrokenRule::REACTIVATES_DELETED_MACHINES => BecameActiveAgain at [12],
        allowing DuplicateActiveMachine AuditIncomplete;
    detects_server_created_before_fence: BrokenRule::StoreLosesFences => ServerCreatedBeforeFence at [1];
    detects_pointer_moved_backward: BrokenRule::StoreIgnoresConditions => PointerMovedBackward at [133, 136, 139, 152, 203];
    detects_pointer_moved_by_a_replaced_host: BrokenRule::HostIgnoresFence => PointerMovedByFencedHost at [28],
        allowing ServerCreatedBeforeFence;
    detects_pointer_to_an_unverified_snapshot: BrokenRule::HostDoesNotVerify => PointerToUnverifiedSnapshot at [2],
        allowing PointerMovedByFencedHost PointerMovedBackward;
    detects_removed_snapshot: BrokenRule::StoreRemovesSnapshots => SnapshotRemoved at [5];
    detects_machine_without_an_operation: BrokenRule::ENDS_OPERATIONS_EARLY => MissingOperation at [1];
    detects_operation_that_never_ends: BrokenRule::NEVER_ENDS_OPERATIONS => UnfinishedOperation at [0],
        allowing OrphanedServer;
    detects_lost_operation: BrokenRule::LOSES_OPERATIONS => AcceptedOperationLost at [12],
        allowing OrphanedServer;
    detects_server_that_outlives_its_machine: BrokenRule::ProviderDeletesNothing => OrphanedServer at [7, 15, 16, 17],
        allowing UnfinishedOperation;
    detects_running_machine_without_server: BrokenRule::RESETS_MISSING_SINCE => RunningWithoutServer at [51];
    detects_change_without_an_audit_row: BrokenRule::LOSES_AUDIT_ROWS => AuditIncomplete at [0];
    detects_different_response_to_the_same_key: BrokenRule::LOSES_IDEMPOTENCY_KEYS => ReplayDiffers at [1],
        allowing AuditIncomplete;
    detects_replaced_host_that_is_not_notified: BrokenRule::REVOKES_OLD_TOKENS => HostNotNotified at [1];
    detects_lost_rows: BrokenRule::LOSES_UNSAVED_SINCE => LostRows at [131, 136, 210, 113],
        allowing UnfinishedOperation OrphanedServer;
    detects_unexplained_internal_error: BrokenRule::RAISES_ERRORS => InternalError at [12];
}

//! Metric declarations, for recording and for `docs/reference/metrics.md`.

use super::{Counters, Durations, Gauges};

/// Processes exporting a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricScope {
    Platform,
    Host,
    Everywhere,
}

/// Metric description for the reference.
#[derive(Debug, Clone, Copy)]
pub struct MetricDescription {
    pub name: &'static str,
    /// `Counters`, `Gauges` or `Durations`.
    pub kind: &'static str,
    pub labels: &'static [&'static str],
    pub scope: MetricScope,
    pub help: &'static str,
}

/// Declares the metrics, plus [`ALL`] to describe them.
macro_rules! families {
    ($(
        $name:ident: $kind:ident<$count:literal> = $metric:literal, [$($label:literal),*], on $scope:ident,
            $help:literal;
    )+) => {
        $(
            #[doc = $help]
            pub static $name: $kind<$count> = $kind::new($metric, $help, [$($label),*]);
        )+

        /// Every metric.
        pub const ALL: &[MetricDescription] = &[$(MetricDescription {
            name: $metric,
            kind: stringify!($kind),
            labels: &[$($label),*],
            scope: MetricScope::$scope,
            help: $help,
        }),+];
    };
}

families! {
    HTTP_REQUESTS: Counters<4> = "svc_http_requests_total",
        ["listener", "method", "route", "status"], on Everywhere,
        "Finished requests, by listener, method, route template and status class. cancelled: ended without \
         a response, usually because the client disconnected.";
    HTTP_DURATION: Durations<2> = "svc_http_request_duration_seconds", ["listener", "route"], on Everywhere,
        "Time until the response head was ready, excluding the rest of a streamed body, or until the \
         request was cancelled.";
    DISPATCHES: Counters<1> = "svc_dispatches_total", ["outcome"], on Host,
        "Finished dispatches, by outcome: success, error, or limited (refused because a cost limit was \
         reached).";
    DISPATCHES_RUNNING: Gauges<0> = "svc_dispatches_running", [], on Host,
        "Running dispatches.";
    DISPATCHES_QUEUED: Gauges<0> = "svc_dispatches_queued", [], on Host,
        "Queued dispatches.";
    OPERATIONS: Counters<2> = "svc_operations_total", ["kind", "outcome"], on Platform,
        "Finished operations, by kind and outcome.";
    OPERATION_DURATION: Durations<1> = "svc_operation_duration_seconds", ["kind"], on Platform,
        "Time from the creation of an operation to its end.";
    OPERATION_STEPS: Counters<3> = "svc_operation_steps_total", ["kind", "step", "outcome"], on Platform,
        "Step runs in this process, by outcome: done, waiting, failed, or lost (another process took over \
         its lease).";
    OPERATION_STEP_DURATION: Durations<2> = "svc_operation_step_duration_seconds",
        ["kind", "step"], on Platform,
        "Duration of one run of a step. A waiting step runs repeatedly.";
    OPERATIONS_IN_PROGRESS: Gauges<1> = "svc_operations_in_progress", ["kind"], on Platform,
        "Operations in progress in the whole installation, by kind.";
    ROLLOUTS: Counters<1> = "svc_rollouts_total", ["state"], on Platform,
        "Rollouts that ended without an operator's action, by state.";
    ROLLOUT_MACHINES: Counters<1> = "svc_rollout_machines_total", ["state"], on Platform,
        "Machines whose part in a rollout has ended, by state.";
    CLOCK_SKEW: Gauges<0> = "svc_clock_skew_seconds", [], on Platform,
        "How far this process's clock is ahead of the database's clock.";
    ROUTES_AGE: Gauges<0> = "svc_router_routes_age_seconds", [], on Platform,
        "Time since the router's routes last matched the database. Above a few seconds, the database is \
         unreachable and the routes are stale.";
    RETENTION_DELETED: Counters<1> = "svc_retention_deleted_total", ["table"], on Platform,
        "Rows that the reconciler deleted after their retention period, by table.";
    OPERATIONS_UNSUPPORTED: Gauges<0> = "svc_operations_unknown", [], on Platform,
        "Operations in progress whose kind or step this release does not support. A process of a newer \
         release runs them.";
    ALARMS: Gauges<1> = "svc_alarms", ["alarm"], on Platform,
        "Alarms that `svcctl fleet` shows: 1 while the alarm is raised, by name.";
    OPERATIONS_OVERDUE: Gauges<0> = "svc_operations_overdue", [], on Platform,
        "Operations in progress for more than 30 minutes.";
    MACHINES: Gauges<1> = "svc_machines", ["status"], on Platform,
        "Active machines in the whole installation, by status.";
    MACHINES_BY_HEALTH: Gauges<1> = "svc_machines_by_health", ["health"], on Platform,
        "Active machines by the health that their hosts last reported. silent: no report for two minutes. \
         unknown: no report yet.";
    MACHINES_NEEDING_ATTENTION: Gauges<0> = "svc_machines_needing_attention", [], on Platform,
        "Machines that `svcctl fleet` lists with a reason.";
    MACHINES_BY_CERTIFICATE: Gauges<1> = "svc_machines_by_certificate", ["certificate"], on Platform,
        "Machines that have booted, by the certificate that their hosts last reported: trusted, expiring, \
         or missing (no certificate that the host's trusted roots verify for its name). Only with \
         `HOST_DOMAIN`.";
    BACKUP_AGE: Gauges<1> = "svc_backup_age_seconds", ["over"], on Platform,
        "Age of the last verified snapshot, capped at the time since the machine registered: maximum and \
         median over all slots with data.";
    SLOTS_WITHOUT_BACKUP: Gauges<0> = "svc_backups_never", [], on Platform,
        "Slots with data but no verified snapshot.";
    SLOTS_WITH_FAILED_PRUNE: Gauges<0> = "svc_files_prunings_failed", [], on Platform,
        "Slots whose last prune of file backups failed.";
    FLEET_READ_AT: Gauges<0> = "svc_fleet_read_timestamp_seconds", [], on Platform,
        "Unix time when the figures for the whole installation were last read from the database.";
    PROVIDER_CALLS: Counters<2> = "svc_provider_calls_total", ["call", "outcome"], on Platform,
        "Attempts to call the cloud provider, by call and outcome.";
    PROVIDER_DURATION: Durations<1> = "svc_provider_call_duration_seconds", ["call"], on Platform,
        "Duration of one attempt to call the cloud provider, excluding the wait for the rate budget.";
    PROVIDER_BUDGET: Gauges<0> = "svc_provider_budget_calls", [], on Platform,
        "Calls that the provider's rate limit still allows, shared by all processes.";
    STORE_CALLS: Counters<2> = "svc_store_calls_total", ["call", "outcome"], on Platform,
        "Calls to the object store for whole objects, and requests that list keys (`call=\"list\"`), by \
         call and outcome.";
    STORE_DURATION: Durations<1> = "svc_store_call_duration_seconds", ["call"], on Platform,
        "Duration of one call to the object store, including its retries; of one request for \
         `call=\"list\"`.";
    RECONCILER_RUNS: Counters<2> = "svc_reconciler_runs_total", ["part", "outcome"], on Platform,
        "Runs of the reconciler's parts in this process, by part and outcome.";
    RECONCILER_SUCCESS: Gauges<1> = "svc_reconciler_last_success_timestamp_seconds", ["part"], on Platform,
        "Unix time when a part of the reconciler last succeeded in this process.";
    UPSTREAM_FAILURES: Counters<1> = "svc_router_upstream_failures_total", ["reason"], on Platform,
        "Requests to a running machine that got no valid response, by reason.";
    SESSIONS_OPENED: Counters<1> = "svc_router_sessions_opened_total", ["host"], on Platform,
        "Browser sessions opened, by public host.";
    POOL_CONNECTIONS: Gauges<1> = "svc_database_pool_connections", ["state"], on Everywhere,
        "Connections of this process's database pools, by state: open, idle (also counted as open), or, on \
         the platform, limit (the maximum).";
    POOL_WAITING: Gauges<0> = "svc_database_pool_waiting", [], on Platform,
        "Tasks of this process that are waiting for a database connection.";
    BRIDGE_ACTIONS: Counters<2> = "svc_bridge_actions_total", ["action", "outcome"], on Host,
        "Bridge requests, by action and outcome: ok, or the problem's code.";
    BRIDGE_SQLSTATES: Counters<1> = "svc_bridge_sqlstates_total", ["class"], on Host,
        "Statements that the database rejected, by SQLSTATE class.";
    BRIDGE_WAITS: Counters<1> = "svc_bridge_pool_waits_total", ["outcome"], on Host,
        "Bridge requests that found all connections of their app in use, by outcome: served later, or \
         given_up (timed out, or cancelled by the client).";
    PROOFS: Counters<1> = "svc_gateway_proofs_total", ["outcome"], on Host,
        "Requests with a proof or a token, by outcome: verified or refused.";
    APPS: Gauges<0> = "svc_gateway_apps", [], on Host,
        "Apps that the gateway serves.";
    CHANGE_LISTENERS: Gauges<0> = "svc_gateway_change_listeners", [], on Host,
        "Open event streams of changes (SSE).";
    RECORDS_STUCK: Gauges<0> = "svc_records_stuck", [], on Host,
        "1 while records cannot be written to the disk.";
    UNWRITTEN_RECORD_BYTES: Gauges<0> = "svc_records_waiting_bytes", [], on Host,
        "Bytes of accepted records that are not written yet.";
    CERTIFICATE_EXPIRY: Gauges<0> = "svc_certificate_expiry_timestamp_seconds", [], on Host,
        "Unix time at which the presented certificate expires.";
    CERTIFICATE_TRUSTED: Gauges<0> = "svc_certificate_trusted", [], on Host,
        "1 if this machine's trusted roots verify the presented certificate for its name, else 0.";
    SNAPSHOT_TAKEN_AT: Gauges<0> = "svc_backup_last_success_timestamp_seconds", [], on Host,
        "Unix time of the last verified snapshot of this machine.";
    BACKUP_OK: Gauges<0> = "svc_backup_last_run_success", [], on Host,
        "1 if the last backup of this machine succeeded, 0 if it failed.";
    SNAPSHOT_CHECK_OK: Gauges<1> = "svc_snapshot_check_last_success", ["check"], on Host,
        "1 if the last check of snapshots succeeded, 0 if it failed. verify: rereads stored snapshots. \
         drill: restores the latest one.";
    SNAPSHOT_CHECK_AT: Gauges<1> = "svc_snapshot_check_last_timestamp_seconds", ["check"], on Host,
        "Unix time when the last check of snapshots ended, by check.";
    FILES_SAVED_UNTIL: Gauges<0> = "svc_files_saved_until_timestamp_seconds", [], on Host,
        "Unix time up to which all changes in the home directory are saved.";
    FILES_PENDING_SINCE: Gauges<0> = "svc_files_pending_since_timestamp_seconds", [], on Host,
        "Unix time of the oldest unsaved change in the home directory; 0 if there is none.";
    FILES_PENDING_BYTES: Gauges<0> = "svc_files_pending_bytes", [], on Host,
        "Estimated size of the unsaved changes that are older than a minute; 0 if there are none, or if \
         their size is unknown.";
    FILES_CHECK_OK: Gauges<1> = "svc_files_check_last_success", ["check"], on Host,
        "1 if the last check of the file backup found everything intact, else 0. verify: rereads part of the \
         backup. drill: restores a sample and compares it with the files on the machine.";
    FILES_CHECK_AT: Gauges<1> = "svc_files_check_last_timestamp_seconds", ["check"], on Host,
        "Unix time of the last check of the file backup, by check.";
    BUILD: Gauges<2> = "svc_build_info", ["version", "commit"], on Everywhere,
        "Always 1; the labels name the running version and commit.";
    RESIDENT_MEMORY: Gauges<0> = "process_resident_memory_bytes", [], on Everywhere,
        "Resident memory of this process.";
    OPEN_FDS: Gauges<0> = "process_open_fds", [], on Everywhere,
        "Open file descriptors of this process.";
    STARTED_AT: Gauges<0> = "process_start_time_seconds", [], on Everywhere,
        "Unix time when this process started.";
}

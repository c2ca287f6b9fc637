//! Checks a release on a running host (specification, part 9): the shell that it serves, and the gateway's own routes.
//! `svcctl verify-rollout` runs the checks on a host or through the router; the platform runs them on a rollout's
//! canaries.

mod gateway;
mod host_client;
mod responses;
mod scan;
mod shell;

use std::time::Duration;

pub use self::gateway::fetch_database_server;
pub use self::host_client::{Credential, HostClient, TIMEOUTS};
use svc_base::diagnosis::{self, Check, Finding, Findings};
use svc_base::untrusted_text;

/// Timeout for each check, and for loading the shell.
pub const CHECK_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs all checks. `database_check` is the caller's check that the gateway uses the machine's own database.
pub async fn check_release(
    host: &HostClient,
    database_check: impl Future<Output = Findings> + Send,
) -> Vec<Finding> {
    let mut findings = shell::check_shell(host, CHECK_TIMEOUT).await;
    let checks = vec![
        Check::new("gateway-health", CHECK_TIMEOUT, gateway::check_health(host)),
        Check::new("vps-database", CHECK_TIMEOUT, database_check),
        Check::new("bridge-schemas", CHECK_TIMEOUT, gateway::check_schemas(host)),
        Check::new("legacy-route", CHECK_TIMEOUT, gateway::check_legacy_route(host)),
        Check::new("icons", CHECK_TIMEOUT, gateway::check_icons(host)),
    ];
    findings.extend(diagnosis::run_checks(checks).await);
    // The findings contain text from the host, and are shown on the operator's terminal.
    for finding in &mut findings {
        finding.what = untrusted_text::truncate_printable(&untrusted_text::one_line(&finding.what));
    }
    findings
}

//! `svcctl doctor` on a machine: checks its files, database and services.
//!
//! Checks never modify files, credentials or units, and report files they lack permission to read.

mod backup;
mod certificate;
mod configuration;
mod database;
mod file_backup;
mod files;
mod firewall;
mod gateway;
mod platform;
mod ports;
mod release;
mod space;
mod store;
mod units;

use std::time::Duration;

use super::system::config::services_env;
use super::system::layout::Layout;
use svc_base::diagnosis::{self, Check, Findings, Report};

/// Timeout for checks that use the network or run a program.
const SLOW_CHECK_TIMEOUT: Duration = Duration::from_secs(15);
/// Timeout for checks that only read local files.
const FILE_CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether the host side of svc is installed under `SVC_ROOT`.
pub fn is_installed() -> bool {
    Layout::from_process().host_env().parent().is_some_and(std::path::Path::exists)
}

/// Returns the path to the gateway's trusted socket under `SVC_ROOT`.
pub fn gateway_socket() -> std::path::PathBuf {
    gateway::socket_path(&Layout::from_process())
}

/// Checks that the gateway is configured for this machine's database and connected to it. `server` is the database
/// server address reported by the gateway.
///
/// # Errors
/// If the gateway isn't connected to this machine's database, or that can't be determined.
pub fn check_gateway_database(server: Option<&str>) -> Result<String, String> {
    let layout = Layout::from_process();
    let port = database::read_own_port(&layout, &mut services_env(&layout))?;
    let server = server.ok_or("the gateway does not report which server it is connected to")?;
    database::check_gateway_server(server, port)
}

/// Runs all checks for the machine under `SVC_ROOT`.
pub async fn run_checks() -> Report {
    let layout = Layout::from_process();
    let blocking_checks = BlockingChecks { layout: &layout };
    let checks = vec![
        blocking_checks.check("configuration", configuration::check),
        blocking_checks.check("env-files", files::check_env_files),
        blocking_checks.check("secrets", files::check_secrets),
        blocking_checks.check("gate", release::check_gate),
        blocking_checks.check("release", release::check_current),
        blocking_checks.check("update", release::check_update),
        Check::new("database", SLOW_CHECK_TIMEOUT, database::check(&layout)),
        Check::new("gateway", SLOW_CHECK_TIMEOUT, gateway::check(&layout)),
        blocking_checks.check("tls-key", gateway::check_key),
        blocking_checks.check("certificate", certificate::check),
        Check::new("platform", SLOW_CHECK_TIMEOUT, platform::check(&layout)),
        Check::new("clock", SLOW_CHECK_TIMEOUT, platform::check_clock(&layout)),
        Check::new("store", SLOW_CHECK_TIMEOUT, store::check(&layout)),
        blocking_checks.check("backup", backup::check),
        blocking_checks.check("snapshots", backup::check_snapshots),
        blocking_checks.check("file-backup", file_backup::check),
        blocking_checks.check("disk", space::check),
        blocking_checks.check("ports", ports::check),
        Check::new("firewall", SLOW_CHECK_TIMEOUT, firewall::check(&layout)),
        Check::new("units", SLOW_CHECK_TIMEOUT, units::check(&layout)),
    ];
    Report { subject: "host".to_owned(), findings: diagnosis::run_checks(checks).await }
}

struct BlockingChecks<'a> {
    layout: &'a Layout,
}

impl<'a> BlockingChecks<'a> {
    /// Returns a file-only check that runs on the blocking thread pool.
    fn check(&self, name: &'static str, check: fn(&Layout) -> Findings) -> Check<'a> {
        let layout = self.layout.clone();
        Check::new(name, FILE_CHECK_TIMEOUT, async move {
            let result = tokio::task::spawn_blocking(move || check(&layout)).await;
            result.unwrap_or_else(|_| Findings::new(name).skipped("the check panicked: this is a bug in svc"))
        })
    }
}

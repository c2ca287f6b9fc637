//! `svc-heartbeat`: rotates and expires the machine's log files and measures its storage, once a day. A timer runs it
//! hourly.
//!
//! This module holds the command line, configuration and sequence of steps. Each run derives its work from the files on
//! disk, so it picks up where a killed run left off. A failed step doesn't stop the others.

pub mod clock_trust;
mod expire;
mod rotate;
mod storage;

use std::ffi::OsString;
use std::process::ExitCode;

use jiff::Timestamp;
use jiff::civil::Date;

use super::records::calendar::Calendar;
use super::records::log_file_names;
use crate::agents::owner_config::OwnerSettings;
use crate::system::config;
use crate::system::config::{DatabaseUrl, init_log};
use crate::system::layout::Layout;
use crate::system::lock::{Lock, LockError};
use crate::system::postgres::PostgresServer;
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_base::failpoint;
use svc_base::fsx::FileError;
use svc_http::request_id;

/// Fail points in a run.
pub const FAILPOINTS: &[&str] =
    &["heartbeat.begin", "heartbeat.rotated", "heartbeat.expired", "heartbeat.measured"];

#[derive(clap::Parser)]
#[command(
    name = "svc-heartbeat",
    version = applet::version(),
    about = "Rotates the activity and audit logs, deletes activity, audit and interaction logs older than \
             30 days, and measures the machine's storage",
    after_help = "Days begin at midnight in costLimits.timeZone of the owner's system/config.json. The program is idempotent and can run at any time."
)]
struct Args {}

/// Returns the command-line definition used to generate the reference pages.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    if let Err(code) = applet::parse::<Args>(args) {
        return code;
    }
    init_log("svc-heartbeat", &Layout::from_process());
    applet::block_on("svc-heartbeat", request_id::run_with_new_id(run_maintenance(Layout::from_process())))
}

async fn run_maintenance(layout: Layout) -> Result<(), Failure> {
    let mut env = config::environment(&layout);
    let database = DatabaseUrl::read(&mut env);
    let server = PostgresServer::new(env.finish(database)?.config()?);
    let _lock = Lock::acquire(&layout.retention_lock()).map_err(|error| match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!("another instance is running")),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    })?;
    failpoint::trigger("heartbeat.begin").or_exit(Exit::Internal)?;
    let logs = layout.logs();
    std::fs::create_dir_all(&logs)
        .map_err(FileError::wrap("create directory", &logs))
        .or_exit(Exit::Internal)?;
    let settings = OwnerSettings::load(&layout.settings(), &layout.last_good_settings());
    if let Some(error) = &settings.error {
        tracing::warn!(error, "invalid system/config.json; using last valid settings");
    }
    let calendar = settings.calendar;
    let now = Timestamp::now();
    let today = calendar.day(now);
    let rotated = rotate_and_expire(&layout, &calendar, now);
    let measured = measure_storage(&layout, &server, today).await;
    rotated.and(measured)
}

fn rotate_and_expire(layout: &Layout, calendar: &Calendar, now: Timestamp) -> Result<(), Failure> {
    let (logs, today) = (layout.logs(), calendar.day(now));
    let rotated = [log_file_names::ACTIVITY, log_file_names::AUDIT].map(|log| {
        let name = rotate::rotate(&logs, log, calendar, today).or_exit(Exit::Internal)?;
        if let Some(name) = name {
            tracing::info!(name, "rotated log file");
        }
        failpoint::trigger("heartbeat.rotated").or_exit(Exit::Internal)
    });
    let trusted_now = clock_trust::update_trusted_time(&layout.retention_clock(), &logs, now);
    let expired =
        trusted_now.and_then(|now| expire::expire(&logs, calendar.day(now))).or_exit(Exit::Internal);
    let expired = expired.and_then(|names| {
        if !names.is_empty() {
            tracing::info!(?names, "deleted log files older than 30 days");
        }
        failpoint::trigger("heartbeat.expired").or_exit(Exit::Internal)
    });
    rotated.into_iter().chain([expired]).collect()
}

async fn measure_storage(layout: &Layout, server: &PostgresServer, today: Date) -> Result<(), Failure> {
    if storage::is_measured(&storage::log_path(layout), today).or_exit(Exit::Internal)? {
        return Ok(());
    }
    let line = storage::measure_and_append(layout, server, today).await.map_err(|error| {
        let exit = if error.is_database_error() { Exit::Unavailable } else { Exit::Internal };
        Failure::new(exit, error)
    })?;
    tracing::info!(home = line.files.home_bytes, database = line.database_bytes, "measured storage");
    failpoint::trigger("heartbeat.measured").or_exit(Exit::Internal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_machine_expires_its_last_log_files() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let (logs, now) = (layout.logs(), Timestamp::now());
        std::fs::create_dir_all(&logs).unwrap();
        let old = logs.join("interactions-2020-01-01.jsonl");
        std::fs::write(&old, "{}\n").unwrap();
        std::fs::write(layout.logs().join("interactions-2020-01-02.jsonl"), "{}\n").unwrap();
        let files = || std::fs::read_dir(&logs).unwrap().count();
        let run_after = |days: i64| {
            let now = now.checked_add(jiff::SignedDuration::from_hours(24 * days)).unwrap();
            assert!(rotate_and_expire(&layout, &Calendar::utc(), now).is_ok());
        };
        run_after(0);
        assert_eq!(files(), 0, "old log files were not deleted without newer ones");
        // A clock that jumps ahead deletes nothing.
        std::fs::write(logs.join(format!("interactions-{}.jsonl", Calendar::utc().day(now))), "{}\n")
            .unwrap();
        run_after(400);
        assert_eq!(files(), 1);
    }
}

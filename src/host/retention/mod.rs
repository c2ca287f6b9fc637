//! `svc-heartbeat`: the daily check of the machine's records. Rotation, retention, the measurement of storage.
//!
//! Here: the command line, the configuration, the order. Everything is decided by what lies there, so each run does what
//! is left to do, and a run that was killed anywhere is simply run again. What fails does not keep the rest from being
//! done.

pub mod clock_trust;
mod expire;
mod rotate;
mod storage;

use std::ffi::OsString;
use std::process::ExitCode;

use jiff::Timestamp;
use jiff::civil::Date;

use super::records::calendar::Calendar;
use super::records::names;
use crate::applet::{self, Exit, Failure, OrExit};
use crate::failpoint;
use crate::fsx::FileError;
use crate::host::agents::owner_config::Settings;
use crate::host::system::config;
use crate::host::system::config::{DatabaseUrl, begin_log};
use crate::host::system::layout::Layout;
use crate::host::system::lock::{Lock, LockError};
use crate::host::system::postgres::Server;
use crate::http::request_id;

/// The places of a run where a test can stop it.
pub const POINTS: &[&str] =
    &["heartbeat.begin", "heartbeat.rotated", "heartbeat.expired", "heartbeat.measured"];

#[derive(clap::Parser)]
#[command(
    name = "svc-heartbeat",
    version = applet::VERSION,
    about = "Rotates the machine's records, deletes those older than 30 days, and measures its storage",
    after_help = "Days are those of costLimits.timeZone in the owner's system/config.json. It may run at any time and as often as wanted."
)]
struct Args {}

pub fn run(args: Vec<OsString>) -> ExitCode {
    if let Err(code) = applet::parse::<Args>(args) {
        return code;
    }
    begin_log("svc-heartbeat", &Layout::from_process());
    applet::block_on("svc-heartbeat", request_id::own(check(Layout::from_process())))
}

async fn check(layout: Layout) -> Result<(), Failure> {
    let mut env = config::environment(&layout);
    let database = DatabaseUrl::read(&mut env);
    let server = Server::new(env.finish(database)?.config()?);
    let _lock = Lock::take(&layout.heartbeat_lock()).map_err(|error| match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!("another check is under way")),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    })?;
    failpoint::pass("heartbeat.begin").or_exit(Exit::Internal)?;
    let logs = layout.logs();
    std::fs::create_dir_all(&logs)
        .map_err(FileError::at("create directory", &logs))
        .or_exit(Exit::Internal)?;
    let settings = Settings::load(&layout.settings(), &layout.good_settings());
    if let Some(mistake) = &settings.mistake {
        tracing::warn!(mistake, "system/config.json is not used as it is now");
    }
    let calendar = settings.calendar;
    let now = Timestamp::now();
    let today = calendar.day(now);
    let kept = keep(&layout, &calendar, now);
    let measured = measure(&layout, &server, today).await;
    kept.and(measured)
}

fn keep(layout: &Layout, calendar: &Calendar, now: Timestamp) -> Result<(), Failure> {
    let (logs, today) = (layout.logs(), calendar.day(now));
    let rotated = [names::ACTIVITY, names::AUDIT].map(|record| {
        let name = rotate::rotate(&logs, record, calendar, today).or_exit(Exit::Internal)?;
        if let Some(name) = name {
            tracing::info!(name, "rotated");
        }
        failpoint::pass("heartbeat.rotated").or_exit(Exit::Internal)
    });
    let believed = clock_trust::believed(&layout.heartbeat_clock(), now);
    let expired = believed.and_then(|now| expire::expire(&logs, calendar.day(now))).or_exit(Exit::Internal);
    let expired = expired.and_then(|names| {
        if !names.is_empty() {
            tracing::info!(?names, "deleted: older than 30 days");
        }
        failpoint::pass("heartbeat.expired").or_exit(Exit::Internal)
    });
    rotated.into_iter().chain([expired]).collect()
}

async fn measure(layout: &Layout, server: &Server, today: Date) -> Result<(), Failure> {
    if storage::is_measured(&storage::path(layout), today).or_exit(Exit::Internal)? {
        return Ok(());
    }
    let line = storage::measure(layout, server, today).await.map_err(|error| {
        let exit = if error.is_unavailable() { Exit::Unavailable } else { Exit::Internal };
        Failure::new(exit, error)
    })?;
    tracing::info!(home = line.files.home_bytes, database = line.database_bytes, "measured");
    failpoint::pass("heartbeat.measured").or_exit(Exit::Internal)
}

//! The whole main job, played on real parts: a stack is started, a machine provisioned, used, backed up, lost,
//! recovered, its predecessor fenced off, and deleted.
//!
//! It drives what users have — the CLI, HTTP, signals — and looks at what they could look at: records, disks, objects.
//! [`Breakage`] breaks one thing from outside; the story must then stop at the step that this is about.

mod breakage;
pub(crate) mod first_life;
pub(crate) mod platform;
pub(crate) mod program;
mod report;
mod second_life;
pub(crate) mod slot;
pub(crate) mod stack;
mod web;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

pub use self::breakage::Breakage;
pub use self::first_life::{Machine as MachineRecord, backup, insert_and_find, insert_later};
pub use self::report::{Report, Step, Stopped};
pub use self::second_life::{Patience, delete, fail_half_way, nobody_is_served, rows_are_back, undelete};
pub use self::slot::BUCKET;
pub use self::stack::{Front, Ground, HANDLE, IMAGE_VERSION, Stack, USER, eventually};
pub use self::web::Web;
use crate::child;

#[derive(Debug, Clone)]
pub struct Options {
    /// The binary that is played with.
    pub svc: PathBuf,
    pub breakage: Option<Breakage>,
    /// Keep disks and logs when all went well, too.
    pub keep: bool,
    /// Where `report.json` goes.
    pub report: Option<PathBuf>,
}

/// Plays the story to its end, or to the step that fails. All that was started has ended when this returns.
///
/// # Errors
/// When it cannot even begin, or the report cannot be written; a story that fails is a report.
pub async fn run(options: Options) -> Result<Report> {
    run_inspected(options, &[], async |_, _| Ok(())).await
}

/// Where the story stands when somebody looks at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// All parts run, and there is no machine yet.
    Begun,
    /// The second machine runs and holds the rows; the first has been told that it is replaced.
    Lived,
}

/// [`run`] with further settings for every process of ours, shown to `look` at each [`Moment`].
///
/// # Errors
/// As [`run`].
pub async fn run_inspected(
    options: Options,
    more: &[(&str, &str)],
    mut look: impl AsyncFnMut(&Stack, Moment) -> Result<()>,
) -> Result<Report> {
    // Short, and not below `target`: unix sockets lie in it, whose paths have room for 107 bytes.
    let dir =
        tempfile::Builder::new().prefix("svc-demo-").tempdir_in("/tmp").context("a directory to play in")?;
    child::remove_on_exit(dir.path());
    let mut report = Report::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let interrupted = tokio::select! {
        end = whole(&mut report, &options, more, dir.path(), &mut look) => {
            report.ok = end.is_ok();
            false
        }
        _ = terminate.recv() => true,
        _ = interrupt.recv() => true,
    };
    let as_expected =
        options.breakage.map(Breakage::fails_at) == report.failed().map(|step| step.name.as_str());
    if options.keep || (!interrupted && !report.ok && !as_expected) {
        println!("kept: {}", kept(dir)?.display());
    }
    println!("{}", report.summary());
    if let Some(path) = &options.report {
        report.write(path)?;
    }
    Ok(report)
}

/// Under another name, because the one that is known is removed when this process ends.
fn kept(dir: TempDir) -> Result<PathBuf> {
    let dir = dir.keep();
    let kept = dir.with_added_extension("kept");
    std::fs::rename(&dir, &kept)?;
    Ok(kept)
}

async fn whole(
    report: &mut Report,
    options: &Options,
    more: &[(&str, &str)],
    dir: &Path,
    look: &mut impl AsyncFnMut(&Stack, Moment) -> Result<()>,
) -> Result<(), Stopped> {
    let mut stack = report.step("stack", Stack::start_with(&options.svc, dir, Front::Tls, more)).await?;
    let end = acts(report, options.breakage, &mut stack, look).await;
    if end.is_err() {
        stack.print_logs();
    }
    stack.stop().await;
    end
}

async fn acts(
    report: &mut Report,
    breakage: Option<Breakage>,
    stack: &mut Stack,
    look: &mut impl AsyncFnMut(&Stack, Moment) -> Result<()>,
) -> Result<(), Stopped> {
    let broken = |what: Breakage| breakage == Some(what);
    report.quietly("watched", look(stack, Moment::Begun)).await?;
    report.step("publish", first_life::publish(stack)).await?;
    let first = report.step("provision", first_life::provision(stack)).await?;
    report.step("boot", first_life::boot(stack, &first)).await?;
    if broken(Breakage::Pin) {
        breakage::replace_tls_key(stack, &first).await;
    }
    report.step("use", first_life::insert_and_find(stack)).await?;
    if broken(Breakage::Backup) {
        breakage::fail_snapshot_puts(stack);
    }
    let backup = report.step("backup", first_life::backup(stack, &first)).await?;
    report.step("resize", first_life::resize(stack, &first)).await?;
    report.step("update", first_life::update(stack, &first)).await?;
    report.step("roll-back", first_life::roll_back(stack, &first)).await?;
    let first =
        report.step("failed-recovery", second_life::fail_half_way(stack, &first, Patience::DEMO)).await?;
    report.step("later-row", first_life::insert_later(stack)).await?;
    report.step("loss", second_life::lose(stack, &first)).await?;
    if broken(Breakage::Restore) {
        breakage::corrupt_snapshot_gets(stack);
    }
    let second = report.step("recover", second_life::recover(stack, &first)).await?;
    report.step("rows", second_life::rows_are_back(stack)).await?;
    if broken(Breakage::Fence) {
        breakage::put_fence_back(stack, &first);
    }
    report.step("fenced", second_life::old_machine_is_fenced(stack, &first, &backup)).await?;
    report.step("superseded", second_life::old_machine_learns(stack, &first, &backup)).await?;
    report.quietly("watched", look(stack, Moment::Lived)).await?;
    report.step("undelete", second_life::undelete(stack, &second, Patience::DEMO)).await?;
    report.step("delete", second_life::delete(stack, &second)).await?;
    report.step("gone", second_life::nobody_is_served(stack)).await
}

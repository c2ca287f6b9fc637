//! The main scenario against real services: a stack is started; a machine is provisioned, used, backed up, lost and
//! recovered; the lost machine is fenced off; and its successor is deleted.
//!
//! It uses the interfaces that users have (the CLI, HTTP and signals), and checks only what users could check: records,
//! disks and objects. [`InjectedDefect`] injects one defect from outside; the scenario must then fail at the matching
//! step.

mod files;
pub(crate) mod first_machine;
mod injected_defect;
mod platform;
mod program;
mod recovery;
mod report;
pub(crate) mod slot;
pub(crate) mod stack;
mod web;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

pub use self::first_machine::{
    MachineRecord, backup, insert_and_find_rows, insert_later_row, publish_signed,
};
pub use self::injected_defect::InjectedDefect;
pub use self::platform::Platform;
pub use self::program::Program;
pub use self::recovery::{
    RecoveryTimeouts, check_owner_gets_503, check_restored_rows, delete, fail_recovery_midway, undelete,
};
pub use self::report::{Report, Step, StepFailed};
pub use self::slot::BUCKET;
pub use self::stack::{
    CONFIRM_FLAGS, HANDLE, HostBackend, IMAGE_VERSION, RouterTransport, Stack, USER, eventually,
};
pub use self::web::WebClient;
use crate::child;
use crate::stores::StoreKind;

#[derive(Debug, Clone)]
pub struct ScenarioOptions {
    /// The binary to run.
    pub svc: PathBuf,
    pub defect: Option<InjectedDefect>,
    /// The object store.
    pub store: StoreKind,
    /// Whether to keep disks and logs even after success.
    pub keep: bool,
    /// Path of `report.json`.
    pub report: Option<PathBuf>,
}

/// Runs the scenario to its end, or until a step fails. Everything has been stopped when this returns.
///
/// # Errors
/// Fails if the scenario cannot start or the report cannot be written. A failed step is reported, and is not an error.
pub async fn run(options: ScenarioOptions) -> Result<Report> {
    run_inspected(options, &[], async |_, _| Ok(())).await
}

/// A point in the scenario at which it can be inspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checkpoint {
    /// All services are running; there is no machine yet.
    Started,
    /// The second machine is running and has the rows; the first has recorded that it is superseded.
    Recovered,
}

/// Like [`run`], with extra settings for every product process, and an inspection at each [`Checkpoint`].
///
/// # Errors
/// Like [`run`].
pub async fn run_inspected(
    options: ScenarioOptions,
    extra_env: &[(&str, &str)],
    mut inspect: impl AsyncFnMut(&Stack, Checkpoint) -> Result<()>,
) -> Result<Report> {
    // In `/tmp`, because a Unix socket path is limited to 107 bytes.
    let dir = tempfile::Builder::new()
        .prefix("svc-demo-")
        .tempdir_in("/tmp")
        .context("cannot create a temporary directory")?;
    child::remove_on_exit(dir.path());
    let mut report = Report::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let is_interrupted = tokio::select! {
        result = run_all(&mut report, &options, extra_env, dir.path(), &mut inspect) => {
            report.ok = result.is_ok();
            false
        }
        _ = terminate.recv() => true,
        _ = interrupt.recv() => true,
    };
    let is_expected = options.defect.map(InjectedDefect::failing_step)
        == report.failed_step().map(|step| step.name.as_str());
    if options.keep || (!is_interrupted && !report.ok && !is_expected) {
        println!("kept: {}", keep_dir(dir)?.display());
    }
    println!("{}", report.summary());
    if let Some(path) = &options.report {
        report.write(path)?;
    }
    Ok(report)
}

/// Renames the directory, because the registered path is removed when this process ends.
fn keep_dir(dir: TempDir) -> Result<PathBuf> {
    let dir = dir.keep();
    let kept_dir = dir.with_added_extension("kept");
    std::fs::rename(&dir, &kept_dir)?;
    Ok(kept_dir)
}

async fn run_all(
    report: &mut Report,
    options: &ScenarioOptions,
    extra_env: &[(&str, &str)],
    dir: &Path,
    inspect: &mut impl AsyncFnMut(&Stack, Checkpoint) -> Result<()>,
) -> Result<(), StepFailed> {
    let start = async {
        let store = options.store.start(dir, BUCKET).await?;
        let (transport, backend) = (RouterTransport::Tls, HostBackend::Processes);
        let started = Stack::start_with_store(&options.svc, dir, transport, backend, store, extra_env).await;
        started.map(|(stack, summary)| (stack, format!("{summary}, store {}", options.store.name())))
    };
    let mut stack = report.step("stack", start).await?;
    let result = run_steps(report, options.defect, &mut stack, inspect).await;
    if result.is_err() {
        stack.print_logs();
    }
    stack.stop().await;
    result
}

async fn run_steps(
    report: &mut Report,
    defect: Option<InjectedDefect>,
    stack: &mut Stack,
    inspect: &mut impl AsyncFnMut(&Stack, Checkpoint) -> Result<()>,
) -> Result<(), StepFailed> {
    let is_injected = |expected: InjectedDefect| defect == Some(expected);
    report.hidden_step("inspect", inspect(stack, Checkpoint::Started)).await?;
    report.step("publish", first_machine::publish(stack)).await?;
    let first = report.step("provision", first_machine::provision(stack)).await?;
    report.step("boot", first_machine::check_boot(stack, &first)).await?;
    if is_injected(InjectedDefect::Pin) {
        report.hidden_step("inject", injected_defect::replace_tls_key(stack, &first)).await?;
    }
    report.step("use", first_machine::insert_and_find_rows(stack)).await?;
    if is_injected(InjectedDefect::Backup) {
        injected_defect::fail_snapshot_puts(stack);
    }
    let backup = report.step("backup", first_machine::backup(stack, &first)).await?;
    // Skipped with a defect, because the later steps, at which the scenario must fail, do not depend on these.
    let first = if defect.is_some() {
        first
    } else {
        report.step("resize", first_machine::resize(stack, &first)).await?;
        report.step("update", first_machine::update(stack, &first)).await?;
        report.step("roll-back", first_machine::roll_back(stack, &first)).await?;
        report
            .step("failed-recovery", recovery::fail_recovery_midway(stack, &first, RecoveryTimeouts::DEMO))
            .await?
    };
    report.step("later-row", first_machine::insert_later_row(stack)).await?;
    report.step("files", files::save(stack, &first)).await?;
    report.step("loss", recovery::lose_machine(stack, &first)).await?;
    if is_injected(InjectedDefect::Restore) {
        injected_defect::corrupt_snapshot_gets(stack);
    }
    let second = report.step("recover", recovery::recover(stack, &first)).await?;
    report.step("rows", recovery::check_restored_rows(stack)).await?;
    report.step("restored-files", async { files::check_restored(stack, &second) }).await?;
    if defect.is_none() {
        report.step("earlier-file", files::restore_deleted_file(stack, &second)).await?;
    }
    if is_injected(InjectedDefect::Fence) {
        report.hidden_step("inject", async { injected_defect::remove_fence(stack, &first) }).await?;
    }
    report.step("fenced", recovery::check_old_backup_refused(stack, &first, &backup)).await?;
    report.step("superseded", recovery::check_old_machine_superseded(stack, &first, &backup)).await?;
    report.hidden_step("inspect", inspect(stack, Checkpoint::Recovered)).await?;
    report.step("undelete", recovery::undelete(stack, &second, RecoveryTimeouts::DEMO)).await?;
    report.step("delete", recovery::delete(stack, &second)).await?;
    report.step("gone", recovery::check_owner_gets_503(stack)).await
}

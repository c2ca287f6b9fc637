//! The lab: the main scenario on virtual machines, and checks that need them. The machines run Debian in QEMU, are
//! provisioned by cloud-init, and run the host's units under systemd and the database in a container.
//!
//! It uses the interfaces of operators and owners: `svcctl`, HTTP and the provider's console. Over SSH and in the
//! object store, it also inspects state and injects faults. Console output and journals are stored under `target/lab`,
//! in one directory per machine.

mod agent;
mod data;
mod faults;
mod files;
mod invariants;
mod packages;
mod release;
mod scenario;
mod stages;
mod steps;
mod updates;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

use self::steps::{LabStep, SlotMachines, StepSelection};
use kit::child;
use kit::fetch::target_dir;
use kit::pg::PgBinaries;
use kit::provider::MachineSettings;
use kit::scenario::{HostBackend, Report, RouterTransport, Stack, StepFailed};
use kit::vm::{Accel, Image};

/// Long enough for emulation on a busy machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(1800);
/// Added to the timeout of a step for each MiB of the owner's files.
const SECONDS_PER_MIB: u64 = 3;

#[derive(Parser)]
#[command(name = "cargo xtask lab")]
struct Args {
    /// Run only the main scenario: use, dispatch, reboot, backup, loss and recovery
    #[arg(long)]
    quick: bool,
    /// Run only these steps, on a newly provisioned machine: `--only update,bad-update`
    #[arg(long, value_name = "STEP", value_delimiter = ',', conflicts_with = "quick")]
    only: Vec<String>,
    /// Total size, in MiB, of the owner's files that the lab backs up and a recovery restores
    #[arg(long, value_name = "MIB", default_value_t = 32)]
    files_mib: u64,
    /// The binary for the platform, `svcctl` and the machines
    #[arg(long, value_name = "PATH")]
    svc: PathBuf,
}

fn main() -> ExitCode {
    let result = Args::parse().run();
    result.unwrap_or_else(|error| {
        eprintln!("lab: {error:#}");
        ExitCode::FAILURE
    })
}

impl Args {
    fn run(self) -> Result<ExitCode> {
        let steps = match (self.quick, self.only.is_empty()) {
            (true, _) => StepSelection::Quick,
            (false, true) => StepSelection::Full,
            (false, false) => StepSelection::only(self.only)?,
        };
        let runtime = tokio::runtime::Runtime::new().context("cannot start a runtime")?;
        let report = runtime.block_on(run(&self.svc, &steps, self.files_mib))?;
        Ok(if report.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Runs the steps until one fails; no machine is running when this returns.
///
/// # Errors
/// Fails if the directories cannot be created, another lab is running, or the report cannot be written. A failed step
/// is not an error: it is recorded in the report.
async fn run(svc: &Path, steps: &StepSelection, files_mib: u64) -> Result<Report> {
    let steps = steps.selected();
    let mut report =
        Report::with_timeout("lab", STEP_TIMEOUT + Duration::from_secs(files_mib * SECONDS_PER_MIB));
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // In `/tmp`, because a Unix socket path is limited to 107 bytes.
    let sockets = tempfile::Builder::new().prefix("svc-lab-").tempdir_in("/tmp")?;
    child::remove_on_exit(sockets.path());
    let dir = target_dir().join("lab");
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    // Only one lab at a time: concurrent runs would delete each other's disks.
    let lock = fs::File::create(dir.join("lock"))?;
    lock.try_lock().context("another lab is running in this target directory")?;
    let machines = dir.join("machines");
    // Deletes the disks, which are large, and the logs from an earlier run.
    fs::remove_dir_all(&machines).ok();
    fs::create_dir_all(&machines).with_context(|| format!("cannot create {}", machines.display()))?;
    let outcome = tokio::select! {
        result = run_all(&mut report, svc, (&steps, files_mib), &machines, sockets.path()) => Some(result.is_ok()),
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
    };
    report.ok = outcome == Some(true);
    remove_disks(&machines);
    println!("{}", report.summary());
    println!("consoles and journals: {}", machines.display());
    report.write(&dir.join("report.json"))?;
    Ok(report)
}

async fn run_all(
    report: &mut Report,
    svc: &Path,
    (steps, files_mib): (&[&LabStep], u64),
    machines: &Path,
    sockets: &Path,
) -> Result<(), StepFailed> {
    let (image, accel) =
        report.step("image", build_image(steps.iter().any(|step| step.name == "full-release"))).await?;
    let settings = MachineSettings { image, accel, dir: machines.to_owned(), socket_dir: sockets.to_owned() };
    let backend = HostBackend::VirtualMachines(settings);
    let stack = Stack::start_with_backend(svc, sockets, RouterTransport::Tls, backend, &[]);
    let stack = report.step("stack", stack).await?;
    let result = run_steps(report, steps, files_mib, &stack).await;
    if result.is_err() {
        stack.print_logs();
    }
    invariants::save_journals(&stack, machines).await;
    stack.stop().await;
    result
}

async fn build_image(with_full_release: bool) -> Result<((Image, Accel), String)> {
    let built = tokio::task::spawn_blocking(move || {
        if with_full_release {
            release::prefetch_full_parts()?;
        }
        let image = Image::build_or_reuse(&target_dir(), &PgBinaries::locate_or_fetch(&target_dir())?)?;
        let accel = Accel::probe(&image)?;
        Ok::<_, anyhow::Error>((image, accel))
    });
    let (image, accel) = built.await??;
    let accel_name = match accel {
        Accel::Kvm => "KVM",
        Accel::Tcg => "emulation: /dev/kvm is missing or unusable",
    };
    Ok(((image, accel), format!("Debian with podman and PostgreSQL 16; {accel_name}")))
}

async fn run_steps(
    report: &mut Report,
    steps: &[&LabStep],
    files_mib: u64,
    stack: &Stack,
) -> Result<(), StepFailed> {
    report.step("publish", scenario::publish(stack)).await?;
    let first = report.step("provision", scenario::provision(stack)).await?;
    let mut slot_machines = SlotMachines { current: first.clone(), first, files_mib, files: None };
    for step in steps {
        report.step(step.name, (step.run)(stack, &mut slot_machines)).await?;
    }
    invariants::save_journal(stack, &slot_machines.current).await;
    report.step("delete", scenario::delete(stack, &slot_machines.current)).await?;
    report.step("gone", scenario::check_owner_gets_503(stack)).await
}

/// Deletes the disks and the user-data; the logs remain.
fn remove_disks(machines: &Path) {
    for machine in fs::read_dir(machines).into_iter().flatten().flatten() {
        fs::remove_file(machine.path().join("disk.qcow2")).ok();
        // The seed and the user-data contain credentials.
        fs::remove_file(machine.path().join("seed.iso")).ok();
        fs::remove_file(machine.path().join("user-data")).ok();
    }
}

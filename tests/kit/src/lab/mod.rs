//! The lab: the main job on real machines, then what only a machine shows. Debian in QEMU, booted by cloud-init, run by
//! systemd, with the database in its container.
//!
//! It drives what an operator has: `svcctl`, HTTP, the provider's console, and SSH for looks inside.
//! Everything it saw stays below `target/lab`: a directory for each machine with its console and its journal.

mod acts;
mod agent;
mod data;
mod faults;
mod life;
mod look;
mod packages;
mod release;
mod stages;
mod updates;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};

pub use self::acts::Acts;
use self::acts::{Act, Lives};
use crate::child;
use crate::fetch::target_dir;
use crate::pg::PgBinaries;
use crate::provider::MachineSettings;
use crate::story::{Front, Ground, Report, Stack, Stopped};
use crate::vm::{Accel, Image};

/// Under emulation, and with whatever else this machine is doing.
const LONGEST_STEP: Duration = Duration::from_secs(1800);

#[derive(Debug, Clone)]
pub struct Options {
    /// The binary for the platform, `svcctl` and the machines.
    pub svc: PathBuf,
    pub acts: Acts,
}

/// Plays it to its end, or to the step that fails; no machine runs when this returns.
///
/// # Errors
/// When it cannot begin: no root, no QEMU, no image.
pub async fn run(options: Options) -> Result<Report> {
    let acts = options.acts.chosen();
    let mut report = Report::of("lab", LONGEST_STEP);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Sockets lie in it, whose paths have room for 107 bytes.
    let sockets = tempfile::Builder::new().prefix("svc-lab-").tempdir_in("/tmp")?;
    child::remove_on_exit(sockets.path());
    let dir = target_dir().join("lab");
    fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
    // One at a time: they would delete each other's disks.
    let lock = fs::File::create(dir.join("lock"))?;
    lock.try_lock().context("another lab is played in this target directory")?;
    let machines = dir.join("machines");
    // Disks of gigabytes, and the logs of another run.
    fs::remove_dir_all(&machines).ok();
    fs::create_dir_all(&machines).with_context(|| format!("make {}", machines.display()))?;
    let ended = tokio::select! {
        end = whole(&mut report, &options.svc, &acts, &machines, sockets.path()) => Some(end.is_ok()),
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
    };
    report.ok = ended == Some(true);
    remove_disks(&machines);
    println!("{}", report.summary());
    println!("consoles and journals: {}", machines.display());
    report.write(&dir.join("report.json"))?;
    Ok(report)
}

async fn whole(
    report: &mut Report,
    svc: &Path,
    acts: &[&Act],
    machines: &Path,
    sockets: &Path,
) -> Result<(), Stopped> {
    let (image, accel) =
        report.step("image", image(acts.iter().any(|act| act.name == "full-release"))).await?;
    let settings = MachineSettings { image, accel, dir: machines.to_owned(), sockets: sockets.to_owned() };
    let ground = Ground::Machines(settings);
    let stack = Stack::start_on(svc, sockets, Front::Tls, ground, &[]);
    let stack = report.step("stack", stack).await?;
    let end = story(report, acts, &stack).await;
    if end.is_err() {
        stack.print_logs();
    }
    look::keep_journals(&stack, machines).await;
    stack.stop().await;
    end
}

async fn image(with_full_release: bool) -> Result<((Image, Accel), String)> {
    let built = tokio::task::spawn_blocking(move || {
        if with_full_release {
            release::prepare()?;
        }
        let image = Image::built(&target_dir(), &PgBinaries::locate_or_fetch(&target_dir())?)?;
        let accel = Accel::probe(&image)?;
        Ok::<_, anyhow::Error>((image, accel))
    });
    let (image, accel) = built.await??;
    let how = match accel {
        Accel::Kvm => "KVM",
        Accel::Tcg => "emulation: /dev/kvm is missing or runs no kernel",
    };
    Ok(((image, accel), format!("Debian with podman and PostgreSQL 16; processors by {how}")))
}

async fn story(report: &mut Report, acts: &[&Act], stack: &Stack) -> Result<(), Stopped> {
    report.step("publish", life::publish(stack)).await?;
    let first = report.step("provision", life::provision(stack)).await?;
    let mut lives = Lives { now: first.clone(), first };
    for act in acts {
        report.step(act.name, (act.play)(stack, &mut lives)).await?;
    }
    look::keep_journal(stack, &lives.now).await;
    report.step("delete", life::delete(stack, &lives.now)).await?;
    report.step("gone", life::nobody_is_served(stack)).await
}

/// What is left is small, and says what happened.
fn remove_disks(machines: &Path) {
    for machine in fs::read_dir(machines).into_iter().flatten().flatten() {
        fs::remove_file(machine.path().join("disk.qcow2")).ok();
        fs::remove_file(machine.path().join("seed.iso")).ok();
        // It has credentials in it, if of a fleet that is gone.
        fs::remove_file(machine.path().join("user-data")).ok();
    }
}

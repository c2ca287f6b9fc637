//! The lab: the main job on real machines, then what only a machine shows. Debian in QEMU, booted by cloud-init, run by
//! systemd, with the database in its container.
//!
//! It drives what an operator has: `svcctl`, HTTP, the provider's console, and SSH for looks inside.
//! Everything it saw stays below `target/lab`: a directory for each machine with its console and its journal.

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

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

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

/// What is played on the machine once it is provisioned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acts {
    /// The main job: use, reboot, backup, loss, recovery.
    Quick,
    /// What only a machine shows, too.
    Whole,
    /// These alone, in the story's order: for whoever works on one of them.
    Only(Vec<String>),
}

/// In their order, with whether the quick story has them.
const ACTS: [(&str, bool); 21] = [
    ("boot", true),
    ("sound", true),
    ("use", true),
    ("reboot", true),
    ("database-dies", false),
    ("disk-full", false),
    ("resize", false),
    ("backup", true),
    ("later-row", true),
    ("loss", true),
    ("bad-restore", false),
    ("recover", true),
    ("rows", true),
    ("fenced", false),
    ("clock-jump", false),
    ("update", false),
    ("cut-in-update", false),
    ("bad-update", false),
    ("cut-in-backup", false),
    ("full-release", false),
    ("package", false),
];

impl Acts {
    fn has(&self, act: &str) -> bool {
        match self {
            Self::Quick => ACTS.contains(&(act, true)),
            Self::Whole => true,
            Self::Only(acts) => acts.iter().any(|named| named == act),
        }
    }

    fn check(&self) -> Result<()> {
        let Self::Only(acts) = self else { return Ok(()) };
        let known = ACTS.map(|(name, _)| name);
        match acts.iter().find(|named| !known.contains(&named.as_str())) {
            Some(named) => bail!("the lab has no act {named}; its acts are {}", known.join(", ")),
            None => Ok(()),
        }
    }
}

/// Plays it to its end, or to the step that fails; no machine runs when this returns.
///
/// # Errors
/// When it cannot begin: an act that there is not, no root, no QEMU, no image.
pub async fn play(options: Options) -> Result<Report> {
    options.acts.check()?;
    let mut report = Report::of("lab", LONGEST_STEP);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Sockets lie in it, whose paths have room for 107 bytes.
    let sockets = tempfile::Builder::new().prefix("svc-lab-").tempdir_in("/tmp")?;
    child::remove_with_us(sockets.path());
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
        end = whole(&mut report, &options, &machines, sockets.path()) => Some(end.is_ok()),
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
    options: &Options,
    machines: &Path,
    sockets: &Path,
) -> Result<(), Stopped> {
    let (image, accel) = report.step("image", image(options.acts.has("full-release"))).await?;
    let settings = MachineSettings { image, accel, dir: machines.to_owned(), sockets: sockets.to_owned() };
    let ground = Ground::Machines(settings);
    let stack = Stack::up_on(&options.svc, sockets, Front::Tls, ground, &[]);
    let mut stack = report.step("stack", stack).await?;
    let end = acts(report, options, &mut stack).await;
    if end.is_err() {
        stack.print_logs();
    }
    look::keep_journals(&stack, machines).await;
    stack.down().await;
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

async fn acts(report: &mut Report, options: &Options, stack: &mut Stack) -> Result<(), Stopped> {
    let has = |act: &str| options.acts.has(act);
    report.step("publish", life::publish(stack)).await?;
    let mut machine = report.step("provision", life::provision(stack)).await?;
    if has("boot") {
        report.step("boot", stages::of_boot(stack, &machine)).await?;
    }
    if has("sound") {
        report.step("sound", look::sound(stack, &machine)).await?;
    }
    if has("use") {
        report.step("use", life::insert_and_find(stack)).await?;
    }
    if has("reboot") {
        report.step("reboot", life::reboot(stack, &machine)).await?;
    }
    if has("database-dies") {
        report.step("database-dies", faults::database_killed(stack, &machine)).await?;
    }
    if has("disk-full") {
        report.step("disk-full", faults::disk_full(stack, &machine)).await?;
    }
    if has("resize") {
        report.step("resize", life::resize(stack, &machine)).await?;
    }
    if has("backup") {
        report.step("backup", life::backup(stack, &machine)).await?;
    }
    if has("later-row") {
        report.step("later-row", life::insert_later(stack)).await?;
    }
    if has("loss") {
        look::keep_journal(stack, &machine).await;
        report.step("loss", life::lose(stack, &machine)).await?;
    }
    if has("bad-restore") {
        report.step("bad-restore", life::refused_restore(stack)).await?;
    }
    let first = machine.clone();
    if has("recover") {
        machine = report.step("recover", life::recover(stack, &machine)).await?;
    }
    if has("rows") {
        report.step("rows", life::rows_are_back(stack)).await?;
    }
    if has("fenced") {
        report.step("fenced", life::old_machine_learns(stack, &first)).await?;
    }
    if has("clock-jump") {
        report.step("clock-jump", faults::clock_jump(stack, &machine)).await?;
    }
    if has("update") {
        report.step("update", updates::update(stack, &machine)).await?;
    }
    if has("cut-in-update") {
        report.step("cut-in-update", updates::power_cut_in_update(stack, &machine)).await?;
    }
    if has("bad-update") {
        report.step("bad-update", updates::broken_update(stack, &machine)).await?;
    }
    if has("cut-in-backup") {
        report.step("cut-in-backup", faults::power_cut_in_backup(stack, &machine)).await?;
    }
    if has("full-release") {
        report.step("full-release", updates::full_release(stack, &machine)).await?;
    }
    if has("package") {
        report.step("package", packages::platform_package(stack, &machine)).await?;
    }
    if options.acts == Acts::Whole {
        report.step("sound-again", look::sound(stack, &machine)).await?;
    }
    look::keep_journal(stack, &machine).await;
    report.step("delete", life::delete(stack, &machine)).await?;
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

//! The lab's steps, in order.

use anyhow::{Context, Result, bail};
use futures_util::future::LocalBoxFuture;

use super::{agent, data, faults, files, invariants, packages, scenario, stages, updates};
use kit::scenario::{MachineRecord, Stack, fail_recovery_midway, undelete};

/// Selects the steps to run on the machine after provisioning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepSelection {
    /// The main scenario: use, dispatch, reboot, backup, loss, recovery.
    Quick,
    /// All steps, including those that are not part of the main scenario.
    Full,
    /// Only these steps, in the order of `STEPS`.
    Only(Vec<String>),
}

/// The slot's machines, and the owner's files.
pub(super) struct SlotMachines {
    pub(super) first: MachineRecord,
    /// The serving machine; equal to `first` until a recovery.
    pub(super) current: MachineRecord,
    /// The size of the owner's files, in MiB.
    pub(super) files_mib: u64,
    /// The files that the step `files` has saved.
    pub(super) files: Option<files::SavedFiles>,
}

type RunStep = for<'a> fn(&'a Stack, &'a mut SlotMachines) -> LocalBoxFuture<'a, Result<((), String)>>;

pub(super) struct LabStep {
    pub(super) name: &'static str,
    is_quick: bool,
    pub(super) run: RunStep,
}

const fn quick_step(name: &'static str, run: RunStep) -> LabStep {
    LabStep { name, is_quick: true, run }
}

const fn full_step(name: &'static str, run: RunStep) -> LabStep {
    LabStep { name, is_quick: false, run }
}

static STEPS: [LabStep; 35] = [
    quick_step("boot", |stack, machines| Box::pin(stages::measure_boot(stack, &machines.current))),
    quick_step("invariants", |stack, machines| Box::pin(invariants::check_machine(stack, &machines.current))),
    quick_step("use", |stack, _| Box::pin(scenario::insert_and_find_rows(stack))),
    quick_step("dispatch", |stack, machines| Box::pin(agent::run_dispatch(stack, &machines.current))),
    quick_step("reboot", |stack, machines| Box::pin(scenario::reboot(stack, &machines.current))),
    full_step("database-crash", |stack, machines| Box::pin(faults::kill_database(stack, &machines.current))),
    full_step("disk-full", |stack, machines| Box::pin(faults::fill_disk(stack, &machines.current))),
    full_step("resize", |stack, machines| Box::pin(scenario::resize(stack, &machines.current))),
    quick_step("backup", |stack, machines| {
        Box::pin(async { scenario::backup(stack, &machines.current).await.map(|(_, detail)| ((), detail)) })
    }),
    full_step("drill", |stack, machines| Box::pin(scenario::run_drill(stack, &machines.current))),
    full_step("store-outage", |stack, machines| Box::pin(data::interrupt_store(stack, &machines.current))),
    full_step("side-database", |stack, machines| {
        Box::pin(data::restore_from_side_database(stack, &machines.current))
    }),
    full_step("export-import", |stack, machines| Box::pin(data::export_and_import(stack, &machines.current))),
    full_step("failed-recovery", |stack, machines| {
        Box::pin(async {
            let (machine, detail) =
                fail_recovery_midway(stack, &machines.current, scenario::TIMEOUTS).await?;
            (machines.first, machines.current) = (machine.clone(), machine);
            Ok(((), detail))
        })
    }),
    quick_step("files", |stack, machines| {
        Box::pin(async {
            let (saved, detail) = files::save(stack, &machines.current, machines.files_mib).await?;
            machines.files = Some(saved);
            Ok(((), detail))
        })
    }),
    quick_step("later-row", |stack, _| Box::pin(scenario::insert_later_row(stack))),
    quick_step("loss", |stack, machines| Box::pin(scenario::lose_machine(stack, &machines.current))),
    full_step("corrupt-restore", |stack, _| Box::pin(scenario::check_corrupted_snapshot_refused(stack))),
    quick_step("recover", |stack, machines| {
        Box::pin(async {
            let (second, detail) = scenario::recover(stack, &machines.current, machines.files_mib).await?;
            machines.current = second;
            Ok(((), detail))
        })
    }),
    quick_step("rows", |stack, _| Box::pin(scenario::check_restored_rows(stack))),
    quick_step("restored-files", |stack, machines| {
        Box::pin(async {
            let saved = machines.files.as_ref().context("run the step `files` first")?;
            files::check_restored(stack, &machines.current, saved).await
        })
    }),
    full_step("undelete", |stack, machines| Box::pin(undelete(stack, &machines.current, scenario::TIMEOUTS))),
    full_step("fenced", |stack, machines| {
        Box::pin(scenario::check_old_machine_fenced(stack, &machines.first))
    }),
    full_step("clock-jump", |stack, machines| Box::pin(faults::jump_clock(stack, &machines.current))),
    full_step("update", |stack, machines| Box::pin(updates::deploy_update(stack, &machines.current))),
    full_step("power-cut-update", |stack, machines| {
        Box::pin(updates::cut_power_during_update(stack, &machines.current))
    }),
    full_step("bad-update", |stack, machines| {
        Box::pin(updates::roll_back_broken_update(stack, &machines.current))
    }),
    full_step("power-cut-backup", |stack, machines| {
        Box::pin(faults::cut_power_during_backup(stack, &machines.current))
    }),
    full_step("full-release", |stack, machines| {
        Box::pin(updates::deploy_full_release(stack, &machines.current))
    }),
    full_step("bundled-agent", |stack, machines| {
        Box::pin(agent::run_bundled_agents(stack, &machines.current))
    }),
    full_step("attacks", |stack, machines| Box::pin(agent::run_attacks(stack, &machines.current))),
    // Requires the full release, which contains code-server.
    full_step("terminal", |stack, machines| Box::pin(agent::attack_from_terminal(stack, &machines.current))),
    full_step("platform-package", |stack, machines| {
        Box::pin(packages::check_platform_package(stack, &machines.current))
    }),
    full_step("invariants-again", |stack, machines| {
        Box::pin(invariants::check_machine(stack, &machines.current))
    }),
    // Last, because it stops the services.
    full_step("host-package", |stack, machines| {
        Box::pin(packages::check_host_package(stack, &machines.current))
    }),
];

impl StepSelection {
    /// Selects steps by name.
    ///
    /// # Errors
    /// Fails if a name is unknown.
    pub fn only(names: Vec<String>) -> Result<Self> {
        if let Some(unknown) = names.iter().find(|name| STEPS.iter().all(|step| step.name != **name)) {
            let valid_names: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
            bail!("unknown step {unknown}: choose from {}", valid_names.join(", "));
        }
        Ok(Self::Only(names))
    }

    /// Returns the selected steps in the order of `STEPS`.
    pub(super) fn selected(&self) -> Vec<&'static LabStep> {
        let is_selected = |step: &&LabStep| match self {
            Self::Quick => step.is_quick,
            Self::Full => true,
            Self::Only(names) => names.iter().any(|name| name == step.name),
        };
        STEPS.iter().filter(is_selected).collect()
    }
}

//! The list of all acts, in order.

use anyhow::{Result, bail};
use futures_util::future::LocalBoxFuture;

use super::{agent, data, faults, invariants, life, packages, stages, updates};
use kit::story::{self, MachineRecord, Stack};

/// Acts to run on the machine after provisioning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acts {
    /// The main scenario: use, reboot, backup, loss, recovery.
    Quick,
    /// Also the checks that need a real machine.
    Full,
    /// Only these, in the same order: for working on one of them.
    Only(Vec<String>),
}

/// The machines of the slot.
pub(super) struct SlotMachines {
    pub(super) first: MachineRecord,
    /// The serving machine; equal to `first` until a recovery.
    pub(super) current: MachineRecord,
}

type RunAct = for<'a> fn(&'a Stack, &'a mut SlotMachines) -> LocalBoxFuture<'a, Result<((), String)>>;

pub(super) struct LabAct {
    pub(super) name: &'static str,
    is_quick: bool,
    pub(super) run: RunAct,
}

const fn quick_act(name: &'static str, run: RunAct) -> LabAct {
    LabAct { name, is_quick: true, run }
}

const fn full_act(name: &'static str, run: RunAct) -> LabAct {
    LabAct { name, is_quick: false, run }
}

static ACTS: [LabAct; 33] = [
    quick_act("boot", |stack, machines| Box::pin(stages::measure_boot(stack, &machines.current))),
    quick_act("sound", |stack, machines| Box::pin(invariants::check_machine(stack, &machines.current))),
    quick_act("use", |stack, _| Box::pin(life::insert_and_find(stack))),
    quick_act("dispatch", |stack, machines| Box::pin(agent::run_dispatch(stack, &machines.current))),
    quick_act("reboot", |stack, machines| Box::pin(life::reboot(stack, &machines.current))),
    full_act("database-dies", |stack, machines| Box::pin(faults::kill_database(stack, &machines.current))),
    full_act("disk-full", |stack, machines| Box::pin(faults::fill_disk(stack, &machines.current))),
    full_act("resize", |stack, machines| Box::pin(life::resize(stack, &machines.current))),
    quick_act("backup", |stack, machines| {
        Box::pin(async { life::backup(stack, &machines.current).await.map(|(_, detail)| ((), detail)) })
    }),
    full_act("drill", |stack, machines| Box::pin(life::run_drill(stack, &machines.current))),
    full_act("store-away", |stack, machines| Box::pin(data::interrupt_store(stack, &machines.current))),
    full_act("side-database", |stack, machines| {
        Box::pin(data::restore_side_database(stack, &machines.current))
    }),
    full_act("archive", |stack, machines| Box::pin(data::export_and_import(stack, &machines.current))),
    full_act("failed-recovery", |stack, machines| {
        Box::pin(async {
            let (machine, detail) =
                story::fail_recovery_midway(stack, &machines.current, life::TIMEOUTS).await?;
            (machines.first, machines.current) = (machine.clone(), machine);
            Ok(((), detail))
        })
    }),
    quick_act("later-row", |stack, _| Box::pin(life::insert_later_row(stack))),
    quick_act("loss", |stack, machines| Box::pin(life::lose_machine(stack, &machines.current))),
    full_act("bad-restore", |stack, _| Box::pin(life::refuse_damaged_restore(stack))),
    quick_act("recover", |stack, machines| {
        Box::pin(async {
            let (second, detail) = life::recover(stack, &machines.current).await?;
            machines.current = second;
            Ok(((), detail))
        })
    }),
    quick_act("rows", |stack, _| Box::pin(life::check_restored_rows(stack))),
    full_act("undelete", |stack, machines| {
        Box::pin(story::undelete(stack, &machines.current, life::TIMEOUTS))
    }),
    full_act("fenced", |stack, machines| Box::pin(life::fence_old_machine(stack, &machines.first))),
    full_act("clock-jump", |stack, machines| Box::pin(faults::jump_clock(stack, &machines.current))),
    full_act("update", |stack, machines| Box::pin(updates::deploy_update(stack, &machines.current))),
    full_act("cut-in-update", |stack, machines| {
        Box::pin(updates::cut_power_during_update(stack, &machines.current))
    }),
    full_act("bad-update", |stack, machines| {
        Box::pin(updates::roll_back_broken_update(stack, &machines.current))
    }),
    full_act("cut-in-backup", |stack, machines| {
        Box::pin(faults::cut_power_during_backup(stack, &machines.current))
    }),
    full_act("full-release", |stack, machines| {
        Box::pin(updates::deploy_full_release(stack, &machines.current))
    }),
    full_act("bundled-agent", |stack, machines| {
        Box::pin(agent::run_bundled_agents(stack, &machines.current))
    }),
    full_act("attacks", |stack, machines| Box::pin(agent::run_attacks(stack, &machines.current))),
    // Requires the full release, which contains code-server.
    full_act("terminal", |stack, machines| Box::pin(agent::attack_from_terminal(stack, &machines.current))),
    full_act("platform-package", |stack, machines| {
        Box::pin(packages::check_platform_package(stack, &machines.current))
    }),
    full_act("sound-again", |stack, machines| Box::pin(invariants::check_machine(stack, &machines.current))),
    // Last, because it stops the services.
    full_act("host-package", |stack, machines| {
        Box::pin(packages::check_host_package(stack, &machines.current))
    }),
];

impl Acts {
    /// Selects acts by name.
    ///
    /// # Errors
    /// Fails for an unknown name.
    pub fn only(names: Vec<String>) -> Result<Self> {
        if let Some(unknown) = names.iter().find(|name| ACTS.iter().all(|act| act.name != **name)) {
            let known: Vec<&str> = ACTS.iter().map(|act| act.name).collect();
            bail!("unknown act {unknown}: choose from {}", known.join(", "));
        }
        Ok(Self::Only(names))
    }

    /// The selected acts.
    pub(super) fn selected(&self) -> Vec<&'static LabAct> {
        let is_selected = |act: &&LabAct| match self {
            Self::Quick => act.is_quick,
            Self::Full => true,
            Self::Only(names) => names.iter().any(|name| name == act.name),
        };
        ACTS.iter().filter(is_selected).collect()
    }
}

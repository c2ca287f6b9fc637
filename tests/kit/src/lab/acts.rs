//! The acts, in the story's order: the one list that the lab plays from.

use anyhow::{Result, bail};
use futures_util::future::LocalBoxFuture;

use super::{agent, data, faults, life, look, packages, stages, updates};
use crate::story::{self, MachineRecord, Stack};

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

/// The slot's machines as the story goes on.
pub(super) struct Lives {
    pub(super) first: MachineRecord,
    /// The one that serves; the first, until there was a recovery.
    pub(super) now: MachineRecord,
}

type Play = for<'a> fn(&'a Stack, &'a mut Lives) -> LocalBoxFuture<'a, Result<((), String)>>;

pub(super) struct Act {
    pub(super) name: &'static str,
    is_quick: bool,
    pub(super) play: Play,
}

const fn quick(name: &'static str, play: Play) -> Act {
    Act { name, is_quick: true, play }
}

const fn whole(name: &'static str, play: Play) -> Act {
    Act { name, is_quick: false, play }
}

static ACTS: [Act; 32] = [
    quick("boot", |stack, lives| Box::pin(stages::of_boot(stack, &lives.now))),
    quick("sound", |stack, lives| Box::pin(look::sound(stack, &lives.now))),
    quick("use", |stack, _| Box::pin(life::insert_and_find(stack))),
    quick("dispatch", |stack, lives| Box::pin(agent::dispatch(stack, &lives.now))),
    quick("reboot", |stack, lives| Box::pin(life::reboot(stack, &lives.now))),
    whole("database-dies", |stack, lives| Box::pin(faults::database_killed(stack, &lives.now))),
    whole("disk-full", |stack, lives| Box::pin(faults::disk_full(stack, &lives.now))),
    whole("resize", |stack, lives| Box::pin(life::resize(stack, &lives.now))),
    quick("backup", |stack, lives| {
        Box::pin(async { life::backup(stack, &lives.now).await.map(|(_, said)| ((), said)) })
    }),
    whole("drill", |stack, lives| Box::pin(life::drill(stack, &lives.now))),
    whole("store-away", |stack, lives| Box::pin(data::store_away(stack, &lives.now))),
    whole("side-database", |stack, lives| Box::pin(data::side_database(stack, &lives.now))),
    whole("archive", |stack, lives| Box::pin(data::archive(stack, &lives.now))),
    whole("failed-recovery", |stack, lives| {
        Box::pin(async {
            let (back, said) = story::fail_half_way(stack, &lives.now, life::PATIENCE).await?;
            (lives.first, lives.now) = (back.clone(), back);
            Ok(((), said))
        })
    }),
    quick("later-row", |stack, _| Box::pin(life::insert_later(stack))),
    quick("loss", |stack, lives| Box::pin(life::lose(stack, &lives.now))),
    whole("bad-restore", |stack, _| Box::pin(life::refused_restore(stack))),
    quick("recover", |stack, lives| {
        Box::pin(async {
            let (second, said) = life::recover(stack, &lives.now).await?;
            lives.now = second;
            Ok(((), said))
        })
    }),
    quick("rows", |stack, _| Box::pin(life::rows_are_back(stack))),
    whole("undelete", |stack, lives| Box::pin(story::undelete(stack, &lives.now, life::PATIENCE))),
    whole("fenced", |stack, lives| Box::pin(life::old_machine_learns(stack, &lives.first))),
    whole("clock-jump", |stack, lives| Box::pin(faults::clock_jump(stack, &lives.now))),
    whole("update", |stack, lives| Box::pin(updates::update(stack, &lives.now))),
    whole("cut-in-update", |stack, lives| Box::pin(updates::power_cut_in_update(stack, &lives.now))),
    whole("bad-update", |stack, lives| Box::pin(updates::broken_update(stack, &lives.now))),
    whole("cut-in-backup", |stack, lives| Box::pin(faults::power_cut_in_backup(stack, &lives.now))),
    whole("full-release", |stack, lives| Box::pin(updates::full_release(stack, &lives.now))),
    whole("attacks", |stack, lives| Box::pin(agent::attacks(stack, &lives.now))),
    // After the full release, which brings code-server.
    whole("terminal", |stack, lives| Box::pin(agent::terminal(stack, &lives.now))),
    whole("platform-package", |stack, lives| Box::pin(packages::platform_package(stack, &lives.now))),
    whole("sound-again", |stack, lives| Box::pin(look::sound(stack, &lives.now))),
    // Last, since it ends what runs.
    whole("host-package", |stack, lives| Box::pin(packages::host_package(stack, &lives.now))),
];

impl Acts {
    /// These alone.
    ///
    /// # Errors
    /// When one is named that there is not.
    pub fn only(names: Vec<String>) -> Result<Self> {
        if let Some(unknown) = names.iter().find(|name| ACTS.iter().all(|act| act.name != **name)) {
            let known: Vec<&str> = ACTS.iter().map(|act| act.name).collect();
            bail!("the lab has no act {unknown}; its acts are {}", known.join(", "));
        }
        Ok(Self::Only(names))
    }

    /// Those that are played.
    pub(super) fn chosen(&self) -> Vec<&'static Act> {
        let is_played = |act: &&Act| match self {
            Self::Quick => act.is_quick,
            Self::Whole => true,
            Self::Only(names) => names.iter().any(|name| name == act.name),
        };
        ACTS.iter().filter(is_played).collect()
    }
}

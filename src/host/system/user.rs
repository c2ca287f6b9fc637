//! As which user a program of the machine works when root calls it by hand.
//!
//! Root opens nothing by a path that one of the machine's two users can change. What has to be read or written there is
//! done by a process of that user: [`step_down`] for a program as a whole, [`program_as`] for a part of it.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::{Gid, Uid, geteuid, setgid, setgroups, setuid};
use tokio::process::Command;

use super::layout::Layout;
use crate::failpoint;

/// Root becomes the user whose env files these are, as the units have it: files that root made could not be written by
/// the next run of a unit. To be called before there is another thread.
///
/// # Errors
/// When the kernel refuses.
pub fn step_down(layout: &Layout) -> anyhow::Result<()> {
    let has_tools = std::env::var_os("SVC_PG_BIN_DIR").is_some()
        || layout.link("runtime").join("postgres/bin/pg_dump").exists();
    if !has_tools {
        // Those of the database's container are for root alone.
        return Ok(());
    }
    become_gateway(layout)
}

/// As [`step_down`], with or without tools of PostgreSQL: for programs that read or write the home.
///
/// # Errors
/// When the kernel refuses.
pub fn become_gateway(layout: &Layout) -> anyhow::Result<()> {
    let Ok(meta) = std::fs::metadata(layout.host_env()) else { return Ok(()) };
    if !geteuid().is_root() || meta.uid() == 0 {
        return Ok(());
    }
    // It is of the owner's group, too: its records lie in the home.
    let home = std::fs::metadata(layout.home()).map(|meta| Gid::from_raw(meta.gid()));
    let groups: Vec<Gid> = home.into_iter().filter(|gid| gid.as_raw() != 0).collect();
    setgroups(&groups)?;
    setgid(Gid::from_raw(meta.gid()))?;
    setuid(Uid::from_raw(meta.uid()))?;
    Ok(())
}

/// The users of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineUser {
    /// `svc-gateway`: env files, database, records.
    Gateway,
    /// `svc`: the owner's home.
    Owner,
}

/// What a process of the owner's user may see of root's environment.
const OWNERS_VARIABLES: [&str; 4] = ["PATH", "LANG", "RUST_LOG", "SVC_ROOT"];

/// An applet of ours as a process for another user, killed when this is dropped. For the gateway's user it calls
/// [`become_gateway`] first; for the owner's it is that user's from the start. Where this process is not root, or the machine
/// has only root, it is a process of this user.
///
/// # Errors
/// When the user is not known.
pub fn program_as(layout: &Layout, user: MachineUser, args: &[&str]) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args).kill_on_drop(true).current_dir("/");
    if user == MachineUser::Owner {
        let names = OWNERS_VARIABLES.into_iter().chain(failpoint::VARIABLE);
        let passed = names.filter_map(|name| Some((name, std::env::var_os(name)?)));
        let passed: Vec<_> = passed.collect();
        command.env_clear().envs(passed);
        if let Some((uid, gid)) = owner_ids(layout)? {
            command.uid(uid).gid(gid);
        }
    }
    Ok(command)
}

/// Lets the kernel end this process, which [`program_as`] started, when the one that started it is gone.
pub fn end_with_parent() {
    if let Err(error) = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGTERM) {
        tracing::warn!(%error, "this process may outlive the one that started it");
    }
}

/// Whether this is root on a machine whose users are others.
///
/// # Errors
/// When the machine has no env file.
pub fn is_root_for_others(layout: &Layout) -> io::Result<bool> {
    Ok(geteuid().is_root() && std::fs::metadata(layout.host_env())?.uid() != 0)
}

/// Directories above these belong to root: what they say of the owner's user only root can change.
fn owner_ids(layout: &Layout) -> io::Result<Option<(u32, u32)>> {
    if !is_root_for_others(layout)? {
        return Ok(None);
    }
    let of = |path: &Path| {
        std::fs::symlink_metadata(path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
    };
    let (uid, gid) = (of(&layout.owner_sockets())?.uid(), of(&layout.home())?.gid());
    if uid == 0 || gid == 0 {
        let why = format!("{} does not belong to the owner's user", layout.owner_sockets().display());
        return Err(io::Error::other(why));
    }
    Ok(Some((uid, gid)))
}

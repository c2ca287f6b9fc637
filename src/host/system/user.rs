//! The user that a program of the machine runs as when root starts it by hand.
//!
//! Root opens no path that one of the machine's two users can change. A process of that user reads and writes there:
//! [`step_down`] for a whole program, [`program_as`] for a part of it.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::{Gid, Uid, geteuid, setgid, setgroups, setuid};
use tokio::process::Command;

use super::layout::Layout;
use super::vars;
use svc_base::failpoint;

/// Root becomes the user that owns the env files, as the units do: the next run of a unit could not write files of
/// root. Must be called before another thread exists.
///
/// # Errors
/// If the kernel refuses.
pub fn step_down(layout: &Layout) -> anyhow::Result<()> {
    let has_tools = vars::SVC_PG_BIN_DIR.from_process().is_some()
        || layout.link("runtime").join("postgres/bin/pg_dump").exists();
    if !has_tools {
        // The tools in the database's container are usable only by root.
        return Ok(());
    }
    become_gateway(layout)
}

/// Like [`step_down`], but even without PostgreSQL tools, for programs that read or write the home.
///
/// # Errors
/// If the kernel refuses.
pub fn become_gateway(layout: &Layout) -> anyhow::Result<()> {
    let Ok(meta) = std::fs::metadata(layout.host_env()) else { return Ok(()) };
    if !geteuid().is_root() || meta.uid() == 0 {
        return Ok(());
    }
    // The gateway's user is in the owner's group, because its records are in the home.
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

/// Variables of root's environment that a process of the owner's user inherits.
const OWNER_VARIABLES: [&str; 4] = ["PATH", "LANG", "RUST_LOG", "SVC_ROOT"];

/// One of our applets as a process of another user, killed when it is dropped. For the gateway's user the applet
/// calls [`become_gateway`] first; for the owner's user it starts as that user. If this process is not root, or the
/// machine has only root, it keeps the current user.
///
/// # Errors
/// If the user is unknown.
pub fn program_as(layout: &Layout, user: MachineUser, args: &[&str]) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args).kill_on_drop(true).current_dir("/");
    if user == MachineUser::Owner {
        let names = OWNER_VARIABLES.into_iter().chain(failpoint::VARIABLE);
        let passed = names.filter_map(|name| Some((name, std::env::var_os(name)?)));
        let passed: Vec<_> = passed.collect();
        command.env_clear().envs(passed);
        if let Some((uid, gid)) = owner_ids(layout)? {
            command.uid(uid).gid(gid);
        }
    }
    Ok(command)
}

/// Makes the kernel end this process, which [`program_as`] started, together with its parent.
pub fn end_with_parent() {
    if let Err(error) = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGTERM) {
        tracing::warn!(%error, "could not bind this process to its parent; it may outlive it");
    }
}

/// Whether this process is root on a machine with separate users.
///
/// # Errors
/// If the machine has no env file.
pub fn is_root_for_others(layout: &Layout) -> io::Result<bool> {
    Ok(geteuid().is_root() && std::fs::metadata(layout.host_env())?.uid() != 0)
}

/// The parent directories belong to root, so only root can change these owners.
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

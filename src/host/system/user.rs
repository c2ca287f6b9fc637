//! Switches programs that root starts by hand to the appropriate user on the machine.
//!
//! A user could replace a path in its own directories with a symbolic link, so these programs read and write such
//! paths not as root, but in a process that runs as that user. [`switch_user_for_database_tools`] is for a whole
//! program, and [`applet_command`] for part of one.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::{Gid, Uid, geteuid, setgid, setgroups, setuid};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_keep_capabilities};
use tokio::process::Command;

use super::layout::Layout;
use super::vars;
use svc_base::failpoint;

/// Switches from root to the gateway's user, which owns the env files and runs the units: a unit's next run could not
/// write to files that root created. Does nothing if only the database container has the PostgreSQL tools. Must be
/// called before other threads are started.
///
/// # Errors
/// If the user or the groups cannot be changed.
pub fn switch_user_for_database_tools(layout: &Layout) -> anyhow::Result<()> {
    let has_tools = vars::SVC_PG_BIN_DIR.env_value().is_some()
        || layout.link("runtime").join("postgres/bin/pg_dump").exists();
    if !has_tools {
        // Only root can use the tools in the database container.
        return Ok(());
    }
    switch_to_gateway_user(layout)
}

/// Like [`switch_user_for_database_tools`], but even without PostgreSQL tools, for programs that read or write the home
/// directory. Does nothing if this process is not root, or if `host.env` does not exist or belongs to root.
///
/// # Errors
/// If the user or the groups cannot be changed.
pub fn switch_to_gateway_user(layout: &Layout) -> anyhow::Result<()> {
    let Ok(meta) = std::fs::metadata(layout.host_env()) else { return Ok(()) };
    if !geteuid().is_root() || meta.uid() == 0 {
        return Ok(());
    }
    // The gateway's user is in the owner's group, because its records are in the home directory.
    let home = std::fs::metadata(layout.home()).map(|meta| Gid::from_raw(meta.gid()));
    let groups: Vec<Gid> = home.into_iter().filter(|gid| gid.as_raw() != 0).collect();
    setgroups(&groups)?;
    setgid(Gid::from_raw(meta.gid()))?;
    setuid(Uid::from_raw(meta.uid()))?;
    Ok(())
}

/// Like [`switch_to_gateway_user`], but keeps `capabilities`, as a unit with ambient capabilities does.
///
/// # Errors
/// If the user, the groups or the capabilities cannot be changed.
pub fn switch_to_gateway_user_with(layout: &Layout, capabilities: CapabilitySet) -> anyhow::Result<()> {
    if !geteuid().is_root() {
        return Ok(());
    }
    set_keep_capabilities(true)?;
    switch_to_gateway_user(layout)?;
    if geteuid().is_root() {
        return Ok(());
    }
    // The change of user has cleared the effective set, but not the permitted one.
    let sets = CapabilitySets {
        effective: capabilities,
        permitted: capabilities,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

/// The users of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineUser {
    /// `svc-gateway`: env files, database, records.
    Gateway,
    /// `svc`: the owner's home directory.
    Owner,
}

/// Variables that a process running as the owner's user inherits from root.
const OWNER_VARIABLES: [&str; 4] = ["PATH", "LANG", "RUST_LOG", "SVC_ROOT"];

/// Builds the command that runs one of our applets as another user; the process is killed when its handle is dropped.
/// For the gateway's user, the applet calls [`switch_to_gateway_user`] first; for the owner's user, it starts as that
/// user. If this process is not root, or the machine has no separate users, the applet keeps the current user.
///
/// # Errors
/// If the path of this executable cannot be found; for the owner's user, also if root cannot determine that user's ids.
pub fn applet_command(layout: &Layout, user: MachineUser, args: &[&str]) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args).kill_on_drop(true).current_dir("/");
    if user == MachineUser::Owner {
        let names = OWNER_VARIABLES.into_iter().chain(failpoint::VARIABLE);
        let inherited: Vec<_> = names.filter_map(|name| Some((name, std::env::var_os(name)?))).collect();
        command.env_clear().envs(inherited);
        if let Some((uid, gid)) = read_owner_ids(layout)? {
            command.uid(uid).gid(gid);
        }
    }
    Ok(command)
}

/// Makes the kernel send SIGTERM to this process, which [`applet_command`] started, when the thread that started it
/// ends.
pub fn set_parent_death_signal() {
    if let Err(error) = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGTERM) {
        tracing::warn!(%error, "cannot set the parent-death signal; this process may outlive its parent");
    }
}

/// Returns whether this process is root on a machine with separate users.
///
/// # Errors
/// If this process is root, and `host.env` does not exist or cannot be inspected.
pub fn is_root_with_separate_users(layout: &Layout) -> io::Result<bool> {
    Ok(geteuid().is_root() && std::fs::metadata(layout.host_env())?.uid() != 0)
}

/// Reads the user id and group id of the owner's user from directories whose parents belong to root, so that only root
/// can replace them; `None` if this process is not root, or on a machine without separate users.
fn read_owner_ids(layout: &Layout) -> io::Result<Option<(u32, u32)>> {
    if !is_root_with_separate_users(layout)? {
        return Ok(None);
    }
    let metadata_of = |path: &Path| {
        std::fs::symlink_metadata(path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
    };
    let (uid, gid) = (metadata_of(&layout.owner_sockets())?.uid(), metadata_of(&layout.home())?.gid());
    if uid == 0 || gid == 0 {
        let (sockets, home) = (layout.owner_sockets(), layout.home());
        let reason = format!(
            "{} must belong to the owner's user, and {} to that user's group, not to root",
            sockets.display(),
            home.display()
        );
        return Err(io::Error::other(reason));
    }
    Ok(Some((uid, gid)))
}

//! User switching for programs started manually as root.
//!
//! Users can replace paths in their own directories with symlinks, so root must not access those paths itself: only a
//! process running as the directory's user may. [`switch_user_for_database_tools`] switches the whole program, and
//! [`applet_command`] runs part of it in a child process.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::{Gid, Uid, geteuid, setgid, setgroups, setuid};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_keep_capabilities};
use tokio::process::Command;

use super::layout::Layout;
use super::vars;
use svc_base::failpoint;

/// Switches from root to the gateway user, which owns the env files and runs the units; files created by root wouldn't
/// be writable by a unit's next run. No-op if only the database container has the PostgreSQL tools. Must be called
/// before any other threads are spawned.
///
/// # Errors
/// If the user or groups can't be changed.
pub fn switch_user_for_database_tools(layout: &Layout) -> anyhow::Result<()> {
    let has_tools = vars::SVC_PG_BIN_DIR.env_value().is_some()
        || layout.link("runtime").join("postgres/bin/pg_dump").exists();
    if !has_tools {
        // Only root can use the tools in the container.
        return Ok(());
    }
    switch_to_gateway_user(layout)
}

/// Like [`switch_user_for_database_tools`], but regardless of PostgreSQL tools, for programs that access the home
/// directory. No-op if not root, or if `host.env` doesn't exist or belongs to root.
///
/// # Errors
/// If the user or groups can't be changed.
pub fn switch_to_gateway_user(layout: &Layout) -> anyhow::Result<()> {
    let Ok(meta) = std::fs::metadata(layout.host_env()) else { return Ok(()) };
    if !geteuid().is_root() || meta.uid() == 0 {
        return Ok(());
    }
    // The gateway user is in the owner's group, because the gateway stores records in the home directory.
    let home = std::fs::metadata(layout.home()).map(|meta| Gid::from_raw(meta.gid()));
    let groups: Vec<Gid> = home.into_iter().filter(|gid| gid.as_raw() != 0).collect();
    setgroups(&groups)?;
    setgid(Gid::from_raw(meta.gid()))?;
    setuid(Uid::from_raw(meta.uid()))?;
    Ok(())
}

/// Like [`switch_to_gateway_user`], but retains `capabilities`, like a unit with ambient capabilities.
///
/// # Errors
/// If the user, groups or capabilities can't be changed.
pub fn switch_to_gateway_user_with(layout: &Layout, capabilities: CapabilitySet) -> anyhow::Result<()> {
    if !geteuid().is_root() {
        return Ok(());
    }
    set_keep_capabilities(true)?;
    switch_to_gateway_user(layout)?;
    if geteuid().is_root() {
        return Ok(());
    }
    // Changing the user cleared the effective set, but not the permitted one.
    let sets = CapabilitySets {
        effective: capabilities,
        permitted: capabilities,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

/// Unprivileged users on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineUser {
    /// `svc-gateway`: env files, database, records.
    Gateway,
    /// `svc`: the owner's home directory.
    Owner,
}

/// Environment variables passed from root to a process running as the owner.
const OWNER_VARIABLES: [&str; 4] = ["PATH", "LANG", "RUST_LOG", "SVC_ROOT"];

/// Builds a command that runs one of our applets as another user and is killed when its handle is dropped. Gateway
/// applets start as root and call [`switch_to_gateway_user`] first; owner applets start as the owner. If we aren't
/// root, or the machine has no separate users, the applet runs as the current user.
///
/// # Errors
/// If the executable path can't be determined. For the owner, also if we're root and can't determine the owner's ids.
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

/// Asks the kernel to send SIGTERM to this process, started by [`applet_command`], when the parent thread that spawned
/// it exits.
pub fn set_parent_death_signal() {
    if let Err(error) = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGTERM) {
        tracing::warn!(%error, "cannot set parent-death signal; this process may outlive its parent");
    }
}

/// Returns whether we're running as root on a machine with separate users.
///
/// # Errors
/// If running as root and `host.env` doesn't exist or can't be inspected.
pub fn is_root_with_separate_users(layout: &Layout) -> io::Result<bool> {
    Ok(geteuid().is_root() && std::fs::metadata(layout.host_env())?.uid() != 0)
}

/// Reads the owner's uid and gid from directories with root-owned parents, which only root can replace. Returns `None`
/// if not root, or on a machine without separate users.
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

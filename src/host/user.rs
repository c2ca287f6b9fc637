//! Which user a program of the machine works as when root calls it by hand.

use std::os::unix::fs::MetadataExt;

use nix::unistd::{Gid, Uid, geteuid, setgid, setgroups, setuid};

use super::layout::Layout;

/// Root becomes the user whose env files these are, as the units have it: files that root made could not be written by
/// the next run of a unit. To be called before there is another thread.
///
/// # Errors
/// When the kernel refuses.
pub fn step_down(layout: &Layout) -> anyhow::Result<()> {
    let Ok(meta) = std::fs::metadata(layout.host_env()) else { return Ok(()) };
    if !geteuid().is_root() || meta.uid() == 0 {
        return Ok(());
    }
    let has_tools = std::env::var_os("SVC_PG_BIN_DIR").is_some()
        || layout.link("runtime").join("postgres/bin/pg_dump").exists();
    if !has_tools {
        // Those of the database's container are for root alone.
        return Ok(());
    }
    setgroups(&[])?;
    setgid(Gid::from_raw(meta.gid()))?;
    setuid(Uid::from_raw(meta.uid()))?;
    Ok(())
}

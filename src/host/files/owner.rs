//! The Unix account of the owner's files, and access to the root-owned directories that contain them.

use std::io;
use std::path::Path;

use svc_base::accounts::Accounts;
use svc_base::beneath::DirFd;

use crate::system::layout::Layout;

/// Returns the ids of the user and the group `svc`; `None` if the system does not have both, as in tests.
pub fn owner_ids(layout: &Layout) -> Option<(u32, u32)> {
    let names = Accounts::load(layout.root()).names();
    names.uid("svc").zip(names.gid("svc"))
}

/// Opens a root-owned directory that contains the owner's files. Files in it are accepted if they belong to the owner's
/// user, even though the directory itself does not.
///
/// # Errors
/// If the directory cannot be opened.
pub fn open_home(layout: &Layout, path: &Path) -> io::Result<DirFd> {
    let directory = DirFd::open(path)?;
    Ok(match owner_ids(layout) {
        Some((uid, _)) => directory.with_owner(uid),
        None => directory,
    })
}

//! The Unix account of the owner's files, and access to the root-owned directories that contain them.

use std::io;
use std::path::Path;

use svc_base::accounts::Accounts;
use svc_base::beneath::DirFd;

use crate::system::layout::Layout;

/// Returns the ids of the user and the group; `None` where the system has no such account, as in tests.
pub fn owner_ids(layout: &Layout) -> Option<(u32, u32)> {
    let names = Accounts::load(layout.root()).names();
    names.uid("svc").zip(names.gid("svc"))
}

/// Opens a root-owned directory that contains the owner's files.
///
/// # Errors
/// File system errors.
pub fn open_home(layout: &Layout, path: &Path) -> io::Result<DirFd> {
    let directory = DirFd::open(path)?;
    Ok(match owner_ids(layout) {
        Some((uid, _)) => directory.with_owner(uid),
        None => directory,
    })
}

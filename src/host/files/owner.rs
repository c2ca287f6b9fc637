//! The owner's Unix account, and access to the root-owned directories holding the owner's files.

use std::io;
use std::path::Path;

use svc_base::accounts::Accounts;
use svc_base::beneath::DirFd;

use crate::system::layout::Layout;

/// Returns the uid and gid of `svc`, or `None` unless both exist, as in tests.
pub fn owner_ids(layout: &Layout) -> Option<(u32, u32)> {
    let names = Accounts::load(layout.root()).names();
    names.uid("svc").zip(names.gid("svc"))
}

/// Opens a root-owned directory holding the owner's files. Files in it may belong to the owner's user, even though the
/// directory itself doesn't.
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

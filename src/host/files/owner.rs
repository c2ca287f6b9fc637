//! The Unix account of the owner's files, and access to the directories of root in which they are.

use std::io;
use std::path::Path;

use svc_base::accounts::Accounts;
use svc_base::beneath::Folder;

use crate::system::layout::Layout;

/// Returns the ids of the user and the group; `None` where the system has no such account, as in tests.
pub fn owner_ids(layout: &Layout) -> Option<(u32, u32)> {
    let names = Accounts::load(layout.root()).names();
    names.uid("svc").zip(names.gid("svc"))
}

/// Opens a directory of root that contains the owner's files.
///
/// # Errors
/// File system errors.
pub fn open_home(layout: &Layout, path: &Path) -> io::Result<Folder> {
    let folder = Folder::open(path)?;
    Ok(match owner_ids(layout) {
        Some((uid, _)) => folder.with_owner(uid),
        None => folder,
    })
}

//! Hard links, owners, modes, times and extended attributes.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use rustix::fs::{AtFlags, Gid, Timespec, Timestamps, Uid};

use svc_base::accounts::AccountNames;
use svc_base::untrusted_text::truncate_printable;

use super::Restored;
use super::plan::{PlannedEntry, RestorePlan};
use super::target::Target;
use crate::error::FilesError;
use crate::tree::{Node, NodeType};
use crate::xattrs::write_xattrs;

/// Who owns what is restored.
pub(super) enum Owners {
    /// The accounts of the same names on this system, else the same numbers.
    Saved(AccountNames),
    Fixed {
        uid: u32,
        gid: u32,
    },
}

impl Owners {
    fn resolve(&self, node: &Node) -> (u32, u32) {
        match self {
            Self::Saved(names) => {
                (names.uid(&node.user).unwrap_or(node.uid), names.gid(&node.group).unwrap_or(node.gid))
            }
            Self::Fixed { uid, gid } => (*uid, *gid),
        }
    }

    /// A file that runs with the rights of its owner must not do so for another owner.
    fn resolve_mode(&self, node: &Node) -> u32 {
        match self {
            Self::Fixed { .. } if node.node_type == NodeType::File => node.unix_mode() & 0o1777,
            _ => node.unix_mode(),
        }
    }
}

/// Creates hard links, and sets owners, modes, times and attributes.
///
/// # Errors
/// If a hard link cannot be created, or the files cannot be written to the disk. Other failures are counted.
pub(super) fn apply(plan: &RestorePlan, path: &Path, owners: &Owners) -> Result<Restored, FilesError> {
    let mut target = Target::open(path).map_err(FilesError::io("open", path))?;
    let mut restored = Restored {
        files: (plan.files.len() + plan.hard_links.len()) as u64,
        directories: plan.directories.len() as u64,
        bytes: plan.total_bytes,
        ..Restored::default()
    };
    for (path, file) in &plan.hard_links {
        let linked = target.create_hard_link(path, &plan.files[*file as usize].path);
        linked.map_err(FilesError::io("create the hard link", path))?;
    }
    let mut count = |entry: &PlannedEntry, result: io::Result<()>| {
        if let Err(error) = result {
            restored.incomplete += 1;
            let describe = || truncate_printable(&format!("{}: {error}", entry.path.display()));
            restored.first_incomplete.get_or_insert_with(describe);
        }
    };
    for link in &plan.links {
        count(link, apply_to_link(&mut target, link, owners));
    }
    for file in &plan.files {
        count(file, apply_to_open(&mut target, file, owners));
    }
    // A directory's times change when its entries do, so the deepest come first.
    for directory in plan.directories.iter().rev() {
        count(directory, apply_to_open(&mut target, directory, owners));
    }
    let opened = File::open(path).map_err(FilesError::io("open", path))?;
    nix::unistd::syncfs(&opened).map_err(FilesError::io("sync", path))?;
    Ok(restored)
}

fn apply_to_open(target: &mut Target, entry: &PlannedEntry, owners: &Owners) -> io::Result<()> {
    let PlannedEntry { path, node } = entry;
    let file = target.open_for_reading(path)?;
    let (uid, gid) = owners.resolve(node);
    // Changing the owner clears the set-user-ID bit, so the mode follows; the mode may make attributes unwritable. A
    // failed step does not prevent the next ones.
    let attributes = write_xattrs(&file, &node.extended_attributes);
    let owner = change_owner(&file, uid, gid);
    let mode = file.set_permissions(Permissions::from_mode(owners.resolve_mode(node)));
    let times = rustix::fs::futimens(&file, &to_times(node));
    attributes.and(owner).and(mode).and(times.map_err(io::Error::from))
}

/// Changes the owner unless it is already the right one: a sandbox may forbid the system call.
fn change_owner(file: &File, uid: u32, gid: u32) -> io::Result<()> {
    let meta = file.metadata()?;
    if (meta.uid(), meta.gid()) == (uid, gid) { Ok(()) } else { fchown(file, Some(uid), Some(gid)) }
}

fn apply_to_link(target: &mut Target, link: &PlannedEntry, owners: &Owners) -> io::Result<()> {
    let (uid, gid) = owners.resolve(&link.node);
    let (parent, name) = target.locate(&link.path)?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let owner = rustix::fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW);
    let times = rustix::fs::utimensat(parent, name, &to_times(&link.node), AtFlags::SYMLINK_NOFOLLOW);
    Ok(owner.and(times)?)
}

fn to_times(node: &Node) -> Timestamps {
    // The nanoseconds of a time before 1970 are negative in jiff, but count forward in a timespec.
    let nanoseconds = node.mtime.as_nanosecond();
    let seconds = nanoseconds.div_euclid(1_000_000_000);
    let time = Timespec {
        tv_sec: i64::try_from(seconds).unwrap_or(0),
        tv_nsec: i64::try_from(nanoseconds.rem_euclid(1_000_000_000)).unwrap_or(0),
    };
    Timestamps { last_access: time, last_modification: time }
}

//! Sets the owners, modes, times and extended attributes of restored entries.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use jiff::Timestamp;
use rustix::fs::{AtFlags, Gid, Timespec, Timestamps, Uid};

use svc_base::accounts::AccountNames;
use svc_base::untrusted_text::truncate_printable;

use super::RestoreReport;
use super::batch::{Batch, PlannedEntry};
use super::target::Target;
use crate::error::FilesError;
use crate::path_stack::PathStack;
use crate::tree::{ExtendedAttribute, Node, NodeType};
use crate::xattrs::write_xattrs;

/// Ownership of restored entries.
pub(super) enum Owners {
    /// Accounts with the saved names on this system, falling back to the saved ids.
    Saved(AccountNames),
    Fixed {
        uid: u32,
        gid: u32,
    },
}

impl Owners {
    fn resolve(&self, node: Node) -> Attributes {
        // Strip set-ID bits, so that no file runs with another account's privileges: anyone with the repository key can
        // write a snapshot containing a setuid-root file.
        let mode = match node.node_type {
            NodeType::File => node.unix_mode() & 0o1777,
            _ => node.unix_mode(),
        };
        let (uid, gid) = match self {
            Self::Saved(names) => {
                (names.uid(&node.user).unwrap_or(node.uid), names.gid(&node.group).unwrap_or(node.gid))
            }
            Self::Fixed { uid, gid } => (*uid, *gid),
        };
        Attributes { uid, gid, mode, modified_at: node.mtime, extended: node.extended_attributes }
    }
}

/// The attributes to set on an entry.
#[derive(Debug)]
struct Attributes {
    uid: u32,
    gid: u32,
    mode: u32,
    modified_at: Timestamp,
    extended: Vec<ExtendedAttribute>,
}

/// Sets the attributes of entries. Failures are counted and don't prevent later changes.
pub(super) struct AttributeWriter {
    owners: Owners,
    /// Set last: creating entries in a directory changes its times, and its mode may forbid it. Parents precede their
    /// subdirectories.
    directories: Vec<Attributes>,
    /// Paths of `directories`, in the same order.
    directory_paths: PathStack,
    report: RestoreReport,
}

impl AttributeWriter {
    pub(super) fn new(owners: Owners) -> Self {
        Self {
            owners,
            directories: Vec::new(),
            directory_paths: PathStack::default(),
            report: RestoreReport::default(),
        }
    }

    /// Sets the attributes of a batch's files and symbolic links, and defers its directories to [`Self::finish`].
    ///
    /// # Errors
    /// [`FilesError::Io`] if the target can't be opened.
    pub(super) fn apply(&mut self, batch: Batch, target: &Path) -> Result<(), FilesError> {
        let mut target = Target::open(target).map_err(FilesError::io("open", target))?;
        self.report.files += (batch.files.len() + batch.hard_links.len()) as u64;
        self.report.directories += batch.directories.len() as u64;
        for PlannedEntry { path, node } in batch.symlinks {
            let result = apply_to_symlink(&mut target, &path, &self.owners.resolve(node));
            self.count_failure(&path, result);
        }
        for PlannedEntry { path, node } in batch.files {
            self.report.bytes += node.size;
            let result = apply_to_file_or_directory(&mut target, &path, &self.owners.resolve(node));
            self.count_failure(&path, result);
        }
        for PlannedEntry { path, node } in batch.directories {
            let attributes = self.owners.resolve(node);
            self.directory_paths.push(&path);
            self.directories.push(attributes);
        }
        Ok(())
    }

    /// Sets the attributes of all directories and syncs the file system.
    ///
    /// # Errors
    /// [`FilesError::Io`] if the target can't be opened or synced.
    pub(super) fn finish(mut self, path: &Path) -> Result<RestoreReport, FilesError> {
        let mut target = Target::open(path).map_err(FilesError::io("open", path))?;
        while let (Some(path), Some(attributes)) = (self.directory_paths.pop(), self.directories.pop()) {
            let result = apply_to_file_or_directory(&mut target, &path, &attributes);
            self.count_failure(&path, result);
        }
        let opened = File::open(path).map_err(FilesError::io("open", path))?;
        nix::unistd::syncfs(&opened).map_err(FilesError::io("sync", path))?;
        Ok(self.report)
    }

    fn count_failure(&mut self, path: &Path, result: io::Result<()>) {
        if let Err(error) = result {
            self.report.incomplete += 1;
            let describe = || truncate_printable(&format!("{}: {error}", path.display()));
            self.report.first_incomplete.get_or_insert_with(describe);
        }
    }
}

fn apply_to_file_or_directory(target: &mut Target, path: &Path, attributes: &Attributes) -> io::Result<()> {
    let file = target.open_for_reading(path)?;
    // Set the mode after the owner, because chown can clear a directory's set-ID bits, and after the extended
    // attributes, because the mode may make them unwritable. Attempt every step even if an earlier one fails.
    let extended = write_xattrs(&file, &attributes.extended);
    let owner = change_owner(&file, attributes.uid, attributes.gid);
    let mode = file.set_permissions(Permissions::from_mode(attributes.mode));
    let times = rustix::fs::futimens(&file, &to_times(attributes.modified_at));
    extended.and(owner).and(mode).and(times.map_err(io::Error::from))
}

/// Changes the owner unless it already matches: a sandbox may forbid the system call.
fn change_owner(file: &File, uid: u32, gid: u32) -> io::Result<()> {
    let meta = file.metadata()?;
    if (meta.uid(), meta.gid()) == (uid, gid) { Ok(()) } else { fchown(file, Some(uid), Some(gid)) }
}

fn apply_to_symlink(target: &mut Target, path: &Path, attributes: &Attributes) -> io::Result<()> {
    let (parent, name) = target.locate(path)?;
    let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
    let owner = rustix::fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW);
    let times = to_times(attributes.modified_at);
    let times = rustix::fs::utimensat(parent, name, &times, AtFlags::SYMLINK_NOFOLLOW);
    Ok(owner.and(times)?)
}

fn to_times(time: Timestamp) -> Timestamps {
    // Before the Unix epoch, jiff's nanoseconds are negative, but a timespec's still count forward.
    let nanoseconds = time.as_nanosecond();
    let seconds = nanoseconds.div_euclid(1_000_000_000);
    let time = Timespec {
        tv_sec: i64::try_from(seconds).unwrap_or(0),
        tv_nsec: i64::try_from(nanoseconds.rem_euclid(1_000_000_000)).unwrap_or(0),
    };
    Timestamps { last_access: time, last_modification: time }
}

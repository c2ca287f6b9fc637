//! The home's entries of an archive, put in place: each by one rename in a directory that is not the owner's to change, so
//! that no link of the owner's programs leads root anywhere else.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, lchown};
use std::path::{Path, PathBuf};

use super::archived::Staged;
use crate::fsx::{self, FileError};
use crate::host::archive::{BEFORE, STAGED};
use crate::host::layout::Layout;

/// The gateway's part of the home. Services have it mounted: what is in it is replaced, not the directory.
const SYSTEM: &str = "system";

/// What runs that were killed left.
///
/// # Errors
/// [`FileError`].
pub fn remove_staged(home: &Path) -> Result<(), FileError> {
    for name in names(home)? {
        if name.to_string_lossy().starts_with(STAGED) {
            let path = home.join(name);
            fs::remove_dir_all(&path).map_err(FileError::at("remove", &path))?;
        }
    }
    Ok(())
}

/// Puts everything in place; gives the directory with what was there before, if anything was.
///
/// # Errors
/// [`FileError`]; what is in place then is whole, and so is what is not.
pub fn place(layout: &Layout, staged: &Staged) -> Result<Option<PathBuf>, FileError> {
    let home = layout.home();
    let before = home.join(format!("{BEFORE}{}", staged.number));
    let owners = metadata(&layout.apps()).or_else(|| metadata(&home));
    let gateways = metadata(&home.join(SYSTEM)).or_else(|| metadata(&home));
    for name in names(&staged.home)? {
        let from = staged.home.join(&name);
        if name == SYSTEM && from.is_dir() && !from.is_symlink() {
            give(&from, gateways.as_ref())?;
            let to = home.join(SYSTEM);
            if metadata(&to).is_some_and(|meta| meta.is_dir()) {
                for inside in names(&from)? {
                    exchange(&from.join(&inside), &to.join(&inside), &before.join(SYSTEM).join(&inside))?;
                }
                continue;
            }
        }
        give(&from, if name == SYSTEM { gateways.as_ref() } else { owners.as_ref() })?;
        exchange(&from, &home.join(&name), &before.join(&name))?;
    }
    fs::remove_dir_all(&staged.home).map_err(FileError::at("remove", &staged.home))?;
    fsx::sync_dir(&home)?;
    if !before.exists() {
        return Ok(None);
    }
    give_one(&before, owners.as_ref())?;
    Ok(Some(before))
}

/// `from` becomes `to`, and what was `to` becomes `before`.
fn exchange(from: &Path, to: &Path, before: &Path) -> Result<(), FileError> {
    if fs::symlink_metadata(to).is_ok() {
        let dir = before.parent().unwrap_or(before);
        let mut private = fs::DirBuilder::new();
        private.recursive(true).mode(0o750).create(dir).map_err(FileError::at("create directory", dir))?;
        fs::rename(to, before).map_err(FileError::at("put aside", to))?;
    }
    fs::rename(from, to).map_err(FileError::at("put in place", to))
}

/// A file of root's becomes its directory's owner's.
///
/// # Errors
/// [`FileError`].
pub fn give_as_beside(path: &Path) -> Result<(), FileError> {
    give_one(path, path.parent().and_then(metadata).as_ref())
}

/// The file becomes the owner's of `model`.
pub fn give_as(path: &Path, model: &Path) -> Result<(), FileError> {
    give_one(path, metadata(model).as_ref())
}

/// The whole tree becomes this one's owner's; links themselves, not what they lead to.
fn give(tree: &Path, owner: Option<&Metadata>) -> Result<(), FileError> {
    give_one(tree, owner)?;
    if fs::symlink_metadata(tree).is_ok_and(|meta| meta.is_dir()) {
        for name in names(tree)? {
            give(&tree.join(name), owner)?;
        }
    }
    Ok(())
}

fn give_one(path: &Path, owner: Option<&Metadata>) -> Result<(), FileError> {
    let Some(owner) = owner else { return Ok(()) };
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        // All that this user makes is this user's.
        return Ok(());
    }
    let mode = fs::symlink_metadata(path).map_err(FileError::at("look at", path))?;
    lchown(path, Some(owner.uid()), Some(owner.gid())).map_err(FileError::at("give away", path))?;
    if mode.is_symlink() {
        return Ok(());
    }
    // The kernel takes setgid away with it.
    fs::set_permissions(path, mode.permissions()).map_err(FileError::at("set the mode of", path))
}

fn metadata(path: &Path) -> Option<Metadata> {
    fs::symlink_metadata(path).ok()
}

fn names(dir: &Path) -> Result<Vec<OsString>, FileError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(FileError::at("read", dir)(error)),
    };
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    names.sort_unstable();
    Ok(names)
}

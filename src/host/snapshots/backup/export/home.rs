//! `svc-db-backup export-home`: reads the home directory as the owner's user, and sends its entries to the process that
//! writes the archive.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use super::files::{self, HomeEntry, OmittedEntry};
use super::stream::{Frame, MAX_FRAME_BYTES, write_data};
use crate::system::tar_reader::EntryKind;
use crate::system::user;
use svc_base::applet::{Exit, Failure, OrExit};

/// Waits for the start byte, and then sends everything under `home`, apart from the paths in `except`.
///
/// # Errors
/// `TryAgain` if the receiver exits before it sends the start byte; `Internal` if it exits later, the home directory
/// itself cannot be listed, or a file cannot be read to its end.
pub fn send(home: &Path, except: &[PathBuf], mut start: impl Read, to: impl Write) -> Result<(), Failure> {
    user::set_parent_death_signal();
    let mut start_byte = [0; 1];
    start.read_exact(&mut start_byte).or_exit(Exit::TryAgain)?;
    let mut to = BufWriter::with_capacity(MAX_FRAME_BYTES, to);
    let except: Vec<&Path> = except.iter().map(PathBuf::as_path).collect();
    let (entries, omitted) = files::list_files(home, &except).or_exit(Exit::Internal)?;
    let result =
        omitted.into_iter().try_for_each(|entry| Frame::OmittedEntry(entry).write(&mut to)).and_then(|()| {
            for entry in entries {
                send_entry(home, entry, &mut to)?;
            }
            Frame::End.write(&mut to)?;
            to.flush()
        });
    result.or_exit(Exit::Internal)
}

fn send_entry(home: &Path, entry: HomeEntry, to: &mut impl Write) -> io::Result<()> {
    let path = home.join(&entry.path);
    let omitted_frame = |error: io::Error, path: PathBuf| {
        Frame::OmittedEntry(OmittedEntry { path, reason: error.to_string() })
    };
    match entry.kind {
        EntryKind::Directory => Frame::Entry { entry, link_target: None }.write(to),
        EntryKind::Symlink => match std::fs::read_link(&path) {
            Ok(target) => Frame::Entry { entry, link_target: Some(target) }.write(to),
            Err(error) => omitted_frame(error, entry.path).write(to),
        },
        EntryKind::File => match open_file(&path) {
            Ok(file) => {
                Frame::Entry { entry, link_target: None }.write(to)?;
                send_content(file, to)
            }
            Err(error) => omitted_frame(error, entry.path).write(to),
        },
    }
}

/// Opens a file without following symbolic links or blocking: since it was listed, it may have been replaced with a
/// symbolic link or a FIFO.
fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = File::options().read(true).custom_flags(flags.bits()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("no longer a regular file")) }
}

fn send_content(mut file: File, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; MAX_FRAME_BYTES];
    loop {
        match file.read(&mut buffer)? {
            0 => return Frame::FileEnd.write(to),
            read => write_data(&buffer[..read], to)?,
        }
    }
}

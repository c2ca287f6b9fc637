//! `svc-db-backup export`: writes all of the owner's data to one archive (`host::snapshots::archive`): a verified dump,
//! the home with its records, and a manifest with checksums.
//!
//! Root runs it, opens the archive's file and renames it at the end. `archive` reads the database and writes the file as
//! the gateway's user; `home` reads the home as the owner's user.

mod archive;
mod files;
mod home;
mod stream;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use crate::system::layout::Layout;
use crate::system::user;
use crate::system::user::MachineUser;
use svc_base::applet::{Exit, Failure};
use svc_base::fsx::{self, FileError};

pub use archive::write as write_archive;
pub use home::send as send_home;

/// Fail points of a run.
pub const FAILPOINTS: &[&str] = &["export.begin", "export.dumped", "export.listed", "export.written"];
/// Maximum time for the process that reads the home to exit once the archive is written.
const END_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("{} is there already; it is not written over", .path.display())]
    Exists { path: PathBuf },
    #[error(
        "{} can be changed by others than root\n  next: choose a directory of root's, such as /var/backups",
        .path.display()
    )]
    NotRoots { path: PathBuf },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("start {program}")]
    Start {
        program: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("{program} failed ({end})")]
    Failed { program: &'static str, end: ExitStatus },
    #[error("{program} did not end")]
    Stuck { program: &'static str },
    #[error("stopped by a signal")]
    Stopped,
}

impl ExportError {
    fn exit(&self) -> Exit {
        match self {
            Self::Exists { .. } | Self::NotRoots { .. } => Exit::Refused,
            Self::Failed { end, .. } => Exit::of_child(*end),
            Self::Stopped => Exit::TryAgain,
            Self::File(_) | Self::Start { .. } | Self::Stuck { .. } => Exit::Internal,
        }
    }
}

/// Writes the archive to `output`, which appears only when complete.
///
/// # Errors
/// [`Failure`]; no file of that name exists then.
pub async fn run(layout: &Layout, output: &Path, stop: impl Future<Output = ()>) -> Result<(), Failure> {
    let path = output_path(layout, output).map_err(|error| Failure::new(error.exit(), error))?;
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let end = tokio::select! {
        end = export(layout, &path, &partial) => end,
        () = stop => Err(ExportError::Stopped),
    };
    match end {
        Ok(bytes) => {
            println!("{}: {bytes} bytes", output.display());
            Ok(())
        }
        Err(error) => {
            if !matches!(error, ExportError::Exists { .. }) {
                // A partial archive is useless.
                let _ = std::fs::remove_file(&partial);
            }
            Err(Failure::new(error.exit(), error))
        }
    }
}

/// Returns the path of the archive. When root writes it, no other user may be able to replace the file.
fn output_path(layout: &Layout, output: &Path) -> Result<PathBuf, ExportError> {
    let parent = output.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let parent = parent.canonicalize().map_err(FileError::at("find", parent))?;
    let is_for_others =
        user::is_root_with_separate_users(layout).map_err(FileError::at("find", &layout.host_env()))?;
    for dir in parent.ancestors().filter(|_| is_for_others) {
        let meta = dir.symlink_metadata().map_err(FileError::at("inspect", dir))?;
        if meta.uid() != 0 || meta.mode() & 0o022 != 0 && meta.mode() & 0o1000 == 0 {
            return Err(ExportError::NotRoots { path: dir.to_owned() });
        }
    }
    let name = output.file_name().ok_or_else(|| ExportError::Exists { path: output.to_owned() })?;
    Ok(parent.join(name))
}

async fn export(layout: &Layout, path: &Path, partial: &Path) -> Result<u64, ExportError> {
    if path.symlink_metadata().is_ok() {
        return Err(ExportError::Exists { path: path.to_owned() });
    }
    // Left behind by a killed run.
    fsx::remove_if_exists(partial)?;
    let mut options = File::options();
    let file = options.create_new(true).write(true).mode(0o600).open(partial);
    let file = file.map_err(FileError::at("create", partial))?;
    write(layout, &file, &[path, partial]).await?;
    std::fs::rename(partial, path).map_err(FileError::at("rename", partial))?;
    fsx::sync_dir(path.parent().unwrap_or(Path::new("/")))?;
    Ok(file.metadata().map_err(FileError::at("inspect", path))?.len())
}

async fn write(layout: &Layout, file: &File, except: &[&Path]) -> Result<(), ExportError> {
    const HOME: &str = "svc-db-backup export-home";
    const ARCHIVE: &str = "svc-db-backup export-archive";
    let start = |program| move |source| ExportError::Start { program, source };
    let (archives_end, homes_end) = UnixStream::pair().map_err(start(HOME))?;
    let output = file.try_clone().map_err(start(ARCHIVE))?;
    let homes_input = homes_end.try_clone().map_err(start(HOME))?;

    let mut reader = user::applet_command(layout, MachineUser::Owner, &["svc-db-backup", "export-home"])
        .map_err(start(HOME))?;
    reader.args(except.iter().flat_map(|path| [Path::new("--except"), path]));
    reader.stdin(OwnedFd::from(homes_input)).stdout(OwnedFd::from(homes_end));
    let mut reading = reader.spawn().map_err(start(HOME))?;
    // Dropping the commands closes this process's ends of the connection.
    drop(reader);
    let mut writer = user::applet_command(layout, MachineUser::Gateway, &["svc-db-backup", "export-archive"])
        .map_err(start(ARCHIVE))?;
    writer.stdin(OwnedFd::from(archives_end)).stdout(output);
    let mut writing = writer.spawn().map_err(start(ARCHIVE))?;
    drop(writer);

    let written = writing.wait().await.map_err(start(ARCHIVE))?;
    if !written.success() {
        return Err(ExportError::Failed { program: ARCHIVE, end: written });
    }
    let read = tokio::time::timeout(END_TIMEOUT, reading.wait()).await;
    match read.map_err(|_| ExportError::Stuck { program: HOME })?.map_err(start(HOME))? {
        end if end.success() => Ok(()),
        end => Err(ExportError::Failed { program: HOME, end }),
    }
}

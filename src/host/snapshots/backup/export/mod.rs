//! `svc-db-backup export`: writes all of the owner's data to one archive (`host::snapshots::archive`): a verified dump,
//! the home directory with its records, and a manifest with checksums.
//!
//! This process runs as root: it opens the archive's file and renames it at the end. `archive` reads the database and
//! writes the file as the gateway's user; `home` reads the home directory as the owner's user.

mod archive;
mod files;
mod home;
mod limits;
mod stream;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use crate::system::layout::Layout;
use crate::system::lock::{Lock, LockError};
use crate::system::user;
use crate::system::user::MachineUser;
use svc_base::applet::{Exit, Failure};
use svc_base::fsx::{self, FileError};

pub use archive::write as write_archive;
pub use home::send as send_home;

/// Fail points of a run.
pub const FAILPOINTS: &[&str] = &["export.begin", "export.dumped", "export.listed", "export.written"];
/// Maximum time for the process that reads the home directory to exit once the archive is written.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("{} has no file name", .path.display())]
    NoFileName { path: PathBuf },
    #[error("{} already exists\n  next: choose another file name", .path.display())]
    Exists { path: PathBuf },
    #[error(
        "{} can be changed by users other than root\n  next: choose a directory that only root can change, such as /var/backups",
        .path.display()
    )]
    WritableByOthers { path: PathBuf },
    /// Two exports to the same file would write to the same partial archive.
    #[error("another export is running")]
    Busy,
    #[error(transparent)]
    File(#[from] FileError),
    #[error("cannot run {program}")]
    Run {
        program: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("{program} failed ({status})")]
    Failed { program: &'static str, status: ExitStatus },
    #[error("{program} did not exit within {} s", EXIT_TIMEOUT.as_secs())]
    TimedOut { program: &'static str },
    #[error("stopped by a signal")]
    Stopped,
}

impl ExportError {
    fn exit(&self) -> Exit {
        match self {
            Self::NoFileName { .. } | Self::Exists { .. } | Self::WritableByOthers { .. } => Exit::Refused,
            Self::Failed { status, .. } => Exit::from_child(*status),
            Self::Busy | Self::Stopped => Exit::TryAgain,
            Self::File(_) | Self::Run { .. } | Self::TimedOut { .. } => Exit::Internal,
        }
    }
}

/// Writes the archive to `output`, which appears only when complete.
///
/// # Errors
/// `Refused` if `output` exists or has no file name, or users other than root can change its directory; `TryAgain` if
/// another export is running, or `stop` ended the run; the exit code of a process that failed; otherwise `Internal`.
/// The partial archive is removed. If only the final sync of the directory failed, the complete archive exists.
pub async fn run(layout: &Layout, output: &Path, stop: impl Future<Output = ()>) -> Result<(), Failure> {
    let lock = Lock::acquire(&layout.export_lock()).map_err(|error| match error {
        LockError::Held => ExportError::Busy,
        LockError::File(error) => error.into(),
    });
    let _lock = lock.map_err(|error| Failure::new(error.exit(), error))?;
    let path = resolve_output_path(layout, output).map_err(|error| Failure::new(error.exit(), error))?;
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let result = tokio::select! {
        result = export(layout, &path, &partial) => result,
        () = stop => Err(ExportError::Stopped),
    };
    match result {
        Ok(bytes) => {
            println!("{}: {bytes} bytes", output.display());
            Ok(())
        }
        Err(error) => {
            if !matches!(error, ExportError::Exists { .. }) {
                // An error is ignored, because a partial archive cannot be imported.
                let _ = std::fs::remove_file(&partial);
            }
            Err(Failure::new(error.exit(), error))
        }
    }
}

/// Returns the path of the archive. If this process is root on a machine with separate users, checks that only root can
/// replace the file.
fn resolve_output_path(layout: &Layout, output: &Path) -> Result<PathBuf, ExportError> {
    let parent = output.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let parent = parent.canonicalize().map_err(FileError::wrap("find", parent))?;
    let has_separate_users =
        user::is_root_with_separate_users(layout).map_err(FileError::wrap("find", &layout.host_env()))?;
    for dir in parent.ancestors().filter(|_| has_separate_users) {
        let meta = dir.symlink_metadata().map_err(FileError::wrap("inspect", dir))?;
        if meta.uid() != 0 || meta.mode() & 0o022 != 0 && meta.mode() & 0o1000 == 0 {
            return Err(ExportError::WritableByOthers { path: dir.to_owned() });
        }
    }
    let name = output.file_name().ok_or_else(|| ExportError::NoFileName { path: output.to_owned() })?;
    Ok(parent.join(name))
}

async fn export(layout: &Layout, path: &Path, partial: &Path) -> Result<u64, ExportError> {
    if path.symlink_metadata().is_ok() {
        return Err(ExportError::Exists { path: path.to_owned() });
    }
    // A killed run may have left the file behind.
    fsx::remove_if_exists(partial)?;
    let mut options = File::options();
    let file = options.create_new(true).write(true).mode(0o600).open(partial);
    let file = file.map_err(FileError::wrap("create", partial))?;
    run_processes(layout, &file, &[path, partial]).await?;
    std::fs::rename(partial, path).map_err(FileError::wrap("rename", partial))?;
    fsx::sync_dir(path.parent().unwrap_or(Path::new("/")))?;
    Ok(file.metadata().map_err(FileError::wrap("inspect", path))?.len())
}

/// Runs the process that reads the home directory and the one that writes the archive.
async fn run_processes(layout: &Layout, file: &File, except: &[&Path]) -> Result<(), ExportError> {
    const HOME: &str = "svc-db-backup export-home";
    const ARCHIVE: &str = "svc-db-backup export-archive";
    let run_error = |program| move |source| ExportError::Run { program, source };
    let (archive_end, home_end) = UnixStream::pair().map_err(run_error(HOME))?;
    let output = file.try_clone().map_err(run_error(ARCHIVE))?;
    let home_input = home_end.try_clone().map_err(run_error(HOME))?;

    let mut reader = user::applet_command(layout, MachineUser::Owner, &["svc-db-backup", "export-home"])
        .map_err(run_error(HOME))?;
    reader.args(except.iter().flat_map(|path| [Path::new("--except"), path]));
    reader.stdin(OwnedFd::from(home_input)).stdout(OwnedFd::from(home_end));
    let mut home_child = reader.spawn().map_err(run_error(HOME))?;
    // Dropping the commands closes this process's ends of the connection.
    drop(reader);
    let mut writer = user::applet_command(layout, MachineUser::Gateway, &["svc-db-backup", "export-archive"])
        .map_err(run_error(ARCHIVE))?;
    writer.stdin(OwnedFd::from(archive_end)).stdout(output);
    let mut archive_child = writer.spawn().map_err(run_error(ARCHIVE))?;
    drop(writer);

    let status = archive_child.wait().await.map_err(run_error(ARCHIVE))?;
    if !status.success() {
        return Err(ExportError::Failed { program: ARCHIVE, status });
    }
    let exited = tokio::time::timeout(EXIT_TIMEOUT, home_child.wait()).await;
    match exited.map_err(|_| ExportError::TimedOut { program: HOME })?.map_err(run_error(HOME))? {
        status if status.success() => Ok(()),
        status => Err(ExportError::Failed { program: HOME, status }),
    }
}

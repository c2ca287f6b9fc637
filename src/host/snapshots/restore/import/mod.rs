//! `svc-restore import`: imports an owner's archive (`host::snapshots::archive`) onto this machine, replacing the
//! database and any home entries of the same name.
//!
//! This process runs as root. It opens the archive and runs each step in a child process, either as the gateway user,
//! which owns the database, or as the owner's user. Nothing changes until every byte has been verified against the
//! manifest. If the database has rows, a snapshot is taken first unless `--no-backup` is given. Replaced data is
//! retained: the database for seven days or until disk space runs low, and home entries in directories whose paths are
//! printed. A killed import can be retried.

pub mod archive_reader;
mod catalog;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod home;
mod manifest;
mod options;
mod pre_import_snapshot;
mod steps;
mod toc;
mod untrusted;

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use nix::fcntl::OFlag;

use crate::snapshots::restore::journal::Journal;
use crate::system::layout::Layout;
use crate::system::lock::{Lock, LockError};
use crate::system::systemd;
use crate::system::user;
use crate::system::user::MachineUser;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::clock;
use svc_base::failpoint;
use svc_base::stdout;
use svc_http::problem::format_chain;

pub use options::ImportOptions;
use steps::Step;
pub use steps::{StepArgs, run_step};

/// Fail points of a run.
pub const FAILPOINTS: &[&str] = &[
    "import.begin",
    "import.checked",
    "import.staged",
    "import.settings_reset",
    "import.loaded",
    "import.swapped",
    "import.installed",
    "import.done",
];

const RESTART_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
enum ImportError {
    #[error("cannot start import step {step}")]
    Start {
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("import step {step} failed ({status})")]
    Failed { step: &'static str, status: ExitStatus },
}

impl ImportError {
    fn exit(&self) -> Exit {
        match self {
            Self::Start { .. } => Exit::Internal,
            Self::Failed { status, .. } => Exit::from_child(*status),
        }
    }
}

/// Imports an archive.
///
/// # Errors
/// `TryAgain` if another import is in progress; `Refused` if the archive cannot be opened; `Internal` if the lock file
/// cannot be opened or a step cannot be started; otherwise the failed step's exit code. A failure before the database
/// swap changes nothing.
pub async fn run(layout: &Layout, archive_path: &Path, options: ImportOptions) -> Result<(), Failure> {
    let lock = Lock::acquire(&layout.import_lock()).map_err(|error| match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!("another import is running")),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    })?;
    let archive = open_archive(archive_path).or_exit(Exit::Refused)?;
    let run = ImportRun { layout, archive, archive_path, options, number: clock::now_ms().as_millisecond() };
    let mut is_swapped = false;
    let imported = run.import(&mut is_swapped).await;
    let imported = imported.map_err(|error| Failure::new(error.exit(), error));
    let result = imported.and_then(|()| failpoint::trigger("import.done").or_exit(Exit::Internal));
    drop(lock);
    if is_swapped {
        restart_gateway(layout).await;
    }
    result
}

/// Opens the archive and checks that it's a regular file. We open it only once, since other users may be able to
/// replace it.
fn open_archive(path: &Path) -> Result<File, io::Error> {
    let with_path = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let mut options = File::options();
    // `O_NONBLOCK`, so that opening a FIFO doesn't wait for a writer.
    let file = options.read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path).map_err(with_path)?;
    if file.metadata().map_err(with_path)?.is_file() {
        Ok(file)
    } else {
        Err(with_path(io::Error::other("not a regular file")))
    }
}

struct ImportRun<'a> {
    layout: &'a Layout,
    archive: File,
    /// For messages.
    archive_path: &'a Path,
    options: ImportOptions,
    /// Import number, used in directory names.
    number: i64,
}

impl ImportRun<'_> {
    /// Runs all steps. Sets `is_swapped` if the databases were or may have been swapped: the new one's roles have no
    /// passwords or privileges until the gateway starts.
    async fn import(&self, is_swapped: &mut bool) -> Result<(), ImportError> {
        self.run_step(Step::Check).await?;
        if self.options.check {
            return Ok(());
        }
        let was_interrupted = Journal::is_open(self.layout);
        let prepare = async {
            self.run_step(Step::Stage).await?;
            self.run_step(Step::Database).await
        };
        if let Err(error) = prepare.await {
            // Report the original error, not one from the cleanup.
            let _ = self.run_step(Step::Unstage).await;
            // The database step removes the journal only after completing the swap. It may also have completed an
            // earlier run's swap before failing.
            *is_swapped = was_interrupted || Journal::is_open(self.layout);
            return Err(error);
        }
        *is_swapped = true;
        self.run_step(Step::Install).await
    }

    /// Runs a step to completion as the user owning the data that it changes.
    async fn run_step(&self, step: Step) -> Result<(), ImportError> {
        let name = step.name();
        let start_error = |source| ImportError::Start { step: name, source };
        let user = if step.is_run_as_owner() { MachineUser::Owner } else { MachineUser::Gateway };
        let mut command = user::applet_command(self.layout, user, &["svc-restore", "import-step", name])
            .map_err(start_error)?;
        command.args(["--number", &self.number.to_string(), "--archive"]).arg(self.archive_path);
        command.args(self.options.to_arguments());
        command.stdin(self.archive.try_clone().map_err(start_error)?);
        let status = command.status().await.map_err(start_error)?;
        if status.success() { Ok(()) } else { Err(ImportError::Failed { step: name, status }) }
    }
}

/// Restarts the sync agent and the gateway, which sets the database role passwords at startup.
async fn restart_gateway(layout: &Layout) {
    let Some(systemctl) = systemd::find_systemctl(layout) else {
        print_line("next: restart svc-gateway");
        return;
    };
    let mut command = tokio::process::Command::new(systemctl);
    command.args(["try-restart", "svc-gateway.service", "svc-sync-agent.service"]);
    match tokio::time::timeout(RESTART_TIMEOUT, command.status()).await {
        Ok(Ok(status)) if status.success() => print_line("restarted svc-gateway"),
        Ok(Err(error)) => {
            tracing::warn!(error = %format_chain(&error), "could not restart the gateway");
            print_line("next: systemctl restart svc-gateway");
        }
        _ => print_line("next: systemctl restart svc-gateway"),
    }
}

/// Prints a line to stdout, ignoring errors: a closed pipe, for example, must not fail the import.
fn print_line(text: &str) {
    let _ = stdout::print(&format!("{text}\n"));
}

//! Import steps. Each runs in its own process, with the archive as standard input.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use tokio_postgres::Client;

use super::archive_reader::{ArchiveError, ExtractTarget, VerifiedArchive};
use super::home::{self, ImportStaging};
use super::options::ImportOptions;
use super::pre_import_snapshot::{self, PreImportSnapshotError};
use super::print_line;
use super::untrusted::{self, UntrustedLoadError};
use crate::snapshots::archive::SYSTEM;
use crate::snapshots::database_identity;
use crate::snapshots::database_identity::IdentityError;
use crate::snapshots::restore;
use crate::snapshots::restore::gate;
use crate::snapshots::restore::journal;
use crate::snapshots::restore::journal::Journal;
use crate::snapshots::restore::settings::RestoreSettings;
use crate::snapshots::restore::swap;
use crate::snapshots::restore::swap::SwapError;
use crate::snapshots::restore_marker::RestoreMarker;
use crate::snapshots::staging;
use crate::snapshots::staging::{DownloadError, LoadError, ScratchDatabase, ScratchPurpose};
use crate::system::layout::Layout;
use crate::system::postgres;
use crate::system::postgres::ConnectError;
use crate::system::user;
use svc_base::applet::{Exit, Failure};
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::{self, FileError};
use svc_store::pointer::SnapshotRef;

/// A step of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Step {
    /// Compares the whole archive with its manifest.
    Check,
    /// Extracts the owner's files into the staging directory.
    Stage,
    /// Removes the staging directory of [`Step::Stage`].
    Unstage,
    /// Replaces the database and the gateway's part of the home directory.
    Database,
    /// Installs the owner's staged files.
    Install,
}

impl Step {
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns whether the step runs as the owner's user rather than the gateway user.
    pub fn is_run_as_owner(self) -> bool {
        matches!(self, Self::Stage | Self::Unstage | Self::Install)
    }
}

#[derive(clap::Args)]
pub struct StepArgs {
    pub step: Step,
    /// Number of this import
    #[arg(long)]
    number: i64,
    /// Name of the archive on standard input
    #[arg(long)]
    archive: PathBuf,
    #[command(flatten)]
    options: ImportOptions,
}

#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error(
        "the restore gate is closed: `svc-restore` must restore this machine's own snapshot before an import"
    )]
    GateClosed,
    #[error("this machine has been replaced or deleted (superseded.json)")]
    Superseded,
    #[error(
        "the archive belongs to the user {archive}, but this machine belongs to {machine}\n  next: if this \
         is intended, add `--from-another-user`"
    )]
    OtherUser { archive: String, machine: String },
    #[error("cannot open the archive on standard input")]
    Input(#[source] std::io::Error),
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Untrusted(#[from] UntrustedLoadError),
    #[error(transparent)]
    PreImportSnapshot(#[from] PreImportSnapshotError),
    #[error("cannot clean up after an earlier run")]
    Query(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Swap(#[from] SwapError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl StepError {
    fn exit(&self) -> Exit {
        match self {
            Self::Superseded => Exit::Permission,
            Self::GateClosed => Exit::TryAgain,
            Self::Archive(error) => error.exit(),
            Self::OtherUser { .. } | Self::Download(DownloadError::NoSpace { .. }) => Exit::Refused,
            Self::Download(error) => error.exit(),
            Self::Untrusted(error) => error.exit(),
            Self::PreImportSnapshot(error) => error.exit(),
            Self::Connect(_) => Exit::Unavailable,
            Self::Load(error) => error.exit(),
            Self::Query(error) => postgres::to_exit(error),
            Self::Identity(error) => error.exit(),
            Self::Swap(error) => error.exit(),
            Self::Input(_) | Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Runs one step.
pub async fn run_step(layout: Layout, args: StepArgs) -> Result<(), Failure> {
    user::set_parent_death_signal();
    let archive = std::io::stdin().as_fd().try_clone_to_owned().map(File::from).map_err(StepError::Input);
    let result = match (args.step, archive) {
        (_, Err(error)) => Err(error),
        (Step::Check, Ok(archive)) => check_archive(&RestoreSettings::read(layout)?, &archive, &args),
        (Step::Stage, Ok(archive)) => stage_files(&layout, &archive, &args),
        (Step::Unstage, Ok(_)) => home::remove_staged(&layout.home()).map_err(StepError::from),
        (Step::Database, Ok(archive)) => {
            let settings = RestoreSettings::read(layout)?;
            let lock = restore::acquire_lock(&settings)?;
            // After an interrupted swap, the database may refuse connections or differ from the one in the marker.
            gate::finish_interrupted_swap(&lock, &settings).await?;
            replace_database(&settings, &archive, &args).await
        }
        (Step::Install, Ok(_)) => install_files(&layout, &args),
    };
    result.map_err(|error| Failure::new(error.exit(), error))
}

fn check_archive(settings: &RestoreSettings, archive: &File, args: &StepArgs) -> Result<(), StepError> {
    failpoint::trigger("import.begin")?;
    let verified = read_archive(archive, &args.archive, &ExtractTarget::Nothing)?;
    let rows: u64 = verified.sidecar.tables.iter().map(|table| table.rows).sum();
    print_line(&format!(
        "archive of {}, created at {}: {} tables with {rows} rows, {} home entries; all are intact",
        verified.info.idp_user_id,
        svc_base::clock::rfc3339_ms(verified.info.created_at),
        verified.sidecar.tables.len(),
        verified.home_entries,
    ));
    if args.options.check {
        return Ok(());
    }
    let machine = settings.user.as_str();
    if verified.info.idp_user_id.as_str() != machine && !args.options.from_another_user {
        let archive = verified.info.idp_user_id.as_str().to_owned();
        return Err(StepError::OtherUser { archive, machine: machine.to_owned() });
    }
    if settings.layout.superseded().exists() {
        return Err(StepError::Superseded);
    }
    if !settings.layout.restore_complete().exists() {
        return Err(StepError::GateClosed);
    }
    failpoint::trigger("import.checked")?;
    Ok(())
}

fn read_archive(
    archive: &File,
    archive_path: &Path,
    extract: &ExtractTarget<'_>,
) -> Result<VerifiedArchive, ArchiveError> {
    tokio::task::block_in_place(|| VerifiedArchive::read(archive, archive_path, extract))
}

/// Reads the archive and extracts the target entries, which must fit on the file system of `dir`: PostgreSQL and the
/// gateway write to the same disk.
fn extract_archive(
    archive: &File,
    archive_path: &Path,
    dir: &Path,
    extract: &ExtractTarget<'_>,
) -> Result<VerifiedArchive, StepError> {
    let bytes = tokio::task::block_in_place(|| {
        VerifiedArchive::compute_required_disk_space(archive, archive_path, extract)
    })?;
    staging::ensure_free_space(dir, bytes.saturating_add(staging::FREE_SPACE_MARGIN_BYTES))?;
    Ok(read_archive(archive, archive_path, extract)?)
}

fn stage_files(layout: &Layout, archive: &File, args: &StepArgs) -> Result<(), StepError> {
    let staging = ImportStaging::new(&layout.home(), args.number);
    let staged = staging.create()?;
    extract_archive(archive, &args.archive, staged, &ExtractTarget::Home(staged))?;
    staging.ensure_replaceable()?;
    tokio::task::block_in_place(|| staging.sync())?;
    failpoint::trigger("import.staged")?;
    Ok(())
}

fn install_files(layout: &Layout, args: &StepArgs) -> Result<(), StepError> {
    let staging = ImportStaging::new(&layout.home(), args.number);
    let replaced = tokio::task::block_in_place(|| staging.install())?;
    failpoint::trigger("import.installed")?;
    if let Some(replaced) = replaced {
        print_line(&format!("the replaced home files are in {}", replaced.display()));
    }
    Ok(())
}

async fn replace_database(
    settings: &RestoreSettings,
    archive: &File,
    args: &StepArgs,
) -> Result<(), StepError> {
    let layout = &settings.layout;
    if !args.options.no_backup {
        pre_import_snapshot::take_snapshot(settings).await?;
    }
    let system = ImportStaging::new(&layout.home().join(SYSTEM), args.number);
    let dump = layout.restore_state().join("import.dump");
    // May be left over from an earlier run.
    fsx::remove_if_exists(&dump)?;
    let result = load_and_swap(settings, archive, args, &system, &dump).await;
    if result.is_err() {
        // Best effort: we report the original error, and the next run cleans up again.
        let _ = home::remove_staged(&layout.home().join(SYSTEM));
        let _ = fsx::remove_if_exists(&dump);
    }
    result
}

async fn load_and_swap(
    settings: &RestoreSettings,
    archive: &File,
    args: &StepArgs,
    system: &ImportStaging,
    dump: &Path,
) -> Result<(), StepError> {
    let layout = &settings.layout;
    let staged = system.create()?;
    let state = layout.restore_state();
    std::fs::create_dir_all(&state).map_err(FileError::wrap("create directory", &state))?;
    let target = ExtractTarget::Gateway { dump, system: staged };
    let verified = extract_archive(archive, &args.archive, &state, &target)?;
    let snapshot = verified.sidecar.snapshot_ref();
    staging::check_postgres_version(&settings.context, &verified.sidecar).await?;
    let client = staging::connect_with_retries(&settings.context, postgres::MAINTENANCE_DATABASE).await?;
    staging::end_application_sessions(&client, settings.context.name).await?;
    staging::drop_scratch_databases(&client, ScratchPurpose::Restore).await?;
    drop(client);
    staging::ensure_space_for_snapshot(
        &layout.restore_state(),
        &snapshot,
        &verified.sidecar,
        snapshot.size_bytes,
    )?;
    tokio::task::block_in_place(|| system.sync())?;
    let loaded = untrusted::load(&settings.context, dump, &verified.sidecar).await?;
    let client = match prepare_swap(settings, &snapshot, &loaded).await {
        Ok(client) => client,
        Err(error) => {
            untrusted::clean_up(&settings.context, &loaded).await;
            return Err(error);
        }
    };
    if let Err(error) = swap::swap(&settings.context.server, &loaded).await {
        swap::clean_up(&settings.context.server, &loaded).await;
        return Err(error.into());
    }
    failpoint::trigger("import.swapped")?;
    let identity = database_identity::adopt(&client, settings.context.server.database()).await?;
    RestoreMarker::new(Some(snapshot.key.clone()), identity).write(layout)?;
    drop(client);
    let installed = tokio::task::block_in_place(|| system.install());
    // The database has been replaced even if the records and settings couldn't be installed.
    gate::request_backup(layout)?;
    let replaced = installed?;
    staging::remove_dumps(&layout.restore_state())?;
    print_line(&format!(
        "imported the database; the replaced one is kept as svc_before_{} for seven days, or until space is short",
        loaded.number
    ));
    if let Some(replaced) = replaced {
        print_line(&format!("the replaced records and settings are in {}", replaced.display()));
    }
    // Must be last: as long as there's a journal, the caller restarts the gateway after a failure.
    Ok(journal::remove(layout)?)
}

/// Assigns a restore id to the loaded database and journals the swap.
async fn prepare_swap(
    settings: &RestoreSettings,
    snapshot: &SnapshotRef,
    loaded: &ScratchDatabase,
) -> Result<Client, StepError> {
    failpoint::trigger("import.loaded")?;
    let client = staging::connect_with_retries(&settings.context, postgres::MAINTENANCE_DATABASE).await?;
    database_identity::assign_restore_id(&client, &loaded.name).await?;
    Journal::new(snapshot, loaded).write(&settings.layout)?;
    Ok(client)
}

//! The first release of a machine: the bundle that user-data names, with the digest that user-data states; its units, and
//! the password of the machine's database.
//!
//! Nothing is switched before the digest of every byte was right. Each step can be done again, so a run that was
//! killed anywhere is simply run again.

use std::path::{Path, PathBuf};

use super::database::{self, DatabaseError};
use super::download::{DownloadError, Source};
use super::place::{self, PlaceError};
use super::services::{Services, ServicesError, Systemctl};
use super::units::{self, UnitsError};
use super::unpack::{self, Limits, UnpackError};
use crate::applet::{Exit, Failure};
use crate::config::Env;
use crate::failpoint::{self, Injected};
use crate::fsx::FileError;
use crate::host::config::{self, PlatformLink};
use crate::host::layout::Layout;
use crate::host::lock::{Lock, LockError};
use crate::host::release;
use crate::machine::name::ImageVersion;
use crate::store::bundle;

/// The places of a run where a test can stop it.
pub const POINTS: &[&str] = &[
    "update.begin",
    "update.downloading",
    "update.unpacked",
    "update.verified",
    "update.synced",
    "update.renamed",
    "update.switched",
    "update.linked",
    "update.units_written",
    "update.units_recorded",
    "update.password_made",
    "update.password_told",
];

/// An archive unpacks to a few times its size.
const GROWTH: u64 = 5;
/// Room that is left free.
const MARGIN: u64 = 64 << 20;

/// Why there is no new release. The current one, if any, is as it was.
#[derive(Debug, thiserror::Error)]
enum BootError {
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error("the bundle's SHA-256 is {found}, and user-data states {expected}")]
    WrongDigest { expected: String, found: String },
    #[error("{}: {free} bytes are free and {needed} are needed", .path.display())]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    Units(#[from] UnitsError),
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Services(#[from] ServicesError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] Injected),
}

impl BootError {
    fn exit(&self) -> Exit {
        match self {
            Self::Download(DownloadError::Refused { .. }) => Exit::Permission,
            Self::Download(_) => Exit::Unavailable,
            _ => Exit::Internal,
        }
    }
}

struct Settings {
    source: Source,
    sha256: String,
    version: ImageVersion,
    /// `None` in a directory that stands for a machine.
    services: Option<Systemctl>,
}

impl Settings {
    fn read(env: &mut Env, layout: &Layout) -> Option<Self> {
        let url = env.required("SVC_HOST_BUNDLE_URL");
        let stated: Option<String> = env.required("SVC_BUNDLE_SHA256");
        let sha256 = stated.and_then(|text| {
            let digest = bundle::parse_digest(&text);
            if digest.is_none() {
                env.mistake("SVC_BUNDLE_SHA256", "must be 64 hexadecimal digits");
            }
            digest
        });
        let version = config::image_version(env);
        let platform = PlatformLink::read(env);
        let source = Source::new(url?, platform?);
        let services = Systemctl::find(env, layout);
        Some(Self { source, sha256: sha256?, version: version?, services })
    }
}

/// Brings the release and makes it current.
///
/// # Errors
/// [`Failure`] with the exit code of the contract.
pub async fn run(layout: Layout) -> Result<(), Failure> {
    let mut env = config::environment(&layout);
    let settings = Settings::read(&mut env, &layout);
    let settings = env.finish(settings)?;
    let _lock = Lock::take(&layout.update_state().join("lock")).map_err(|error| match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!("another update is under way")),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    })?;
    bring(&layout, &settings).await.map_err(|error| Failure::new(error.exit(), error))?;
    tracing::info!(version = %settings.version, "the release is current");
    Ok(())
}

async fn bring(layout: &Layout, settings: &Settings) -> Result<(), BootError> {
    failpoint::pass("update.begin")?;
    place::remove_leftovers(layout)?;
    let there = layout.release(&settings.version);
    if there.is_dir() {
        let found = release::digest(&there)?.unwrap_or_default();
        if found != settings.sha256 {
            return Err(BootError::WrongDigest { expected: settings.sha256.clone(), found });
        }
    } else {
        fetch(layout, settings).await?;
    }
    place::switch(layout, &settings.version)?;
    units::install(layout, &settings.version)?;
    database::ensure_password(layout)?;
    if let Some(services) = &settings.services {
        services.reload().await?;
    }
    Ok(())
}

/// One pass over the archive: hash, inflate, unpack beside; then the digest decides.
async fn fetch(layout: &Layout, settings: &Settings) -> Result<(), BootError> {
    let partial = place::Partial::create(layout, &settings.version)?;
    let download = settings.source.open().await?;
    ensure_room(partial.path(), download.length())?;
    let (chunks, archive) = unpack::channel();
    let into = partial.path().to_owned();
    let unpacking = tokio::task::spawn_blocking(move || unpack::unpack(archive, &into, Limits::BUNDLE));
    let downloaded = download.pump(chunks).await;
    // A panic in there is no error that we could name: it goes on here.
    let unpacked = unpacking.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    // What the unpacker refused ends the download, too: its word comes first, unless the bytes just stopped coming.
    let found = match (downloaded, unpacked) {
        (Ok(found), Ok(())) => found,
        (Err(error), Ok(())) => return Err(error.into()),
        (Err(DownloadError::Abandoned) | Ok(_), Err(error)) => return Err(error.into()),
        (Err(error), Err(_)) => return Err(error.into()),
    };
    failpoint::pass("update.unpacked")?;
    if found != settings.sha256 {
        return Err(BootError::WrongDigest { expected: settings.sha256.clone(), found });
    }
    failpoint::pass("update.verified")?;
    partial.keep(layout, &settings.version, &found)?;
    Ok(())
}

fn ensure_room(dir: &Path, archive: Option<u64>) -> Result<(), BootError> {
    let Some(archive) = archive else { return Ok(()) };
    let needed = archive.saturating_mul(GROWTH).saturating_add(MARGIN);
    let free = fs4::available_space(dir).map_err(FileError::at("measure", dir))?;
    if free < needed {
        return Err(BootError::NoSpace { path: dir.to_owned(), needed, free });
    }
    Ok(())
}

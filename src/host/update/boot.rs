//! First-boot installation: the release bundle named in user-data, its units, and the local database password.
//!
//! `current` is switched only after verifying the digest of the whole bundle. Each step is idempotent, so an
//! interrupted run can simply be rerun. A complete current release is never replaced here; only missing links, units
//! and the password are added. Later releases require a signed manifest.

use super::database::{self, PasswordError};
use super::download::{BundleSource, DownloadError};
use super::fetch;
use super::fetch::{ExpectedArchive, FetchError};
use super::journal::{Journal, JournalError};
use super::releases;
use super::releases::InstallError;
use super::services::{ServiceManager, ServiceManagerError, Systemctl};
use super::trust;
use super::units::{self, UnitsError};
use crate::system::config;
use crate::system::config::PlatformAccess;
use crate::system::layout::Layout;
use crate::system::lock::{Lock, LockError};
use crate::system::root_settings;
use crate::system::vars;
use svc_base::applet::{Exit, Failure};
use svc_base::config::Env;
use svc_base::error_chain::format_chain;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::FileError;
use svc_machine::name::ImageVersion;
use svc_store::bundle;

/// Fail points in `svc-update boot`.
pub const BOOT_FAILPOINTS: &[&str] = &[
    "update.begin",
    "update.downloading",
    "update.unpacked",
    "update.verified",
    "update.synced",
    "update.renamed",
    "update.switched",
    "update.linked",
    "update.units_planned",
    "update.units_written",
    "update.units_recorded",
    "update.password_created",
    "update.password_recorded",
];

/// Errors from `svc-update boot`, which can be rerun.
#[derive(Debug, thiserror::Error)]
enum BootError {
    #[error(
        "the update from {from} to {to} was interrupted\n  next: run `svc-update resume` to finish it, then run `svc-update boot` again"
    )]
    UpdateInterrupted { from: ImageVersion, to: ImageVersion },
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Install(#[from] InstallError),
    #[error(transparent)]
    Units(#[from] UnitsError),
    #[error(transparent)]
    Password(#[from] PasswordError),
    #[error(transparent)]
    ServiceManager(#[from] ServiceManagerError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl BootError {
    fn exit(&self) -> Exit {
        match self {
            Self::UpdateInterrupted { .. } => Exit::TryAgain,
            Self::Fetch(FetchError::Download(DownloadError::Refused { .. })) => Exit::Permission,
            Self::Fetch(FetchError::Download(_)) => Exit::Unavailable,
            _ => Exit::Internal,
        }
    }
}

struct BootConfig {
    release: BootRelease,
    /// `None` if systemd isn't running under the layout's root and `SVC_SYSTEMCTL` is unset.
    services: Option<Systemctl>,
}

/// The release to make current.
enum BootRelease {
    /// Already current.
    Current(ImageVersion),
    First(FirstBundle),
}

/// Bundle of the first release.
struct FirstBundle {
    source: BundleSource,
    sha256: String,
    version: ImageVersion,
}

impl FirstBundle {
    fn read(env: &mut Env, layout: &Layout) -> Option<Self> {
        let url = env.required(&vars::SVC_HOST_BUNDLE_URL);
        let sha256: Option<String> = env.required(&vars::SVC_BUNDLE_SHA256);
        let sha256 = sha256.and_then(|text| {
            let digest = bundle::parse_digest(&text);
            if digest.is_none() {
                env.add_error(&vars::SVC_BUNDLE_SHA256, "must be 64 hexadecimal digits");
            }
            digest
        });
        let version = config::read_image_version(env);
        let platform = PlatformAccess::read(env, layout);
        let source = BundleSource::new(url?, platform?);
        Some(Self { source, sha256: sha256?, version: version? })
    }
}

impl BootConfig {
    fn read(env: &mut Env, layout: &Layout) -> Option<Self> {
        let release = match releases::find_complete_current(layout) {
            Some(current) => BootRelease::Current(current),
            None => BootRelease::First(FirstBundle::read(env, layout)?),
        };
        Some(Self { release, services: Systemctl::find(layout) })
    }
}

/// Installs the first release unless a complete release is already current. Either way, adds missing links, units and
/// the database password.
///
/// # Errors
/// `TryAgain` if another update holds the lock or was interrupted; `Config` if the settings are invalid; `Permission`
/// if the download was refused; `Unavailable` if it failed otherwise; `Internal` for everything else.
pub async fn run(layout: Layout) -> Result<(), Failure> {
    let _lock = Lock::acquire(&layout.update_state().join("lock")).map_err(|error| match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!("another update is running")),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    })?;
    let mut env = config::environment(&layout);
    let config = BootConfig::read(&mut env, &layout);
    let config = env.finish(config)?;
    let version =
        install_release(&layout, &config).await.map_err(|error| Failure::new(error.exit(), error))?;
    tracing::info!(%version, "release is current");
    Ok(())
}

async fn install_release(layout: &Layout, config: &BootConfig) -> Result<ImageVersion, BootError> {
    failpoint::trigger("update.begin")?;
    if let Some(Journal { plan, .. }) = Journal::read(layout)? {
        return Err(BootError::UpdateInterrupted { from: plan.from, to: plan.to });
    }
    releases::remove_leftovers(layout)?;
    let version = match &config.release {
        BootRelease::Current(version) => version,
        BootRelease::First(FirstBundle { source, sha256, version }) => {
            let expected = ExpectedArchive { sha256, size_bytes: None };
            fetch::ensure_release(layout, source, version, &expected).await?;
            version
        }
    };
    root_settings::copy_platform_url(layout)?;
    releases::switch(layout, version)?;
    units::install(layout, version)?;
    database::ensure_password(layout)?;
    if let Err(error) = trust::report_key_ids(layout) {
        // Not needed for boot, and the next update will fail with the same error.
        tracing::warn!(error = %format_chain(&error), "cannot report trusted keys");
    }
    if let Some(services) = &config.services {
        services.reload().await?;
    }
    Ok(version.clone())
}

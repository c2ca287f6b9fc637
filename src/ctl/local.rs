//! The checks of the local machine. `svcctl` imports neither host nor platform: `main` injects them.

use std::path::{Path, PathBuf};

use futures_util::future::BoxFuture;
use secrecy::SecretString;
use url::Url;

use svc_base::diagnosis::{Finding, Report};

/// The checks of host and platform.
#[derive(Clone, Copy)]
pub struct LocalChecks {
    /// Whether this machine is a host.
    pub is_host: fn() -> bool,
    pub host: fn() -> BoxFuture<'static, Report>,
    /// Examines the platform's settings: this process's environment, then the file.
    pub platform: for<'a> fn(Option<&'a Path>) -> BoxFuture<'a, PlatformReport>,
    /// The gateway's trusted socket.
    pub gateway_socket: fn() -> PathBuf,
    /// Checks whether the database server that the gateway reports belongs to this machine: its name, or the reason why
    /// not.
    pub own_database: fn(Option<&str>) -> Result<String, String>,
}

/// The findings about a platform's settings, and the credential for its API.
pub struct PlatformReport {
    pub findings: Vec<Finding>,
    pub api_access: Option<(Url, SecretString)>,
}

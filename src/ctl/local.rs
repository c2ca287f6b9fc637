//! Declares the checks of the local machine. `svcctl` imports neither `host` nor `platform`; the applet table injects
//! the checks.

use std::path::{Path, PathBuf};

use futures_util::future::BoxFuture;
use secrecy::SecretString;
use url::Url;

use svc_base::diagnosis::{Finding, Report};

/// The host's and the platform's checks.
#[derive(Clone, Copy)]
pub struct LocalChecks {
    /// Whether this machine is a host.
    pub is_host: fn() -> bool,
    pub check_host: fn() -> BoxFuture<'static, Report>,
    /// Checks a platform. Its settings are read from this process's environment and, if not set there, from the given
    /// file.
    pub check_platform: for<'a> fn(Option<&'a Path>) -> BoxFuture<'a, PlatformReport>,
    /// The gateway's trusted socket.
    pub gateway_socket: fn() -> PathBuf,
    /// Checks that the gateway is connected to this machine's own database. The argument is the address of the database
    /// server, as reported by the gateway. Returns a description of the connection, or the reason why the check failed.
    pub check_own_database: fn(Option<&str>) -> Result<String, String>,
}

/// The findings about a platform, except those that come from calls to its API.
pub struct PlatformReport {
    pub findings: Vec<Finding>,
    /// The API's URL and the platform's secret; `None` if either is not set, or if the URL is invalid.
    pub api_access: Option<(Url, SecretString)>,
}

//! Local machine checks. `svcctl` doesn't import `host` or `platform`, so the applet table injects them.

use std::path::{Path, PathBuf};

use futures_util::future::BoxFuture;
use secrecy::SecretString;
use url::Url;

use svc_base::diagnosis::{Finding, Report};

/// Host and platform checks.
#[derive(Clone, Copy)]
pub struct LocalChecks {
    /// Whether this machine is a host.
    pub is_host: fn() -> bool,
    pub check_host: fn() -> BoxFuture<'static, Report>,
    /// Checks a platform. Settings are read from this process's environment, falling back to the given file.
    pub check_platform: for<'a> fn(Option<&'a Path>) -> BoxFuture<'a, PlatformReport>,
    /// The gateway's trusted socket.
    pub gateway_socket: fn() -> PathBuf,
    /// Checks that the gateway is connected to this machine's own database, given the server address it reports.
    /// Returns a description of the connection, or why the check failed.
    pub check_own_database: fn(Option<&str>) -> Result<String, String>,
}

/// Platform findings, except those from calling its API.
pub struct PlatformReport {
    pub findings: Vec<Finding>,
    /// API URL and platform secret. `None` if either is unset or the URL is invalid.
    pub api_access: Option<(Url, SecretString)>,
}

//! What `svcctl` can look at on the machine that it runs on. It imports neither host nor platform: `main` hands them in.

use std::path::{Path, PathBuf};

use futures_util::future::BoxFuture;
use secrecy::SecretString;
use url::Url;

use crate::diagnosis::{Finding, Report};

/// The two sides' own checks.
#[derive(Clone, Copy)]
pub struct Local {
    /// Whether this machine is a host.
    pub is_host: fn() -> bool,
    pub host: fn() -> BoxFuture<'static, Report>,
    /// By this process's environment, and a file with settings below it.
    pub platform: for<'a> fn(Option<&'a Path>) -> BoxFuture<'a, Examined>,
    /// The gateway's trusted socket.
    pub gateway_socket: fn() -> PathBuf,
    /// Whether the database is this machine's own, by the gateway's word of its server: what it is, or why not.
    pub own_database: fn(Option<&str>) -> Result<String, String>,
}

/// A platform's settings, judged; and with which credential the platform itself can be asked.
pub struct Examined {
    pub findings: Vec<Finding>,
    pub operator: Option<(Url, SecretString)>,
}

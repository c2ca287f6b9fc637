//! Arguments of `svcctl doctor` and `svcctl verify-rollout`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use url::Url;

#[derive(Debug, Args)]
pub struct Doctor {
    /// What to check (default: the host or platform that is installed on this machine, or else the API)
    #[arg(value_enum)]
    pub subject: Option<Subject>,
    /// File with the platform's settings; environment variables override it (default: PLATFORM_ENV_FILE, or
    /// /etc/svc/platform.env if it exists)
    #[arg(long, value_name = "FILE")]
    pub env_file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Subject {
    /// This machine as a host
    Host,
    /// The platform, from its settings
    Platform,
    /// A remote platform, through its API
    Api,
}

#[derive(Debug, Args)]
pub struct VerifyRollout {
    /// Public URL of the app host, to check from outside. The owner's session token is read from SVC_SESSION_TOKEN or
    /// --session-file
    #[arg(long, value_name = "URL")]
    pub app_url: Option<Url>,
    /// File with the owner's session token
    #[arg(long, value_name = "FILE", requires = "app_url")]
    pub session_file: Option<PathBuf>,
    /// Path of the gateway's trusted socket, to check on the host (default: that of this machine's gateway)
    #[arg(long, value_name = "PATH", conflicts_with = "app_url")]
    pub socket: Option<PathBuf>,
    /// Treat skipped checks as failed
    #[arg(long)]
    pub strict: bool,
}

//! The commands that look at what runs: `doctor` and `verify-rollout`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use url::Url;

#[derive(Debug, Args)]
pub struct Doctor {
    /// What to look at; without it, what this machine is
    #[arg(value_enum)]
    pub subject: Option<Subject>,
    /// File with the platform's settings, below the environment; else the one that PLATFORM_ENV_FILE names, else
    /// /etc/svc/platform.env, where it is
    #[arg(long, value_name = "FILE")]
    pub env_file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Subject {
    /// This machine as a host
    Host,
    /// A platform, from its settings
    Platform,
    /// A platform that runs elsewhere, by its API
    Api,
}

#[derive(Debug, Args)]
pub struct VerifyRollout {
    /// From outside: the public URL of the app host. The owner's session token comes from SVC_SESSION_TOKEN or
    /// --session-file
    #[arg(long, value_name = "URL")]
    pub app_url: Option<Url>,
    /// File with the owner's session token
    #[arg(long, value_name = "FILE", requires = "app_url")]
    pub session_file: Option<PathBuf>,
    /// On the host: the gateway's trusted socket
    #[arg(long, value_name = "PATH", conflicts_with = "app_url")]
    pub socket: Option<PathBuf>,
    /// A check that could not be made fails, too
    #[arg(long)]
    pub strict: bool,
}

//! Checks that a release's own updater starts: if the update is interrupted after the switch, that updater has to
//! finish the update or roll it back.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

const SMOKE_TEST_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, thiserror::Error)]
pub enum SmokeTestError {
    #[error("the release's program does not start")]
    Start(#[source] std::io::Error),
    #[error("the release's updater failed: {0}")]
    Failed(std::process::ExitStatus),
    #[error("the release's updater did not exit within {} s", SMOKE_TEST_TIMEOUT.as_secs())]
    Timeout,
}

/// Runs the release's `svc-update --version`.
pub async fn run(release: &Path) -> Result<(), SmokeTestError> {
    let mut child = Command::new(release.join("bin/svc"))
        .args(["svc-update", "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(SmokeTestError::Start)?;
    match tokio::time::timeout(SMOKE_TEST_TIMEOUT, child.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(SmokeTestError::Failed(status)),
        Ok(Err(error)) => Err(SmokeTestError::Start(error)),
        Err(_) => Err(SmokeTestError::Timeout),
    }
}

//! Reports restore progress to the platform, so a slow boot with a large database or many files isn't mistaken for a
//! hang.
//!
//! Reports are best effort: the restore never waits for one or fails because of one.

use std::time::Duration;

use http::StatusCode;
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::system::config;
use crate::system::config::{Identity, PlatformAccess};
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::error_chain::format_chain;
use svc_http::client::{self, Timeouts};
use svc_machine::id::MachineId;
use svc_wire::registration::{BootStageName, BootStageReport, StageProgress};

/// Minimum time between reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Reports progress until dropped.
pub struct BootReporter(JoinHandle<()>);

impl Drop for BootReporter {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct ProgressClient {
    http: reqwest::Client,
    platform: PlatformAccess,
    machine: MachineId,
    token: SecretString,
}

impl BootReporter {
    /// Reports changes to `progress`, at most one per `REPORT_INTERVAL`. Returns `None` if the identity, platform or
    /// registration token isn't configured, or the HTTP client can't be created.
    pub fn start(layout: &Layout, progress: watch::Receiver<Option<StageProgress>>) -> Option<Self> {
        let mut env = config::environment(layout);
        let identity = Identity::read(&mut env);
        let platform = PlatformAccess::read(&mut env, layout);
        let token = env.secret(&vars::REGISTRATION_TOKEN);
        let http = client::build(Timeouts::CALL).ok()?;
        let client = ProgressClient { http, platform: platform?, machine: identity?.machine, token: token? };
        Some(Self(tokio::spawn(send_reports(client, progress))))
    }
}

async fn send_reports(client: ProgressClient, mut progress: watch::Receiver<Option<StageProgress>>) {
    while progress.changed().await.is_ok() {
        let Some(progress) = *progress.borrow_and_update() else { continue };
        match tokio::time::timeout(CALL_TIMEOUT, client.send(progress)).await {
            // Registration invalidated the token, so the boot is over.
            Ok(Ok(StatusCode::UNAUTHORIZED)) => return,
            Ok(Ok(status)) if status.is_success() => {}
            Ok(Ok(status)) => {
                tracing::debug!(%status, "platform rejected boot progress report");
            }
            Ok(Err(error)) => {
                tracing::debug!(error = %format_chain(&error), "could not send boot progress report");
            }
            Err(_) => tracing::debug!("timed out sending boot progress report"),
        }
        tokio::time::sleep(REPORT_INTERVAL).await;
    }
}

impl ProgressClient {
    async fn send(&self, progress: StageProgress) -> Result<StatusCode, reqwest::Error> {
        let url = self.platform.url(&format!("/vps/{}/boot-stage", self.machine));
        let body = BootStageReport { stage: BootStageName::Restore.into(), progress: Some(progress) };
        let call = self.http.post(url).bearer_auth(self.token.expose_secret()).json(&body);
        Ok(call.send().await?.status())
    }
}

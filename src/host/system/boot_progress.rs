//! Reports the progress of a restore to the platform, so that the boot with a large database is not taken for a hang.
//!
//! Best effort: the restore neither waits for a report nor fails with it.

use std::time::Duration;

use http::StatusCode;
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::system::config;
use crate::system::config::{Identity, PlatformLink};
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::chain::chain;
use svc_http::client::{self, Deadlines};
use svc_machine::id::MachineId;

/// Minimum time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The progress of a restore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProgressAmount {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_rows: Option<u64>,
}

impl ProgressAmount {
    pub fn of_bytes(bytes: u64, total: u64) -> Self {
        Self { bytes: Some(bytes), total_bytes: Some(total), ..Self::default() }
    }

    pub fn of_rows(rows: u64, total: u64) -> Self {
        Self { rows: Some(rows), total_rows: Some(total), ..Self::default() }
    }
}

/// Reports until it is dropped.
pub struct BootReporter(JoinHandle<()>);

impl Drop for BootReporter {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct ReportLink {
    client: reqwest::Client,
    platform: PlatformLink,
    machine: MachineId,
    token: SecretString,
}

impl BootReporter {
    /// Reports each change of `amount`. `None` on a machine without a registration token.
    pub fn start(layout: &Layout, amount: watch::Receiver<Option<ProgressAmount>>) -> Option<Self> {
        let mut env = config::environment(layout);
        let identity = Identity::read(&mut env);
        let platform = PlatformLink::read(&mut env, layout);
        let token = env.secret(&vars::REGISTRATION_TOKEN);
        let client = client::build(Deadlines::CALL).ok()?;
        let link = ReportLink { client, platform: platform?, machine: identity?.machine, token: token? };
        Some(Self(tokio::spawn(report(link, amount))))
    }
}

async fn report(link: ReportLink, mut amount: watch::Receiver<Option<ProgressAmount>>) {
    while amount.changed().await.is_ok() {
        let Some(now) = *amount.borrow_and_update() else { continue };
        match tokio::time::timeout(CALL_TIMEOUT, link.send(now)).await {
            // The token is used up: this machine is registered, and its boot is over.
            Ok(Ok(StatusCode::UNAUTHORIZED)) => return,
            Ok(Ok(status)) if status.is_success() => {}
            Ok(Ok(status)) => {
                tracing::debug!(%status, "the platform rejected the boot progress");
            }
            Ok(Err(error)) => {
                tracing::debug!(error = %chain(&error), "could not send the boot progress");
            }
            Err(_) => tracing::debug!("no response to the boot progress in time"),
        }
        tokio::time::sleep(REPORT_INTERVAL).await;
    }
}

impl ReportLink {
    async fn send(&self, amount: ProgressAmount) -> Result<StatusCode, reqwest::Error> {
        let url = self.platform.url(&format!("/vps/{}/boot-stage", self.machine));
        let body = json!({ "stage": "restore", "progress": amount });
        let call = self.client.post(url).bearer_auth(self.token.expose_secret()).json(&body);
        Ok(call.send().await?.status())
    }
}

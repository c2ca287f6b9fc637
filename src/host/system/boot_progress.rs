//! Says to the platform how far a restore is, so that a large database is not taken for a boot that hangs.
//!
//! Best effort: the restore does not wait for it, and no failure here is one of the restore's.

use std::time::Duration;

use http::StatusCode;
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::chain::chain;
use crate::host::system::config;
use crate::host::system::config::{Identity, PlatformLink};
use crate::host::system::layout::Layout;
use crate::http::client::{self, Deadlines};
use crate::machine::id::MachineId;

/// The platform is told at most this often.
const INTERVAL: Duration = Duration::from_secs(10);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// How much of a restore is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Amount {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_rows: Option<u64>,
}

impl Amount {
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

struct Link {
    client: reqwest::Client,
    platform: PlatformLink,
    machine: MachineId,
    token: SecretString,
}

impl BootReporter {
    /// Reports each change of `amount`. `None` on a machine that has no registration token.
    pub fn start(layout: &Layout, amount: watch::Receiver<Option<Amount>>) -> Option<Self> {
        let mut env = config::environment(layout);
        let identity = Identity::read(&mut env);
        let platform = PlatformLink::read(&mut env, layout);
        let token = env.secret("REGISTRATION_TOKEN");
        let client = client::build(Deadlines::CALL).ok()?;
        let link = Link { client, platform: platform?, machine: identity?.machine, token: token? };
        Some(Self(tokio::spawn(report(link, amount))))
    }
}

async fn report(link: Link, mut amount: watch::Receiver<Option<Amount>>) {
    while amount.changed().await.is_ok() {
        let Some(now) = *amount.borrow_and_update() else { continue };
        match tokio::time::timeout(CALL_TIMEOUT, link.send(now)).await {
            // The token is used up: this machine is registered, and nobody waits for its boot.
            Ok(Ok(StatusCode::UNAUTHORIZED)) => return,
            Ok(Ok(status)) if status.is_success() => {}
            Ok(Ok(status)) => {
                tracing::debug!(%status, "the platform did not take the boot's progress");
            }
            Ok(Err(error)) => {
                tracing::debug!(error = %chain(&error), "the boot's progress was not delivered");
            }
            Err(_) => tracing::debug!("the platform did not answer to the boot's progress in time"),
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

impl Link {
    async fn send(&self, amount: Amount) -> Result<StatusCode, reqwest::Error> {
        let url = self.platform.url(&format!("/vps/{}/boot-stage", self.machine));
        let body = json!({ "stage": "restore", "progress": amount });
        let call = self.client.post(url).bearer_auth(self.token.expose_secret()).json(&body);
        Ok(call.send().await?.status())
    }
}

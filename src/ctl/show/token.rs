//! Text view of the token with which a machine's host authenticates to the platform.

use serde::Deserialize;

use super::View;
use super::human::{ago, when};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpgradeToken {
    generation: u64,
    rotated_at: String,
    requested_at: Option<String>,
}

/// The number of machines that got a request to rotate.
#[derive(Debug, Deserialize)]
pub struct Requested {
    requested: u64,
}

impl UpgradeToken {
    /// `generation 3, since 2026-01-01 00:00:00 UTC, 5 min ago; rotation requested 1 min ago`.
    pub fn line(&self, view: &View) -> String {
        let Self { generation, rotated_at, requested_at } = self;
        let requested =
            requested_at.as_deref().map(|at| format!("; rotation requested {}", ago(view.now, at)));
        let since = when(view.now, rotated_at);
        format!("generation {generation}, since {since}{}", requested.unwrap_or_default())
    }
}

impl Requested {
    pub fn line(&self) -> String {
        let count = self.requested;
        format!(
            "{count} tokens rotate with the next heartbeats of their hosts; `svcctl fleet` lists machines that did not rotate\n"
        )
    }
}

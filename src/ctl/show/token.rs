//! Text view of the token with which a machine's host authenticates to the platform.

use super::View;
use super::human::{ago, when};
use svc_wire::change::TokenRotations;
use svc_wire::machine::UpgradeToken;

/// `generation 3, since 2026-01-01 00:00:00 UTC, 5 min ago; rotation requested 1 min ago`.
pub fn line(view: &View, token: &UpgradeToken) -> String {
    let UpgradeToken { generation, rotated_at, requested_at } = token;
    let requested = requested_at.as_deref().map(|at| format!("; rotation requested {}", ago(view.now, at)));
    let since = when(view.now, rotated_at);
    format!("generation {generation}, since {since}{}", requested.unwrap_or_default())
}

/// The number of machines whose tokens rotate.
pub fn rotations(rotations: TokenRotations) -> String {
    let count = rotations.requested;
    format!(
        "{count} tokens rotate with the next heartbeats of their hosts; `svcctl fleet` lists machines that did not rotate\n"
    )
}

//! Text view of the token that authenticates a machine's host to the platform.

use super::View;
use super::human::{format_ago, format_time};
use svc_base::quantity::pluralize;
use svc_wire::change::TokenRotations;
use svc_wire::machine::UpgradeToken;

/// Formats a token's state as `generation 3, since 2026-01-01 00:00:00 UTC, 5 min ago; rotation requested 1 min ago`.
pub fn line(view: &View, token: &UpgradeToken) -> String {
    let UpgradeToken { generation, rotated_at, requested_at } = token;
    let requested =
        requested_at.as_deref().map(|at| format!("; rotation requested {}", format_ago(view.now, at)));
    let since = format_time(view.now, rotated_at);
    format!("generation {generation}, since {since}{}", requested.unwrap_or_default())
}

/// Reports how many tokens will be rotated.
pub fn rotations(rotations: TokenRotations) -> String {
    let count = rotations.requested;
    format!(
        "{} will be rotated with the hosts' next heartbeats; after a week, `svcctl fleet` lists the machines \
         whose tokens have not been rotated\n",
        pluralize(count, "token")
    )
}

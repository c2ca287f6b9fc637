//! Reports tokens that name a recorded machine but were issued with neither the current nor the previous platform key:
//! either the platform has the wrong key, or the token is forged. Without a report, the host that sent such a token
//! would look like a lost machine.
//!
//! Anyone can send such a token, so the log lines and alarms are rate-limited for the whole process.

use serde_json::json;

use crate::alarms::{self, Alarm};
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::tokens::{Purpose, TokenClaim};

/// Reports a rejected token, unless the platform issued it: such a token is rejected only because a later one has
/// replaced it.
pub async fn report_rejected_token(
    platform: &Platform,
    machine: &MachineRow,
    token: &str,
    claim: TokenClaim,
) {
    if platform.mint.is_genuine(token, claim, Purpose::Upgrade)
        || !platform.rate_limits.admit_rejection_report()
    {
        return;
    }
    let (sent_generation, recorded_generation) = (claim.generation.0, machine.upgrade_token.generation.0);
    tracing::warn!(machine = %machine.id, generation = sent_generation, known = recorded_generation,
        "host token rejected: not issued with an active platform key; check that PLATFORM_KEY is the current key");
    let detail = json!({machine.handle.as_str(): {"machineId": machine.id, "generation": sent_generation}});
    alarms::raise_or_log(platform, Alarm::HostTokensRejected, &detail).await;
}

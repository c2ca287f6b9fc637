//! A known machine's host whose token no platform key in force has made: it lives, and the platform has not the key of now, or the
//! token was made up. Without a word of it, such a host would look as if it were lost.
//!
//! Anybody can send such a token, so what follows from it is bounded for the whole process: a line of the log and a case of
//! an alarm.

use serde_json::json;

use crate::platform::alarms::{self, Alarm};
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::tokens::{Purpose, TokenClaim};

/// Notes a token that was refused, unless the platform made it and it has ended.
pub async fn note(platform: &Platform, machine: &MachineRow, token: &str, claim: TokenClaim) {
    if platform.mint.has_made(token, claim, Purpose::Upgrade) || !platform.rates.admit_refused_host() {
        return;
    }
    let (sent, known) = (claim.generation.0, machine.upgrade_token.generation.0);
    tracing::warn!(machine = %machine.id, generation = sent, known,
        "a host's token is refused: no platform key in force has made it; is PLATFORM_KEY the key of now?");
    let detail = json!({machine.handle.as_str(): {"machineId": machine.id, "generation": sent}});
    alarms::inform(platform, Alarm::HostTokensRefused, &detail).await;
}

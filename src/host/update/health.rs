//! Checks a release's health after its services have been restarted, using unit states and a gateway probe.
//!
//! A unit that is starting does not count as failed. The release passes once it has stayed healthy for a few seconds.
//! It fails if a unit fails, or if it is not healthy when the deadline has passed.

use std::time::{Duration, Instant};

use super::services::{ServiceManager, ServiceManagerError, UnitState};
use crate::system::probe::GatewayClient;
use svc_base::error_chain::format_chain;

pub const GATEWAY_UNIT: &str = "svc-gateway.service";
/// Services that are checked after an update if they were running before it. One that is inactive does not count as
/// failed.
pub const CHECKED_SERVICES: [&str; 5] = [
    "svc-shell.service",
    "svc-code.service",
    "svc-sync-agent.service",
    "svc-watch.service",
    "svc-files.service",
];
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Time for which the release must stay healthy; a tenth of the timeout if that is shorter.
const MIN_HEALTHY_TIME: Duration = Duration::from_secs(3);
/// Number of automatic restarts after which a unit counts as failed, even if it is running again.
const MAX_RESTARTS: u32 = 3;

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealthState {
    Healthy,
    Starting(String),
    Failed(String),
}

/// How the gateway is probed.
pub enum GatewayProbe {
    /// The gateway has no usable certificate, so it cannot be probed and the release cannot pass.
    Unavailable,
    /// The gateway must be ready.
    Ready(GatewayClient),
    /// The gateway was not ready before the update, so liveness is enough.
    Alive(GatewayClient),
}

impl GatewayProbe {
    async fn passes(&self) -> bool {
        match self {
            Self::Unavailable => false,
            Self::Ready(gateway) => gateway.is_ready().await,
            Self::Alive(gateway) => gateway.is_alive().await,
        }
    }
}

/// Combines the unit states and the gateway's probe result.
fn assess(units: &[(String, UnitState)], passes_probe: bool) -> HealthState {
    let mut starting = None;
    for (name, unit) in units {
        if unit.restarts >= MAX_RESTARTS {
            return HealthState::Failed(format!(
                "{name} was restarted {} times ({})",
                unit.restarts, unit.result
            ));
        }
        match unit.active.as_str() {
            "active" => {}
            "failed" => return HealthState::Failed(format!("{name} failed ({})", unit.result)),
            // A release may lack any of the checked services, or the program that one of them runs. systemd then leaves
            // the unit inactive.
            "inactive" if name != GATEWAY_UNIT => {}
            "inactive" => return HealthState::Failed(format!("{name} is not running ({})", unit.result)),
            other => starting = Some(format!("{name} is {other}")),
        }
    }
    match starting {
        Some(reason) => HealthState::Starting(reason),
        None if passes_probe => HealthState::Healthy,
        None => HealthState::Starting("the gateway is running, but its probe fails".to_owned()),
    }
}

async fn check_health(
    services: &impl ServiceManager,
    units: &[String],
    probe: &GatewayProbe,
) -> Result<HealthState, ServiceManagerError> {
    let mut states = Vec::new();
    for name in units {
        states.push((name.clone(), services.state(name).await?));
    }
    Ok(assess(&states, probe.passes().await))
}

/// Waits until the release is healthy.
///
/// # Errors
/// A message about the unit that failed, or about what was not healthy yet at the deadline.
pub async fn wait_until_healthy(
    services: &impl ServiceManager,
    units: &[String],
    probe: &GatewayProbe,
    timeout: Duration,
) -> Result<(), String> {
    let deadline = Instant::now() + timeout;
    let min_healthy_time = MIN_HEALTHY_TIME.min(timeout / 10);
    let mut healthy_since = None;
    loop {
        let state = check_health(services, units, probe)
            .await
            .unwrap_or_else(|error| HealthState::Starting(format_chain(&error)));
        match state {
            HealthState::Healthy => {
                let since = *healthy_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= min_healthy_time {
                    return Ok(());
                }
            }
            HealthState::Failed(reason) => return Err(reason),
            HealthState::Starting(reason) if Instant::now() >= deadline => {
                return Err(format!("the release was not healthy within {} s: {reason}", timeout.as_secs()));
            }
            HealthState::Starting(_) => healthy_since = None,
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(name: &str, active: &str, restarts: u32) -> (String, UnitState) {
        (name.to_owned(), UnitState { active: active.to_owned(), result: "exit-code".to_owned(), restarts })
    }

    #[test]
    fn assess_distinguishes_starting_from_failed_units() {
        let other = "svc-code.service";
        let is_starting = |state: &HealthState| matches!(state, HealthState::Starting(_));
        let is_failed = |state: &HealthState| matches!(state, HealthState::Failed(_));
        assert_eq!(
            assess(&[unit(GATEWAY_UNIT, "active", 0), unit(other, "active", 1)], true),
            HealthState::Healthy
        );
        assert!(is_starting(&assess(&[unit(GATEWAY_UNIT, "active", 0)], false)));
        assert!(is_starting(&assess(&[unit(GATEWAY_UNIT, "activating", 2)], false)));
        assert!(is_starting(&assess(&[unit(GATEWAY_UNIT, "active", 0), unit(other, "reloading", 0)], true)));
        assert!(is_failed(&assess(&[unit(GATEWAY_UNIT, "activating", 3)], false)));
        assert!(is_failed(&assess(&[unit(GATEWAY_UNIT, "failed", 0)], true)));
        assert!(is_failed(&assess(&[unit(GATEWAY_UNIT, "inactive", 0)], false)));
        assert!(is_failed(&assess(&[unit(GATEWAY_UNIT, "active", 0), unit(other, "failed", 0)], true)));
        assert_eq!(
            assess(&[unit(GATEWAY_UNIT, "active", 0), unit(other, "inactive", 0)], true),
            HealthState::Healthy
        );
    }
}

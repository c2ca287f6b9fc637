//! Post-restart health checks for a release, based on unit states and a gateway probe.
//!
//! Starting units aren't treated as failed. The release passes once it has stayed healthy for a few seconds, and fails
//! if a unit fails or if it isn't healthy by the deadline.

use std::time::{Duration, Instant};

use super::services::{ServiceManager, ServiceManagerError, UnitState};
use crate::system::probe::GatewayClient;
use svc_base::error_chain::format_chain;

pub const GATEWAY_UNIT: &str = "svc-gateway.service";
/// Services to check after an update if they were running before. Inactive ones aren't treated as failed.
pub const CHECKED_SERVICES: [&str; 5] = [
    "svc-shell.service",
    "svc-code.service",
    "svc-sync-agent.service",
    "svc-watch.service",
    "svc-files.service",
];
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// How long the release must stay healthy, capped at a tenth of the timeout.
const MIN_HEALTHY_TIME: Duration = Duration::from_secs(3);
/// Number of automatic restarts after which a unit is treated as failed, even if it is running again.
const MAX_RESTARTS: u32 = 3;

/// Result of a single check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealthState {
    Healthy,
    Starting(String),
    Failed(String),
}

/// How to probe the gateway.
pub enum GatewayProbe {
    /// No usable certificate, so the gateway can't be probed and the release can't pass.
    Unavailable,
    /// The gateway must be ready.
    Ready(GatewayClient),
    /// The gateway wasn't ready before the update, so it only has to be alive.
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

/// Combines unit states and the gateway probe result.
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
            // Any checked service, or the program it runs, may be missing from the release. systemd then leaves the
            // unit inactive.
            "inactive" if name != GATEWAY_UNIT => {}
            "inactive" => return HealthState::Failed(format!("{name} is not running ({})", unit.result)),
            other => starting = Some(format!("{name} is {other}")),
        }
    }
    match starting {
        Some(reason) => HealthState::Starting(reason),
        None if passes_probe => HealthState::Healthy,
        None => HealthState::Starting("gateway is running but failing its probe".to_owned()),
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
/// A message naming the failed unit, or what wasn't healthy by the deadline.
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
                return Err(format!("release not healthy within {} s: {reason}", timeout.as_secs()));
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

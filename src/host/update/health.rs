//! Health check of a release after its services were restarted, from unit states and the gateway's probe.
//!
//! A unit that is starting has not failed. The release is healthy once it stays healthy for a moment within the
//! deadline.

use std::time::{Duration, Instant};

use super::services::{Services, ServicesError, UnitState};
use crate::host::system::probe::Gateway;

pub const GATEWAY: &str = "svc-gateway.service";
/// Services that must run after an update if they ran before it.
pub const OTHERS: [&str; 4] =
    ["svc-shell.service", "svc-code.service", "svc-sync-agent.service", "svc-watch.service"];
const PAUSE: Duration = Duration::from_millis(250);
/// Time for which the release must stay healthy. A short deadline reduces it.
const SETTLING: Duration = Duration::from_secs(3);
/// Restarts after which a unit counts as failed, not starting.
const MOST_RESTARTS: u32 = 3;

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Look {
    Well,
    Starting(String),
    Failed(String),
}

/// The gateway probe to use.
pub enum Door {
    /// No certificate exists yet.
    Closed,
    Ready(Gateway),
    /// The gateway was not ready before the update, so liveness is enough.
    Alive(Gateway),
}

impl Door {
    async fn answers(&self) -> bool {
        match self {
            Self::Closed => false,
            Self::Ready(gateway) => gateway.is_ready().await,
            Self::Alive(gateway) => gateway.is_alive().await,
        }
    }
}

/// Combines the unit states and the gateway's probe result.
fn judge(units: &[(String, UnitState)], answers: bool) -> Look {
    let mut starting = None;
    for (name, unit) in units {
        if unit.restarts >= MOST_RESTARTS {
            return Look::Failed(format!("{name} ended {} times ({})", unit.restarts, unit.result));
        }
        match unit.active.as_str() {
            "active" => {}
            "failed" => return Look::Failed(format!("{name} failed ({})", unit.result)),
            // A release may lack any other service, or give it nothing to run.
            "inactive" if name != GATEWAY => {}
            "inactive" => return Look::Failed(format!("{name} does not run ({})", unit.result)),
            other => starting = Some(format!("{name} is {other}")),
        }
    }
    match starting {
        Some(why) => Look::Starting(why),
        None if answers => Look::Well,
        None => Look::Starting("the gateway is running but not ready".to_owned()),
    }
}

async fn look(services: &impl Services, units: &[String], door: &Door) -> Result<Look, ServicesError> {
    let mut states = Vec::new();
    for name in units {
        states.push((name.clone(), services.state(name).await?));
    }
    Ok(judge(&states, door.answers().await))
}

/// Waits until the release is healthy.
///
/// # Errors
/// The failure, or the unit that was still starting at the deadline.
pub async fn wait(
    services: &impl Services,
    units: &[String],
    door: &Door,
    deadline: Duration,
) -> Result<(), String> {
    let end = Instant::now() + deadline;
    let settling = SETTLING.min(deadline / 10);
    let mut well_since = None;
    loop {
        let seen =
            look(services, units, door).await.unwrap_or_else(|error| Look::Starting(error.to_string()));
        match seen {
            Look::Well => {
                let since = *well_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= settling {
                    return Ok(());
                }
            }
            Look::Failed(why) => return Err(why),
            Look::Starting(why) if Instant::now() >= end => {
                return Err(format!("not healthy within {} s: {why}", deadline.as_secs()));
            }
            Look::Starting(_) => well_since = None,
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(name: &str, active: &str, restarts: u32) -> (String, UnitState) {
        (name.to_owned(), UnitState { active: active.to_owned(), result: "exit-code".to_owned(), restarts })
    }

    #[test]
    fn starting_is_not_failing_and_failing_is_not_starting() {
        let other = "svc-code.service";
        let starting = |look: &Look| matches!(look, Look::Starting(_));
        let failed = |look: &Look| matches!(look, Look::Failed(_));
        assert_eq!(judge(&[unit(GATEWAY, "active", 0), unit(other, "active", 1)], true), Look::Well);
        assert!(starting(&judge(&[unit(GATEWAY, "active", 0)], false)));
        assert!(starting(&judge(&[unit(GATEWAY, "activating", 2)], false)));
        assert!(starting(&judge(&[unit(GATEWAY, "active", 0), unit(other, "reloading", 0)], true)));
        assert!(failed(&judge(&[unit(GATEWAY, "activating", 3)], false)));
        assert!(failed(&judge(&[unit(GATEWAY, "failed", 0)], true)));
        assert!(failed(&judge(&[unit(GATEWAY, "inactive", 0)], false)));
        assert!(failed(&judge(&[unit(GATEWAY, "active", 0), unit(other, "failed", 0)], true)));
        assert_eq!(judge(&[unit(GATEWAY, "active", 0), unit(other, "inactive", 0)], true), Look::Well);
    }
}

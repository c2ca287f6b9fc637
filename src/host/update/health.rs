//! Whether the release that was just started is well: what the service manager says, and what the gateway answers.
//!
//! Starting is not failing. Well is what stays well for a moment, within the deadline.

use std::time::{Duration, Instant};

use super::services::{Services, ServicesError, UnitState};
use crate::host::system::probe::Gateway;

pub const GATEWAY: &str = "svc-gateway.service";
/// Whatever of these runs when an update begins must run when it ends.
pub const OTHERS: [&str; 4] =
    ["svc-shell.service", "svc-code.service", "svc-sync-agent.service", "svc-watch.service"];
/// Between looks.
const PAUSE: Duration = Duration::from_millis(250);
/// How long it must stay well, at most; a short deadline makes it shorter.
const SETTLING: Duration = Duration::from_secs(3);
/// Ends of a process after which it is no longer called starting.
const MOST_RESTARTS: u32 = 3;

/// What one look shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Look {
    Well,
    Starting(String),
    Failed(String),
}

/// Whether a gateway answers, asked as the router would.
pub enum Door {
    /// Its certificate is not there yet.
    Closed,
    Ready(Gateway),
    /// It was not ready before the update: to be alive is enough.
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

/// What the states of the units and the gateway's answer mean together.
fn judge(units: &[(String, UnitState)], answers: bool) -> Look {
    let mut starting = None;
    for (name, unit) in units {
        if unit.restarts >= MOST_RESTARTS {
            return Look::Failed(format!("{name} ended {} times ({})", unit.restarts, unit.result));
        }
        match unit.active.as_str() {
            "active" => {}
            "failed" => return Look::Failed(format!("{name} failed ({})", unit.result)),
            // Of the others a release may have none, or one that has nothing to do here.
            "inactive" if name != GATEWAY => {}
            "inactive" => return Look::Failed(format!("{name} does not run ({})", unit.result)),
            other => starting = Some(format!("{name} is {other}")),
        }
    }
    match starting {
        Some(why) => Look::Starting(why),
        None if answers => Look::Well,
        None => Look::Starting("the gateway runs and is not ready".to_owned()),
    }
}

async fn look(services: &impl Services, units: &[String], door: &Door) -> Result<Look, ServicesError> {
    let mut states = Vec::new();
    for name in units {
        states.push((name.clone(), services.state(name).await?));
    }
    Ok(judge(&states, door.answers().await))
}

/// Waits until all is well; otherwise says why it is not.
///
/// # Errors
/// What failed, or what was still starting at the deadline.
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
                return Err(format!("not well within {} s: {why}", deadline.as_secs()));
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

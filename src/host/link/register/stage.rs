//! The word that the boot has come to a stage. People look at it and nothing depends on it: whatever goes wrong with it
//! is a line of the log, and the boot goes on.

use std::time::Duration;

use anyhow::anyhow;
use serde::Serialize;

use super::call::Platform;
use super::failure::Stage;
use super::ledger::Ledger;
use crate::applet::{Exit, Failure, OrExit};
use crate::host::system::config;
use crate::host::system::config::{Identity, PlatformLink};
use crate::host::system::layout::Layout;

/// A boot waits no longer than this for somebody to hear it.
const DEADLINE: Duration = Duration::from_secs(3);

#[derive(Serialize)]
struct Word {
    stage: Stage,
}

pub async fn report(layout: &Layout, stage: Stage) {
    let told = tokio::time::timeout(DEADLINE, tell(layout, stage)).await;
    let told = told.unwrap_or_else(|_| Err(Failure::new(Exit::TryAgain, anyhow!("no answer in time"))));
    if let Err(failure) = told {
        tracing::warn!(
            ?stage,
            why = format!("{:#}", failure.error),
            "the platform was not told of the stage"
        );
    }
}

async fn tell(layout: &Layout, stage: Stage) -> Result<(), Failure> {
    let mut env = config::environment(layout);
    let identity = Identity::read(&mut env);
    let platform = PlatformLink::read(&mut env, layout);
    let token = env.required_secret("REGISTRATION_TOKEN");
    let ((identity, platform), token) = env.finish(identity.zip(platform).zip(token))?;
    let ledger = Ledger::read(layout).or_exit(Exit::Internal)?;
    if ledger.is_some_and(|ledger| ledger.is_done_for(identity.machine)) {
        // A later start of a machine that is known: its token is used up.
        return Ok(());
    }
    let body = serde_json::to_string(&Word { stage }).or_exit(Exit::Internal)?;
    let platform = Platform::new(&platform, &token).or_exit(Exit::Config)?;
    platform.boot_stage(identity.machine, &body, DEADLINE).await.map_err(super::failure)
}

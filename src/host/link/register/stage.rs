//! Reports a stage of the boot. The report is informational: a failure is logged and does not stop the boot.

use std::time::Duration;

use anyhow::anyhow;
use serde::Serialize;

use super::call::RegistrationClient;
use super::failure::BootStage;
use super::ledger::Ledger;
use crate::system::config;
use crate::system::config::{Identity, PlatformLink};
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::applet::{Exit, Failure, OrExit};

/// Maximum delay of the boot by one report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Serialize)]
struct StageReport {
    stage: BootStage,
}

pub async fn report(layout: &Layout, stage: BootStage) {
    let sent = tokio::time::timeout(REPORT_TIMEOUT, send_stage(layout, stage)).await;
    let sent = sent.unwrap_or_else(|_| Err(Failure::new(Exit::TryAgain, anyhow!("timed out"))));
    if let Err(failure) = sent {
        tracing::warn!(
            ?stage,
            why = format!("{:#}", failure.error),
            "could not report the boot stage to the platform"
        );
    }
}

async fn send_stage(layout: &Layout, stage: BootStage) -> Result<(), Failure> {
    let mut env = config::environment(layout);
    let identity = Identity::read(&mut env);
    let platform = PlatformLink::read(&mut env, layout);
    let token = env.required_secret(&vars::REGISTRATION_TOKEN);
    let ((identity, platform), token) = env.finish(identity.zip(platform).zip(token))?;
    let ledger = Ledger::read(layout).or_exit(Exit::Internal)?;
    if ledger.is_some_and(|ledger| ledger.is_registered(identity.machine)) {
        // A later start of a registered machine, whose token is used up.
        return Ok(());
    }
    let body = serde_json::to_string(&StageReport { stage }).or_exit(Exit::Internal)?;
    let platform = RegistrationClient::new(&platform, &token).or_exit(Exit::Config)?;
    platform.boot_stage(identity.machine, &body, REPORT_TIMEOUT).await.map_err(super::failure)
}

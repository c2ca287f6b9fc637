//! Reports a boot stage. Best effort: failures are logged and don't stop the boot.

use std::time::Duration;

use anyhow::anyhow;

use super::client::RegistrationClient;
use super::state::RegistrationState;
use crate::system::config;
use crate::system::config::{Identity, PlatformAccess};
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_wire::registration::{BootStageName, BootStageReport};

/// Upper bound on the delay a report can add to the boot.
const REPORT_TIMEOUT: Duration = Duration::from_secs(3);

pub async fn report(layout: &Layout, stage: BootStageName) {
    let result = tokio::time::timeout(REPORT_TIMEOUT, send_stage(layout, stage)).await;
    let result = result.unwrap_or_else(|_| Err(Failure::new(Exit::TryAgain, anyhow!("timed out"))));
    if let Err(failure) = result {
        tracing::warn!(
            %stage,
            error = format!("{:#}", failure.error),
            "could not report boot stage"
        );
    }
}

async fn send_stage(layout: &Layout, stage: BootStageName) -> Result<(), Failure> {
    let mut env = config::environment(layout);
    let identity = Identity::read(&mut env);
    let platform = PlatformAccess::read(&mut env, layout);
    let token = env.required_secret(&vars::REGISTRATION_TOKEN);
    let ((identity, platform), token) = env.finish(identity.zip(platform).zip(token))?;
    let state = RegistrationState::read(layout).or_exit(Exit::Internal)?;
    if state.is_some_and(|state| state.is_registered(identity.machine)) {
        // Already registered during an earlier boot, which used up the token.
        return Ok(());
    }
    let report = BootStageReport { stage: stage.into(), progress: None };
    let platform = RegistrationClient::new(&platform, &token).or_exit(Exit::Config)?;
    platform.report_boot_stage(identity.machine, &report, REPORT_TIMEOUT).await.map_err(super::to_failure)
}

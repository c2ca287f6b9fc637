//! Table-driven tests of object-store failures: each row names the failure and the expected exit code and result of the
//! run.

mod backup;
mod restore;

use anyhow::{Result, ensure};
use jiff::SignedDuration;
use kit::s3::{Fault, FaultRule, S3Server};

use super::super::credentials::{CredentialPlatform, CredentialResponse};
use super::super::machine::{Machine, RunResult, RunningApplet};

/// A machine, its store, and the platform that issues its short-lived credentials.
struct FaultFixture {
    store: S3Server,
    platform: CredentialPlatform,
    machine: Machine,
}

/// A disruption, applied before the run.
enum Disruption {
    /// Store faults; each must be triggered.
    Rules(Vec<FaultRule>),
    Action(fn(&FaultFixture)),
}

fn rule(fault: Fault) -> FaultRule {
    FaultRule::new(fault)
}

fn single_rule(rule: FaultRule) -> Disruption {
    Disruption::Rules(vec![rule])
}

impl FaultFixture {
    /// Applies the disruption, starts the run and waits for its exit, and restores normal operation. Returns an error
    /// if a fault was not triggered.
    async fn run_disrupted(
        &self,
        disruption: Disruption,
        spawn: impl FnOnce() -> Result<RunningApplet>,
    ) -> Result<RunResult> {
        let counters: Vec<_> = match disruption {
            Disruption::Rules(rules) => rules.into_iter().map(|rule| self.store.add_fault(rule)).collect(),
            Disruption::Action(action) => {
                action(self);
                Vec::new()
            }
        };
        let running = spawn()?;
        let result = tokio::task::spawn_blocking(move || running.wait()).await??;
        ensure!(
            counters.iter().all(|counter| counter.hits() > 0),
            "a fault was not triggered:\n{}",
            result.stderr
        );
        self.restore_normal_operation().await?;
        Ok(result)
    }

    async fn restore_normal_operation(&self) -> Result<()> {
        self.store.heal();
        self.store.bring_up()?;
        self.platform.set_response(CredentialResponse::Issue);
        svc::fsx::remove_if_exists(&self.machine.path("var/lib/svc/store-credentials.json"))?;
        self.platform.write_credentials(&self.machine, SignedDuration::from_hours(9)).await
    }
}

/// Expires all sessions at the store, and makes the platform issue no new ones.
fn expire_without_renewal(fixture: &FaultFixture) {
    fixture.platform.set_response(CredentialResponse::Unavailable);
    fixture.store.expire_sessions();
}

fn supersede_machine(fixture: &FaultFixture) {
    fixture.platform.set_response(CredentialResponse::Superseded);
    fixture.store.expire_sessions();
}

fn revoke_sessions(fixture: &FaultFixture) {
    assert!(fixture.store.revoke_sessions("svc-host") > 0, "there was no session");
}

//! Verifies a rollout's release on the first machines that receive it, before the next batch starts.
//!
//! The checks take a long time, so they run outside any transaction, under a claim that is renewed: if the process
//! stops, another process takes over. A failed verification pauses the rollout and raises an alarm; after
//! `svcctl deploy resume`, the release is verified again.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::GenericClient;
use futures_util::StreamExt;
use http::{HeaderName, HeaderValue};
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use crate::alarms::{self, Alarm};
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::rollouts::{self, RolloutRow};
use crate::db::{self, audit};
use crate::operations::host_call;
use svc_base::diagnosis::{Finding, Findings, Level};
use svc_base::error_chain::format_chain;
use svc_base::untrusted_text;
use svc_http::proof::{self, Route};
use svc_http::request_id;
use svc_machine::id::MachineId;
use svc_verify::{CHECK_TIMEOUT, Credential, HostClient, TIMEOUTS, check_release};
use svc_wire::rollout::{RolloutFinding, RolloutState, RolloutVerification};

/// Maximum number of machines that are verified.
const MAX_MACHINES: usize = 5;
const MAX_CONCURRENT_MACHINES: usize = 2;
/// Maximum number of findings that are stored.
const MAX_FINDINGS: usize = 20;
/// Maximum number of attempts per machine: a host that was just updated may still be starting.
const MAX_ATTEMPTS: usize = 3;
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum duration of the checks on one machine.
const MACHINE_TIMEOUT: Duration = Duration::from_secs(CHECK_TIMEOUT.as_secs() * 3);
pub const CLAIM_TTL: Duration = Duration::from_secs(60);
const CLAIM_RENEWAL_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum number of findings in a paused rollout's reason.
const MAX_REASON_FINDINGS: usize = 3;

/// Verifies the release on the first machines that run it, and stores the result.
///
/// # Errors
/// If the database is unavailable. The claim then expires.
pub async fn run(platform: &Arc<Platform>, mut claimed: RolloutRow) -> anyhow::Result<()> {
    let rollout = claimed.clone();
    let mut verification = pin!(verify_release(platform, &rollout));
    loop {
        tokio::select! {
            verification = &mut verification => return store_result(platform, &claimed, verification?).await,
            () = tokio::time::sleep(CLAIM_RENEWAL_INTERVAL) => match renew_claim(platform, &claimed).await {
                Ok(Some(renewed)) => claimed = renewed,
                // Another process took over, or an operator resumed the rollout: only the new verification counts.
                Ok(None) => return Ok(()),
                Err(error) => tracing::warn!(error = %format_chain(&error), "cannot renew a verification claim"),
            },
        }
    }
}

async fn renew_claim(platform: &Platform, claimed: &RolloutRow) -> Result<Option<RolloutRow>, db::DbError> {
    let session = platform.db.session().await?;
    rollouts::renew_verification(&session, claimed, CLAIM_TTL).await
}

async fn verify_release(
    platform: &Arc<Platform>,
    rollout: &RolloutRow,
) -> Result<RolloutVerification, db::DbError> {
    let session = platform.db.session().await?;
    let machines = rollouts::list_running_release(&session, rollout, None).await?;
    let rows = load_machines(&session, machines).await?;
    drop(session);
    let checks = rows.clone().into_iter().map(|machine| {
        let (platform, rollout) = (Arc::clone(platform), rollout.clone());
        async move { verify_machine(&platform, &rollout, machine).await }
    });
    let checked: Vec<_> =
        futures_util::stream::iter(checks).buffered(MAX_CONCURRENT_MACHINES).collect().await;
    let mut handles = Vec::new();
    let mut findings = Vec::new();
    for (machine, result) in rows.iter().zip(checked) {
        if let Some(machine_findings) = result? {
            handles.push((&machine.handle).into());
            findings.extend(machine_findings);
        }
    }
    let has_checked_machine = !handles.is_empty();
    if !has_checked_machine {
        let session = platform.db.session().await?;
        let updated = rollouts::list_updated(&session, rollout.id).await?;
        findings = load_machines(&session, updated)
            .await?
            .iter()
            .take(1)
            .map(|row| release_missing_finding(rollout, row))
            .collect();
    }
    Ok(RolloutVerification {
        at: svc_base::clock::now_ms().into(),
        passed: has_checked_machine && findings.is_empty(),
        handles,
        findings,
    })
}

async fn load_machines(
    client: &impl GenericClient,
    machines: Vec<MachineId>,
) -> Result<Vec<MachineRow>, db::DbError> {
    let mut rows = Vec::new();
    for machine in machines.into_iter().take(MAX_MACHINES) {
        rows.extend(db::machines::get(client, machine).await?);
    }
    Ok(rows)
}

/// Returns the findings for a machine; `None` if it is no longer running the release.
async fn verify_machine(
    platform: &Arc<Platform>,
    rollout: &RolloutRow,
    mut machine: MachineRow,
) -> Result<Option<Vec<RolloutFinding>>, db::DbError> {
    let deadline = Instant::now() + MACHINE_TIMEOUT;
    let mut findings = vec![timeout_finding()];
    for attempt in 0..MAX_ATTEMPTS {
        if attempt > 0 {
            tokio::time::sleep(RETRY_INTERVAL).await;
            // The next attempt uses the newest heartbeat.
            let Some(current) = reload_if_running_release(platform, rollout, &machine).await? else {
                return Ok(None);
            };
            machine = current;
        }
        // After a timeout, the findings from the last complete attempt count; without one, the timeout is the finding.
        let Ok(attempt_findings) = timeout_at(deadline, check_machine(platform, &machine)).await else {
            break;
        };
        findings = attempt_findings;
        if findings.is_empty() {
            break;
        }
    }
    // A result counts only if the machine is still running the release.
    let current = reload_if_running_release(platform, rollout, &machine).await?;
    Ok(current
        .map(|machine| findings.into_iter().map(|finding| to_rollout_finding(&machine, finding)).collect()))
}

/// Checks a machine once, and returns the problems.
async fn check_machine(platform: &Arc<Platform>, machine: &MachineRow) -> Vec<Finding> {
    let mut findings = match build_host_client(platform, machine) {
        Ok(host) => check_release(&host, async { check_database(machine) }).await,
        Err(error) => {
            let what = format!("cannot connect to the host: {error:#}");
            Findings::new("connection").problem(what, "run `svcctl status MACHINE`").into_list()
        }
    };
    findings.retain(|finding| finding.level == Level::Problem);
    findings
}

/// Reads the machine's current row; `None` if it is no longer running the release.
async fn reload_if_running_release(
    platform: &Platform,
    rollout: &RolloutRow,
    machine: &MachineRow,
) -> Result<Option<MachineRow>, db::DbError> {
    let session = platform.db.session().await?;
    let running = rollouts::list_running_release(&session, rollout, Some(machine.id)).await?;
    Ok(load_machines(&session, running).await?.pop())
}

/// Checks that the gateway uses the machine's own database. Only the host can check this; its heartbeats report a
/// mismatch.
fn check_database(machine: &MachineRow) -> Findings {
    let findings = Findings::new("vps-database");
    let reported = machine.attention.as_array().into_iter().flatten();
    match reported.into_iter().find(|problem| problem["code"] == "database_mismatch") {
        Some(mismatch) => {
            let what =
                mismatch["detail"].as_str().unwrap_or("the host reports a different database").to_owned();
            findings.problem(what, "run `svcctl status MACHINE`")
        }
        None => findings.ok("the host reports no database mismatch"),
    }
}

/// Builds a client that calls the host on the owner's behalf, as the router does.
fn build_host_client(platform: &Arc<Platform>, machine: &MachineRow) -> anyhow::Result<HostClient> {
    let (base, client) = host_call::build_client(platform, machine, TIMEOUTS)?;
    let (platform, machine) = (Arc::clone(platform), machine.clone());
    let sign = move || {
        let keys = platform.keys.borrow();
        let proof =
            keys.signer_for(&machine.proof_kids).sign(&host_call::build_claims(&machine, Route::Shell));
        HeaderValue::from_str(&proof).unwrap_or_else(|_| HeaderValue::from_static(""))
    };
    let header = HeaderName::from_static(proof::HEADER);
    Ok(HostClient::direct(client, base, Credential::Signed(header, Box::new(sign))))
}

fn to_rollout_finding(machine: &MachineRow, finding: Finding) -> RolloutFinding {
    let next = finding.next.map(|next| next.replace("MACHINE", machine.handle.as_str()));
    RolloutFinding {
        machine_id: machine.id.into(),
        handle: (&machine.handle).into(),
        check: finding.check.to_owned(),
        what: untrusted_text::truncate_printable(&finding.what),
        next,
    }
}

fn timeout_finding() -> Finding {
    let what = format!("the checks did not finish within {} s", MACHINE_TIMEOUT.as_secs());
    let next = "check that the host responds (`svcctl status MACHINE`), then run `svcctl deploy resume`";
    Finding { check: "verification", level: Level::Problem, what, next: Some(next.to_owned()) }
}

/// Returns the finding for a release that cannot be verified, because none of the first machines is still running it.
fn release_missing_finding(rollout: &RolloutRow, machine: &MachineRow) -> RolloutFinding {
    let version = &rollout.image_version;
    let what = format!(
        "none of the first machines still runs {version}: they were rolled back, updated again, replaced, deleted or \
         powered off, or have failed"
    );
    let next = format!(
        "run `svcctl status MACHINE`; if the machine should run {version}, run `svc-update apply --version {version} \
         --allow-quarantined` on it, then `svcctl deploy resume`; otherwise run `svcctl deploy abort`, and start a new rollout"
    );
    to_rollout_finding(machine, Finding { check: "release", level: Level::Problem, what, next: Some(next) })
}

/// Stores the result. A failed verification pauses the rollout, unless the rollout has ended in the meantime.
async fn store_result(
    platform: &Platform,
    rollout: &RolloutRow,
    mut verification: RolloutVerification,
) -> anyhow::Result<()> {
    let reason = summarize_and_truncate_findings(&mut verification);
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(current) = rollouts::lock(&tx, rollout.id).await? else { return Ok(()) };
    // Another process took over, or an operator resumed the rollout: only the new verification counts.
    if !rollouts::record_verification(&tx, rollout, &json!(verification)).await? {
        return Ok(());
    }
    let is_open = !current.state.has_ended();
    if !verification.passed && is_open {
        rollouts::set_state(&tx, rollout.id, RolloutState::Paused, Some(&reason)).await?;
        let detail =
            json!({"rolloutId": rollout.id, "imageVersion": rollout.image_version, "finding": reason});
        alarms::raise_or_clear(&tx, Alarm::RolloutHalted, 1, &detail).await?;
        let after = json!({"state": RolloutState::Paused.as_str(), "why": reason});
        let entry = audit::AuditEntry {
            actor: "platform",
            action: "deploy.halted",
            target: &rollout.id.to_string(),
            before: None,
            after: Some(&after),
            request_id: &request_id::current(),
        };
        audit::write(&tx, &entry).await?;
    }
    db::commit(tx).await?;
    tracing::info!(rollout = %rollout.id, passed = verification.passed, "release verification ended");
    Ok(())
}

/// Truncates the findings for storage, and returns the reason for a pause, which counts all of them.
fn summarize_and_truncate_findings(verification: &mut RolloutVerification) -> String {
    let reason = pause_reason(verification);
    verification.findings.truncate(MAX_FINDINGS);
    reason
}

/// Summarizes the findings on one line.
fn pause_reason(verification: &RolloutVerification) -> String {
    let findings = &verification.findings;
    let summaries: Vec<_> = findings
        .iter()
        .take(MAX_REASON_FINDINGS)
        .map(|finding| format!("{}: {}: {}", finding.handle, finding.check, finding.what))
        .collect();
    let more = findings.len().saturating_sub(MAX_REASON_FINDINGS);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    let reason = format!("the verification failed: {}{more}", summaries.join("; "));
    untrusted_text::truncate_printable(&untrusted_text::one_line(&reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_reason_names_first_findings_and_counts_others() {
        let finding = |check: &str| RolloutFinding {
            machine_id: MachineId::new().into(),
            handle: svc_wire::text::WireString::from_stored("ada"),
            check: check.to_owned(),
            what: "failing".to_owned(),
            next: None,
        };
        let mut verification = RolloutVerification {
            at: svc_base::clock::now_ms().into(),
            passed: false,
            handles: Vec::new(),
            findings: vec![finding("icons")],
        };
        assert_eq!(pause_reason(&verification), "the verification failed: ada: icons: failing");
        // A host can report any text.
        verification.findings[0].what = "it is\r\nresumed: all is well\u{1b}[2J".to_owned();
        assert_eq!(
            pause_reason(&verification),
            "the verification failed: ada: icons: it is; resumed: all is well\u{FFFD}[2J"
        );
        verification.findings = ["shell", "icons", "schemas", "health", "route"].map(finding).to_vec();
        assert!(pause_reason(&verification).ends_with("ada: schemas: failing; and 2 more"));
        verification.findings = ["icons"; MAX_FINDINGS + 10].map(finding).to_vec();
        assert!(summarize_and_truncate_findings(&mut verification).ends_with("; and 27 more"));
        assert_eq!(verification.findings.len(), MAX_FINDINGS);
    }
}

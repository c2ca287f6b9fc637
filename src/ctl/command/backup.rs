//! `svcctl backup`: requests backups and restore drills; lists, downloads, verifies and accepts snapshots.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use http::Method;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::dump;
use super::kept_server::list_kept_servers;
use super::machine::{find_active_id, find_machine};
use crate::api::ApiClient;
use crate::args::{BackupCommand, MachineTarget};
use crate::confirm;
use crate::interrupt;
use crate::output::{Output, print};
use crate::progress::Progress;
use crate::show::View;
use crate::show::backup::{details, downloaded, list};
use crate::show::machine::waiting_operation;
use crate::show::operation::HELD_BACK_CODE;
use crate::wait;
use svc_base::applet::{Exit, Failure};
use svc_base::untrusted_text::one_line;
use svc_wire::backup::{Backup, BackupPage};
use svc_wire::host::{LastBackup, Outcome, SnapshotCheck};
use svc_wire::machine::MachineDetail;
use svc_wire::operation::Operation;

pub async fn run(api: &ApiClient, command: BackupCommand, out: &Output) -> Result<(), Failure> {
    match command {
        BackupCommand::List { machine, limit, cursor } => {
            let machine = find_machine(api, &machine).await?;
            let parameters = [("limit", limit.map(|limit| limit.to_string())), ("cursor", cursor)];
            let query: Vec<_> =
                parameters.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
            let response = api.get(&["vps", &machine.machine_id, "backups"], &query).await?;
            out.print_response(&response, |view| Ok(list(view, &response.parse::<BackupPage>()?)))
        }
        BackupCommand::Download { machine, key, output } => {
            let machine = find_machine(api, &machine).await?;
            let backup = dump::find_snapshot(api, &machine.machine_id, key.as_deref()).await?;
            let output = output.unwrap_or_else(|| PathBuf::from(backup.name()));
            dump::download(api, &machine.machine_id, &backup, &output).await?;
            print_backup(out, &backup, json!({"file": output.display().to_string()}), |view| {
                downloaded(view, &backup, &output)
            })
        }
        BackupCommand::Verify { machine, key } => {
            let machine = find_machine(api, &machine).await?;
            let backup = dump::find_snapshot(api, &machine.machine_id, key.as_deref()).await?;
            dump::verify(api, &machine.machine_id, &backup).await?;
            print_backup(out, &backup, json!({"verified": true}), |view| {
                format!("{}size and SHA-256 match the sidecar\n", details(view, &backup))
            })
        }
        BackupCommand::Accept { machine, yes } => accept(api, &machine, yes, out).await,
        BackupCommand::Drill { machine, wait } => {
            let machine = find_machine(api, &machine).await?;
            let id = machine.machine_id.as_str();
            let response = api.send(Method::POST, &["vps", id, "drill"], Some(&json!({}))).await?;
            match wait.seconds {
                None => {
                    let next =
                        format!("  next: run `svcctl status {}` later to see the result", machine.handle);
                    out.print_response(&response, |_| {
                        Ok(format!("requested a restore drill from the host\n{next}\n"))
                    })
                }
                Some(seconds) => {
                    let result = interrupt::run_until_interrupted(
                        &format!("svcctl status {id}"),
                        wait_for_drill(api, id, last_drill(&machine), Duration::from_secs(seconds)),
                    )
                    .await?;
                    print(&if out.is_json { format!("{}\n", json!(result)) } else { format_drill(&result) })?;
                    if result.status.is(Outcome::Success) {
                        return Ok(());
                    }
                    let error = anyhow!(
                        "the restore drill of the latest snapshot failed\n  next: run `svcctl backup now {id} --wait` \
                         to take a new snapshot"
                    );
                    Err(Failure::new(Exit::Refused, error))
                }
            }
        }
        BackupCommand::Now { machine, wait } => {
            let machine = find_machine(api, &machine).await?;
            let id = machine.machine_id.as_str();
            // Detect the new snapshot by its key: comparing times would require synchronized clocks.
            let previous_latest = match wait.seconds {
                Some(_) => {
                    let response = api.get(&["vps", id, "backups"], &latest_only_query()).await?;
                    response.parse::<BackupPage>()?.latest
                }
                None => None,
            };
            let response = api.send(Method::POST, &["vps", id, "backup"], Some(&json!({}))).await?;
            match wait.seconds {
                None => {
                    let next = format!(
                        "  next: run `svcctl backup list {}` later to see the verified snapshot",
                        machine.handle
                    );
                    out.print_response(&response, |_| {
                        Ok(format!("requested a backup from the host\n{next}\n"))
                    })
                }
                Some(seconds) => {
                    let accepted: Value = response.parse()?;
                    let request = BackupRequest {
                        id,
                        previous_latest,
                        last_backup: machine.last_backup.clone(),
                        requested_at: accepted["requestedAt"].as_str().and_then(|at| at.parse().ok()),
                    };
                    let timeout = Duration::from_secs(seconds);
                    let backup = interrupt::run_until_interrupted(
                        &format!("svcctl backup list {}", request.id),
                        wait_for_backup(api, &request, timeout),
                    )
                    .await?;
                    print(&if out.is_json {
                        format!("{}\n", backup.json)
                    } else {
                        details(&View::for_stdout(), &backup.backup)
                    })
                }
            }
        }
    }
}

async fn accept(api: &ApiClient, target: &MachineTarget, yes: bool, out: &Output) -> Result<(), Failure> {
    let effect = format!(
        "This makes the held-back snapshot of {target} the latest: a recovery then restores it, even though rows are \
         missing from it."
    );
    let must_confirm = confirm::is_required(&effect, yes)?;
    let machine = find_machine_with_held_snapshot(api, target).await?;
    let waiting = waiting_operation(&machine);
    if must_confirm {
        let question = waiting.and_then(Operation::question).map(|question| &question.detail);
        let details = machine.attention.iter().map(|item| &item.detail).chain(question);
        let details: String = details.map(|detail| format!("\n{detail}")).collect();
        confirm::prompt(&format!("{effect}{details}"), &machine.handle)?;
    }
    let path = ["vps", machine.machine_id.as_str(), "backup-accept"];
    let response = api.send(Method::POST, &path, Some(&json!({}))).await?;
    let accepted: Value = response.parse()?;
    let id = accepted["machineId"].as_str().unwrap_or(&machine.machine_id);
    let next = match waiting {
        Some(operation) => {
            format!(
                "once the host has made the snapshot the latest, run `svcctl operation continue {}` to use it",
                operation.operation_id
            )
        }
        None => format!("run `svcctl status {id}` to see whether the snapshot is the latest"),
    };
    out.print_response(&response, |_| {
        Ok(format!("requested that the host of machine {id} accept the snapshot\n  next: {next}\n"))
    })
}

/// Finds the machine to name when accepting a held-back snapshot. Normally that's the active machine; if it's replacing
/// another one, the platform finds the replaced machine itself. Without an active machine, it's the former machine
/// whose operation is waiting on a held-back final backup.
async fn find_machine_with_held_snapshot(
    api: &ApiClient,
    target: &MachineTarget,
) -> Result<MachineDetail, Failure> {
    if let Some(id) = find_active_id(api, target).await? {
        return Ok(api.get(&["vps", &id], &[]).await?.parse()?);
    }
    let mut candidates = Vec::new();
    for server in list_kept_servers(api, target).await? {
        let machine: MachineDetail = api.get(&["vps", &server.machine_id], &[]).await?.parse()?;
        let question = waiting_operation(&machine).and_then(Operation::question);
        if question.is_some_and(|question| question.code == HELD_BACK_CODE) {
            candidates.push(machine);
        }
    }
    match candidates.len() {
        0 => find_machine(api, target).await,
        1 => Ok(candidates.remove(0)),
        _ => {
            let ids: Vec<_> = candidates.iter().map(|machine| &*machine.machine_id).collect();
            let error = anyhow!(
                "several deleted machines of {target} have a held-back snapshot\n  \
                 next: specify one by its id: {}",
                ids.join(", ")
            );
            Err(Failure::new(Exit::Refused, error))
        }
    }
}

fn last_drill(machine: &MachineDetail) -> Option<&SnapshotCheck> {
    machine.checks.as_ref()?.drill.as_ref()
}

/// Waits for a heartbeat that reports a drill other than `previous`.
async fn wait_for_drill(
    api: &ApiClient,
    id: &str,
    previous: Option<&SnapshotCheck>,
    timeout: Duration,
) -> Result<SnapshotCheck, Failure> {
    let progress = Progress::start();
    progress.set_message("the host is restoring the latest snapshot in a drill".to_owned());
    let reported = wait::poll_until(timeout, async || {
        let Ok((_, machine)) = wait::poll_machine(api, id).await? else { return Ok(None) };
        Ok(last_drill(&machine).filter(|drill| Some(*drill) != previous).cloned())
    });
    reported.await?.ok_or_else(|| {
        let error = anyhow!(
            "the host reported no drill result within {} s\n  next: run `journalctl -u svc-db-drill-request` on \
             the host",
            timeout.as_secs()
        );
        Failure::new(Exit::TryAgain, error)
    })
}

fn format_drill(result: &SnapshotCheck) -> String {
    let SnapshotCheck { status, at, key, error, .. } = result;
    let key = key.as_deref().map_or("-".into(), one_line);
    let error = error.as_deref().map(|error| format!("error   {}\n", one_line(error))).unwrap_or_default();
    format!("drill   {}\nkey     {key}\nat      {}\n{error}", one_line(status), one_line(at))
}

/// Prints a snapshot along with the result of downloading or verifying it.
fn print_backup(
    out: &Output,
    backup: &Backup,
    extra_members: Value,
    format_text: impl FnOnce(&View) -> String,
) -> Result<(), Failure> {
    if !out.is_json {
        return print(&format_text(&View::for_stdout()));
    }
    let mut body = json!({"key": backup.key, "sizeBytes": backup.size_bytes, "sha256": backup.sha256});
    if let (Some(members), Value::Object(extra_members)) = (body.as_object_mut(), extra_members) {
        members.extend(extra_members);
    }
    print(&format!("{body}\n"))
}

struct BackupRequest<'a> {
    id: &'a str,
    /// The latest snapshot before the request.
    previous_latest: Option<String>,
    /// The host's last backup before the request.
    last_backup: Option<LastBackup>,
    /// Request time by the host's clock, or by the platform's if the host doesn't report it.
    requested_at: Option<Timestamp>,
}

impl BackupRequest<'_> {
    /// Whether `reported` means that the requested backup failed, and isn't a late report of an earlier one.
    fn has_failed(&self, reported: &LastBackup) -> bool {
        let began: Option<Timestamp> = reported.began_at.as_deref().and_then(|at| at.parse().ok());
        let is_earlier =
            self.requested_at.zip(began).is_some_and(|(requested_at, began)| began < requested_at);
        reported.status.is(Outcome::Error) && self.last_backup.as_ref() != Some(reported) && !is_earlier
    }
}

struct NewBackup {
    backup: Backup,
    /// Raw JSON from the API.
    json: Value,
}

/// Waits for a new latest snapshot, or for the host to report a failed backup.
async fn wait_for_backup(
    api: &ApiClient,
    request: &BackupRequest<'_>,
    timeout: Duration,
) -> Result<NewBackup, Failure> {
    let progress = Progress::start();
    progress.set_message("the host is taking and verifying a backup".to_owned());
    let id = request.id;
    let backup = wait::poll_until(timeout, async || {
        let polled = wait::poll_once(api, &["vps", id, "backups"], &latest_only_query()).await?;
        let Ok(response) = polled else { return Ok(None) };
        let page: BackupPage = response.parse()?;
        if page.latest.is_some() && page.latest != request.previous_latest {
            let mut body: Value = response.parse()?;
            let index = page.backups.iter().position(|backup| Some(&backup.key) == page.latest.as_ref());
            if let Some((index, backup)) = index.zip(page.backups.into_iter().nth(index.unwrap_or(0))) {
                return Ok(Some(NewBackup { backup, json: body["backups"][index].take() }));
            }
        }
        if let Ok((_, machine)) = wait::poll_machine(api, id).await?
            && let Some(reported) =
                machine.last_backup.as_ref().filter(|reported| request.has_failed(reported))
        {
            let error = anyhow!(
                "the backup failed: {}\n  next: see /home/svc/home/system/logs/backup.jsonl on the host",
                reported.error.as_deref().map(one_line).unwrap_or_default()
            );
            return Err(Failure::new(Exit::Unavailable, error));
        }
        Ok(None)
    });
    backup.await?.ok_or_else(|| {
        let error = anyhow!(
            "no new snapshot after {} s\n  next: run `svcctl status {id}` to see the last backup, and \
             `svcctl backup list {id}` to see the snapshots",
            timeout.as_secs()
        );
        Failure::new(Exit::TryAgain, error)
    })
}

/// Query for a page with just the latest snapshot.
fn latest_only_query() -> [(&'static str, String); 1] {
    [("latest", "true".to_owned())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_failed_ignores_late_reports_of_earlier_backups() {
        let report = |report: Value| -> LastBackup { serde_json::from_value(report).unwrap() };
        let failed = |began: &str| report(json!({"status": "error", "beganAt": began, "error": "no space"}));
        let earlier = failed("2026-11-22T10:00:00.000Z");
        let request = BackupRequest {
            id: "m",
            previous_latest: None,
            last_backup: Some(earlier.clone()),
            requested_at: "2026-11-22T10:00:05.000Z".parse().ok(),
        };
        assert!(!request.has_failed(&earlier), "the report predates the request");
        assert!(
            !request.has_failed(&failed("2026-11-22T10:00:04.999Z")),
            "the backup started before the request"
        );
        assert!(request.has_failed(&failed("2026-11-22T10:00:05.000Z")));
        assert!(
            !request.has_failed(&report(json!({"status": "success", "beganAt": "2026-11-22T10:00:06.000Z"})))
        );
        // Hosts on older releases omit `beganAt`.
        assert!(request.has_failed(&report(json!({"status": "error", "error": "no space"}))));
    }
}

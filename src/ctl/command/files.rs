//! `svcctl files`: shows, restores, verifies and prunes a slot's file backups.

use std::time::Duration;

use anyhow::anyhow;
use http::Method;
use jiff::Timestamp;
use serde_json::json;

use super::machine::find_id;
use crate::api::ApiClient;
use crate::args::FilesCommand;
use crate::interrupt;
use crate::output::Output;
use crate::show::files::{access, listing, prune_plan, restored, status, usage, versions};
use crate::wait::{poll_once, poll_until};
use svc_base::applet::{Exit, Failure};
use svc_base::clock::rfc3339_ms;
use svc_base::untrusted_text::one_line;
use svc_wire::files::{
    FileRestore, FileRestoreAccepted, FileRestoreResponse, FileRestoreStatus, MAX_ENTRIES,
};

/// Maximum time to wait for a restore. It continues on the host after that.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(6 * 3600);
const PRUNE_PATH: [&str; 3] = ["vps", "slots", "files-prune"];

pub async fn run(api: &ApiClient, command: FilesCommand, out: &Output) -> Result<(), Failure> {
    match command {
        FilesCommand::Key { slot } => {
            let query = [("idpUserId", slot.user.to_string()), ("slot", slot.slot.to_string())];
            let response = api.get(&["vps", "slots", "files-key"], &query).await?;
            out.print_response(&response, |view| Ok(access(view, &slot, &response.parse()?)))
        }
        FilesCommand::Status { machine } => {
            let id = find_id(api, &machine).await?;
            let response = api.get(&["vps", &id, "files", "status"], &[]).await?;
            out.print_response(&response, |view| Ok(status(view, &response.parse()?)))
        }
        FilesCommand::Versions { machine, path, before, limit } => {
            let id = find_id(api, &machine).await?;
            let mut query = vec![("path", path), ("limit", limit.to_string())];
            query.extend(before.map(|before| ("before", rfc3339_ms(before))));
            let response = api.get(&["vps", &id, "files", "versions"], &query).await?;
            out.print_response(&response, |view| Ok(versions(view, &response.parse()?)))
        }
        FilesCommand::List { machine, path, time } => {
            let id = find_id(api, &machine).await?;
            let mut query = vec![("path", path), ("limit", MAX_ENTRIES.to_string())];
            query.extend(time.map(|time| ("time", rfc3339_ms(time))));
            let response = api.get(&["vps", &id, "files", "at"], &query).await?;
            out.print_response(&response, |view| Ok(listing(view, &response.parse()?)))
        }
        FilesCommand::Restore { machine, path, time, into, replace, no_wait } => {
            let id = find_id(api, &machine).await?;
            let time = time.map(rfc3339_ms);
            let body = json!({"path": path, "time": time, "into": into, "replace": replace});
            let response = api.send(Method::POST, &restore_path(&id), Some(&body)).await?;
            if no_wait {
                return out.print_response(&response, |_| {
                    Ok("the machine will restore the path and record the result in activity.log\n".to_owned())
                });
            }
            let accepted: FileRestoreAccepted = response.parse()?;
            wait_for_restore(api, &id, &accepted, out).await
        }
        FilesCommand::Verify { machine } => {
            let id = find_id(api, &machine).await?;
            let response = api.send(Method::POST, &["vps", &id, "files", "verify"], Some(&json!({}))).await?;
            out.print_response(&response, |_| {
                Ok(format!(
                    "the host is verifying the next part of its file backup; the `files` row of \
                     `svcctl status {id}` shows the result\n"
                ))
            })
        }
        FilesCommand::Usage { slot } => {
            let query = [("idpUserId", slot.user.to_string()), ("slot", slot.slot.to_string())];
            let response = api.get(&["vps", "slots", "files-usage"], &query).await?;
            out.print_response(&response, |view| Ok(usage(view, &slot, &response.parse()?)))
        }
        FilesCommand::Prune { slot, dry_run: true } => {
            let query = [("idpUserId", slot.user.to_string()), ("slot", slot.slot.to_string())];
            let response = api.get(&PRUNE_PATH, &query).await?;
            out.print_response(&response, |view| Ok(prune_plan(view, &slot, &response.parse()?)))
        }
        FilesCommand::Prune { slot, dry_run: false } => {
            let body = json!({"idpUserId": slot.user, "slot": slot.slot});
            let response = api.send(Method::POST, &PRUNE_PATH, Some(&body)).await?;
            out.print_response(&response, |_| {
                Ok(format!("the file backups of {slot} will be pruned within a few minutes\n"))
            })
        }
    }
}

fn restore_path(id: &str) -> [&str; 4] {
    ["vps", id, "files", "restore"]
}

/// Waits for a machine's restore to finish, and shows the result.
///
/// # Errors
/// [`Exit::Unavailable`] if the restore failed; [`Exit::TryAgain`] if it doesn't finish within [`RESTORE_TIMEOUT`], or
/// if the machine already reports a later restore instead; or any non-transient call error.
async fn wait_for_restore(
    api: &ApiClient,
    id: &str,
    accepted: &FileRestoreAccepted,
    out: &Output,
) -> Result<(), Failure> {
    let finished = poll_until(RESTORE_TIMEOUT, async || {
        let Ok(response) = poll_once(api, &restore_path(id), &[]).await? else { return Ok(None) };
        let body: FileRestoreResponse = response.parse()?;
        if body.restore.as_ref().is_some_and(|state| is_successor(state, accepted)) {
            let message = "another restore has started, so this one has finished\n  next: see the result in \
                           the machine's activity.log";
            return Err(Failure::new(Exit::TryAgain, anyhow!(message)));
        }
        let state = body.restore.filter(|state| state.request_id == accepted.request_id);
        Ok(state.filter(|state| state.status.has_ended()).map(|state| (response, state)))
    });
    let command = format!("svcctl status {id}");
    let finished = interrupt::run_until_interrupted(&command, finished).await?;
    let Some((response, state)) = finished else {
        let message = "the restore is still in progress\n  next: see the result in the machine's \
                    activity.log later";
        return Err(Failure::new(Exit::TryAgain, anyhow!(message)));
    };
    if state.status == FileRestoreStatus::Failed {
        let reason = state.error.unwrap_or_default();
        return Err(Failure::new(Exit::Unavailable, anyhow!("the restore failed: {}", one_line(&reason))));
    }
    out.print_response(&response, |view| Ok(restored(view, &state)))
}

/// Whether `reported` was requested after the accepted restore. If so, the accepted one has finished: a machine runs
/// one restore at a time and only reports the last. Both times come from the machine's clock.
fn is_successor(reported: &FileRestore, accepted: &FileRestoreAccepted) -> bool {
    let parse = |at: &str| at.parse::<Timestamp>().ok();
    let times = parse(&reported.requested_at).zip(parse(&accepted.requested_at));
    times.is_some_and(|(reported, accepted)| reported > accepted)
        && reported.request_id != accepted.request_id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_successor_rejects_same_and_earlier_restores() {
        let accepted = json!({"requestId": "this", "requestedAt": "2026-11-22T10:00:00.000Z"});
        let accepted: FileRestoreAccepted = serde_json::from_value(accepted).unwrap();
        let is_later = |id: &str, at: &str| {
            let state = json!({"requestId": id, "status": "running", "path": "a", "requestedAt": at});
            is_successor(&serde_json::from_value(state).unwrap(), &accepted)
        };
        assert!(!is_later("this", "2026-11-22T10:00:00.000Z"));
        assert!(!is_later("earlier", "2026-11-22T09:59:59.000Z"));
        assert!(!is_later("older-host", "unknown"));
        assert!(is_later("later", "2026-11-22T10:00:00.500Z"));
    }
}

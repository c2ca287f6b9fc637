//! A simulated host's `systemctl`: a script that passes its arguments to this process in a file, and waits for the
//! response.
//!
//! `restart` restarts one of the init process's services. `show` reports the state of such a service, and every other
//! unit as inactive. `start` runs a requested backup, and does nothing for a target. `daemon-reload`, and
//! `reset-failed` for one of the services, do nothing. All other requests fail as if the unit were not loaded.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};

use super::HostSettings;
use super::boot::{SERVICES, run_requested_backup, start_service};
use super::service::ServiceState;
use super::session::PowerSession;

const POLL_INTERVAL: Duration = Duration::from_millis(30);
/// `systemctl`'s exit code for a unit that is not loaded.
const NOT_LOADED: i32 = 5;

const SCRIPT: &str = r#"#!/bin/sh
request=$(mktemp "DIR/systemctl.XXXXXX") || exit 1
printf '%s\n' "$*" >"$request"
mv "$request" "$request.request"
while [ ! -e "$request.response" ]; do [ -d "DIR" ] || exit 1; sleep 0.05; done
code=$(head -n 1 "$request.response")
tail -n +2 "$request.response"
rm -f "$request.response"
exit "$code"
"#;

/// Writes the script; [`serve`] responds to it.
pub(super) fn install(run_dir: &Path) -> Result<PathBuf> {
    let path = run_dir.join("systemctl");
    fs::write(&path, SCRIPT.replace("DIR", &run_dir.display().to_string()))
        .context("cannot write the systemctl script")?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// Serves requests until power-off.
pub(super) fn serve(session: &Arc<PowerSession>, settings: &HostSettings) {
    let (task_session, settings) = (Arc::clone(session), settings.clone());
    session.tasks.spawn_on(
        async move {
            let session = task_session;
            loop {
                for request in pending_requests(session.run_dir()) {
                    let (request_session, settings) = (Arc::clone(&session), settings.clone());
                    session.tasks.spawn_on(
                        async move { respond(&request_session, &settings, &request).await.unwrap_or_default() },
                        crate::runtime::handle(),
                    );
                }
                tokio::select! {
                    () = tokio::time::sleep(POLL_INTERVAL) => {}
                    () = session.off.cancelled() => return,
                }
            }
        },
        crate::runtime::handle(),
    );
}

fn pending_requests(run_dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(run_dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "request")).collect()
}

async fn respond(session: &Arc<PowerSession>, settings: &HostSettings, request: &Path) -> Result<()> {
    let args = fs::read_to_string(request)?;
    fs::remove_file(request)?;
    let (exit_code, output) = tokio::select! {
        result = execute(session, settings, args.trim()) => result,
        () = session.off.cancelled() => return Ok(()),
    };
    session.disk.append_log("systemctl", format!("[init] {}: {exit_code}\n", args.trim()).as_bytes())?;
    let (response, staged) = (request.with_extension("response"), request.with_extension("staged"));
    fs::write(&staged, format!("{exit_code}\n{output}"))?;
    Ok(fs::rename(staged, response)?)
}

async fn execute(session: &Arc<PowerSession>, settings: &HostSettings, args: &str) -> (i32, String) {
    let mut args = args.split_whitespace().filter(|arg| !arg.starts_with("--"));
    let verb = args.next().unwrap_or_default();
    let unit = args.next().unwrap_or_default().trim_end_matches(".service");
    let name = SERVICES.into_iter().find(|name| *name == unit);
    match (verb, name) {
        ("daemon-reload", _) | ("reset-failed", Some(_)) => (0, String::new()),
        ("start", None) if unit.ends_with(".target") => (0, String::new()),
        ("start", None) if unit == "svc-db-backup-request" => {
            let (task_session, settings) = (Arc::clone(session), settings.clone());
            session.tasks.spawn_on(
                async move { run_requested_backup(&task_session, &settings).await },
                crate::runtime::handle(),
            );
            (0, String::new())
        }
        ("restart", Some(name)) => {
            let running = session.services().get(name).cloned();
            if let Some(running) = running {
                running.stop.cancel();
                running.wait_until_ended().await;
            }
            match start_service(session, settings, name).wait_until_ready().await {
                Ok(()) => (0, String::new()),
                Err(_) => (1, String::new()),
            }
        }
        ("show", Some(name)) => {
            let state = session.services().get(name).map(|service| service.state.borrow().clone());
            let (active, result) = match state {
                Some(ServiceState::Starting) => ("activating", "success"),
                Some(ServiceState::Ready) => ("active", "success"),
                Some(ServiceState::Ended(reason)) if is_clean_end(&reason) => ("inactive", "success"),
                Some(ServiceState::Ended(_)) => ("failed", "exit-code"),
                None => ("inactive", "success"),
            };
            (0, format!("ActiveState={active}\nResult={result}\nNRestarts=0\n"))
        }
        ("show", None) => (0, "ActiveState=inactive\nResult=success\nNRestarts=0\n".to_owned()),
        _ => (NOT_LOADED, String::new()),
    }
}

fn is_clean_end(reason: &str) -> bool {
    reason.contains("was stopped")
        || reason.contains("condition is not met")
        || reason.contains("exit status: 0")
}

//! `svcctl deploy`: starts, lists, follows, pauses, resumes and aborts rollouts.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::anyhow;
use http::Method;
use serde_json::{Value, json};

use crate::api::{ApiClient, ApiResponse};
use crate::args::{DeployCommand, RolloutTarget, StartRollout, Wait};
use crate::confirm;
use crate::interrupt;
use crate::output::Output;
use crate::progress::Progress;
use crate::show::deploy::{list, machine_line, progress_line, show};
use crate::wait;
use svc_base::applet::{Exit, Failure};
use svc_machine::name::Handle;
use svc_wire::rollout::{Rollout, RolloutList};

pub async fn run(api: &ApiClient, command: DeployCommand, out: &Output) -> Result<(), Failure> {
    match command {
        DeployCommand::Start(args) => start(api, args, out).await,
        DeployCommand::List => {
            let response = api.get(&["vps", "deploy"], &[]).await?;
            out.print_response(&response, |view| Ok(list(view, &response.parse()?)))
        }
        DeployCommand::Status { target, wait } => {
            let rollout = find_rollout(api, target, Fallback::Latest).await?;
            let response = api.get(&["vps", "deploy", &rollout], &[]).await?;
            follow(api, response, wait, out).await
        }
        DeployCommand::Pause(target) => send_action(api, target, "pause", out).await,
        DeployCommand::Resume(target) => send_action(api, target, "resume", out).await,
        DeployCommand::Abort(target) => send_action(api, target, "abort", out).await,
    }
}

/// Rollout to use if no id is given and no rollout is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fallback {
    Latest,
    Nothing,
}

/// Returns the given rollout id, or else the id of the open (running or paused) rollout. If there's neither, `fallback`
/// applies.
async fn find_rollout(api: &ApiClient, target: RolloutTarget, fallback: Fallback) -> Result<String, Failure> {
    if let Some(id) = target.rollout {
        return Ok(id.to_string());
    }
    let page: RolloutList = api.get(&["vps", "deploy"], &[]).await?.parse()?;
    let open = page.rollouts.iter().find(|rollout| !rollout.has_ended());
    let selected = open.or_else(|| page.rollouts.first().filter(|_| fallback == Fallback::Latest));
    selected.map(|rollout| rollout.rollout_id.to_string()).ok_or_else(|| {
        let error = match fallback {
            Fallback::Latest => {
                anyhow!(
                    "there has been no rollout yet\n  next: run `svcctl deploy start <version>` to start one"
                )
            }
            Fallback::Nothing => {
                anyhow!("no rollout is open\n  next: run `svcctl deploy list` to see earlier rollouts")
            }
        };
        Failure::new(Exit::Refused, error)
    })
}

async fn start(api: &ApiClient, args: StartRollout, out: &Output) -> Result<(), Failure> {
    // Rollouts to explicitly named machines don't need confirmation.
    if args.handles.is_empty() {
        let except: Vec<_> = args.except.iter().map(Handle::as_str).collect();
        let except = if except.is_empty() { String::new() } else { format!(" except {}", except.join(", ")) };
        let effect = format!("This updates every running machine{except} to release {}.", args.version);
        if confirm::is_required(&effect, args.yes)? {
            let fleet: Value = api.get(&["vps", "fleet"], &[]).await?.parse()?;
            let running = &fleet["totals"]["byStatus"]["running"];
            confirm::prompt(&format!("{effect} Running machines now: {running}."), args.version.as_str())?;
        }
    }
    let mut body = json!({"imageVersion": args.version});
    if !args.handles.is_empty() {
        body["handles"] = json!(args.handles);
    }
    if !args.except.is_empty() {
        body["except"] = json!(args.except);
    }
    for (name, value) in
        [("canary", args.canary), ("batchSize", args.batch_size), ("maxFailures", args.max_failures)]
    {
        if let Some(value) = value {
            body[name] = value.into();
        }
    }
    // Omitted by default: older platforms reject this field, and don't verify releases anyway.
    if args.no_verify {
        body["verify"] = false.into();
    }
    let response = api.send(Method::POST, &["vps", "deploy"], Some(&body)).await?;
    follow(api, response, args.wait, out).await
}

async fn send_action(
    api: &ApiClient,
    target: RolloutTarget,
    action: &str,
    out: &Output,
) -> Result<(), Failure> {
    let rollout = find_rollout(api, target, Fallback::Nothing).await?;
    let response = api.send(Method::POST, &["vps", "deploy", &rollout, action], Some(&json!({}))).await?;
    out.print_response(&response, |view| Ok(show(view, &response.parse()?)))
}

/// Prints a rollout. With `--wait`, follows it until it finishes or a failed verification halts it.
async fn follow(api: &ApiClient, response: ApiResponse, wait: Wait, out: &Output) -> Result<(), Failure> {
    let rollout: Rollout = response.parse()?;
    let Some(seconds) = wait.seconds else {
        return out.print_response(&response, |view| Ok(show(view, &rollout)));
    };
    let command = format!("svcctl deploy status {} --wait", rollout.rollout_id);
    interrupt::run_until_interrupted(&command, wait_until_ended(api, response, rollout, seconds, out)).await
}

async fn wait_until_ended(
    api: &ApiClient,
    response: ApiResponse,
    rollout: Rollout,
    seconds: u64,
    out: &Output,
) -> Result<(), Failure> {
    let id = rollout.rollout_id.clone();
    let progress = Progress::start();
    let (mut reported, mut initial) = (BTreeSet::new(), Some((response, rollout)));
    let outcome = wait::poll_until(Duration::from_secs(seconds), async || {
        let (response, rollout) = match initial.take() {
            Some(initial) => initial,
            None => {
                let Ok(response) = wait::poll_once(api, &["vps", "deploy", &id], &[]).await? else {
                    return Ok(None);
                };
                let rollout: Rollout = response.parse()?;
                (response, rollout)
            }
        };
        for machine in rollout.machines.iter().filter(|machine| machine.has_ended()) {
            if reported.insert(machine.machine_id.clone()) {
                progress.print_line(&machine_line(progress.view(), machine));
            }
        }
        progress.set_message(progress_line(&rollout));
        Ok((rollout.has_ended() || rollout.is_halted()).then_some((response, rollout)))
    });
    let (response, rollout) = outcome.await?.ok_or_else(|| {
        let error = anyhow!(
            "the rollout is still in progress after {seconds} s\n  next: run `svcctl deploy status {id} \
             --wait` to keep waiting"
        );
        Failure::new(Exit::TryAgain, error)
    })?;
    drop(progress);
    out.print_response(&response, |view| Ok(show(view, &rollout)))?;
    let reason = rollout.why.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
    match rollout.state.as_str() {
        "succeeded" => Ok(()),
        _ if rollout.is_halted() => {
            let error = anyhow!(
                "the rollout is waiting for your decision{reason}\n  next: fix the cause and run `svcctl \
                 deploy resume` to verify again, or run `svcctl deploy abort`"
            );
            Err(Failure::new(Exit::TryAgain, error))
        }
        state => {
            let error = anyhow!(
                "the rollout was {state}{reason}\n  next: run `svcctl deploy status {}` to see the reason for each \
                 machine",
                rollout.rollout_id
            );
            Err(Failure::new(Exit::Unavailable, error))
        }
    }
}

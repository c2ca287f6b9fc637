//! `svcctl deploy`: starts, lists, follows, pauses and aborts rollouts.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::anyhow;
use http::Method;
use serde_json::{Value, json};

use crate::applet::{Exit, Failure};
use crate::ctl::api::{Answer, Api, CallError};
use crate::ctl::args::{DeployCommand, Start, Wait, RolloutTarget};
use crate::ctl::confirm;
use crate::ctl::interrupt;
use crate::ctl::out::Out;
use crate::ctl::progress::Progress;
use crate::ctl::show::deploy::{Rollout, Rollouts, list, show};
use crate::ctl::wait::Clock;

pub async fn run(api: &Api, command: DeployCommand, out: &Out) -> Result<(), Failure> {
    match command {
        DeployCommand::Start(args) => start(api, args, out).await,
        DeployCommand::List => {
            let answer = api.get(&["vps", "deploy"], &[]).await?;
            out.answer(&answer, |view| Ok(list(view, &answer.read()?)))
        }
        DeployCommand::Status { which, wait } => {
            let rollout = find(api, which, Else::Latest).await?;
            let answer = api.get(&["vps", "deploy", &rollout], &[]).await?;
            follow(api, answer, wait, out).await
        }
        DeployCommand::Pause(which) => say(api, which, "pause", out).await,
        DeployCommand::Resume(which) => say(api, which, "resume", out).await,
        DeployCommand::Abort(which) => say(api, which, "abort", out).await,
    }
}

/// The rollout to use without an id, if none is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Else {
    Latest,
    Nothing,
}

/// The id of the rollout that the operator names.
async fn find(api: &Api, which: RolloutTarget, otherwise: Else) -> Result<String, Failure> {
    if let Some(id) = which.rollout {
        return Ok(id.to_string());
    }
    let page: Rollouts = api.get(&["vps", "deploy"], &[]).await?.read()?;
    let open = page.rollouts.iter().find(|rollout| !rollout.has_ended());
    let meant = open.or_else(|| page.rollouts.first().filter(|_| otherwise == Else::Latest));
    meant.map(|rollout| rollout.rollout_id.clone()).ok_or_else(|| {
        let error = match otherwise {
            Else::Latest => anyhow!("there was no rollout yet\n  next: `svcctl deploy start <version>`"),
            Else::Nothing => {
                anyhow!("no rollout is open\n  next: `svcctl deploy list` shows the ended ones")
            }
        };
        Failure::new(Exit::Refused, error)
    })
}

async fn start(api: &Api, args: Start, out: &Out) -> Result<(), Failure> {
    // Naming machines explicitly needs no confirmation.
    if args.handles.is_empty() {
        let what = format!("Every running machine gets the release {}.", args.version);
        if confirm::is_due(&what, args.yes)? {
            let fleet: Value = api.get(&["vps", "fleet"], &[]).await?.read()?;
            let running = &fleet["totals"]["byStatus"]["running"];
            confirm::ask(&format!("{what} Running machines now: {running}."), args.version.as_str())?;
        }
    }
    let mut body = json!({"imageVersion": args.version});
    if !args.handles.is_empty() {
        body["handles"] = json!(args.handles);
    }
    for (name, value) in
        [("canary", args.canary), ("batchSize", args.batch_size), ("maxFailures", args.max_failures)]
    {
        if let Some(value) = value {
            body[name] = value.into();
        }
    }
    let answer = api.send(Method::POST, &["vps", "deploy"], Some(&body)).await?;
    follow(api, answer, args.wait, out).await
}

async fn say(api: &Api, which: RolloutTarget, word: &str, out: &Out) -> Result<(), Failure> {
    let rollout = find(api, which, Else::Nothing).await?;
    let answer = api.send(Method::POST, &["vps", "deploy", &rollout, word], Some(&json!({}))).await?;
    out.answer(&answer, |view| Ok(show(view, &answer.read()?)))
}

/// Prints a rollout; with `--wait`, follows it to its end.
async fn follow(api: &Api, answer: Answer, wait: Wait, out: &Out) -> Result<(), Failure> {
    let rollout: Rollout = answer.read()?;
    let Some(seconds) = wait.wait else {
        return out.answer(&answer, |view| Ok(show(view, &rollout)));
    };
    let command = format!("svcctl deploy status {} --wait", rollout.rollout_id);
    interrupt::or(&command, until_ended(api, answer, rollout, seconds, out)).await
}

async fn until_ended(
    api: &Api,
    mut answer: Answer,
    mut rollout: Rollout,
    seconds: u64,
    out: &Out,
) -> Result<(), Failure> {
    let id = rollout.rollout_id.clone();
    let progress = Progress::start();
    let (mut told, mut clock) = (BTreeSet::new(), Clock::start(Duration::from_secs(seconds)));
    loop {
        for machine in rollout.machines.iter().filter(|machine| machine.has_ended()) {
            if told.insert(machine.machine_id.clone()) {
                progress.line(&machine.line(progress.view()));
            }
        }
        progress.at(rollout.progress());
        if rollout.has_ended() {
            break;
        }
        if clock.is_over() {
            let error = anyhow!(
                "not ended after {seconds} s; the rollout continues\n  next: `svcctl deploy status {id} --wait`"
            );
            return Err(Failure::new(Exit::TryAgain, error));
        }
        clock.pause().await;
        match api.poll(&["vps", "deploy", &id], &[]).await {
            Ok(next) => {
                rollout = next.read()?;
                answer = next;
            }
            // The rollout continues meanwhile.
            Err(CallError::Unreachable { .. } | CallError::NoAnswer { .. }) => {}
            Err(CallError::Refused(refusal)) if refusal.is_transient() => {}
            Err(error) => return Err(error.into()),
        }
    }
    drop(progress);
    out.answer(&answer, |view| Ok(show(view, &rollout)))?;
    match rollout.state.as_str() {
        "succeeded" => Ok(()),
        state => {
            let why = rollout.why.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
            let error = anyhow!(
                "the rollout is {state}{why}\n  next: `svcctl fleet` shows the machines that rolled back"
            );
            Err(Failure::new(Exit::Unavailable, error))
        }
    }
}

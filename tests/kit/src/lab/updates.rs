//! Releases on a machine: one that comes by the fleet's rollout, one whose power is cut on the way, and one that does not
//! work and is gone back from.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::faults::serves_again;
use super::life::{UP, publish_as};
use super::release;
use crate::story::{HANDLE, MachineRecord, Stack, Web, eventually};

const SHORT: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(400);
const SECOND: &str = "story-2";
const CUT: &str = "story-3";
const BROKEN: &str = "story-4";
const FULL: &str = "story-5";

/// The fleet's rollout: canary, health, the record.
pub async fn update(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let before = stack.web.titles(&stack.owner()).await?;
    publish_as(stack, SECOND, &stack.svc, release::small).await?;
    let began = Instant::now();
    let args = ["--json", "deploy", "start", SECOND, "--yes", "--wait=800"];
    let rollout: Value = stack.svcctl(&args).await?.success()?.json()?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(rollout["state"] == "succeeded" && rollout["totals"]["updated"] == 1, "the rollout is {rollout}");
    ensure!(current(stack, machine).await? == SECOND, "the machine runs {}", current(stack, machine).await?);
    let after = serves_again(stack).await?;
    ensure!(after == before, "there were {before:?}, now {after:?}");
    Ok(((), format!("{SECOND} by the rollout in {seconds:.0} s, {} rows", after.len())))
}

/// The power goes while the services of the new release start: the next boot finishes what was begun.
pub async fn power_cut_in_update(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let before = stack.web.titles(&stack.owner()).await?;
    let former = current(stack, machine).await?;
    publish_as(stack, CUT, &stack.svc, release::small).await?;
    let run = stack.svcctl(&["--json", "deploy", "start", CUT, "--yes"]).await?.success()?;
    let rollout: Value = run.json()?;
    let id = rollout["rolloutId"].as_str().with_context(|| format!("no rolloutId in {rollout}"))?.to_owned();
    let activating = "for n in $(seq 3000); do grep -rqs '\"activating\"' /var/lib/svc/update && exit 0; sleep 0.1; done; exit 1";
    on.run(activating, LONG).await?.success().context("wait for the new release's services")?;
    stack.provider.kill_server(&machine.server).await?;
    stack.provider.switch_on(&machine.server)?;
    let after = serves_again(stack).await?;
    ensure!(after == before, "there were {before:?}, now {after:?}");
    let ended = eventually("the rollout ends", UP, || async {
        let told: Value = stack.svcctl(&["--json", "deploy", "status", &id]).await?.success()?.json()?;
        ensure!(told["state"] == "succeeded" || told["state"] == "stopped", "it is {}", told["state"]);
        Ok(told["state"].clone())
    })
    .await?;
    let now = current(stack, machine).await?;
    ensure!(
        now == if ended == "succeeded" { CUT } else { &former },
        "the rollout {ended}, the machine runs {now}"
    );
    let resumed = "journalctl -b -u svc-update.service -o cat --no-pager";
    let resumed = on.run(resumed, SHORT).await?.success()?;
    ensure!(resumed.contains("cut off"), "the cut came when nothing was under way: {resumed}");
    let open = on.run("cat /var/lib/svc/update/journal.json 2>/dev/null; true", SHORT).await?.success()?;
    ensure!(open.trim().is_empty() || open.contains("ended"), "the update is still open: {open}");
    Ok(((), format!("cut while {CUT} started; after power-on the machine runs {now}, rollout {ended}")))
}

/// Its gateway does not start: the machine goes back by itself, and the fleet says so.
pub async fn broken_update(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let before = current(stack, machine).await?;
    // By its own name it knows which program it is to be.
    let svc = stack.dir.join("broken/svc");
    fs::create_dir_all(stack.dir.join("broken"))?;
    let script = format!(
        "#!/bin/sh\nname=$(basename \"$0\")\n[ \"$name\" != svc-gateway ] || {{ echo broken >&2; exit 70; }}\n\
         for svc in {here} /opt/svc/releases/{before}/bin/svc; do\n\
         [ ! -x \"$svc\" ] || {{ [ \"$name\" = svc ] && exec \"$svc\" \"$@\"; exec \"$svc\" \"$name\" \"$@\"; }}\ndone\n",
        here = stack.svc.canonicalize()?.display()
    );
    fs::write(&svc, script)?;
    fs::set_permissions(&svc, fs::Permissions::from_mode(0o755))?;
    publish_as(stack, BROKEN, &svc, release::small).await?;
    let run = stack.svcctl(&["--json", "deploy", "start", BROKEN, "--yes", "--wait=800"]).await?;
    ensure!(run.code == Some(69), "svcctl ended with {:?}: {}{}", run.code, run.stdout, run.stderr);
    let record: Value = stack.svcctl(&["--json", "status", HANDLE]).await?.success()?.json()?;
    let told = &record["lastUpdate"];
    ensure!(told["version"] == BROKEN && told["outcome"] == "rolled_back", "the host tells {told}");
    let fleet: Value = stack.svcctl(&["--json", "fleet"]).await?.success()?.json()?;
    ensure!(fleet["attention"].to_string().contains("update_rolled_back"), "the fleet says {fleet}");
    ensure!(current(stack, machine).await? == before, "it runs {}", current(stack, machine).await?);
    let after = serves_again(stack).await?;
    Ok((
        (),
        format!(
            "{BROKEN} is not well at {}; back to {before} by itself, {} rows",
            told["stage"],
            after.len()
        ),
    ))
}

/// A release with all that one may have: the rollout brings it, and shell and code-server are reached by the owner alone.
pub async fn full_release(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let mib = publish_as(stack, FULL, &stack.svc, release::full).await?;
    let began = Instant::now();
    let args = ["--json", "deploy", "start", FULL, "--yes", "--wait=1200"];
    let rollout: Value = stack.svcctl_within(Duration::from_secs(1300), &args).await?.success()?.json()?;
    ensure!(rollout["state"] == "succeeded", "the rollout is {rollout}");
    let seconds = began.elapsed().as_secs_f64();
    let owner = stack.owner();
    let page = |web, path| answered(web, path, &owner);
    let shell = eventually("the shell", UP, || page(&stack.web, "/")).await?;
    ensure!(shell.contains("<script"), "the shell is {shell}");
    let editor = eventually("code-server", UP, || page(&stack.code, "/?folder=/home/svc/home")).await?;
    ensure!(editor.contains("workbench"), "code-server is {editor}");
    let socket = "/stable-0000000000000000000000000000000000000000?reconnectionToken=lab&reconnection=false";
    let upgraded = stack.code.web_socket(socket, &owner).await?;
    ensure!(upgraded == 101, "code-server's WebSocket answered {upgraded}");
    let stranger = stack.code.get("/", None, "application/json").await?;
    ensure!(stranger.status == 401, "a stranger at code-server got {}", stranger.status);
    let strict = "/opt/svc/bin/svcctl verify-rollout --strict --socket /run/svc/gateway/gateway.sock";
    let verified = on.run(strict, LONG).await?.success().context("verify-rollout --strict")?;
    let node = "su -l -s /bin/sh svc -c 'node --version'";
    let node = on.run(node, LONG).await?.success().context("Node.js at the owner's prompt")?;
    let lines = verified.lines().filter(|line| !line.trim().is_empty()).count();
    Ok((
        (),
        format!(
            "{mib} MiB in {seconds:.0} s; shell, code-server and its WebSocket answer the owner; {lines} lines of \
             verify-rollout; Node.js {}",
            node.trim()
        ),
    ))
}

async fn answered(web: &Web, path: &str, owner: &str) -> Result<String> {
    let answer = web.get(path, Some(owner), "text/html").await?;
    ensure!(answer.status.is_success(), "{path}: {}: {}", answer.status, answer.short());
    Ok(answer.body)
}

async fn current(stack: &Stack, machine: &MachineRecord) -> Result<String> {
    let on = stack.provider.machine(&machine.server)?;
    let link = on.run("readlink /opt/svc/current", SHORT).await?.success()?;
    Ok(link.trim().rsplit('/').next().unwrap_or_default().to_owned())
}

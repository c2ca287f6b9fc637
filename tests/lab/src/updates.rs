//! Releases on a machine: one deployed by a rollout, one with a power cut during the update, a broken one that is
//! rolled back, and a full one.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::faults::wait_until_served;
use super::release;
use super::scenario::{BOOT_TIMEOUT, publish_as};
use kit::scenario::{HANDLE, MachineRecord, Stack, WebClient, eventually};

const SHORT_TIMEOUT: Duration = Duration::from_secs(60);
const LONG_TIMEOUT: Duration = Duration::from_secs(400);
const SECOND_VERSION: &str = "demo-2";
const POWER_CUT_VERSION: &str = "demo-3";
const BROKEN_VERSION: &str = "demo-4";
const FULL_VERSION: &str = "demo-5";

/// Deploys a release with a rollout: the machine runs it, and serves the same rows.
pub async fn deploy_update(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let before = stack.web.list_titles(&stack.owner_token()).await?;
    publish_as(stack, SECOND_VERSION, &stack.svc, release::small_options).await?;
    let started = Instant::now();
    let args = ["--json", "deploy", "start", SECOND_VERSION, "--no-verify", "--yes", "--wait=800"];
    let rollout: Value = stack.svcctl(&args).await?.ensure_success()?.json()?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(rollout["state"] == "succeeded" && rollout["totals"]["updated"] == 1, "the rollout is {rollout}");
    ensure!(
        current_release(stack, machine).await? == SECOND_VERSION,
        "the machine is running {}",
        current_release(stack, machine).await?
    );
    let after = wait_until_served(stack).await?;
    ensure!(after == before, "there were {before:?}, now {after:?}");
    Ok(((), format!("{SECOND_VERSION} deployed by a rollout in {seconds:.0} s, {} rows", after.len())))
}

/// Cuts the power while the new release's services are starting: the next boot completes the update or rolls it back,
/// and the rollout has the same outcome.
pub async fn cut_power_during_update(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let before = stack.web.list_titles(&stack.owner_token()).await?;
    let previous = current_release(stack, machine).await?;
    publish_as(stack, POWER_CUT_VERSION, &stack.svc, release::small_options).await?;
    let run = stack
        .svcctl(&["--json", "deploy", "start", POWER_CUT_VERSION, "--no-verify", "--yes"])
        .await?
        .ensure_success()?;
    let rollout: Value = run.json()?;
    let id = rollout["rolloutId"].as_str().with_context(|| format!("no rolloutId in {rollout}"))?.to_owned();
    let activating = "for n in $(seq 3000); do grep -rqs '\"activating\"' /var/lib/svc/update && exit 0; sleep 0.1; done; exit 1";
    vm.run(activating, LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("the update did not restart the services")?;
    stack.provider.kill_server(&machine.server).await?;
    stack.provider.power_on(&machine.server)?;
    let after = wait_until_served(stack).await?;
    ensure!(after == before, "there were {before:?}, now {after:?}");
    let state = eventually("the rollout ends", BOOT_TIMEOUT, || async {
        let status: Value =
            stack.svcctl(&["--json", "deploy", "status", &id]).await?.ensure_success()?.json()?;
        ensure!(
            status["state"] == "succeeded" || status["state"] == "stopped",
            "the rollout is {}",
            status["state"]
        );
        Ok(status["state"].clone())
    })
    .await?;
    let release = current_release(stack, machine).await?;
    ensure!(
        release == if state == "succeeded" { POWER_CUT_VERSION } else { &previous },
        "the rollout is {state}, but the machine is running {release}"
    );
    let journal = "journalctl -b -u svc-update.service -o cat --no-pager";
    let journal = vm.run(journal, SHORT_TIMEOUT).await?.into_stdout()?;
    ensure!(journal.contains("interrupted update"), "no update was in progress at the power cut: {journal}");
    let journal_file = vm
        .run("cat /var/lib/svc/update/journal.json 2>/dev/null; true", SHORT_TIMEOUT)
        .await?
        .into_stdout()?;
    ensure!(
        journal_file.trim().is_empty() || journal_file.contains("ended"),
        "the update is still in progress: {journal_file}"
    );
    Ok((
        (),
        format!(
            "power cut while {POWER_CUT_VERSION} was starting; after power-on, machine on {release}, rollout {state}"
        ),
    ))
}

/// Deploys a release whose gateway does not start: the machine rolls back, and the fleet reports the rollback.
pub async fn roll_back_broken_update(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let before = current_release(stack, machine).await?;
    // The script behaves like the applet that it is invoked as, except that svc-gateway fails.
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
    publish_as(stack, BROKEN_VERSION, &svc, release::small_options).await?;
    let run = stack.svcctl(&["--json", "deploy", "start", BROKEN_VERSION, "--yes", "--wait=800"]).await?;
    ensure!(
        run.exit_code == Some(69),
        "svcctl exited with {:?}: {}{}",
        run.exit_code,
        run.stdout,
        run.stderr
    );
    let record: Value = stack.svcctl(&["--json", "status", HANDLE]).await?.ensure_success()?.json()?;
    let last_update = &record["lastUpdate"];
    ensure!(
        last_update["version"] == BROKEN_VERSION && last_update["outcome"] == "rolled_back",
        "the host reported {last_update}"
    );
    let fleet: Value = stack.svcctl(&["--json", "fleet"]).await?.ensure_success()?.json()?;
    ensure!(fleet["attention"].to_string().contains("update_rolled_back"), "the fleet is {fleet}");
    ensure!(
        current_release(stack, machine).await? == before,
        "the machine is running {}",
        current_release(stack, machine).await?
    );
    let after = wait_until_served(stack).await?;
    Ok((
        (),
        format!(
            "{BROKEN_VERSION} failed at {}; rolled back to {before}, {} rows",
            last_update["stage"],
            after.len()
        ),
    ))
}

/// Deploys a release with all parts: the owner reaches the shell and code-server, and a visitor without a session does
/// not reach code-server.
pub async fn deploy_full_release(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let mib = publish_as(stack, FULL_VERSION, &stack.svc, release::full_options).await?;
    let started = Instant::now();
    let args = ["--json", "deploy", "start", FULL_VERSION, "--yes", "--wait=1200"];
    let rollout: Value =
        stack.svcctl_with_timeout(Duration::from_secs(1300), &args).await?.ensure_success()?.json()?;
    ensure!(rollout["state"] == "succeeded", "the rollout is {rollout}");
    ensure!(rollout["verification"]["passed"] == true, "the platform did not verify the release: {rollout}");
    let seconds = started.elapsed().as_secs_f64();
    let owner = stack.owner_token();
    let page = |web, path| get_page(web, path, &owner);
    let shell = eventually("the shell is served", BOOT_TIMEOUT, || page(&stack.web, "/")).await?;
    ensure!(shell.contains("<script"), "the shell is {shell}");
    let editor =
        eventually("code-server is served", BOOT_TIMEOUT, || page(&stack.code, "/?folder=/home/svc/home"))
            .await?;
    ensure!(editor.contains("workbench"), "code-server is {editor}");
    let socket = "/stable-0000000000000000000000000000000000000000?reconnectionToken=lab&reconnection=false";
    let status = stack.code.request_web_socket(socket, &owner).await?;
    ensure!(status == 101, "code-server's WebSocket returned {status}");
    let anonymous = stack.code.get("/", None, "application/json").await?;
    ensure!(anonymous.status == 401, "a visitor without a session got {} from code-server", anonymous.status);
    let strict = "/opt/svc/bin/svcctl verify-rollout --strict --socket /run/svc/gateway/gateway.sock";
    let verified = vm.run(strict, LONG_TIMEOUT).await?.into_stdout().context("verify-rollout --strict")?;
    let node = "su -l -s /bin/sh svc -c 'node --version'";
    let node = vm.run(node, LONG_TIMEOUT).await?.into_stdout().context("Node.js at the owner's prompt")?;
    let lines = verified.lines().filter(|line| !line.trim().is_empty()).count();
    Ok((
        (),
        format!(
            "{mib} MiB in {seconds:.0} s; shell, code-server and its WebSocket work for the owner; {lines} lines of \
             verify-rollout; Node.js {}",
            node.trim()
        ),
    ))
}

async fn get_page(web: &WebClient, path: &str, owner: &str) -> Result<String> {
    let response = web.get(path, Some(owner), "text/html").await?;
    ensure!(response.status.is_success(), "{path}: {}: {}", response.status, response.excerpt());
    Ok(response.body)
}

async fn current_release(stack: &Stack, machine: &MachineRecord) -> Result<String> {
    let vm = stack.provider.machine(&machine.server)?;
    let link = vm.run("readlink /opt/svc/current", SHORT_TIMEOUT).await?.into_stdout()?;
    Ok(link.trim().rsplit('/').next().unwrap_or_default().to_owned())
}

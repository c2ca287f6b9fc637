//! Dispatches on a virtual machine, and attacks by the owner's user on resources that must be inaccessible.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use kit::browser;
use kit::model_stub::ModelStub;
use kit::scenario::{MachineRecord, Stack};
use kit::vm::HOST_FROM_GUEST;
use serde_json::json;

const DISPATCH: &str = include_str!("agent.sh");
const BUNDLED_AGENT: &str = include_str!("bundled_agent.sh");
const ATTACK: &str = include_str!("attack.sh");
const ATTACKS: &str = include_str!("attacks.sh");
/// Path of `attack.sh` on the machine.
const ATTACK_FILE: &str = "/home/svc/home/lab-attack.sh";
/// Prints the attack's output and removes its files.
const PRINT_AND_CLEAN_UP: &str = "cd /home/svc/home && cat lab-attack.out && rm -rf lab-* apps/lab-*";
const TIMEOUT: Duration = Duration::from_secs(300);
const ATTACKS_TIMEOUT: Duration = Duration::from_secs(1200);
/// The bundled agents take minutes to start on an emulated processor.
const BUNDLED_AGENTS_TIMEOUT: Duration = Duration::from_secs(1800);

/// Runs `agent.sh`.
pub async fn run_dispatch(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    run(stack, machine, DISPATCH, TIMEOUT).await
}

/// Runs `bundled_agent.sh` with a stub for the model's API. Requires a full release.
pub async fn run_bundled_agents(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let final_turn = json!({ "text": "All done." });
    let write = json!({ "name": "Write", "input": { "file_path": "/home/svc/home/lab-from-claude", "content": "x\n" } });
    let command = json!({ "name": "exec_command", "input": { "cmd": "echo x >lab-from-codex" } });
    let model_script = json!({ "tracks": {
        "claude": [{ "tools": [write] }, final_turn], "codex": [{ "tools": [command] }, final_turn]
    } });
    let dir = tempfile::tempdir()?;
    let model = ModelStub::start(&model_script, dir.path())?;
    let script = format!("MODEL=http://{HOST_FROM_GUEST}:{}\n{BUNDLED_AGENT}", model.port());
    let ((), summary) = run(stack, machine, &script, BUNDLED_AGENTS_TIMEOUT).await?;
    Ok(((), format!("{summary}; {} requests to the model's API", model.request_count())))
}

/// Runs `attacks.sh`.
pub async fn run_attacks(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    run(stack, machine, &format!("{}{ATTACKS}", attack_writer_script()), ATTACKS_TIMEOUT).await
}

/// Runs `attack.sh` in a code-server terminal, which Chromium opens through the router.
pub async fn attack_from_terminal(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    vm.run(&attack_writer_script(), TIMEOUT).await?.into_stdout()?;
    browser::run_in_terminal(stack, &format!("sh {ATTACK_FILE} </dev/null")).await?;
    let output = vm.run(PRINT_AND_CLEAN_UP, TIMEOUT).await?.into_stdout()?;
    let lines: Vec<&str> = output.lines().collect();
    let [summary] = lines.as_slice() else { bail!("the terminal reached {lines:?}") };
    ensure!(
        summary.starts_with("done as svc in ") && summary.contains("svc-code.service"),
        "unexpected last line: {summary}"
    );
    Ok(((), format!("the code-server terminal reached nothing: {summary}")))
}

/// Returns a script that writes `attack.sh` for the owner.
fn attack_writer_script() -> String {
    format!(
        "cat >{ATTACK_FILE} <<'END_OF_ATTACK'\n{ATTACK}END_OF_ATTACK\nchown svc:svc {ATTACK_FILE}\n\
         rm -f /home/svc/home/lab-attack.out\n"
    )
}

async fn run(
    stack: &Stack,
    machine: &MachineRecord,
    script: &str,
    timeout: Duration,
) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let output = vm.run(script, timeout).await?;
    ensure!(output.status.success(), "{}{}", output.stdout, output.stderr);
    let last = output.stdout.lines().last().context("the script printed nothing")?;
    Ok(((), last.to_owned()))
}

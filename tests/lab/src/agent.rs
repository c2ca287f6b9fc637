//! A dispatch on a real machine, and attacks of the owner's user on resources that must be out of reach.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use kit::browser;
use kit::story::{MachineRecord, Stack};

const DISPATCH: &str = include_str!("agent.sh");
const ATTACK: &str = include_str!("attack.sh");
const ATTACKS: &str = include_str!("attacks.sh");
/// Path of `attack.sh` on the machine.
const ATTACK_FILE: &str = "/home/svc/home/lab-attack.sh";
/// Prints the output of the attack and removes its files.
const PRINT_AND_CLEAN_UP: &str = "cd /home/svc/home && cat lab-attack.out && rm -rf lab-* apps/lab-*";
const TIMEOUT: Duration = Duration::from_secs(300);
const ATTACKS_TIMEOUT: Duration = Duration::from_secs(1200);

/// Runs `agent.sh`.
pub async fn run_dispatch(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    run(stack, machine, DISPATCH, TIMEOUT).await
}

/// Runs `attacks.sh`.
pub async fn run_attacks(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    run(stack, machine, &format!("{}{ATTACKS}", write_attack()), ATTACKS_TIMEOUT).await
}

/// Runs `attack.sh` in a terminal of code-server, which Chromium opens through the router.
pub async fn attack_from_terminal(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    vm.run(&write_attack(), TIMEOUT).await?.success()?;
    browser::run_in_terminal(stack, &format!("sh {ATTACK_FILE} </dev/null")).await?;
    let reached = vm.run(PRINT_AND_CLEAN_UP, TIMEOUT).await?.success()?;
    let lines: Vec<&str> = reached.lines().collect();
    let [end] = lines.as_slice() else { bail!("the terminal reached {lines:?}") };
    ensure!(
        end.starts_with("done as svc in ") && end.contains("svc-code.service"),
        "unexpected last line: {end}"
    );
    Ok(((), format!("the terminal of code-server reached nothing: {end}")))
}

/// A script that writes `attack.sh` for the owner.
fn write_attack() -> String {
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

//! A dispatch on a real machine, and what the owner's user tries there that it should not reach.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::browser;
use crate::story::{MachineRecord, Stack};

const DISPATCH: &str = include_str!("agent.sh");
const ATTACK: &str = include_str!("attack.sh");
const ATTACKS: &str = include_str!("attacks.sh");
/// Where the machine's owner keeps `attack.sh`.
const ATTACK_FILE: &str = "/home/svc/home/lab-attack.sh";
/// Prints what the attack wrote, and removes what it planted.
const TERMINAL_REACHED: &str = "cd /home/svc/home && cat lab-attack.out && rm -rf lab-* apps/lab-*";
const DEADLINE: Duration = Duration::from_secs(300);
const ATTACKS_DEADLINE: Duration = Duration::from_secs(1200);

/// All of `agent.sh`.
pub async fn dispatch(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    run(stack, machine, DISPATCH, DEADLINE).await
}

/// All of `attacks.sh`.
pub async fn attacks(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    run(stack, machine, &format!("{}{ATTACKS}", write_attack()), ATTACKS_DEADLINE).await
}

/// `attack.sh` in a terminal of code-server, opened and typed into in Chromium through the router.
pub async fn terminal(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    on.run(&write_attack(), DEADLINE).await?.success()?;
    browser::run_in_terminal(stack, &format!("sh {ATTACK_FILE} </dev/null")).await?;
    let reached = on.run(TERMINAL_REACHED, DEADLINE).await?.success()?;
    let lines: Vec<&str> = reached.lines().collect();
    let [end] = lines.as_slice() else { bail!("a terminal reached {lines:?}") };
    ensure!(end.starts_with("done as svc in ") && end.contains("svc-code.service"), "it says {end}");
    Ok(((), format!("a terminal of code-server reached nothing: {end}")))
}

/// A script that gives the owner `attack.sh`.
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
    deadline: Duration,
) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let said = on.run(script, deadline).await?;
    ensure!(said.status.success(), "{}{}", said.stdout, said.stderr);
    let last = said.stdout.lines().last().context("it says nothing")?;
    Ok(((), last.to_owned()))
}

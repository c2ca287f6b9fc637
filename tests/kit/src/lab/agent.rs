//! A dispatch on a real machine, and what the owner's user tries there that it should not reach.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::story::{MachineRecord, Stack};

const DISPATCH: &str = include_str!("agent.sh");
const ATTACKS: &str = include_str!("attacks.sh");
const DEADLINE: Duration = Duration::from_secs(300);
const ATTACKS_DEADLINE: Duration = Duration::from_secs(1200);

/// All of `agent.sh`.
pub async fn dispatch(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    run(stack, machine, DISPATCH, DEADLINE).await
}

/// All of `attacks.sh`.
pub async fn attacks(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    run(stack, machine, ATTACKS, ATTACKS_DEADLINE).await
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

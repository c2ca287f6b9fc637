//! `svcctl power`: powers a machine's server on or off, or restarts it.

use http::Method;
use serde_json::json;

use super::machine::{find_machine, print_outcome};
use super::risk;
use crate::api::ApiClient;
use crate::args::{MachineTarget, PowerCommand, Wait};
use crate::confirm;
use crate::output::Output;
use crate::show::View;
use crate::show::machine;
use svc_base::applet::Failure;
use svc_wire::change::PowerChange;

pub async fn run(api: &ApiClient, command: PowerCommand, out: &Output) -> Result<(), Failure> {
    match command {
        PowerCommand::On { machine, wait } => {
            let machine = find_machine(api, &machine).await?;
            send_action(api, &machine.machine_id, "on", wait, out).await
        }
        PowerCommand::Off { machine, yes, wait } => {
            let id = confirm_machine(api, &machine, &risk::power_off_risk(&machine), yes).await?;
            send_action(api, &id, "off", wait, out).await
        }
        PowerCommand::Reboot { machine, yes, wait } => {
            let effect = format!(
                "This restarts the host of machine {machine}, which will be unreachable for a minute or two."
            );
            let id = confirm_machine(api, &machine, &effect, yes).await?;
            send_action(api, &id, "reboot", wait, out).await
        }
    }
}

/// Prompts the operator for confirmation, unless `yes` is set, and returns the machine's id.
async fn confirm_machine(
    api: &ApiClient,
    target: &MachineTarget,
    effect: &str,
    yes: bool,
) -> Result<String, Failure> {
    let must_confirm = confirm::is_required(effect, yes)?;
    let machine = find_machine(api, target).await?;
    if must_confirm {
        let at_risk = machine::data_at_risk(&View::for_stdout(), &machine);
        confirm::prompt(&format!("{effect}\n{at_risk}"), &machine.handle)?;
    }
    Ok(machine.machine.machine_id.into())
}

async fn send_action(
    api: &ApiClient,
    id: &str,
    action: &str,
    wait: Wait,
    out: &Output,
) -> Result<(), Failure> {
    let body = json!({"action": action});
    let response = api.send(Method::POST, &["vps", id, "power"], Some(&body)).await?;
    print_outcome::<PowerChange>(api, response, wait, out).await
}

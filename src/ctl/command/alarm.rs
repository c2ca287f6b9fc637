//! `svcctl alarm`: releases a fleet alarm, which allows the work that it blocks.

use http::Method;
use serde_json::json;

use crate::api::ApiClient;
use crate::args::AlarmCommand;
use crate::confirm;
use crate::output::Output;
use crate::show::fleet::{alarm_line, show_released};
use svc_base::applet::Failure;
use svc_wire::alarm::Alarm;
use svc_wire::fleet::Fleet;

/// Alarms that the platform refuses to release, so no confirmation is required.
const INFORMATIONAL_ALARMS: [&str; 8] = [
    "provider_unauthorized",
    "provider_limit",
    "provider_capacity",
    "unknown_operations",
    "database_behind_store",
    "unverified_fence",
    "host_tokens_refused",
    "rollout_halted",
];

pub async fn run(api: &ApiClient, command: AlarmCommand, out: &Output) -> Result<(), Failure> {
    let AlarmCommand::Release { alarm, yes } = command;
    let effect = match alarm.as_str() {
        "servers_missing" => {
            "For one hour, machines whose servers are missing at the provider are marked as failed. Each keeps its slot; \
             if its server is lost, so are the changes that are in no snapshot."
        }
        "unknown_servers" => {
            "Each server that currently belongs to no machine is deleted, with its disk, once the platform's \
             ORPHAN_GRACE_SECONDS have passed since it was first seen. Data that exists only there is lost. Kept \
             servers whose grace period has ended are deleted, too."
        }
        _ => "The work that this alarm blocks is allowed.",
    };
    if !INFORMATIONAL_ALARMS.contains(&alarm.as_str()) && confirm::is_required(effect, yes)? {
        let fleet: Fleet = api.get(&["vps", "fleet"], &[]).await?.parse()?;
        let raised = fleet.alarms.iter().find(|raised| raised.alarm == alarm);
        let line = raised.map(|raised| format!("\n{}", alarm_line(raised))).unwrap_or_default();
        confirm::prompt(&format!("{effect}{line}"), &alarm)?;
    }
    let path = ["vps", "fleet", "alarms", &alarm, "release"];
    let response = api.send(Method::POST, &path, Some(&json!({}))).await?;
    out.print_response(&response, |_| Ok(show_released(&response.parse::<Alarm>()?)))
}

//! `svcctl alarm`: what a fuse of the fleet holds back is let through.

use http::Method;
use serde_json::json;

use crate::applet::Failure;
use crate::ctl::api::Api;
use crate::ctl::args::AlarmCommand;
use crate::ctl::confirm;
use crate::ctl::out::Out;
use crate::ctl::show::fleet::{Alarm, Fleet, released};

/// These hold nothing back: the platform refuses their release, so there is nothing to confirm.
const INFORMING: [&str; 7] = [
    "provider_unauthorized",
    "provider_limit",
    "provider_capacity",
    "unknown_operations",
    "database_behind_store",
    "unverified_fence",
    "host_tokens_refused",
];

pub async fn run(api: &Api, command: AlarmCommand, out: &Out) -> Result<(), Failure> {
    let AlarmCommand::Release { alarm, yes } = command;
    let what = match alarm.as_str() {
        "servers_missing" => {
            "For an hour, machines whose servers the provider does not show fail. Each keeps its slot; what no snapshot \
             holds of it is lost if its server is."
        }
        "unknown_servers" => {
            "The unknown servers of this moment are deleted, with their disks, each ORPHAN_GRACE_SECONDS of the platform \
             after it was first seen. What they alone hold is lost then. Kept servers whose time is over are deleted now."
        }
        _ => "What this alarm holds back is carried out.",
    };
    if !INFORMING.contains(&alarm.as_str()) && confirm::is_due(what, yes)? {
        let fleet: Fleet = api.get(&["vps", "fleet"], &[]).await?.read()?;
        let raised = fleet.alarms.iter().find(|raised| raised.alarm == alarm);
        let shown = raised.map(|raised| format!("\n{}", raised.line())).unwrap_or_default();
        confirm::ask(&format!("{what}{shown}"), &alarm)?;
    }
    let path = ["vps", "fleet", "alarms", &alarm, "release"];
    let answer = api.send(Method::POST, &path, Some(&json!({}))).await?;
    out.answer(&answer, |_| Ok(released(&answer.read::<Alarm>()?)))
}

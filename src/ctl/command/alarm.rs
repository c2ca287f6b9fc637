//! `svcctl alarm`: what a fuse of the fleet holds back is let through.

use http::Method;
use serde_json::json;

use crate::applet::Failure;
use crate::ctl::api::Api;
use crate::ctl::args::AlarmCommand;
use crate::ctl::confirm;
use crate::ctl::out::Out;
use crate::ctl::show::fleet::{Alarm, released};

pub async fn run(api: &Api, command: AlarmCommand, out: &Out) -> Result<(), Failure> {
    let AlarmCommand::Release { alarm, yes } = command;
    let what = match alarm.as_str() {
        "servers_missing" => "Machines whose servers the provider does not show fail now, each for good.",
        "unknown_servers" => "Servers that no machine is known for are deleted now, with their disks.",
        _ => "What this alarm holds back is let through.",
    };
    if confirm::is_due(what, yes)? {
        confirm::ask(what, &alarm)?;
    }
    let path = ["vps", "fleet", "alarms", &alarm, "release"];
    let answer = api.send(Method::POST, &path, Some(&json!({}))).await?;
    out.answer(&answer, |_| Ok(released(&answer.read::<Alarm>()?)))
}

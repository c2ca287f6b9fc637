//! `svcctl files`: a slot's file backups.

use http::Method;
use serde_json::json;

use crate::api::ApiClient;
use crate::args::FilesCommand;
use crate::output::Output;
use crate::show::files::{access, prune_plan};
use svc_base::applet::Failure;

const PRUNE_PATH: [&str; 3] = ["vps", "slots", "files-prune"];

pub async fn run(api: &ApiClient, command: FilesCommand, out: &Output) -> Result<(), Failure> {
    match command {
        FilesCommand::Key { slot } => {
            let query = [("idpUserId", slot.user.to_string()), ("slot", slot.slot.to_string())];
            let response = api.get(&["vps", "slots", "files-key"], &query).await?;
            out.print_response(&response, |view| Ok(access(view, &slot, &response.parse()?)))
        }
        FilesCommand::Prune { slot, dry_run: true } => {
            let query = [("idpUserId", slot.user.to_string()), ("slot", slot.slot.to_string())];
            let response = api.get(&PRUNE_PATH, &query).await?;
            out.print_response(&response, |view| Ok(prune_plan(view, &slot, &response.parse()?)))
        }
        FilesCommand::Prune { slot, dry_run: false } => {
            let body = json!({"idpUserId": slot.user, "slot": slot.slot});
            let response = api.send(Method::POST, &PRUNE_PATH, Some(&body)).await?;
            out.print_response(&response, |_| {
                Ok(format!("the file backups of {slot} will be pruned within a minute\n"))
            })
        }
    }
}

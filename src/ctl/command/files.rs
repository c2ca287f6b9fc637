//! `svcctl files`: a slot's file backups.

use crate::api::ApiClient;
use crate::args::FilesCommand;
use crate::output::Output;
use crate::show::files::access;
use svc_base::applet::Failure;

pub async fn run(api: &ApiClient, command: FilesCommand, out: &Output) -> Result<(), Failure> {
    match command {
        FilesCommand::Key { slot } => {
            let query = [("idpUserId", slot.user.to_string()), ("slot", slot.slot.to_string())];
            let response = api.get(&["vps", "slots", "files-key"], &query).await?;
            out.print_response(&response, |view| Ok(access(view, &slot, &response.parse()?)))
        }
    }
}

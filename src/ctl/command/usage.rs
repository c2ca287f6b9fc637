//! `svcctl usage`: the cost of a machine's dispatches.

use super::machine::find_id;
use crate::applet::Failure;
use crate::ctl::api::ApiClient;
use crate::ctl::args::Usage as Args;
use crate::ctl::out::Out;
use crate::ctl::show::usage::show;
use crate::http::usage::UsageQuery;

pub async fn run(api: &ApiClient, args: Args, out: &Out) -> Result<(), Failure> {
    let Args { machine, from, to, user, by } = args;
    let id = find_id(api, &machine).await?;
    let query = UsageQuery { user_id: user, start: from, end: to, group_by: by };
    let response = api.get(&["vps", &id, "usage"], &query.pairs()).await?;
    out.print_response(&response, |view| Ok(show(view, by, &response.read()?)))
}

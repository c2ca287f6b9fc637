//! `svcctl usage`: shows the cost of a machine's dispatches.

use super::machine::find_id;
use crate::api::ApiClient;
use crate::args::Usage as Args;
use crate::output::Output;
use crate::show::usage::show;
use svc_base::applet::Failure;
use svc_http::usage::UsageQuery;

pub async fn run(api: &ApiClient, args: Args, out: &Output) -> Result<(), Failure> {
    let Args { machine, from, to, user, by } = args;
    let id = find_id(api, &machine).await?;
    let query = UsageQuery { user_id: user, start: from, end: to, group_by: by };
    let response = api.get(&["vps", &id, "usage"], &query.pairs()).await?;
    out.print_response(&response, |view| Ok(show(view, by, &response.parse()?)))
}

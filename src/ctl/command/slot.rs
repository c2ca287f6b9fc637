//! `svcctl slot`: sets and lists slot subscriptions.

use http::Method;
use serde_json::json;

use crate::api::ApiClient;
use crate::args::SlotCommand;
use crate::output::Output;
use crate::show::slot::{list, page};
use svc_base::applet::Failure;
use svc_base::clock;
use svc_wire::slot::Subscription;

pub async fn run(api: &ApiClient, command: SlotCommand, out: &Output) -> Result<(), Failure> {
    match command {
        SlotCommand::Set { user, slot, plan, status, period_end, test } => {
            let mut body = json!({"idpUserId": user, "slot": slot, "plan": plan, "status": status.as_str()});
            if let Some(end) = period_end {
                body["currentPeriodEnd"] = clock::rfc3339_ms(end).into();
            }
            // The field is sent only if it is given, because older platforms reject it.
            if let Some(test) = test {
                body["test"] = test.into();
            }
            let response = api.send(Method::PUT, &["vps", "slots"], Some(&body)).await?;
            out.print_response(&response, |view| Ok(list(view, &[response.parse::<Subscription>()?])))
        }
        SlotCommand::List { user, cursor } => {
            let mut query = vec![("idpUserId", user.to_string())];
            query.extend(cursor.map(|cursor| ("cursor", cursor)));
            let response = api.get(&["vps", "slots"], &query).await?;
            out.print_response(&response, |view| Ok(page(view, &response.parse()?)))
        }
    }
}

//! `svcctl pointer`: shows a slot's snapshot pointer, and rebuilds it.

use http::Method;
use serde_json::json;

use crate::api::{ApiClient, ApiResponse};
use crate::args::{PointerCommand, SlotTarget};
use crate::confirm;
use crate::output::Output;
use crate::show::View;
use crate::show::pointer::{inspection, rebuilt};
use svc_base::applet::Failure;
use svc_store::key::SnapshotKey;
use svc_wire::pointer::{PointerInspection, RebuiltPointer};

pub async fn run(api: &ApiClient, command: PointerCommand, out: &Output) -> Result<(), Failure> {
    match command {
        PointerCommand::Show { slot } => {
            let response = inspect(api, &slot, None).await?;
            out.print_response(&response, |view| Ok(inspection(view, &slot, &response.parse()?)))
        }
        PointerCommand::Rebuild { slot, to, empty, force, yes } => {
            let effect = if empty {
                format!(
                    "This makes the snapshot pointer of {slot} refer to no snapshot: a recovery with --allow-empty \
                     then starts with an empty database."
                )
            } else {
                format!("This rebuilds the snapshot pointer of {slot}.")
            };
            if confirm::is_required(&effect, yes)? {
                let current: PointerInspection = inspect(api, &slot, to.as_ref()).await?.parse()?;
                let details = inspection(&View::for_stdout(), &slot, &current);
                confirm::prompt(&format!("{effect}\n{details}"), slot.user.as_str())?;
            }
            let mut body = json!({"idpUserId": slot.user, "slot": slot.slot, "force": force, "empty": empty});
            if let Some(key) = to {
                body["snapshotKey"] = key.as_str().into();
            }
            let path = ["vps", "slots", "pointer", "rebuild"];
            let response = api.send(Method::POST, &path, Some(&body)).await?;
            out.print_response(&response, |view| Ok(rebuilt(view, &response.parse::<RebuiltPointer>()?)))
        }
    }
}

async fn inspect(
    api: &ApiClient,
    slot: &SlotTarget,
    to: Option<&SnapshotKey>,
) -> Result<ApiResponse, Failure> {
    let mut query = vec![("idpUserId", slot.user.to_string()), ("slot", slot.slot.to_string())];
    query.extend(to.map(|key| ("snapshotKey", key.as_str().to_owned())));
    Ok(api.get(&["vps", "slots", "pointer"], &query).await?)
}

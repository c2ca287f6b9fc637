//! POST `/vps/provision/quote`: describes what provisioning would do, cost and use, without changing anything. Rejects
//! every request that provisioning would reject, but does not check confirmations, which may be missing or outdated.
//! Consecutive quotes share the data read from the provider ([`crate::quote_cache`]).

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::Method;

use super::call::ApiCall;
use super::confirmation::RequiredConfirmation;
use super::endpoint::{Access, Endpoint, OPERATE, OPERATOR, documented_json};
use super::provision::{self, ProvisionRequest};
use super::server_limit;
use crate::context::Platform;
use crate::server_cost::{self, ServerLocations};
use crate::{db, exercises};
use svc_base::config::Flag;
use svc_http::openapi::{Operation, schema_of};
use svc_http::problem::{Code, Problem};
use svc_machine::state::Status;
use svc_wire::quote::{ExistingMachine, ProvisionQuote};
use svc_wire::slot::Subscription;

async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let request = provision::parse_request(&platform, &call)?;
    Ok(Json(quote(&platform, &request).await?).into_response())
}

async fn quote(platform: &Platform, request: &ProvisionRequest) -> Result<ProvisionQuote, Problem> {
    let session = platform.db.session().await?;
    let existing = provision::check_admission(platform, &session, request).await?;
    drop(session);
    let orders_server = existing.as_ref().is_none_or(|machine| machine.status == Status::Failed);
    let adds_customer = request.adds_customer(existing.as_ref());
    let needs_cost_confirmation =
        request.required_confirmation(existing.as_ref()) != RequiredConfirmation::Nothing;
    let (mut image_version, mut cost, mut server_count) = (None, None, None);
    if orders_server {
        image_version = Some(provision::check_for_quote(platform, request, existing.as_ref()).await?);
        let fallback = request.locations.fallback_for(platform, &request.location);
        let locations = ServerLocations { location: &request.location, fallback: &fallback };
        let quoted_cost = server_cost::read_quoted_cost(platform, &request.server_type, locations).await;
        cost = if needs_cost_confirmation { Some(quoted_cost?) } else { quoted_cost.ok() };
        let count = async { Ok(server_limit::count_listed(platform).await?) };
        server_count = Some(platform.quotes.get_server_count(count).await?);
    }
    let session = platform.db.session().await?;
    let servers = match (server_count, &existing) {
        (None, _) => None,
        (server_count, None) => Some(server_limit::check_room(platform, &session, server_count).await?),
        (server_count, Some(failed)) => {
            Some(server_limit::check_room_for_replacement(platform, &session, server_count, failed).await?)
        }
    };
    let config = &platform.config;
    let subscription = db::slots::find_subscription(&session, &request.user, &request.slot).await?;
    Ok(ProvisionQuote {
        environment: config.provisioning.environment.clone(),
        platform_url: config.hosts.public_url.to_string(),
        provider: config.provider.api_url.host_str().unwrap_or_default().to_owned(),
        provider_project: config.provider.project.clone(),
        idp_user_id: (&request.user).into(),
        slot: (&request.slot).into(),
        handle: (&request.handle).into(),
        kind: request.kind.into(),
        server_type: (&request.server_type).into(),
        location: (&request.location).into(),
        image_version: image_version.map(Into::into),
        subscription: subscription.as_ref().map(Subscription::from),
        billing_enforced: config.provisioning.billing_enforcement == Flag::On,
        adds_customer,
        needs_cost_confirmation,
        existing: existing
            .map(|machine| ExistingMachine { machine_id: machine.id.into(), status: machine.status.into() }),
        monthly_cost: cost.as_ref().map(|cost| (&cost.highest).into()),
        costs: cost.map(|cost| cost.by_location).unwrap_or_default(),
        servers,
        server_limit: config.provider.server_limit,
        exercises: exercises::load(&session).await?,
    })
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "quoteProvision",
        method: Method::POST,
        path: "/vps/provision/quote",
        summary: "Describes what provisioning would do, cost and use, without changing anything.",
        credentials: &[OPERATOR],
        parameters: &[],
        body: Some(provision::body_schema),
        responses: &[documented_json(200, "Provisioning is possible.", schema_of::<ProvisionQuote>)],
        problems: &[
            Code::Disabled,
            Code::SubscriptionRequired,
            Code::ServerTypeNotAllowed,
            Code::BundleNotFound,
            Code::HandleTaken,
            Code::InvalidState,
            Code::SnapshotUnusable,
            Code::DiskTooSmall,
            Code::PreviewLimitReached,
            Code::ServerLimitReached,
            Code::StoreUnavailable,
            Code::Unavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || post(handle),
};

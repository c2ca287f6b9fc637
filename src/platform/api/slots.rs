//! PUT and GET `/vps/slots`: set a slot's subscription, for the billing system, and list subscriptions.

use std::str::FromStr;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::ApiCall;
use super::endpoint::{
    Access, BILLING, CURSOR, Endpoint, IDEMPOTENCY_KEY, OPERATOR, READ_OR_BILLING, documented_json,
    idp_user_id, plan, slot_name,
};
use super::mutation::{AuditChange, Mutation, MutationEffect, Reply};
use crate::context::Platform;
use crate::db::slots::{self, NewSubscription};
use axum::routing;
use svc_http::openapi::{
    Operation, Parameter, ParameterLocation, boolean, request_object, schema_of, schema_ref, string_enum,
    text_matching, time,
};
use svc_http::problem::{Code, Problem};
use svc_machine::name::{IdpUserId, Slot};
use svc_wire::slot::{Subscription, SubscriptionPage};

const PAGE_SIZE: usize = 1000;

/// Returns the schema for a cursor, `USER/SLOT`.
fn cursor_schema() -> Value {
    let (user, slot) = (IdpUserId::PATTERN, Slot::PATTERN);
    text_matching(&format!("{}/{}", user.trim_end_matches('$'), slot.trim_start_matches('^')))
}

/// The last slot on a page.
struct Cursor(IdpUserId, Slot);

impl FromStr for Cursor {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed =
            text.split_once('/').and_then(|(user, slot)| Some(Self(user.parse().ok()?, slot.parse().ok()?)));
        parsed.ok_or("must be the nextCursor of the previous page")
    }
}

pub async fn put(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let subscription = parse_subscription(&call)?;
    let mutation = Mutation::from_call(&call, &operator)?;

    let outcome = mutation
        .run(&platform, async |tx| {
            let before = slots::find_subscription(tx, &subscription.user, &subscription.slot).await?;
            let after = Subscription::from(&slots::upsert_subscription(tx, &subscription).await?);
            let change = AuditChange {
                action: "slot.set",
                target: format!("{}/{}", subscription.user, subscription.slot),
                before: before.map(|before| json!(Subscription::from(&before))),
                after: Some(json!(after)),
            };
            Ok(MutationEffect::changed(Reply::new(StatusCode::OK, after), change))
        })
        .await?;
    Ok(outcome.into_reply().into_response())
}

fn parse_subscription(call: &ApiCall) -> Result<NewSubscription, Problem> {
    let mut fields = call.request.json_fields()?;
    let user = fields.required("idpUserId");
    let slot = fields.optional("slot").unwrap_or_else(Slot::primary);
    let plan = fields.required("plan");
    let status = fields.required("status");
    let current_period_end = fields.optional_time("currentPeriodEnd");
    let is_test = fields.boolean("test");
    let subscription = (|| {
        Some(NewSubscription { user: user?, slot, plan: plan?, status: status?, current_period_end, is_test })
    })();
    fields.finish(subscription)
}

pub async fn list(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let mut query = call.request.query_fields();
    let user = query.optional("idpUserId");
    let after: Option<Cursor> = query.optional("cursor");
    query.finish(Some(()))?;
    let session = platform.report_db.session().await?;
    let after = after.map(|Cursor(user, slot)| (user, slot));
    let mut rows = slots::list(&session, user.as_ref(), after.as_ref(), PAGE_SIZE as i64 + 1).await?;
    let has_more = rows.len() > PAGE_SIZE;
    rows.truncate(PAGE_SIZE);
    let next_cursor = rows.last().filter(|_| has_more).map(|last| format!("{}/{}", last.user, last.slot));
    let page = SubscriptionPage { slots: rows.iter().map(Into::into).collect(), next_cursor };
    Ok(Json(page).into_response())
}

pub static PUT: Endpoint = Endpoint {
    access: Access::Operator(BILLING),
    operation: Operation {
        id: "setSubscription",
        method: Method::PUT,
        path: "/vps/slots",
        summary: "Sets the subscription of a slot, for the billing system.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY],
        body: Some(|| {
            request_object(
                &[
                    ("idpUserId", idp_user_id()),
                    ("plan", plan()),
                    ("status", string_enum(&["active", "inactive"])),
                ],
                &[("slot", slot_name()), ("currentPeriodEnd", time()), ("test", boolean())],
            )
        }),
        responses: &[documented_json(200, "The subscription.", || schema_ref("Subscription"))],
        problems: &[Code::DatabaseUnavailable, Code::IdempotencyMismatch],
    },
    serve: || routing::put(put),
};

pub static LIST: Endpoint = Endpoint {
    access: Access::Operator(READ_OR_BILLING),
    operation: Operation {
        id: "listSubscriptions",
        method: Method::GET,
        path: "/vps/slots",
        summary: "Lists the subscriptions of slots.",
        credentials: &[OPERATOR],
        parameters: &[
            Parameter {
                name: "idpUserId",
                location: ParameterLocation::Query,
                schema: idp_user_id,
                description: "Only subscriptions of this user.",
            },
            Parameter { schema: cursor_schema, ..CURSOR },
        ],
        body: None,
        responses: &[documented_json(200, "A page of subscriptions.", schema_of::<SubscriptionPage>)],
        problems: &[Code::DatabaseUnavailable],
    },
    serve: || routing::get(list),
};

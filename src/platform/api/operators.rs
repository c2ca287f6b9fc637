//! `/operators`: manages named operators, their scopes and tokens. Only the response to the request that issues a
//! token, or to a retry of that request, contains the token; the stored response and the audit log do not.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::{Method, StatusCode};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};

use super::call::ApiCall;
use super::endpoint::{ADMIN, Access, Endpoint, IDEMPOTENCY_KEY, OPERATOR, documented_json};
use super::mutation::{AuditChange, Mutation, MutationEffect, MutationOutcome, Reply};
use crate::context::Platform;
use crate::db;
use crate::db::operators::{NewToken, OperatorRow};
use crate::operators::{Operator, Scopes};
use crate::tokens;
use svc_http::fields::Fields;
use svc_http::openapi::{
    Operation, Parameter, ParameterLocation, request_object, schema_of, schema_ref, string_enum,
    text_matching,
};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::id::OperatorTokenId;
use svc_machine::name::OperatorName;
use svc_wire::operator::{self as wire, IssuedToken, OperatorList, Scope, TokenIssue, WhoAmI};
use svc_wire::text::UnknownVariant;

const DAY_SECONDS: u64 = 86_400;
const DEFAULT_TTL_SECONDS: u64 = 90 * DAY_SECONDS;
const MIN_TTL_SECONDS: u64 = 60;
const MAX_TTL_SECONDS: u64 = 400 * DAY_SECONDS;
const DEFAULT_OVERLAP_SECONDS: u64 = 3600;
const MAX_OVERLAP_SECONDS: u64 = 7 * DAY_SECONDS;
/// Maximum number of operators, including revoked and expired ones, which are kept as long as the audit log names them.
const MAX_OPERATORS: i64 = 1000;

async fn add(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let mut fields = call.request.json_fields()?;
    let name: Option<OperatorName> = fields.required("name");
    let scopes = read_scopes(&mut fields);
    let ttl = read_ttl(&mut fields);
    let (name, scopes) = fields.finish(name.zip(scopes))?;
    ensure_may_grant(&operator, &scopes)?;
    let mutation = Mutation::from_call(&call, &operator)?;

    let id = OperatorTokenId::new();
    let token_value = platform.mint.operator_token(id);
    let outcome = mutation
        .run(&platform, async |tx| {
            db::lock(tx, "operators").await?;
            if db::operators::count(tx).await? >= MAX_OPERATORS {
                let detail = format!(
                    "There are already {MAX_OPERATORS} operators, including revoked ones, which is the maximum."
                );
                return Err(Problem::new(Code::Conflict, detail));
            }
            let hash = tokens::hash(token_value.expose_secret());
            let token = NewToken { id, hash: &hash, ttl };
            let added = db::operators::insert(tx, &name, &scopes, &token, operator.actor()).await?;
            let added = added.ok_or_else(|| name_taken(&name))?;
            Ok(MutationEffect::changed(
                reply_without_token(StatusCode::CREATED, &added),
                audit_change("operator.add", None, &added),
            ))
        })
        .await?;
    response_with_token(&platform, outcome, &token_value).await
}

fn name_taken(name: &OperatorName) -> Problem {
    let detail = format!(
        "An operator {name} already exists, possibly revoked (see `svcctl operator list`): choose another name. A name \
         cannot be reused while the audit log contains it."
    );
    Problem::new(Code::Conflict, detail)
}

async fn rotate(
    State(platform): State<Arc<Platform>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let mut fields = call.request.json_fields()?;
    let ttl = read_ttl(&mut fields);
    let overlap =
        read_seconds(&mut fields, "overlapSeconds", 0, MAX_OVERLAP_SECONDS, DEFAULT_OVERLAP_SECONDS);
    let name = fields.finish(Some(parse_name(&name)?))?;
    let mutation = Mutation::from_call(&call, &operator)?;

    let id = OperatorTokenId::new();
    let token_value = platform.mint.operator_token(id);
    let outcome = mutation
        .run(&platform, async |tx| {
            let before = db::operators::lock(tx, &name).await?.ok_or_else(|| not_found(&name))?;
            // The caller receives a token with all of the operator's scopes.
            ensure_may_grant(&operator, &before.scopes)?;
            if before.revoked_at.is_some() {
                let detail = format!(
                    "Operator {name} has been revoked: add an operator with a different name instead."
                );
                return Err(Problem::new(Code::Conflict, detail));
            }
            let hash = tokens::hash(token_value.expose_secret());
            let after = db::operators::rotate(tx, &name, &NewToken { id, hash: &hash, ttl }, overlap).await?;
            let change = audit_change("operator.rotate", Some(&before), &after);
            Ok(MutationEffect::changed(reply_without_token(StatusCode::OK, &after), change))
        })
        .await?;
    response_with_token(&platform, outcome, &token_value).await
}

async fn revoke(
    State(platform): State<Arc<Platform>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    call.ensure_empty_body()?;
    let name = parse_name(&name)?;
    let mutation = Mutation::from_call(&call, &operator)?;

    let outcome = mutation
        .run(&platform, async |tx| {
            let before = db::operators::lock(tx, &name).await?.ok_or_else(|| not_found(&name))?;
            let after = db::operators::revoke(tx, &name).await?;
            let reply = Reply::new(StatusCode::OK, wire::Operator::from(&after));
            if before.revoked_at.is_some() {
                return Ok(MutationEffect::unchanged(reply));
            }
            Ok(MutationEffect::changed(reply, audit_change("operator.revoke", Some(&before), &after)))
        })
        .await?;
    Ok(outcome.into_reply().into_response())
}

async fn list(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    call.request.query_fields().finish(Some(()))?;
    let session = platform.report_db.session().await?;
    let rows = db::operators::list(&session, MAX_OPERATORS).await?;
    Ok(Json(OperatorList { operators: rows.iter().map(Into::into).collect() }).into_response())
}

async fn who_am_i(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    call.request.query_fields().finish(Some(()))?;
    let expires_at = match &operator {
        Operator::PlatformSecret => None,
        Operator::Named { name, .. } => {
            let session = platform.report_db.session().await?;
            db::operators::get(&session, name).await?.map(|row| row.expires_at.into())
        }
    };
    let (name, scopes) = (operator.actor().to_owned(), operator.scopes().to_wire());
    Ok(Json(WhoAmI { name, scopes, expires_at }).into_response())
}

fn read_scopes(fields: &mut Fields) -> Option<Scopes> {
    let names = fields.strings("scopes", Scope::ALL.len());
    match names.iter().map(|name| name.parse()).collect::<Result<Scopes, UnknownVariant>>() {
        Ok(scopes) if !scopes.is_empty() => Some(scopes),
        Ok(_) => {
            fields.add_error("scopes", "must name at least one scope");
            None
        }
        Err(UnknownVariant { expected }) => {
            fields.add_error("scopes", format!("must each be one of {}", expected.join(", ")));
            None
        }
    }
}

fn read_ttl(fields: &mut Fields) -> Duration {
    read_seconds(fields, "ttlSeconds", MIN_TTL_SECONDS, MAX_TTL_SECONDS, DEFAULT_TTL_SECONDS)
}

fn read_seconds(fields: &mut Fields, name: &str, min: u64, max: u64, default: u64) -> Duration {
    let seconds = fields.optional_number(name).unwrap_or(default);
    if !(min..=max).contains(&seconds) {
        fields.add_error(name, format!("must be from {min} to {max} seconds"));
    }
    Duration::from_secs(seconds)
}

fn parse_name(name: &str) -> Result<OperatorName, Problem> {
    name.parse().map_err(|error: svc_machine::name::NameError| Problem::field("operator", error.to_string()))
}

fn not_found(name: &OperatorName) -> Problem {
    let detail = format!("There is no operator {name}; `svcctl operator list` lists the operators.");
    Problem::new(Code::NotFound, detail)
}

/// Rejects granting scopes that the caller does not have.
fn ensure_may_grant(operator: &Operator, scopes: &Scopes) -> Result<(), Problem> {
    let missing = operator.scopes().missing(scopes);
    if missing.is_empty() {
        return Ok(());
    }
    let detail = format!(
        "Operator {} cannot grant scopes that it lacks ({}): use PLATFORM_SECRET, or an operator with these scopes and \
         `admin`.",
        operator.actor(),
        missing.join(", ")
    );
    Err(Problem::new(Code::Forbidden, detail).with("missingScopes", json!(missing)))
}

/// Returns the response without the token, as it is stored for replays.
fn reply_without_token(status: StatusCode, operator: &OperatorRow) -> Reply {
    Reply::new(status, TokenIssue { operator: operator.into(), token_id: operator.token_id.into() })
}

/// Returns the response with the token. A replayed response contains the token that was issued first.
async fn response_with_token(
    platform: &Platform,
    outcome: MutationOutcome,
    token: &SecretString,
) -> Result<Response, Problem> {
    let reply = match outcome {
        MutationOutcome::Done(reply) => with_token(reply, token),
        MutationOutcome::Replayed(reply) => with_stored_token(platform, reply).await?,
    };
    Ok(reply.into_response())
}

fn with_token(mut reply: Reply, token: &SecretString) -> Reply {
    reply.body["token"] = token.expose_secret().into();
    reply
}

/// Adds the token to a stored response. The token is derived again from its id with the platform key that issued it.
async fn with_stored_token(platform: &Platform, reply: Reply) -> Result<Reply, Problem> {
    let id: Option<OperatorTokenId> = reply.body["tokenId"].as_str().and_then(|id| id.parse().ok());
    let Some(id) = id else { return Ok(reply) };
    let session = platform.db.session().await?;
    let stored = db::operators::find_by_token(&session, id, Duration::ZERO).await?;
    // The operator's token has been rotated at least twice since, or the operator's row was deleted. The stored
    // response's token is no longer valid, so it does not matter which key derives it.
    let Some(stored) = stored else { return Ok(with_token(reply, &platform.mint.operator_token(id))) };
    let token = platform.mint.stored_operator_token(id, &stored.token_hash).ok_or_else(|| {
        let detail = format!(
            "The token in this response was issued with a PLATFORM_KEY that is no longer in use, and cannot be shown again: \
             issue a new one with `svcctl operator rotate {}`.",
            stored.name
        );
        Problem::new(Code::Conflict, detail)
    })?;
    Ok(with_token(reply, &token))
}

fn audit_change(action: &'static str, before: Option<&OperatorRow>, after: &OperatorRow) -> AuditChange {
    let record = |row: &OperatorRow| json!(wire::Operator::from(row));
    AuditChange {
        action,
        target: after.name.to_string(),
        before: before.map(record),
        after: Some(record(after)),
    }
}

fn seconds_schema(min: u64, max: u64) -> Value {
    json!({ "type": "integer", "minimum": min, "maximum": max })
}

const NAME: Parameter = Parameter {
    name: "operator",
    location: ParameterLocation::Path,
    schema: || text_matching(OperatorName::PATTERN),
    description: "The operator's name.",
};

pub static ADD: Endpoint = Endpoint {
    access: Access::Operator(ADMIN),
    operation: Operation {
        id: "addOperator",
        method: Method::POST,
        path: "/operators",
        summary: "Adds a named operator with some of the caller's scopes. Only this response, and responses to retries \
                  with the same `Idempotency-Key`, contain the token.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY],
        body: Some(|| {
            let scope = string_enum(&Scope::ALL.map(Scope::as_str));
            let scopes =
                json!({ "type": "array", "items": scope, "minItems": 1, "maxItems": Scope::ALL.len() });
            request_object(
                &[("name", text_matching(OperatorName::PATTERN)), ("scopes", scopes)],
                &[("ttlSeconds", seconds_schema(MIN_TTL_SECONDS, MAX_TTL_SECONDS))],
            )
        }),
        responses: &[documented_json(201, "The operator and the token.", schema_of::<IssuedToken>)],
        problems: &[Code::Conflict, Code::DatabaseUnavailable, Code::IdempotencyMismatch],
    },
    serve: || post(add),
};

pub static LIST: Endpoint = Endpoint {
    access: Access::Operator(ADMIN),
    operation: Operation {
        id: "listOperators",
        method: Method::GET,
        path: "/operators",
        summary: "Lists all operators by name, including revoked and expired ones.",
        credentials: &[OPERATOR],
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The operators.", schema_of::<OperatorList>)],
        problems: &[Code::InvalidRequest, Code::DatabaseUnavailable],
    },
    serve: || get(list),
};

pub static ROTATE: Endpoint = Endpoint {
    access: Access::Operator(ADMIN),
    operation: Operation {
        id: "rotateOperator",
        method: Method::POST,
        path: "/operators/{operator}/rotate",
        summary: "Issues a new token to an operator; the previous one stays valid for the overlap.",
        credentials: &[OPERATOR],
        parameters: &[NAME, IDEMPOTENCY_KEY],
        body: Some(|| {
            request_object(
                &[],
                &[
                    ("ttlSeconds", seconds_schema(MIN_TTL_SECONDS, MAX_TTL_SECONDS)),
                    ("overlapSeconds", seconds_schema(0, MAX_OVERLAP_SECONDS)),
                ],
            )
        }),
        responses: &[documented_json(200, "The operator and the new token.", schema_of::<IssuedToken>)],
        problems: &[Code::NotFound, Code::Conflict, Code::DatabaseUnavailable, Code::IdempotencyMismatch],
    },
    serve: || post(rotate),
};

pub static REVOKE: Endpoint = Endpoint {
    access: Access::Operator(ADMIN),
    operation: Operation {
        id: "revokeOperator",
        method: Method::POST,
        path: "/operators/{operator}/revoke",
        summary: "Revokes an operator's tokens permanently, with immediate effect in every process.",
        credentials: &[OPERATOR],
        parameters: &[NAME, IDEMPOTENCY_KEY],
        body: None,
        responses: &[documented_json(200, "The operator.", || schema_ref("Operator"))],
        problems: &[Code::NotFound, Code::DatabaseUnavailable, Code::IdempotencyMismatch],
    },
    serve: || post(revoke),
};

pub static WHO_AM_I: Endpoint = Endpoint {
    access: Access::Operator(&Scope::ALL),
    operation: Operation {
        id: "whoAmI",
        method: Method::GET,
        path: "/operators/whoami",
        summary: "Shows the operator that the token belongs to.",
        credentials: &[OPERATOR],
        parameters: &[],
        body: None,
        responses: &[documented_json(
            200,
            "Name, scopes, and expiry of the newest token.",
            schema_of::<WhoAmI>,
        )],
        problems: &[Code::InvalidRequest, Code::DatabaseUnavailable],
    },
    serve: || get(who_am_i),
};

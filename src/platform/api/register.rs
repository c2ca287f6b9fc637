//! POST `/vps/register`: the one call that makes a machine routable, with a token that works once.
//!
//! The token with the identical body, while it lasts, gets the same answer again: the first one may have been lost.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use deadpool_postgres::Transaction;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::call::{Call, registration_rejected};
use super::endpoint::{Endpoint, REGISTRATION, image_version, sha256, told};
use super::mutation::{self, Changed};
use crate::http::openapi::{Operation, count, extensible, fields, object, one_of, uuid};
use crate::http::problem::{Code, Problem};
use crate::http::tls::SpkiPin;
use crate::machine::event::Event;
use crate::machine::id::MachineId;
use crate::machine::name::ImageVersion;
use crate::platform::context::Platform;
use crate::platform::db::machine_changes::{self, Registration};
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self};
use crate::platform::lifecycle::{self, Circumstances, LifecycleError};
use crate::platform::tokens;
use crate::store::bundle::parse_digest;
use axum::routing::post;
use http::Method;

#[derive(Serialize)]
struct Asked {
    machine: MachineId,
    image_version: ImageVersion,
    bundle_sha256: String,
    tls_spki_sha256: String,
    boot_ms: Option<u64>,
}

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let (claimed, token) = call.registration()?;
    let mut session = platform.host_db.session().await?;
    // Whose token it is comes before what the body says; held, so that uses take turns.
    let tx = db::begin(&mut session).await?;
    let machine = authentic(&tx, claimed, token).await?;
    let (asked, pin) = asked(&call)?;
    if asked.machine != machine.id {
        return Err(registration_rejected());
    }
    let answer = register(&platform, &tx, &machine, &asked, pin).await?;
    db::commit(tx).await?;
    Ok(Json(answer).into_response())
}

/// The machine whose token this is, if it can still be used at all.
pub async fn authentic(tx: &Transaction<'_>, claimed: MachineId, token: &str) -> Result<MachineRow, Problem> {
    let machine = db::machines::locked(tx, claimed).await?.ok_or_else(registration_rejected)?;
    if !tokens::fits(token, &machine.registration_token_hash) || !machine.is_active() {
        return Err(registration_rejected());
    }
    if machine.registration_expires_at.is_some_and(|end| end <= Timestamp::now()) {
        return Err(registration_rejected());
    }
    Ok(machine)
}

fn asked(call: &Call) -> Result<(Asked, SpkiPin), Problem> {
    let mut fields = call.host_fields()?;
    let machine = fields.required("machineId");
    let image_version = fields.required("imageVersion");
    let digest: Option<String> = fields.required("bundleSha256");
    let bundle_sha256 = digest.and_then(|text| {
        let parsed = parse_digest(&text).filter(|_| text.len() == 64);
        if parsed.is_none() {
            fields.wrong("bundleSha256", "must be 64 hexadecimal digits");
        }
        parsed
    });
    let pin: Option<SpkiPin> = fields.required("tlsSpkiSha256");
    let boot_ms = fields.optional_number("bootMs");
    let whole = (|| {
        let asked = Asked {
            machine: machine?,
            image_version: image_version?,
            bundle_sha256: bundle_sha256?,
            tls_spki_sha256: pin?.to_string(),
            boot_ms,
        };
        Some((asked, pin?))
    })();
    fields.finish(whole)
}

async fn register(
    platform: &Platform,
    tx: &Transaction<'_>,
    machine: &MachineRow,
    asked: &Asked,
    pin: SpkiPin,
) -> Result<Value, Problem> {
    let answer = json!({"status": "running", "epoch": machine.epoch});
    let canonical = serde_json::to_vec(asked).map_err(|error| Problem::internal(&error))?;
    let body_hash = Sha256::digest(&canonical).to_vec();
    if let Some(first) = &machine.registration_body_hash {
        let same: bool = first.ct_eq(&body_hash).into();
        return if same { Ok(answer) } else { Err(registration_rejected()) };
    }
    if machine.registration_expires_at.is_none() {
        // The host was faster than the answer to its own creation: it is asked to try again.
        return Err(Problem::new(Code::Unavailable, "The server is not noted yet; try again.").retry_after(1));
    }
    let event = Event::Registered { server_type: machine.server_type.clone() };
    match lifecycle::apply(tx, &platform.mint, machine, &event, Circumstances::default()).await {
        Ok(_) => {}
        Err(LifecycleError::Refused(_)) => {
            return Err(Problem::new(Code::InvalidState, "The machine does not wait for its registration.")
                .with("machineStatus", json!(machine.status)));
        }
        Err(LifecycleError::Db(error)) => return Err(error.into()),
        Err(error @ LifecycleError::Missing(_)) => return Err(Problem::internal(&error)),
    }
    let registration = Registration {
        image_version: &asked.image_version,
        bundle_sha256: &asked.bundle_sha256,
        tls_pin: pin,
        body_hash: &body_hash,
    };
    machine_changes::registered(tx, machine.id, &registration).await?;
    db::slots::set_release(tx, &machine.user, &machine.slot, &asked.image_version).await?;
    db::operations::end_running(tx, machine.id, "succeeded", None).await?;
    let id = machine.id.to_string();
    let actor = format!("machine:{id}");
    let after = serde_json::to_value(asked).ok();
    let changed = Changed { action: "register", target: &id, before: None, after: after.as_ref() };
    mutation::audit(tx, &actor, &changed).await?;
    tracing::info!(machine = %machine.id, boot_ms = asked.boot_ms, "registered");
    Ok(answer)
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    operation: Operation {
        id: "register",
        method: Method::POST,
        path: "/vps/register",
        summary: "The one call of a new host that makes its machine routable.",
        credentials: &[REGISTRATION],
        parameters: &[],
        body: Some(|| {
            extensible(fields(
                &[
                    ("machineId", uuid()),
                    ("imageVersion", image_version()),
                    ("bundleSha256", sha256()),
                    ("tlsSpkiSha256", sha256()),
                ],
                &[("bootMs", count())],
            ))
        }),
        answers: &[told(200, "It is running.", || {
            object(&[("status", one_of(&["running"])), ("epoch", count())], &[])
        })],
        problems: &[
            Code::RegistrationRejected,
            Code::InvalidState,
            Code::Unavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || post(handle),
};

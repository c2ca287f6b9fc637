//! Asks a host for an update, and for a drill; and for a backup: now, for an operator; and as the step `last_backup` of its replacement, within a
//! deadline, best effort.
//!
//! Nothing depends on the answer: the pointer alone says whether there is a newer snapshot.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::Context;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::held::Held;
use super::step::{Answer, StepError};
use crate::config::Flag;
use crate::http::client::{self, Deadlines};
use crate::http::proof::{self, Claims, Route};
use crate::http::request_id;
use crate::http::tls::{ChainCheck, SpkiPin, pinned_client_config};
use crate::machine::name::ImageVersion;
use crate::platform::context::Platform;
use crate::platform::db;
use crate::platform::db::machine_row::MachineRow;
use crate::store::key::SlotPrefix;
use crate::store::pointer_io;

const BACKUP: &str = "/_svc/internal/backup";
const DRILL: &str = "/_svc/internal/drill";
const UPDATE: &str = "/_svc/internal/update";
const LOOK_AGAIN: Duration = Duration::from_millis(500);
const ASK: Deadlines = Deadlines {
    connect: Duration::from_secs(3),
    whole: Some(Duration::from_secs(6)),
    idle: Duration::from_secs(6),
};

/// A host says little.
const LARGEST_ANSWER: usize = 64 << 10;

pub async fn last_backup(held: &Held<'_>) -> Result<Answer, StepError> {
    let platform = held.platform;
    let session = platform.db.session().await?;
    let old = db::machines::replaced_by(&session, held.operation.machine).await?;
    drop(session);
    let Some(old) = old else { return Ok(Answer::done_noting("nothing was replaced")) };
    let facts = held.facts();
    let asked = facts.get("seqBefore").and_then(serde_json::Value::as_u64);
    let deadline = facts.get("deadline").and_then(|at| at.as_str()).and_then(|at| at.parse().ok());
    if let (Some(before), Some(deadline)) = (asked, deadline) {
        return Ok(look(platform, &old, before, deadline).await);
    }
    let (Some(address), Some(pin)) = (old.public_ipv4, old.tls_pin) else {
        return Ok(Answer::done_noting("the old host never registered"));
    };
    let Some(before) = seq(platform, &old).await else {
        return Ok(Answer::done_noting("the pointer could not be read"));
    };
    let call = Ask { path: BACKUP, body: None };
    if let Err(error) = ask(platform, &old, address, pin, &call).await {
        tracing::info!(machine = %old.id, error = format!("{error:#}"), "no last backup");
        return Ok(Answer::done_noting("the old host could not be asked"));
    }
    let wait = platform.config.timing.last_backup_deadline;
    let wait = SignedDuration::try_from(wait).unwrap_or(SignedDuration::from_mins(1));
    let deadline = Timestamp::now().saturating_add(wait).unwrap_or(Timestamp::MAX);
    let mut facts = held.facts();
    facts.insert("seqBefore".to_owned(), json!(before));
    facts.insert("deadline".to_owned(), json!(deadline.to_string()));
    Ok(Answer::Wait { again_in: LOOK_AGAIN, facts: Some(facts) })
}

async fn look(platform: &Platform, old: &MachineRow, before: u64, deadline: Timestamp) -> Answer {
    match seq(platform, old).await {
        Some(now) if now > before => Answer::done_noting("the old host made a last backup"),
        _ if Timestamp::now() >= deadline => Answer::done_noting("no last backup in time"),
        _ => Answer::wait(LOOK_AGAIN),
    }
}

/// `None` where the store does not tell; no pointer counts as before the first.
async fn seq(platform: &Platform, old: &MachineRow) -> Option<u64> {
    let slot = SlotPrefix::new(&old.user, &old.slot);
    let pointer = pointer_io::read(&platform.bucket, &slot).await.ok()?;
    Some(pointer.map_or(0, |pointer| pointer.value.seq))
}

/// Asks the host of a machine for a backup soon; whether it makes one shows later. When it was asked by its own clock, if
/// it says so: a run that began before is another.
///
/// # Errors
/// When it has not taken the request.
pub async fn backup(platform: &Platform, machine: &MachineRow) -> anyhow::Result<Option<Timestamp>> {
    ask_known(platform, machine, &Ask { path: BACKUP, body: None }).await
}

/// Asks the host of a machine to restore the latest snapshot on trial; what comes of it, its heartbeats tell.
///
/// # Errors
/// When it has not taken the request.
pub async fn drill(platform: &Platform, machine: &MachineRow) -> anyhow::Result<Option<Timestamp>> {
    ask_known(platform, machine, &Ask { path: DRILL, body: None }).await
}

/// Asks the host of a machine for a release; what became of it, its heartbeats tell.
///
/// # Errors
/// When it has not taken the request.
pub async fn update(platform: &Platform, machine: &MachineRow, version: &ImageVersion) -> anyhow::Result<()> {
    let body = json!({"imageVersion": version});
    ask_known(platform, machine, &Ask { path: UPDATE, body: Some(body) }).await.map(drop)
}

/// Asks a machine that has registered.
async fn ask_known(
    platform: &Platform,
    machine: &MachineRow,
    what: &Ask,
) -> anyhow::Result<Option<Timestamp>> {
    let address = machine.public_ipv4.context("the machine has no address")?;
    let pin = machine.tls_pin.context("the machine never registered")?;
    ask(platform, machine, address, pin, what).await
}

/// What the host says of it.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Taken {
    #[serde(with = "crate::clock::wire_option")]
    requested_at: Option<Timestamp>,
}

/// What is asked.
struct Ask {
    path: &'static str,
    body: Option<Value>,
}

async fn ask(
    platform: &Platform,
    machine: &MachineRow,
    address: Ipv4Addr,
    pin: SpkiPin,
    what: &Ask,
) -> anyhow::Result<Option<Timestamp>> {
    let url = format!("https://{address}:{}{}", machine.https_port, what.path);
    let check = match platform.config.hosts.tls_verify {
        Flag::On => ChainCheck::PinAndChain,
        Flag::Off => ChainCheck::PinOnly,
    };
    let now = Timestamp::now().as_second();
    let claims = Claims {
        iss: proof::ISSUER.to_owned(),
        aud: machine.id,
        sub: machine.user.clone(),
        handle: machine.handle.clone(),
        slot: machine.slot.clone(),
        route: Route::Internal,
        app: None,
        method: Some("POST".to_owned()),
        path: Some(what.path.to_owned()),
        jti: Some(uuid::Uuid::new_v4().simple().to_string()),
        iat: now,
        exp: now + 30,
    };
    let signed = platform.keys.borrow().signer_for(&machine.proof_kids).sign(&claims);
    let client = client::with_tls(ASK, pinned_client_config(pin, check)?)?;
    let mut call = request_id::onward(client.post(url).header(proof::HEADER, signed));
    if let Some(body) = &what.body {
        call = call.json(body);
    }
    let mut answer = call.send().await.context("ask the host")?;
    anyhow::ensure!(answer.status().is_success(), "the host answered {}", answer.status());
    let mut told = Vec::new();
    // It was taken, whatever else it says.
    while let Ok(Some(piece)) = answer.chunk().await {
        told.extend_from_slice(&piece);
        if told.len() > LARGEST_ANSWER {
            return Ok(None);
        }
    }
    Ok(serde_json::from_slice::<Taken>(&told).unwrap_or_default().requested_at)
}

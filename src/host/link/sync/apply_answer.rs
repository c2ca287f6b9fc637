//! What the platform's answer changes on this machine.

use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;

use super::Settings;
use super::heartbeat::{self, Accepted, Answer};
use crate::chain::chain;
use crate::clock;
use crate::fsx::{self, FileError};
use crate::host::system::epoch;
use crate::host::system::layout::Layout;
use crate::host::system::quiesce;
use crate::host::system::quiesce::{Quiesce, QuiesceError};
use crate::host::system::upgrade_token::TokenError;
use crate::host::update::protocol;
use crate::host::update::protocol::{End, Last, Request};
use crate::http::proof::ProofKeys;
use crate::http::request_id;
use crate::machine::epoch::Epoch;
use crate::machine::id::MachineId;
use crate::machine::name::ImageVersion;

/// Another machine has taken this one's place. Gateway, backup and agent stop by the file that says so.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Superseded {
    version: u32,
    at: String,
    machine_id: MachineId,
    mine: Epoch,
    /// The slot's epoch now, as far as the platform said it.
    pub epoch: Option<Epoch>,
}

impl Superseded {
    /// # Errors
    /// [`FileError`].
    pub fn record(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields are JSON");
        fsx::write_atomic(&layout.superseded(), &text, 0o644)
    }
}

/// Keeps what was delivered.
///
/// # Errors
/// [`FileError`].
pub fn obey(settings: &Settings, answer: Answer) -> Result<Option<Superseded>, FileError> {
    if answer.superseded {
        return Ok(Some(Superseded {
            version: 1,
            at: clock::rfc3339_ms(clock::now_ms()),
            machine_id: settings.identity.machine,
            mine: settings.epoch(),
            epoch: answer.epoch,
        }));
    }
    if let Some(epoch) = answer.epoch {
        epoch::raise(&settings.layout, settings.identity.epoch, epoch)?;
    }
    // No key at all would shut the platform out: that is never meant.
    if let Some(keys) = answer.proof_keys.filter(|keys| !keys.keys.is_empty()) {
        keep_keys(&settings.layout, &keys)?;
    }
    // The token in use stays good: what else the answer says is not held up.
    if let Err(error) = keep_token(settings, answer.next_token.as_ref(), answer.accepted.as_ref()) {
        tracing::error!(error = %chain(&error), "the next token of this machine could not be stored");
    }
    if let Some(desired) = answer.desired_image_version {
        // One that the updater would not take as it is could not be known again.
        let request = answer.desired_request_id.filter(|id| request_id::fits(id));
        ask_for(settings, desired, request)?;
    }
    Ok(None)
}

/// Starts the writers again that were stopped before a heartbeat whose answer does not name their operation: it is over,
/// and nobody called.
///
/// # Errors
/// [`QuiesceError`].
pub async fn resume_writers(
    settings: &Settings,
    before: &Quiesce,
    named: Option<&str>,
) -> Result<(), QuiesceError> {
    let operation = before.operation_id;
    if named == Some(operation.to_string().as_str()) {
        return Ok(());
    }
    if quiesce::resume(&settings.layout, operation).await? {
        tracing::warn!(%operation, "the platform no longer names this operation: writers may write again");
    }
    Ok(())
}

/// Asks for the release that the platform names, unless it runs, is asked for, or came to an end here without being
/// taken, for the same request: a release that was refused or went back would only do so again. For another request it
/// is asked for anew. That is told by the requests' ids and by no clock, and the updater keeps the id with the outcome,
/// whether it heard of it from here or from the gateway.
fn ask_for(settings: &Settings, desired: ImageVersion, request: Option<String>) -> Result<(), FileError> {
    let layout = &settings.layout;
    if desired == heartbeat::image_version(settings)
        || layout.request("update").exists()
        || layout.update_journal().exists()
        || protocol::last(layout)?.is_some_and(|last| came_to_nothing(&last, &desired, request.as_deref()))
    {
        return Ok(());
    }
    tracing::info!(%desired, "the platform names another release");
    Request::under(request.unwrap_or_else(request_id::fresh), desired).write(layout)
}

/// A platform that names no request means the same one each time.
fn came_to_nothing(last: &Last, desired: &ImageVersion, request: Option<&str>) -> bool {
    let is_for_it = request.is_none_or(|request| last.request_id.as_deref() == Some(request));
    last.outcome.version == *desired && last.outcome.outcome != End::Updated && is_for_it
}

/// Stores the next token. The updater has handed the current one on to the release that it switches to: none is taken up
/// while an update is under way.
fn keep_token(
    settings: &Settings,
    next: Option<&SecretString>,
    accepted: Option<&Accepted>,
) -> Result<(), TokenError> {
    let Some(Accepted { token, refused }) = accepted else { return Ok(()) };
    if settings.layout.update_journal().exists() {
        return Ok(());
    }
    let held = &settings.platform.upgrade_token;
    match (next, refused) {
        (Some(next), _) if next.expose_secret() != held.current().expose_secret() => {
            held.store(next, token)?;
            tracing::info!("the platform handed out the next token of this machine");
            Ok(())
        }
        (None, Some(refused)) => held.store(token, refused),
        _ => Ok(()),
    }
}

fn keep_keys(layout: &Layout, keys: &ProofKeys) -> Result<(), FileError> {
    let text = serde_json::to_vec(keys).expect("keys are plain JSON");
    let path = layout.proof_keys();
    if fsx::read_if_there(&path)?.is_some_and(|now| now == text) {
        return Ok(());
    }
    fsx::write_atomic(&path, &text, 0o644)?;
    let kids: Vec<&str> = keys.keys.iter().map(|key| key.kid.as_str()).collect();
    tracing::info!(?kids, "the platform delivered proof keys");
    Ok(())
}

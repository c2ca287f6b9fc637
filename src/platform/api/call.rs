//! One call on its way in, in the contract's order: size, then credential, then JSON. Schema and state come after.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use bytes::Bytes;
use http::{HeaderMap, Method, Uri, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use jiff::Timestamp;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::access::{self, Access, unauthorized};
use super::refused_hosts;
use crate::http::fields::Fields;
use crate::http::problem::{Code, Problem};
use crate::machine::id::MachineId;
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self};
use crate::platform::operators::Operator;
use crate::platform::token_rotation::TokenStatus;
use crate::platform::tokens::{self, Purpose};

/// The largest body of the platform's API.
pub const LARGEST_BODY: usize = 64 << 10;
const BODY_DEADLINE: Duration = Duration::from_secs(15);
const LARGEST_DISCARD: usize = 1 << 20;
const DISCARD_DEADLINE: Duration = Duration::from_secs(2);
const LONGEST_WAIT_SECONDS: u64 = 60;

pub struct Call {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
    /// What the route declares.
    access: Access,
    /// The peer of the connection.
    client: Option<IpAddr>,
    body: Bytes,
}

/// A token that a host presented and that is accepted.
pub struct HostToken {
    pub machine: MachineRow,
    pub standing: TokenStatus,
    pub hash: Vec<u8>,
}

impl Call {
    /// Reads the body, within its bounds.
    pub async fn read(request: Request) -> Result<Self, Problem> {
        let (parts, mut body) = request.into_parts();
        let too_large =
            || Problem::new(Code::RequestTooLarge, format!("A body has at most {LARGEST_BODY} bytes."));
        let stated = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
        if stated.and_then(|text| text.parse::<u64>().ok()).is_some_and(|size| size > LARGEST_BODY as u64) {
            discard(&mut body).await;
            return Err(too_large());
        }
        let bounded = Limited::new(&mut body, LARGEST_BODY).collect();
        let collected = tokio::time::timeout(BODY_DEADLINE, bounded).await;
        let body = match collected {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                discard(&mut body).await;
                return Err(too_large());
            }
            Ok(Err(_)) | Err(_) => {
                return Err(Problem::field("", "the body did not arrive whole"));
            }
        };
        let access = parts.extensions.get().copied().unwrap_or(Access::Open);
        let client = parts.extensions.get().map(|ConnectInfo(peer): &ConnectInfo<SocketAddr>| peer.ip());
        Ok(Self { method: parts.method, uri: parts.uri, headers: parts.headers, access, client, body })
    }

    fn bearer(&self) -> Result<&str, Problem> {
        let value = self.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let (scheme, token) = value.and_then(|value| value.split_once(' ')).ok_or_else(unauthorized)?;
        if scheme.eq_ignore_ascii_case("bearer") { Ok(token.trim()) } else { Err(unauthorized()) }
    }

    /// The bearer token, where its address may have one more verified.
    fn counted_bearer(&self, platform: &Platform) -> Result<&str, Problem> {
        let token = self.bearer()?;
        platform.rates.admit_check(self.client, token)?;
        Ok(token)
    }

    /// The operator who calls, with a scope that the route takes.
    ///
    /// # Errors
    /// As [`access::admit`].
    pub async fn operator(&self, platform: &Platform) -> Result<Operator, Problem> {
        let token = self.counted_bearer(platform)?;
        access::admit(platform, self.access, &self.method, token).await
    }

    /// The machine whose `UPGRADE_TOKEN` this is, whatever has become of it.
    pub async fn host(&self, platform: &Platform) -> Result<MachineRow, Problem> {
        Ok(self.host_token(platform).await?.machine)
    }

    /// The same, with what is known of the token.
    pub async fn host_token(&self, platform: &Platform) -> Result<HostToken, Problem> {
        let token = self.counted_bearer(platform)?;
        let claim = tokens::parse_claim(token, Purpose::Upgrade).ok_or_else(unauthorized)?;
        let session = platform.host_db.session().await?;
        let machine = db::machines::get(&session, claim.machine).await?.ok_or_else(unauthorized)?;
        match machine.upgrade_token.judge(token, claim, &platform.mint, Timestamp::now()) {
            TokenStatus::Refused => {
                drop(session);
                refused_hosts::note(platform, &machine, token, claim).await;
                Err(unauthorized())
            }
            standing => {
                platform.rates.accept(token);
                platform.rates.admit_host(machine.id)?;
                Ok(HostToken { machine, standing, hash: tokens::hash(token) })
            }
        }
    }

    /// An operator, or the current machine whose `UPGRADE_TOKEN` this is.
    pub async fn operator_or_host(&self, platform: &Platform) -> Result<(), Problem> {
        if !self.bearer()?.starts_with("svcu_") {
            return self.operator(platform).await.map(drop);
        }
        let machine = self.host(platform).await?;
        if machine.deleted_at.is_some() {
            return Err(unauthorized());
        }
        if machine.retired_at.is_some() {
            return Err(Problem::new(Code::Superseded, "Another machine has taken this one's place."));
        }
        Ok(())
    }

    /// The machine whose registration token this is, and the token; nothing is known of its expiry yet.
    pub fn registration(&self, platform: &Platform) -> Result<(MachineId, &str), Problem> {
        let token = self.bearer().map_err(|_| registration_rejected())?;
        platform.rates.admit_check(self.client, token)?;
        let claim = tokens::parse_claim(token, Purpose::Registration);
        claim.map(|claim| (claim.machine, token)).ok_or_else(registration_rejected)
    }

    fn media_type(&self) -> &str {
        let content_type = self.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        content_type.and_then(|value| value.split(';').next()).map(str::trim).unwrap_or_default()
    }

    /// Whether the body is a browser's form.
    pub fn is_form(&self) -> bool {
        self.media_type().eq_ignore_ascii_case("application/x-www-form-urlencoded")
    }

    /// The body as a form's fields.
    pub fn form(&self) -> Result<Fields, Problem> {
        let text = std::str::from_utf8(&self.body).map_err(|_| Problem::field("", "is not a form"))?;
        Ok(Fields::of_form(text))
    }

    /// The body as an object whose fields are taken one by one.
    pub fn fields(&self) -> Result<Fields, Problem> {
        if !self.media_type().eq_ignore_ascii_case("application/json") {
            return Err(Problem::new(Code::UnsupportedMediaType, "Send the body as application/json."));
        }
        match serde_json::from_slice(&self.body) {
            Ok(Value::Object(map)) => Ok(Fields::of_body(map)),
            Ok(_) => Err(Problem::field("", "must be a JSON object")),
            Err(error) => Err(Problem::field("", format!("is not JSON: {error}"))),
        }
    }

    /// The fields of a host's body: what a newer release of the host adds is ignored, so that a platform can be older.
    pub fn host_fields(&self) -> Result<Fields, Problem> {
        Ok(self.fields()?.ignoring_unknown())
    }

    /// Refuses an operator's body that says anything, where none is needed.
    pub fn no_body(&self) -> Result<(), Problem> {
        if self.body.is_empty() { Ok(()) } else { self.fields()?.finish(Some(())) }
    }

    /// Passes a host's request that needs no body: a newer host may send an object.
    pub fn nothing_needed(&self) -> Result<(), Problem> {
        if self.body.is_empty() { Ok(()) } else { self.host_fields()?.finish(Some(())) }
    }

    pub fn query(&self) -> Fields {
        Fields::of_query(self.uri.query().unwrap_or_default())
    }

    /// SHA-256 of the body's bytes.
    pub fn body_hash(&self) -> Vec<u8> {
        Sha256::digest(&self.body).to_vec()
    }

    /// The seconds of `Prefer: wait=N` (RFC 7240), at most a minute.
    pub fn wait_seconds(&self) -> Option<u64> {
        let values = self.headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
        let mut preferences = values.flat_map(|value| value.split(',')).map(str::trim);
        let wait = preferences.find_map(|preference| preference.strip_prefix("wait="))?;
        wait.trim_matches('"').parse::<u64>().ok().map(|seconds| seconds.min(LONGEST_WAIT_SECONDS))
    }
}

/// Reads what is left of a refused body, within bounds: a connection closed on unread bytes can lose the answer.
pub async fn discard(body: &mut Body) {
    let read = async {
        let mut left = LARGEST_DISCARD;
        while let Some(Ok(frame)) = body.frame().await {
            let size = frame.data_ref().map_or(0, Bytes::len);
            if size > left {
                return;
            }
            left -= size;
        }
    };
    // What does not come in time is not waited for.
    let _ = tokio::time::timeout(DISCARD_DEADLINE, read).await;
}

/// An id in the path; a request for what is no id is not valid.
pub fn path_id<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, Problem> {
    text.parse().map_err(|_| Problem::field(name, "must be a UUID"))
}

pub fn registration_rejected() -> Problem {
    Problem::new(Code::RegistrationRejected, "The registration token is not valid for this, or not any more.")
}

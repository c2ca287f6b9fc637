//! Probes with requests that object_store cannot send: wrong checksums, wrong signatures and conditional copies.

use http::{Method, StatusCode};

use super::{Support, temporary_key};
use crate::config::S3Config;
use crate::signed_request::{RequestError, SignedClient, StoreResponse};
use svc_base::error_chain::format_chain;

const CONTENT: &[u8] = b"probe";
/// The SHA-256 of an empty body, in base64.
const OTHER_SHA256: &str = "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=";
const OTHER_ETAG: &str = "\"00000000000000000000000000000000\"";

/// Puts a temporary object and deletes it. Returns the response to the put.
async fn put_temporary(
    s3: &S3Config,
    headers: &[(&'static str, &str)],
) -> Result<StoreResponse, RequestError> {
    let key = temporary_key("wire").to_string();
    let client = SignedClient::new(s3)?;
    let response = client.send(Method::PUT, &key, headers, CONTENT).await;
    if response.as_ref().is_ok_and(|response| response.status.is_success()) {
        client.send(Method::DELETE, &key, &[], b"").await?;
    }
    response
}

/// Returns `Yes` if the store rejected the request with one of the statuses in `refusals`, `No` with `deviation` if the
/// request succeeded, and otherwise `Unknown`.
fn require_refusal(
    response: Result<StoreResponse, RequestError>,
    refusals: &[StatusCode],
    deviation: &str,
) -> Support {
    match response {
        Ok(response) if refusals.contains(&response.status) => Support::Yes,
        Ok(response) if response.status.is_success() => Support::No(deviation.to_owned()),
        Ok(response) => Support::Unknown(format!("it returned {}", response.status)),
        Err(error) => Support::Unknown(format_chain(&error)),
    }
}

fn unknown_on_directory() -> Support {
    Support::Unknown("the store is a directory".to_owned())
}

pub(super) async fn probe_checksums(s3: Option<&S3Config>) -> Support {
    let Some(s3) = s3 else { return unknown_on_directory() };
    let headers = [("x-amz-checksum-sha256", OTHER_SHA256), ("x-amz-sdk-checksum-algorithm", "SHA256")];
    require_refusal(put_temporary(s3, &headers).await, &[StatusCode::BAD_REQUEST], "it stored the object")
}

pub(super) async fn probe_signatures(s3: Option<&S3Config>) -> Support {
    let Some(s3) = s3 else { return unknown_on_directory() };
    let wrong_key = S3Config { secret_key: uuid::Uuid::new_v4().to_string().into(), ..s3.clone() };
    let refusals = [StatusCode::FORBIDDEN, StatusCode::UNAUTHORIZED];
    require_refusal(put_temporary(&wrong_key, &[]).await, &refusals, "it stored an object")
}

pub(super) async fn probe_conditional_copy(s3: &S3Config) -> Support {
    let (source, target) = (temporary_key("source").to_string(), temporary_key("copy").to_string());
    let probe = async {
        let client = SignedClient::new(s3)?;
        client.send(Method::PUT, &source, &[], CONTENT).await?;
        let from = format!("/{}/{source}", s3.bucket);
        let headers = [("x-amz-copy-source", from.as_str()), ("x-amz-copy-source-if-match", OTHER_ETAG)];
        let response = client.send(Method::PUT, &target, &headers, b"").await;
        for key in [&source, &target] {
            client.send(Method::DELETE, key, &[], b"").await?;
        }
        response
    };
    require_refusal(probe.await, &[StatusCode::PRECONDITION_FAILED], "it copied a different version")
}

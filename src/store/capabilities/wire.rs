//! Probes that need requests of their own: wrong checksums, wrong signatures and conditional copies.

use http::{Method, StatusCode};

use super::{Support, temporary_key};
use crate::config::S3Config;
use crate::signed_request::{RequestError, SignedClient, StoreResponse};
use svc_base::chain::chain;

const CONTENT: &[u8] = b"probe";
/// Of an empty body, in base 64.
const OTHER_SHA256: &str = "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=";
const OTHER_ETAG: &str = "\"00000000000000000000000000000000\"";

/// Puts a temporary object and deletes it; the response is that of the put.
async fn put(s3: &S3Config, headers: &[(&'static str, &str)]) -> Result<StoreResponse, RequestError> {
    let key = temporary_key("wire").to_string();
    let client = SignedClient::new(s3)?;
    let response = client.send(Method::PUT, &key, headers, CONTENT).await;
    if response.as_ref().is_ok_and(|response| response.status.is_success()) {
        client.send(Method::DELETE, &key, &[], b"").await?;
    }
    response
}

/// Whether the store refused the request with a status of `refusals`.
fn refused(response: Result<StoreResponse, RequestError>, refusals: &[StatusCode], instead: &str) -> Support {
    match response {
        Ok(response) if refusals.contains(&response.status) => Support::Yes,
        Ok(response) if response.status.is_success() => Support::No(instead.to_owned()),
        Ok(response) => Support::Unknown(format!("it returned {}", response.status)),
        Err(error) => Support::Unknown(chain(&error)),
    }
}

fn no_requests() -> Support {
    Support::Unknown("the store is a directory".to_owned())
}

pub(super) async fn checksums(s3: Option<&S3Config>) -> Support {
    let Some(s3) = s3 else { return no_requests() };
    let headers = [("x-amz-checksum-sha256", OTHER_SHA256), ("x-amz-sdk-checksum-algorithm", "SHA256")];
    refused(put(s3, &headers).await, &[StatusCode::BAD_REQUEST], "it stored the object")
}

pub(super) async fn signatures(s3: Option<&S3Config>) -> Support {
    let Some(s3) = s3 else { return no_requests() };
    let stranger = S3Config { secret_key: uuid::Uuid::new_v4().to_string().into(), ..s3.clone() };
    let refusals = [StatusCode::FORBIDDEN, StatusCode::UNAUTHORIZED];
    refused(put(&stranger, &[]).await, &refusals, "it stored an object")
}

pub(super) async fn conditional_copy(s3: &S3Config) -> Support {
    let (source, target) = (temporary_key("source").to_string(), temporary_key("copy").to_string());
    let tried = async {
        let client = SignedClient::new(s3)?;
        client.send(Method::PUT, &source, &[], CONTENT).await?;
        let from = format!("/{}/{source}", s3.bucket);
        let headers = [("x-amz-copy-source", from.as_str()), ("x-amz-copy-source-if-match", OTHER_ETAG)];
        let copied = client.send(Method::PUT, &target, &headers, b"").await;
        for key in [&source, &target] {
            client.send(Method::DELETE, key, &[], b"").await?;
        }
        copied
    };
    refused(tried.await, &[StatusCode::PRECONDITION_FAILED], "it copied another version")
}

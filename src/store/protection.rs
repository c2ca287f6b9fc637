//! Protection of overwritten and deleted objects by the bucket: versioning and object lock, as S3 reports them.
//!
//! Read-only: an operator enables them with the returned commands.

use http::{Method, StatusCode};
use object_store::aws::AwsAuthorizer;
use object_store::client::{HttpClient, HttpRequest};

use super::config::S3Config;
use svc_http::client::{self, Deadlines};

/// The state of one setting of the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    On,
    Off,
    /// The store does not support the request, or refuses it for these credentials.
    Unknown(StatusCode),
}

/// Both settings of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Protection {
    pub versioning: Setting,
    pub object_lock: Setting,
}

/// The reason why the settings are unknown.
#[derive(Debug, thiserror::Error)]
pub enum ProtectionError {
    #[error("the bucket's URL is invalid")]
    Url,
    #[error("the request could not be signed")]
    Sign(#[source] object_store::Error),
    #[error("the store did not respond: {0}")]
    Silent(String),
}

/// Reads both settings, with one request each.
pub async fn read(s3: &S3Config) -> Result<Protection, ProtectionError> {
    let client =
        client::build(Deadlines::CALL).map_err(|error| ProtectionError::Silent(error.to_string()))?;
    let wire = HttpClient::new(client);
    let (versioning, text) = request_setting(&wire, s3, "versioning").await?;
    let versioning = setting(versioning, text.contains("<Status>Enabled</Status>"));
    let (lock, text) = request_setting(&wire, s3, "object-lock").await?;
    let object_lock = match lock {
        // ObjectLockConfigurationNotFoundError.
        StatusCode::NOT_FOUND => Setting::Off,
        status => setting(status, text.contains("<ObjectLockEnabled>Enabled</ObjectLockEnabled>")),
    };
    Ok(Protection { versioning, object_lock })
}

fn setting(status: StatusCode, is_on: bool) -> Setting {
    match (status, is_on) {
        (StatusCode::OK, true) => Setting::On,
        (StatusCode::OK, false) => Setting::Off,
        (status, _) => Setting::Unknown(status),
    }
}

async fn request_setting(
    wire: &HttpClient,
    s3: &S3Config,
    what: &str,
) -> Result<(StatusCode, String), ProtectionError> {
    let base = match &s3.endpoint {
        Some(endpoint) => format!("{}/{}", endpoint.trim_end_matches('/'), s3.bucket),
        None => format!("https://{}.s3.{}.amazonaws.com/", s3.bucket, s3.region),
    };
    let mut request = HttpRequest::new(Vec::new().into());
    *request.method_mut() = Method::GET;
    *request.uri_mut() = format!("{base}?{what}=").parse().map_err(|_| ProtectionError::Url)?;
    let credential = s3.credential();
    AwsAuthorizer::new(&credential, "s3", &s3.region)
        .try_authorize(&mut request, None)
        .map_err(ProtectionError::Sign)?;
    let silent =
        |error: object_store::client::HttpError| ProtectionError::Silent(svc_http::problem::chain(&error));
    let response = wire.execute(request).await.map_err(silent)?;
    let status = response.status();
    let body = response.into_body().bytes().await.map_err(silent)?;
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

/// The command that enables versioning.
pub fn enable_versioning(s3: &S3Config) -> String {
    let change = "--versioning-configuration Status=Enabled";
    format!("aws s3api put-bucket-versioning --bucket {} {change}{}", s3.bucket, endpoint(s3))
}

/// The command that enables object lock, which requires versioning.
pub fn enable_object_lock(s3: &S3Config) -> String {
    let change = r#"--object-lock-configuration '{"ObjectLockEnabled":"Enabled","Rule":{"DefaultRetention":{"Mode":"GOVERNANCE","Days":30}}}'"#;
    format!("aws s3api put-object-lock-configuration --bucket {} {change}{}", s3.bucket, endpoint(s3))
}

fn endpoint(s3: &S3Config) -> String {
    s3.endpoint.as_ref().map(|endpoint| format!(" --endpoint-url {endpoint}")).unwrap_or_default()
}

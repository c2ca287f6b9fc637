//! Reads the bucket settings that protect overwritten and deleted objects: versioning and object lock.
//!
//! The settings are never changed here: an operator enables them with the returned commands.

use http::{Method, StatusCode};

use super::config::S3Config;
use super::signed_request::{RequestError, SignedClient};

/// The state of one of the bucket's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingState {
    On,
    Off,
    /// The store does not support the request, or rejects it for these credentials. Contains the response's status.
    Unknown(StatusCode),
}

/// A bucket's two protection settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Protection {
    pub versioning: SettingState,
    pub object_lock: SettingState,
}

/// Reads both settings, with one request each.
///
/// # Errors
/// `RequestError` if a request cannot be sent or gets no response. An error response from the store is
/// [`SettingState::Unknown`], except for the one that means that object lock is [`SettingState::Off`].
pub async fn read(s3: &S3Config) -> Result<Protection, RequestError> {
    let client = SignedClient::new(s3)?;
    let response = client.send(Method::GET, "?versioning=", &[], b"").await?;
    let versioning = setting_from_status(response.status, response.text.contains("<Status>Enabled</Status>"));
    let response = client.send(Method::GET, "?object-lock=", &[], b"").await?;
    let object_lock = match response.status {
        StatusCode::NOT_FOUND if response.text.contains("ObjectLockConfigurationNotFound") => {
            SettingState::Off
        }
        status => setting_from_status(
            status,
            response.text.contains("<ObjectLockEnabled>Enabled</ObjectLockEnabled>"),
        ),
    };
    Ok(Protection { versioning, object_lock })
}

fn setting_from_status(status: StatusCode, is_on: bool) -> SettingState {
    match (status, is_on) {
        (StatusCode::OK, true) => SettingState::On,
        (StatusCode::OK, false) => SettingState::Off,
        (status, _) => SettingState::Unknown(status),
    }
}

/// Returns the command that enables versioning.
pub fn versioning_command(s3: &S3Config) -> String {
    let change = "--versioning-configuration Status=Enabled";
    format!("aws s3api put-bucket-versioning --bucket {} {change}{}", s3.bucket, endpoint_option(s3))
}

/// Returns the command that enables object lock, with a default retention of 30 days. Object lock requires versioning.
pub fn object_lock_command(s3: &S3Config) -> String {
    let change = r#"--object-lock-configuration '{"ObjectLockEnabled":"Enabled","Rule":{"DefaultRetention":{"Mode":"GOVERNANCE","Days":30}}}'"#;
    format!("aws s3api put-object-lock-configuration --bucket {} {change}{}", s3.bucket, endpoint_option(s3))
}

fn endpoint_option(s3: &S3Config) -> String {
    s3.endpoint.as_ref().map(|endpoint| format!(" --endpoint-url {endpoint}")).unwrap_or_default()
}

//! Requests temporary credentials, restricted by a session policy, with the Security Token Service's AssumeRole call.
//!
//! The request uses the AWS STS query protocol, which MinIO and others support at the store's endpoint. The caller
//! provides the policy.

use std::time::Duration;

use anyhow::Context;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{Method, StatusCode, Uri};
use jiff::Timestamp;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::client::{HttpClient, HttpRequest};
use serde::Deserialize;
use url::Url;

use super::credentials::TemporaryCredentials;
use svc_http::client::{self, Timeouts};

const API_VERSION: &str = "2011-06-15";
const MAX_ATTEMPTS: u32 = 3;
/// Timeout for [`Sts::assume_role`], including retries. It is shorter than a host's timeout for a request to the
/// platform.
const CALL_TIMEOUT: Duration = Duration::from_secs(8);
/// Timeouts for one attempt.
const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(3),
    total: Some(Duration::from_secs(5)),
    idle: Duration::from_secs(5),
};

/// The reason STS returned no session.
#[derive(Debug, thiserror::Error)]
pub enum StsError {
    /// STS returned an error. Unless the error is transient, the role, its trust policy, the session policy or the
    /// caller's credentials are wrong, and an operator must fix them.
    #[error("STS returned {status} to AssumeRole: {code}: {message}")]
    ErrorResponse { status: StatusCode, code: String, message: String },
    #[error("STS did not respond to AssumeRole: {0}")]
    NoResponse(String),
    #[error("cannot parse the STS response to AssumeRole: {0}")]
    Unreadable(String),
    #[error("cannot sign the AssumeRole request")]
    Sign(#[source] object_store::Error),
}

impl StsError {
    fn is_transient(&self) -> bool {
        match self {
            Self::NoResponse(_) => true,
            Self::ErrorResponse { status, code, .. } => {
                status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS || code == "Throttling"
            }
            Self::Unreadable(_) | Self::Sign(_) => false,
        }
    }
}

/// An STS client with its credentials and role.
#[derive(Debug)]
pub struct Sts {
    client: HttpClient,
    endpoint: Uri,
    region: String,
    role_arn: String,
    caller: AwsCredential,
}

impl Sts {
    /// Creates a client.
    ///
    /// # Errors
    /// If the endpoint is not a valid target of a request, or the HTTP client cannot be created.
    pub fn new(
        endpoint: &Url,
        region: String,
        role_arn: String,
        caller: AwsCredential,
    ) -> anyhow::Result<Self> {
        let endpoint =
            endpoint.as_str().parse().context("the STS endpoint cannot be the target of a request")?;
        let client = HttpClient::new(client::build(TIMEOUTS)?);
        Ok(Self { client, endpoint, region, role_arn, caller })
    }

    /// Requests a session that `policy` restricts, and retries transient errors. `session_name` appears in the
    /// store's access log.
    pub async fn assume_role(
        &self,
        session_name: &str,
        policy: &str,
        lifetime: Duration,
    ) -> Result<TemporaryCredentials, StsError> {
        let form = url::form_urlencoded::Serializer::new(String::new())
            .append_pair("Action", "AssumeRole")
            .append_pair("Version", API_VERSION)
            .append_pair("RoleArn", &self.role_arn)
            .append_pair("RoleSessionName", session_name)
            .append_pair("DurationSeconds", &lifetime.as_secs().to_string())
            .append_pair("Policy", policy)
            .finish();
        let attempts = async {
            let mut attempt = 1;
            loop {
                match self.try_assume_role(&form).await {
                    Err(error) if error.is_transient() && attempt < MAX_ATTEMPTS => {
                        tokio::time::sleep(Duration::from_millis(u64::from(200 * attempt + jitter_ms())))
                            .await;
                        attempt += 1;
                    }
                    result => return result,
                }
            }
        };
        let result = tokio::time::timeout(CALL_TIMEOUT, attempts).await;
        result.unwrap_or_else(|_| {
            Err(StsError::NoResponse(format!("timed out after {} s", CALL_TIMEOUT.as_secs())))
        })
    }

    async fn try_assume_role(&self, form: &str) -> Result<TemporaryCredentials, StsError> {
        let mut request = HttpRequest::new(form.to_owned().into());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.endpoint.clone();
        let headers = request.headers_mut();
        let content_type = "application/x-www-form-urlencoded; charset=utf-8";
        headers.insert(CONTENT_TYPE, http::HeaderValue::from_static(content_type));
        headers.insert(ACCEPT, http::HeaderValue::from_static("application/xml"));
        AwsAuthorizer::new(&self.caller, "sts", &self.region)
            .try_authorize(&mut request, None)
            .map_err(StsError::Sign)?;
        let no_response = |error: object_store::client::HttpError| {
            StsError::NoResponse(svc_http::problem::format_chain(&error))
        };
        let response = self.client.execute(request).await.map_err(no_response)?;
        let status = response.status();
        let body = response.into_body().bytes().await.map_err(no_response)?;
        parse_response(status, &String::from_utf8_lossy(&body))
    }
}

fn jitter_ms() -> u32 {
    u32::from(uuid::Uuid::new_v4().as_bytes()[0])
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AssumeRoleResponse {
    assume_role_result: AssumeRoleResult,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AssumeRoleResult {
    credentials: Session,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Session {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    expiration: Timestamp,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ErrorResponse {
    error: ErrorDetail,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ErrorDetail {
    code: String,
    #[serde(default)]
    message: String,
}

fn parse_response(status: StatusCode, text: &str) -> Result<TemporaryCredentials, StsError> {
    if !status.is_success() {
        let detail = quick_xml::de::from_str::<ErrorResponse>(text).map(|response| response.error);
        // Some servers return the `Error` element without an `ErrorResponse` around it.
        let detail = detail.or_else(|_| quick_xml::de::from_str(text));
        let detail =
            detail.unwrap_or_else(|_| ErrorDetail { code: "unknown".to_owned(), message: String::new() });
        return Err(StsError::ErrorResponse { status, code: detail.code, message: detail.message });
    }
    // An unexpected response may contain the secret, so only the parser's error is reported.
    let response: AssumeRoleResponse =
        quick_xml::de::from_str(text).map_err(|error| StsError::Unreadable(error.to_string()))?;
    let session = response.assume_role_result.credentials;
    // AWS may surround the values with whitespace.
    Ok(TemporaryCredentials {
        access_key: session.access_key_id.trim().to_owned(),
        secret_key: session.secret_access_key.trim().to_owned().into(),
        session_token: Some(session.session_token.trim().to_owned().into()),
        expires_at: session.expiration,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret;

    /// From the AWS STS API reference, AssumeRole, "Sample Response".
    const SAMPLE: &str = r#"<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
  <AssumeRoleResult>
  <SourceIdentity>DevUser123</SourceIdentity>
    <AssumedRoleUser>
      <AssumedRoleId>ARO123EXAMPLE123:TestAR</AssumedRoleId>
      <Arn>arn:aws:sts::123456789012:assumed-role/demo/TestAR</Arn>
    </AssumedRoleUser>
    <Credentials>
      <AccessKeyId>ASIAIOSFODNN7EXAMPLE</AccessKeyId>
      <SecretAccessKey>wJalrXUtnFEMI/K7MDENG/bPxRfiCYzEXAMPLEKEY</SecretAccessKey>
      <SessionToken>
       AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQW
      </SessionToken>
      <Expiration>2019-11-09T13:34:41Z</Expiration>
    </Credentials>
    <PackedPolicySize>6</PackedPolicySize>
  </AssumeRoleResult>
  <ResponseMetadata><RequestId>c6104cbe-af31-11e0-8154-cbc7ccf896c7</RequestId></ResponseMetadata>
</AssumeRoleResponse>"#;

    #[test]
    fn parse_response_accepts_the_aws_sample() {
        let session = parse_response(StatusCode::OK, SAMPLE).unwrap();
        assert_eq!(session.access_key, "ASIAIOSFODNN7EXAMPLE");
        let token = session.session_token.unwrap();
        assert!(token.expose_secret().starts_with("AQoD"), "the whitespace was not trimmed");
        assert_eq!(session.expires_at, "2019-11-09T13:34:41Z".parse().unwrap());
    }

    #[test]
    fn parse_response_accepts_errors_in_both_forms() {
        let wrapped = "<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>";
        for text in [wrapped, "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"] {
            let error = parse_response(StatusCode::FORBIDDEN, text).unwrap_err();
            assert!(!error.is_transient() && error.to_string().contains("AccessDenied: no"), "{error}");
        }
        assert!(parse_response(StatusCode::SERVICE_UNAVAILABLE, "").unwrap_err().is_transient());
    }

    #[test]
    fn parse_response_hides_the_secret_in_a_truncated_response() {
        let error = parse_response(StatusCode::OK, &SAMPLE[..SAMPLE.len() / 2]).unwrap_err();
        assert!(!error.to_string().contains("wJalr"), "{error}");
    }

    #[test]
    fn new_refuses_endpoint_that_is_not_a_request_target() {
        svc_http::tls::install_provider();
        let caller = || AwsCredential { key_id: "k".to_owned(), secret_key: "s".to_owned(), token: None };
        let new = |url: &str| Sts::new(&url.parse().unwrap(), "eu".to_owned(), "role".to_owned(), caller());
        assert!(new("https://sts.example/").is_ok());
        assert!(new(&format!("https://sts.example/{}", "a".repeat(70_000))).is_err());
    }
}

//! AssumeRole at the store's endpoint, as in MinIO: the request is a signed form, the response is XML, and errors have
//! AWS's format.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use http::{Extensions, HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use s3s::route::S3Route;
use s3s::{Body, S3Request, S3Response, S3Result, s3_error};

use super::policy::Policy;
use super::session::{Session, Sessions};

const MAX_FORM_BYTES: usize = 8192;
/// AWS's limit for a session policy.
const MAX_POLICY_CHARS: usize = 2048;

pub(super) struct Sts(pub(super) Arc<Sessions>);

struct StsError {
    status: StatusCode,
    code: &'static str,
    message: String,
}

fn invalid(message: impl Into<String>) -> StsError {
    StsError { status: StatusCode::BAD_REQUEST, code: "ValidationError", message: message.into() }
}

#[async_trait::async_trait]
impl S3Route for Sts {
    fn is_match(&self, method: &Method, uri: &Uri, headers: &HeaderMap, _: &mut Extensions) -> bool {
        let content_type =
            headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        method == Method::POST
            && uri.path() == "/"
            && content_type.starts_with("application/x-www-form-urlencoded")
    }

    async fn call(&self, request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let caller = request.credentials.as_ref().map(|credentials| credentials.access_key.clone());
        let service = request.service.clone();
        let mut body = request.input;
        let form =
            body.store_all_limited(MAX_FORM_BYTES).await.map_err(|e| s3_error!(InvalidRequest, "{e}"))?;
        let result = if service.as_ref().is_none_or(|service| !service.eq_ignore_ascii_case("sts")) {
            Err(StsError {
                status: StatusCode::FORBIDDEN,
                code: "SignatureDoesNotMatch",
                message: "Credential should be scoped to correct service: 'sts'.".to_owned(),
            })
        } else if caller.as_deref().is_none_or(|key| !self.0.is_owner(key)) {
            let message = "only the owner may assume a role".to_owned();
            Err(StsError { status: StatusCode::FORBIDDEN, code: "AccessDenied", message })
        } else {
            self.assume_role(&form)
        };
        Ok(match result {
            Ok(session) => xml_response(StatusCode::OK, session_xml(&session)),
            Err(error) => xml_response(error.status, error_xml(&error)),
        })
    }
}

impl Sts {
    fn assume_role(&self, form: &[u8]) -> Result<Session, StsError> {
        let pairs: Vec<(String, String)> = url::form_urlencoded::parse(form).into_owned().collect();
        let field = |name: &str| {
            pairs
                .iter()
                .find(|(field_name, _)| field_name == name)
                .map(|(_, value)| value.as_str())
                .filter(|v| !v.is_empty())
        };
        if (field("Action"), field("Version")) != (Some("AssumeRole"), Some("2011-06-15")) {
            let message = "Could not find operation".to_owned();
            return Err(StsError { status: StatusCode::BAD_REQUEST, code: "InvalidAction", message });
        }
        if field("RoleArn").is_none_or(|arn| arn.len() < 20) {
            return Err(invalid("RoleArn must have at least 20 characters"));
        }
        let name = field("RoleSessionName").unwrap_or_default();
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "_+=,.@-".contains(c);
        if !(2..=64).contains(&name.len()) || !name.chars().all(is_allowed) {
            return Err(invalid("RoleSessionName must be 2 to 64 characters from [\\w+=,.@-]"));
        }
        let seconds = field("DurationSeconds").map_or(Ok(3600), str::parse);
        let Some(seconds) = seconds.ok().filter(|seconds| (900..=43_200).contains(seconds)) else {
            return Err(invalid("DurationSeconds must be 900 to 43200"));
        };
        let policy = match field("Policy") {
            None => None,
            Some(text) if text.len() > MAX_POLICY_CHARS => {
                return Err(invalid(format!("Policy must have at most {MAX_POLICY_CHARS} characters")));
            }
            Some(text) => {
                let malformed = |message| StsError {
                    status: StatusCode::BAD_REQUEST,
                    code: "MalformedPolicyDocument",
                    message,
                };
                Some((text.to_owned(), Policy::parse(text).map_err(malformed)?))
            }
        };
        Ok(self.0.create(name, policy, Duration::from_secs(seconds)))
    }
}

fn session_xml(session: &Session) -> String {
    let expires = jiff::Timestamp::try_from(session.info.expires).unwrap_or(jiff::Timestamp::MAX);
    let mut xml = String::from(
        "<AssumeRoleResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><AssumeRoleResult>",
    );
    let elements = [
        ("AccessKeyId", session.info.access_key.clone()),
        ("SecretAccessKey", session.secret.clone()),
        ("SessionToken", session.token.clone()),
        ("Expiration", format!("{expires:.3}")),
    ];
    xml.push_str("<Credentials>");
    for (name, value) in elements {
        write!(xml, "<{name}>{value}</{name}>").ok();
    }
    xml.push_str("</Credentials></AssumeRoleResult></AssumeRoleResponse>");
    xml
}

fn error_xml(error: &StsError) -> String {
    let message = error.message.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!(
        "<ErrorResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><Error><Type>Sender</Type>\
         <Code>{}</Code><Message>{message}</Message></Error></ErrorResponse>",
        error.code
    )
}

fn xml_response(status: StatusCode, xml: String) -> S3Response<Body> {
    let mut response = S3Response::new(Body::from(xml));
    response.status = Some(status);
    response.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/xml"));
    response
}

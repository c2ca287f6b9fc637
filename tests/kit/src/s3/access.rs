//! Authorizes each request against its session's policy. The owner may do anything.

use std::sync::Arc;

use http::{HeaderMap, Uri};
use percent::decode;
use s3s::access::{S3Access, S3AccessContext};
use s3s::dto::DeleteObjectsInput;
use s3s::path::S3Path;
use s3s::{S3Error, S3Request, S3Result, s3_error};

use super::policy::{AccessRequest, Policy, WriteProperties};
use super::session::Sessions;

pub(super) struct Access(pub(super) Arc<Sessions>);

/// Set on a request whose session may not list the whole bucket: as in S3, a missing object is reported as forbidden.
#[derive(Clone, Copy, Debug)]
pub(super) struct HideMissing;

#[async_trait::async_trait]
impl S3Access for Access {
    async fn check(&self, cx: &mut S3AccessContext<'_>) -> S3Result<()> {
        let Some(key) = cx.credentials().map(|credentials| credentials.access_key.clone()) else {
            return Err(s3_error!(AccessDenied, "the request is not signed"));
        };
        if self.0.is_owner(&key) {
            return Ok(());
        }
        let session = self.0.find_valid(&key, session_token(cx.headers(), cx.uri()).as_deref())?;
        let Some(policy) = session.policy else { return Ok(()) };
        let write_properties = WriteProperties::from_request(cx);
        for mut access_request in required_access(cx)? {
            access_request.write_properties = write_properties.clone();
            authorize(&policy, &access_request)?;
        }
        if let S3Path::Object { bucket, .. } = cx.s3_path() {
            let resource = format!("arn:aws:s3:::{bucket}");
            if !policy.allows(&AccessRequest::new("s3:ListBucket", resource)) {
                cx.extensions_mut().insert(HideMissing);
            }
        }
        cx.extensions_mut().insert(Arc::new(policy));
        Ok(())
    }

    async fn delete_objects(&self, request: &mut S3Request<DeleteObjectsInput>) -> S3Result<()> {
        let Some(policy) = request.extensions.get::<Arc<Policy>>().cloned() else { return Ok(()) };
        for object in &request.input.delete.objects {
            let resource = format!("arn:aws:s3:::{}/{}", request.input.bucket, object.key);
            authorize(&policy, &AccessRequest::new("s3:DeleteObject", resource))?;
        }
        Ok(())
    }
}

fn authorize(policy: &Policy, access_request: &AccessRequest<'_>) -> S3Result<()> {
    if policy.allows(access_request) {
        return Ok(());
    }
    Err(s3_error!(
        AccessDenied,
        "the session's policy does not allow {} on {}",
        access_request.action,
        access_request.resource
    ))
}

/// The session token of a signed request or a presigned URL.
pub(super) fn session_token(headers: &HeaderMap, uri: &Uri) -> Option<String> {
    let header = headers.get("x-amz-security-token").and_then(|value| value.to_str().ok()).map(str::to_owned);
    header.or_else(|| query_parameter(uri, "X-Amz-Security-Token"))
}

fn query_parameter(uri: &Uri, expected_name: &str) -> Option<String> {
    let pairs = url::form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
    pairs.into_iter().find(|(name, _)| name == expected_name).map(|(_, value)| value.into_owned())
}

fn required_access(cx: &S3AccessContext<'_>) -> S3Result<Vec<AccessRequest<'static>>> {
    let object = match cx.s3_path() {
        S3Path::Object { bucket, key } => format!("arn:aws:s3:::{bucket}/{key}"),
        S3Path::Bucket { bucket } => format!("arn:aws:s3:::{bucket}"),
        S3Path::Root => "*".to_owned(),
    };
    let single = |action: &'static str| Ok(vec![AccessRequest::new(action, object.clone())]);
    let listing = |action: &'static str| {
        Ok(vec![AccessRequest {
            prefix: query_parameter(cx.uri(), "prefix"),
            ..AccessRequest::new(action, object.clone())
        }])
    };
    match cx.s3_op().name() {
        "GetObject" | "HeadObject" => single("s3:GetObject"),
        "PutObject" | "CreateMultipartUpload" | "UploadPart" | "CompleteMultipartUpload" => {
            single("s3:PutObject")
        }
        "CopyObject" | "UploadPartCopy" => {
            let source = AccessRequest::new("s3:GetObject", copy_source(cx.headers())?);
            Ok(vec![source, AccessRequest::new("s3:PutObject", object.clone())])
        }
        "DeleteObject" => single("s3:DeleteObject"),
        // The keys are checked after the body has been read.
        "DeleteObjects" => Ok(Vec::new()),
        "AbortMultipartUpload" => single("s3:AbortMultipartUpload"),
        "ListParts" => single("s3:ListMultipartUploadParts"),
        "ListObjects" | "ListObjectsV2" => listing("s3:ListBucket"),
        "ListMultipartUploads" => listing("s3:ListBucketMultipartUploads"),
        "HeadBucket" => single("s3:ListBucket"),
        "ListBuckets" => single("s3:ListAllMyBuckets"),
        "GetBucketLocation" => single("s3:GetBucketLocation"),
        "CreateBucket" => single("s3:CreateBucket"),
        "DeleteBucket" => single("s3:DeleteBucket"),
        name => Err(s3_error!(AccessDenied, "{name} is not available to sessions")),
    }
}

impl WriteProperties {
    /// As in AWS, requests that only start an upload or add a part to it do not create an object.
    fn from_request(cx: &S3AccessContext<'_>) -> Self {
        let creates = matches!(cx.s3_op().name(), "PutObject" | "CompleteMultipartUpload" | "CopyObject");
        let header = |name: &str| cx.headers().get(name)?.to_str().ok().map(str::to_owned);
        Self { creates, if_none_match: header("if-none-match") }
    }
}

fn copy_source(headers: &HeaderMap) -> S3Result<String> {
    let invalid = || -> S3Error { s3_error!(InvalidArgument, "x-amz-copy-source is missing or malformed") };
    let text = headers.get("x-amz-copy-source").and_then(|value| value.to_str().ok()).ok_or_else(invalid)?;
    let text = text.split('?').next().unwrap_or_default().trim_start_matches('/');
    Ok(format!("arn:aws:s3:::{}", decode(text)))
}

mod percent {
    //! Percent-decoding of a path: unlike in a form, `+` does not mean a space.

    pub(super) fn decode(text: &str) -> String {
        let escaped = text.replace('+', "%2B");
        let pairs = format!("k={escaped}");
        url::form_urlencoded::parse(pairs.as_bytes())
            .next()
            .map(|(_, value)| value.into_owned())
            .unwrap_or_default()
    }
}

//! Every request against the policy of the session that signed it. The owner may do everything.

use std::sync::Arc;

use http::{HeaderMap, Uri};
use percent::decode;
use s3s::access::{S3Access, S3AccessContext};
use s3s::dto::DeleteObjectsInput;
use s3s::path::S3Path;
use s3s::{S3Error, S3Request, S3Result, s3_error};

use super::policy::{Creation, Policy, Wish};
use super::session::Sessions;

pub(super) struct Access(pub(super) Arc<Sessions>);

/// Set on a request whose session may not list the whole bucket: to it, what is not there is forbidden, as S3 has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct AbsenceHidden;

#[async_trait::async_trait]
impl S3Access for Access {
    async fn check(&self, cx: &mut S3AccessContext<'_>) -> S3Result<()> {
        let Some(key) = cx.credentials().map(|credentials| credentials.access_key.clone()) else {
            return Err(s3_error!(AccessDenied, "the request is not signed"));
        };
        if self.0.is_owner(&key) {
            return Ok(());
        }
        let session = self.0.check(&key, token(cx.headers(), cx.uri()).as_deref())?;
        let Some(policy) = session.policy else { return Ok(()) };
        let creation = Creation::of(cx);
        for mut wish in wishes(cx)? {
            wish.creation = creation.clone();
            permit(&policy, &wish)?;
        }
        if let S3Path::Object { bucket, .. } = cx.s3_path() {
            let resource = format!("arn:aws:s3:::{bucket}");
            if !policy.allows(&Wish::new("s3:ListBucket", resource)) {
                cx.extensions_mut().insert(AbsenceHidden);
            }
        }
        cx.extensions_mut().insert(Arc::new(policy));
        Ok(())
    }

    async fn delete_objects(&self, request: &mut S3Request<DeleteObjectsInput>) -> S3Result<()> {
        let Some(policy) = request.extensions.get::<Arc<Policy>>().cloned() else { return Ok(()) };
        for named in &request.input.delete.objects {
            let resource = format!("arn:aws:s3:::{}/{}", request.input.bucket, named.key);
            permit(&policy, &Wish::new("s3:DeleteObject", resource))?;
        }
        Ok(())
    }
}

fn permit(policy: &Policy, wish: &Wish<'_>) -> S3Result<()> {
    if policy.allows(wish) {
        return Ok(());
    }
    Err(s3_error!(AccessDenied, "the session's policy does not allow {} on {}", wish.action, wish.resource))
}

/// The token of a signed request, or of a presigned URL.
pub(super) fn token(headers: &HeaderMap, uri: &Uri) -> Option<String> {
    let header = headers.get("x-amz-security-token").and_then(|value| value.to_str().ok()).map(str::to_owned);
    header.or_else(|| query(uri, "X-Amz-Security-Token"))
}

fn query(uri: &Uri, wanted: &str) -> Option<String> {
    let pairs = url::form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
    pairs.into_iter().find(|(name, _)| name == wanted).map(|(_, value)| value.into_owned())
}

fn wishes(cx: &S3AccessContext<'_>) -> S3Result<Vec<Wish<'static>>> {
    let object = match cx.s3_path() {
        S3Path::Object { bucket, key } => format!("arn:aws:s3:::{bucket}/{key}"),
        S3Path::Bucket { bucket } => format!("arn:aws:s3:::{bucket}"),
        S3Path::Root => "*".to_owned(),
    };
    let one = |action: &'static str| Ok(vec![Wish::new(action, object.clone())]);
    let listing = |action: &'static str| {
        Ok(vec![Wish { prefix: query(cx.uri(), "prefix"), ..Wish::new(action, object.clone()) }])
    };
    match cx.s3_op().name() {
        "GetObject" | "HeadObject" => one("s3:GetObject"),
        "PutObject" | "CreateMultipartUpload" | "UploadPart" | "CompleteMultipartUpload" => {
            one("s3:PutObject")
        }
        "CopyObject" | "UploadPartCopy" => {
            let source = Wish::new("s3:GetObject", copy_source(cx.headers())?);
            Ok(vec![source, Wish::new("s3:PutObject", object.clone())])
        }
        "DeleteObject" => one("s3:DeleteObject"),
        // Each key is looked at once the body is read.
        "DeleteObjects" => Ok(Vec::new()),
        "AbortMultipartUpload" => one("s3:AbortMultipartUpload"),
        "ListParts" => one("s3:ListMultipartUploadParts"),
        "ListObjects" | "ListObjectsV2" => listing("s3:ListBucket"),
        "ListMultipartUploads" => listing("s3:ListBucketMultipartUploads"),
        "HeadBucket" => one("s3:ListBucket"),
        "ListBuckets" => one("s3:ListAllMyBuckets"),
        "GetBucketLocation" => one("s3:GetBucketLocation"),
        "CreateBucket" => one("s3:CreateBucket"),
        "DeleteBucket" => one("s3:DeleteBucket"),
        name => Err(s3_error!(AccessDenied, "no session may do {name} here")),
    }
}

impl Creation {
    /// As AWS has it: of the calls that need `s3:PutObject`, those that only begin or feed an upload create nothing.
    fn of(cx: &S3AccessContext<'_>) -> Self {
        let creates = matches!(cx.s3_op().name(), "PutObject" | "CompleteMultipartUpload" | "CopyObject");
        let header = |name: &str| cx.headers().get(name)?.to_str().ok().map(str::to_owned);
        Self { creates, if_none_match: header("if-none-match") }
    }
}

fn copy_source(headers: &HeaderMap) -> S3Result<String> {
    let bad = || -> S3Error { s3_error!(InvalidArgument, "x-amz-copy-source") };
    let text = headers.get("x-amz-copy-source").and_then(|value| value.to_str().ok()).ok_or_else(bad)?;
    let text = text.split('?').next().unwrap_or_default().trim_start_matches('/');
    Ok(format!("arn:aws:s3:::{}", decode(text)))
}

mod percent {
    //! Percent-decoding of a path: unlike in a form, `+` is itself.

    pub(super) fn decode(text: &str) -> String {
        let plus_kept = text.replace('+', "%2B");
        let pairs = format!("k={plus_kept}");
        url::form_urlencoded::parse(pairs.as_bytes())
            .next()
            .map(|(_, value)| value.into_owned())
            .unwrap_or_default()
    }
}

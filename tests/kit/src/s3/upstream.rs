//! A third-party S3 server behind the kit's HTTP layer. Requests are forwarded unchanged. The layer's request log and
//! faults work with it too, except stale reads, which only the kit's own store supports.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use s3s::{Body, HttpError};
use tokio::net::TcpStream;

use super::ObjectInfo;
use crate::moto::Moto;
use crate::s3_process::S3Process;
use crate::seaweed::Seaweed;

const READY_TIMEOUT: Duration = Duration::from_secs(60);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// A signature that is never checked: moto rejects anonymous reads, but does not check signatures.
const UNCHECKED_AUTHORIZATION: &str =
    "AWS4-HMAC-SHA256 Credential=kit/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=00";

/// A third-party store. It does not verify signatures, so the kit can access its contents without a valid one.
pub enum ThirdParty {
    Moto(Moto),
    Seaweed(Seaweed),
}

impl ThirdParty {
    fn process(&self) -> &S3Process {
        match self {
            Self::Moto(moto) => moto.s3(),
            Self::Seaweed(seaweed) => seaweed.s3(),
        }
    }

    /// Whether the store issues sessions.
    pub(super) fn has_sts(&self) -> bool {
        matches!(self, Self::Moto(_))
    }
}

pub(super) struct Upstream {
    pub(super) server: ThirdParty,
    address: SocketAddr,
    client: reqwest::Client,
}

impl Upstream {
    pub(super) fn new(server: ThirdParty) -> Result<Self> {
        // The crypto provider is installed once per process; later attempts fail harmlessly.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let address = server.process().endpoint().trim_start_matches("http://").parse()?;
        let client = reqwest::Client::builder().no_proxy().timeout(CALL_TIMEOUT).build()?;
        Ok(Self { server, address, client })
    }

    /// Forwards a request, with the `Host` that the client has signed.
    pub(super) async fn forward(&self, request: Request<Body>) -> Result<Response<Body>, HttpError> {
        let exchange = async {
            let stream = TcpStream::connect(self.address).await?;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            anyhow::Ok(sender.send_request(request).await?)
        };
        let response = exchange.await.map_err(|error| HttpError::new(error.into()))?;
        Ok(response.map(Body::http_body_unsync))
    }

    /// Creates the bucket and waits until it accepts objects, because a server may reject them at first.
    pub(super) fn create_bucket(&self, name: &str) -> Result<()> {
        let deadline = Instant::now() + READY_TIMEOUT;
        let create_and_probe = || {
            let created = self.call(Method::PUT, name, Bytes::new())?.0;
            ensure!(
                created.is_success() || created == StatusCode::CONFLICT,
                "cannot create the bucket: {created}"
            );
            let put = self.call(Method::PUT, &format!("{name}/ready"), Bytes::from_static(b"ready"))?.0;
            ensure!(put.is_success(), "cannot put an object: {put}");
            anyhow::Ok(())
        };
        while let Err(error) = create_and_probe() {
            ensure!(Instant::now() < deadline, "the bucket {name} is not ready: {error:#}");
            std::thread::sleep(Duration::from_millis(100));
        }
        self.call(Method::DELETE, &format!("{name}/ready"), Bytes::new()).map(drop)
    }

    pub(super) fn read(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        let (status, body) = self.call(Method::GET, &format!("{bucket}/{key}"), Bytes::new()).ok()?;
        status.is_success().then(|| body.to_vec())
    }

    pub(super) fn write(&self, bucket: &str, key: &str, content: Bytes) {
        let put = self.call(Method::PUT, &format!("{bucket}/{key}"), content);
        assert!(put.as_ref().is_ok_and(|(status, _)| status.is_success()), "cannot put {key}: {put:?}");
    }

    pub(super) fn remove(&self, bucket: &str, key: &str) -> bool {
        let existed = self.read(bucket, key).is_some();
        let deleted = self.call(Method::DELETE, &format!("{bucket}/{key}"), Bytes::new());
        existed && deleted.is_ok_and(|(status, _)| status.is_success())
    }

    pub(super) fn objects(&self, bucket: &str, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let mut objects: Vec<ObjectInfo> = Vec::new();
        loop {
            let after = objects.last().map_or_else(String::new, |last| last.key.clone());
            let mut query = url::form_urlencoded::Serializer::new(String::new());
            query.append_pair("list-type", "2").append_pair("prefix", prefix);
            if !after.is_empty() {
                query.append_pair("start-after", &after);
            }
            let (status, body) =
                self.call(Method::GET, &format!("{bucket}?{}", query.finish()), Bytes::new())?;
            ensure!(status.is_success(), "cannot list {prefix}: {status}");
            let text = String::from_utf8(body.to_vec())?;
            let page = elements(&text, "Contents").map(parse_object).collect::<Result<Vec<_>>>()?;
            let is_last = page.is_empty() || !text.contains("<IsTruncated>true</IsTruncated>");
            objects.extend(page);
            if is_last {
                return Ok(objects);
            }
        }
    }

    /// Keys of uploads that were neither completed nor aborted.
    pub(super) fn uploads(&self, bucket: &str) -> Result<Vec<String>> {
        let (status, body) = self.call(Method::GET, &format!("{bucket}?uploads"), Bytes::new())?;
        ensure!(status.is_success(), "cannot list uploads: {status}");
        let text = String::from_utf8(body.to_vec())?;
        elements(&text, "Upload").map(|upload| field(upload, "Key")).collect()
    }

    /// Blocks the calling thread, like every other method that tests use to access the store's contents.
    fn call(&self, method: Method, target: &str, body: Bytes) -> Result<(StatusCode, Bytes)> {
        let request = self.client.request(method, format!("http://{}/{target}", self.address));
        let request = request.header(AUTHORIZATION, UNCHECKED_AUTHORIZATION).body(body);
        block_on_kit_runtime(async move {
            let response = request.send().await?;
            Ok((response.status(), response.bytes().await?))
        })
    }
}

/// Runs `work` on the kit's own runtime, because the caller may be on a different one.
fn block_on_kit_runtime<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    crate::runtime::handle().spawn(async move { sender.send(work.await) });
    receiver.recv().context("the call was cancelled")?
}

fn parse_object(entry: &str) -> Result<ObjectInfo> {
    let modified: jiff::Timestamp = field(entry, "LastModified")?.parse()?;
    Ok(ObjectInfo {
        key: field(entry, "Key")?,
        size: field(entry, "Size")?.parse()?,
        etag: field(entry, "ETag")?.trim_matches('"').to_owned(),
        modified: SystemTime::from(modified),
    })
}

/// Returns the contents of all elements with this name. svc's keys do not require a real XML parser.
fn elements<'a>(text: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let (begin, end) = (format!("<{name}>"), format!("</{name}>"));
    let mut rest = text;
    std::iter::from_fn(move || {
        let from = rest.find(&begin)? + begin.len();
        let to = from + rest[from..].find(&end)?;
        let content = &rest[from..to];
        rest = &rest[to..];
        Some(content)
    })
}

fn field(text: &str, name: &str) -> Result<String> {
    let value = elements(text, name).next().with_context(|| format!("no {name} in {text}"))?;
    let entities = [("&quot;", "\""), ("&#34;", "\""), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")];
    Ok(entities.iter().fold(value.to_owned(), |text, (entity, character)| text.replace(entity, character)))
}

//! An S3 server over HTTP on loopback: verified signatures and checksums, atomic conditional writes, faults on demand.
//!
//! ```no_run
//! # fn f() -> anyhow::Result<()> {
//! let store = kit::s3::S3Server::start(&std::env::temp_dir())?;
//! store.create_bucket("fleet");
//! let environment = store.env("fleet"); // OBJECT_STORE_URL, OBJECT_STORE_ENDPOINT, AWS_…
//! store.write("fleet", "user/primary/system/db/latest", "…");
//! assert_eq!(store.objects("fleet", "user/").len(), 1);
//! store.take_down(); // refuses connections
//! store.bring_up()?; // accepts connections again, with the same objects
//! # Ok(()) }
//! ```
//!
//! STS is available at the same endpoint: with [`S3Server::sts_env`] the platform issues sessions to hosts. Each
//! session's policy is enforced for every key and action.
//!
//! Where S3 and R2 differ, the server behaves like R2: the response to `If-Match` on a missing object is 412; all parts
//! of a multipart upload except the last must have the same size; and the last must not be larger. Buckets are
//! addressed by path. Objects are deleted when the server is dropped.

mod access;
mod attributes;
mod blob;
mod checksum;
mod condition;
mod fault;
mod http_layer;
mod listing;
mod multipart;
mod policy;
mod service;
mod session;
mod store;
mod sts;
mod upstream;

pub use fault::{Fault, FaultRule, HitCounter};
pub use http_layer::RequestRecord;
pub use session::SessionInfo;
pub use upstream::ThirdParty;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use bytes::Bytes;
use s3s::service::S3ServiceBuilder;
use tempfile::TempDir;

use crate::child;
use crate::net::ReopenableListener;
use attributes::Attributes;
use blob::Blob;
use condition::WriteCondition;
use http_layer::{Backend, HttpLayer};
use session::Sessions;
use store::{Object, Store};
use upstream::Upstream;

const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);
const ACCESS_KEY: &str = "KITACCESSKEY";
const ROLE_ARN: &str = "arn:aws:iam::000000000000:role/svc-host";

/// The server. Dropping it stops the server and deletes its objects.
pub struct S3Server {
    listener: ReopenableListener,
    http: Arc<HttpLayer>,
    store: Arc<Store>,
    sessions: Arc<Sessions>,
    secret_key: String,
    /// The third-party server that executes the requests, if any.
    upstream: Option<Arc<Upstream>>,
    _blobs: TempDir,
}

/// An object's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    pub key: String,
    pub size: u64,
    /// Without quotes.
    pub etag: String,
    pub modified: SystemTime,
}

impl S3Server {
    /// Starts on a free port. Large objects are stored under `dir`, which must exist, until the server is dropped.
    pub fn start(dir: &Path) -> Result<Self> {
        Self::start_with(dir, None)
    }

    /// Like [`Self::start`], but a third-party server executes the requests, without checking signatures.
    pub fn start_in_front_of(server: ThirdParty, dir: &Path) -> Result<Self> {
        Self::start_with(dir, Some(Arc::new(Upstream::new(server)?)))
    }

    fn start_with(dir: &Path, upstream: Option<Arc<Upstream>>) -> Result<Self> {
        let blobs = tempfile::Builder::new().prefix("s3-").tempdir_in(dir)?;
        child::remove_on_exit(blobs.path());
        let secret_key = uuid::Uuid::new_v4().simple().to_string();
        let store = Arc::new(Store::new(blobs.path()));
        let mut service = S3ServiceBuilder::new(service::Service { store: Arc::clone(&store) });
        let sessions = Arc::new(Sessions::new(ACCESS_KEY, &secret_key));
        service.set_auth(session::Auth(Arc::clone(&sessions)));
        service.set_access(access::Access(Arc::clone(&sessions)));
        service.set_route(sts::Sts(Arc::clone(&sessions)));
        let http = Arc::new(HttpLayer {
            backend: match &upstream {
                None => Backend::Kit(service.build()),
                Some(upstream) => Backend::Upstream(Arc::clone(upstream)),
            },
            faults: fault::Faults::default(),
            log: Mutex::default(),
        });
        let handler = Arc::clone(&http);
        let listener = ReopenableListener::open(move |stream| Arc::clone(&handler).serve(stream))?;
        Ok(Self { listener, http, store, sessions, secret_key, upstream, _blobs: blobs })
    }

    /// `http://127.0.0.1:<port>`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.listener.addr())
    }

    pub fn access_key(&self) -> &str {
        ACCESS_KEY
    }

    pub fn secret_key(&self) -> &str {
        &self.secret_key
    }

    pub fn region(&self) -> &str {
        if self.upstream.is_some() { "us-east-1" } else { "auto" }
    }

    /// The product's settings for a bucket in this store.
    pub fn env(&self, bucket: &str) -> Vec<(String, String)> {
        let pairs = [
            ("OBJECT_STORE_URL", format!("s3://{bucket}")),
            ("OBJECT_STORE_ENDPOINT", self.endpoint()),
            ("AWS_ACCESS_KEY_ID", self.access_key().to_owned()),
            ("AWS_SECRET_ACCESS_KEY", self.secret_key.clone()),
            ("AWS_REGION", self.region().to_owned()),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).into()
    }

    /// The platform's settings for the hosts' credentials: short-lived ones from this server's STS, or, without an STS,
    /// the platform's own.
    pub fn sts_env(&self) -> Vec<(String, String)> {
        if self.upstream.as_ref().is_some_and(|upstream| !upstream.server.has_sts()) {
            return vec![("STORE_HOST_CREDENTIALS".to_owned(), "static".to_owned())];
        }
        let pairs = [("STORE_HOST_CREDENTIALS", "sts"), ("STS_ROLE_ARN", ROLE_ARN)];
        let pairs = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
        pairs.into_iter().chain([("STS_ENDPOINT".to_owned(), self.endpoint())]).collect()
    }

    /// Overrides the lifetime of new sessions; `None` restores the requested lifetime.
    pub fn set_session_lifetime(&self, lifetime: Option<Duration>) {
        self.sessions.set_lifetime(lifetime);
    }

    /// All sessions issued so far, including expired and revoked ones.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.sessions.all()
    }

    /// The secret keys and tokens of all sessions.
    pub fn session_secrets(&self) -> Vec<(String, String)> {
        self.sessions.secrets()
    }

    /// Expires all existing sessions.
    pub fn expire_sessions(&self) {
        self.sessions.expire_all();
    }

    /// Revokes the sessions with this name; returns how many there were.
    pub fn revoke_sessions(&self, name: &str) -> usize {
        self.sessions.revoke(name)
    }

    /// Creates a bucket; does nothing if it exists.
    ///
    /// # Panics
    /// Panics if [`Self::try_create_bucket`] fails.
    pub fn create_bucket(&self, name: &str) {
        self.try_create_bucket(name).expect("cannot create the bucket");
    }

    /// Like [`Self::create_bucket`].
    ///
    /// # Errors
    /// Fails if a third-party server does not create the bucket or does not accept objects within a minute.
    pub fn try_create_bucket(&self, name: &str) -> Result<()> {
        match &self.upstream {
            None => {
                self.store.create_bucket(name);
                Ok(())
            }
            Some(upstream) => upstream.create_bucket(name),
        }
    }

    /// Objects whose keys start with `prefix`, sorted; empty if the bucket does not exist.
    ///
    /// # Panics
    /// Panics if a third-party server cannot list the objects, for example because the bucket does not exist.
    pub fn objects(&self, bucket: &str, prefix: &str) -> Vec<ObjectInfo> {
        if let Some(upstream) = &self.upstream {
            return upstream.objects(bucket, prefix).expect("cannot list the third-party store");
        }
        let list = |bucket: &mut store::Bucket| Ok(bucket.list(prefix, None, None, usize::MAX).objects);
        let objects = self.store.with_bucket(bucket, list).unwrap_or_default().into_iter();
        let info = |(key, object): (String, Arc<Object>)| ObjectInfo {
            key,
            size: object.body.len(),
            etag: object.etag.value().to_owned(),
            modified: object.modified,
        };
        objects.map(info).collect()
    }

    /// Returns an object's content, or `None` if it cannot be read.
    pub fn read(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        if let Some(upstream) = &self.upstream {
            return upstream.read(bucket, key);
        }
        let object = self.store.with_bucket(bucket, |bucket| Ok(bucket.get(key))).ok()??;
        object.body.read().ok()
    }

    /// Writes an object unconditionally, and creates the bucket if necessary. With a third-party server, the bucket
    /// must exist.
    ///
    /// # Panics
    /// Panics if a third-party server does not accept the object.
    pub fn write(&self, bucket: &str, key: &str, content: impl Into<Bytes>) {
        let content = content.into();
        if let Some(upstream) = &self.upstream {
            return upstream.write(bucket, key, content);
        }
        let digest = ring::digest::digest(&ring::digest::SHA256, &content);
        let sha256 = digest.as_ref().try_into().expect("SHA-256 has 32 bytes");
        let object = Object::from_blob(Arc::new(Blob::in_memory(content)), &sha256, Attributes::default());
        self.store.create_bucket(bucket);
        let put = |bucket: &mut store::Bucket| bucket.put(key, Arc::new(object), &WriteCondition::default());
        self.store.with_bucket(bucket, put).expect("unconditional write to an existing bucket");
    }

    /// Deletes an object; returns whether it existed.
    pub fn remove(&self, bucket: &str, key: &str) -> bool {
        if let Some(upstream) = &self.upstream {
            return upstream.remove(bucket, key);
        }
        self.store
            .with_bucket(bucket, |bucket| bucket.remove(key, &WriteCondition::default()))
            .unwrap_or(false)
    }

    /// Keys of multipart uploads that were neither completed nor aborted.
    ///
    /// # Panics
    /// Panics if a third-party server cannot list the uploads.
    pub fn uploads(&self, bucket: &str) -> Vec<String> {
        if let Some(upstream) = &self.upstream {
            return upstream.uploads(bucket).expect("cannot list the uploads of the third-party store");
        }
        let keys = |bucket: &mut store::Bucket| {
            Ok(bucket.uploads.values().map(|upload| upload.key.clone()).collect())
        };
        let mut keys: Vec<String> = self.store.with_bucket(bucket, keys).unwrap_or_default();
        keys.sort();
        keys
    }

    /// Like [`Self::uploads`], but only for uploads with parts. Always empty with a third-party server.
    pub fn uploads_with_parts(&self, bucket: &str) -> Vec<String> {
        let keys = |bucket: &mut store::Bucket| {
            let with_parts = bucket.uploads.values().filter(|upload| !upload.parts.is_empty());
            Ok(with_parts.map(|upload| upload.key.clone()).collect())
        };
        let mut keys: Vec<String> = self.store.with_bucket(bucket, keys).unwrap_or_default();
        keys.sort();
        keys
    }

    /// Activates a fault for the requests selected by the rule.
    pub fn add_fault(&self, rule: FaultRule) -> HitCounter {
        self.http.faults.add(rule)
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.http.faults.clear();
    }

    /// Refuses connections, and cuts existing ones, until [`S3Server::bring_up`].
    pub fn take_down(&self) {
        self.listener.close();
    }

    /// Serves again on the same port, with the same objects.
    pub fn bring_up(&self) -> Result<()> {
        Ok(self.listener.reopen()?)
    }

    /// Waits until every client has closed its connections and every request has been executed. Until then, requests
    /// that a killed client has sent may still change the objects.
    pub async fn drain(&self) -> Result<()> {
        self.listener.drain(DRAIN_TIMEOUT).await.context("cannot drain the store's connections")
    }

    /// All requests that were handled or cut so far, in order of completion; only the first 100,000.
    pub fn requests(&self) -> Vec<RequestRecord> {
        self.http.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Clears the request log.
    pub fn clear_requests(&self) {
        self.http.log.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

#[cfg(test)]
mod tests;

//! An S3 server over HTTP on loopback: signatures and checksums checked, conditional writes exact, faults on demand.
//!
//! ```no_run
//! # fn f() -> anyhow::Result<()> {
//! let store = kit::s3::S3Server::start(&std::env::temp_dir())?;
//! store.create_bucket("fleet");
//! let environment = store.env("fleet"); // OBJECT_STORE_URL, OBJECT_STORE_ENDPOINT, AWS_…
//! store.write("fleet", "user/primary/system/db/latest", "…");
//! assert_eq!(store.objects("fleet", "user/").len(), 1);
//! store.down(); // connections are refused …
//! store.up()?; // … until now; the objects are still there
//! # Ok(()) }
//! ```
//!
//! STS answers at the same endpoint: [`S3Server::sts_env`] has the platform give hosts sessions, whose policies are
//! enforced on every key and action.
//!
//! Where S3 and R2 differ it is R2: `If-Match` on a missing object is 412, and all parts of a multipart upload but the
//! last have one size. Buckets are addressed by path. Objects live as long as the server.

mod access;
mod attributes;
mod blob;
mod checksum;
mod condition;
mod fault;
mod listing;
mod policy;
mod service;
mod session;
mod store;
mod sts;
mod upload;
mod wire;

pub use fault::{Fault, Hits, Rule};
pub use session::SessionInfo;
pub use wire::Seen;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Result;
use bytes::Bytes;
use s3s::service::S3ServiceBuilder;
use tempfile::TempDir;

use crate::child;
use crate::net::ReopenableListener;
use attributes::Attributes;
use blob::Blob;
use condition::WriteCondition;
use session::Sessions;
use store::{Object, Store};
use wire::Wire;

const ACCESS_KEY: &str = "KITACCESSKEY";
const ROLE_ARN: &str = "arn:aws:iam::000000000000:role/svc-host";

/// The server; dropped, it is gone with all that it held.
pub struct S3Server {
    gate: ReopenableListener,
    wire: Arc<Wire>,
    store: Arc<Store>,
    sessions: Arc<Sessions>,
    secret_key: String,
    _blobs: TempDir,
}

/// What there is under a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    pub key: String,
    pub size: u64,
    /// Without quotes.
    pub etag: String,
    pub modified: SystemTime,
}

impl S3Server {
    /// Starts on a free port. Larger contents lie below `dir` (which has to exist) until the server is dropped.
    pub fn start(dir: &Path) -> Result<Self> {
        let blobs = tempfile::Builder::new().prefix("s3-").tempdir_in(dir)?;
        child::remove_on_exit(blobs.path());
        let secret_key = uuid::Uuid::new_v4().simple().to_string();
        let store = Arc::new(Store::new(blobs.path()));
        let mut service = S3ServiceBuilder::new(service::Service { store: Arc::clone(&store) });
        let sessions = Arc::new(Sessions::new(ACCESS_KEY, &secret_key));
        service.set_auth(session::Auth(Arc::clone(&sessions)));
        service.set_access(access::Access(Arc::clone(&sessions)));
        service.set_route(sts::Sts(Arc::clone(&sessions)));
        let wire = Arc::new(Wire {
            service: service.build(),
            faults: fault::Faults::default(),
            log: Mutex::default(),
        });
        let serving = Arc::clone(&wire);
        let gate = ReopenableListener::open(move |stream| Arc::clone(&serving).serve(stream))?;
        Ok(Self { gate, wire, store, sessions, secret_key, _blobs: blobs })
    }

    /// `http://127.0.0.1:<port>`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.gate.addr())
    }

    pub fn access_key(&self) -> &str {
        ACCESS_KEY
    }

    pub fn secret_key(&self) -> &str {
        &self.secret_key
    }

    pub fn region(&self) -> &str {
        "auto"
    }

    /// The product's settings for this store and a bucket of it.
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

    /// The platform's settings for giving hosts short-lived credentials by this server's STS.
    pub fn sts_env(&self) -> Vec<(String, String)> {
        let pairs = [("STORE_HOST_CREDENTIALS", "sts"), ("STS_ROLE_ARN", ROLE_ARN)];
        let pairs = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
        pairs.into_iter().chain([("STS_ENDPOINT".to_owned(), self.endpoint())]).collect()
    }

    /// Sessions live so long from now on, whatever is asked for; `None` for what is asked.
    pub fn set_session_life(&self, life: Option<Duration>) {
        self.sessions.set_life(life);
    }

    /// All sessions that were ever given.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.sessions.all()
    }

    /// All sessions that there are have run out.
    pub fn session_secrets(&self) -> Vec<(String, String)> {
        self.sessions.secrets()
    }

    /// Lets every session that there is expire.
    pub fn expire_sessions(&self) {
        self.sessions.expire_all();
    }

    /// Takes the sessions of this name away; says how many there were.
    pub fn revoke_sessions(&self, name: &str) -> usize {
        self.sessions.revoke(name)
    }

    /// Makes a bucket; one that is there stays as it is.
    pub fn create_bucket(&self, name: &str) {
        self.store.create_bucket(name);
    }

    /// What is stored under keys that start with `prefix`, in order; nothing in a bucket that is not there.
    pub fn objects(&self, bucket: &str, prefix: &str) -> Vec<ObjectInfo> {
        let list = |bucket: &mut store::Bucket| Ok(bucket.list(prefix, None, None, usize::MAX).objects);
        let objects = self.store.with(bucket, list).unwrap_or_default().into_iter();
        let info = |(key, object): (String, Arc<Object>)| ObjectInfo {
            key,
            size: object.body.len(),
            etag: object.etag.value().to_owned(),
            modified: object.modified,
        };
        objects.map(info).collect()
    }

    /// An object's content.
    pub fn read(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        let object = self.store.with(bucket, |bucket| Ok(bucket.get(key))).ok()??;
        object.body.read().ok()
    }

    /// Puts an object there, whatever was, making the bucket if need be.
    pub fn write(&self, bucket: &str, key: &str, content: impl Into<Bytes>) {
        let content = content.into();
        let digest = ring::digest::digest(&ring::digest::SHA256, &content);
        let sha256 = digest.as_ref().try_into().expect("SHA-256 has 32 bytes");
        let object = Object::simple(Arc::new(Blob::in_memory(content)), &sha256, Attributes::default());
        self.store.create_bucket(bucket);
        let put = |bucket: &mut store::Bucket| bucket.put(key, Arc::new(object), &WriteCondition::default());
        self.store.with(bucket, put).expect("without a condition, in a bucket that is there");
    }

    /// Takes an object away; says whether it was there.
    pub fn remove(&self, bucket: &str, key: &str) -> bool {
        self.store.with(bucket, |bucket| bucket.remove(key, &WriteCondition::default())).unwrap_or(false)
    }

    /// The keys of multipart uploads that were neither completed nor aborted.
    pub fn uploads(&self, bucket: &str) -> Vec<String> {
        let keys = |bucket: &mut store::Bucket| {
            Ok(bucket.uploads.values().map(|upload| upload.key.clone()).collect())
        };
        let mut keys: Vec<String> = self.store.with(bucket, keys).unwrap_or_default();
        keys.sort();
        keys
    }

    /// Those of them that hold parts, and so take room.
    pub fn uploads_with_parts(&self, bucket: &str) -> Vec<String> {
        let keys = |bucket: &mut store::Bucket| {
            let filled = bucket.uploads.values().filter(|upload| !upload.parts.is_empty());
            Ok(filled.map(|upload| upload.key.clone()).collect())
        };
        let mut keys: Vec<String> = self.store.with(bucket, keys).unwrap_or_default();
        keys.sort();
        keys
    }

    /// Lets a fault happen to the requests that the rule names.
    pub fn fault(&self, rule: Rule) -> Hits {
        self.wire.faults.add(rule)
    }

    /// No more faults.
    pub fn heal(&self) {
        self.wire.faults.clear();
    }

    /// Refuses connections, and cuts those there are, until [`S3Server::up`].
    pub fn down(&self) {
        self.gate.close();
    }

    /// Serves again, on the same port and with the same objects.
    pub fn up(&self) -> Result<()> {
        Ok(self.gate.reopen()?)
    }

    /// All requests that were answered or cut so far, in the order of their ends; the first 100,000.
    pub fn requests(&self) -> Vec<Seen> {
        self.wire.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets the requests so far, before a part of a test that counts.
    pub fn forget_requests(&self) {
        self.wire.log.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

#[cfg(test)]
mod tests;

//! Holds a machine's row, its upstream while it is running, and recently signed proofs for requests to it.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use http::HeaderValue;
use jiff::Timestamp;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::host_trust::HostTrust;
use crate::signing_set::SigningSet;
use svc_http::proof::{Claims, ISSUER, MAX_LIFETIME_SECONDS, Route, Signer};
use svc_http::proxy::{Dial, Io, Proxy, ProxyLimits};
use svc_http::tls::SpkiPin;
use svc_machine::id::MachineId;
use svc_machine::name::{Handle, IdpUserId, Slot};
use svc_machine::state::Status;

/// How long a signed proof is reused. It remains valid for the rest of [`MAX_LIFETIME_SECONDS`].
const PROOF_REUSE_SECONDS: i64 = 10;

/// A machine's routing data, from the database.
#[derive(Debug, Clone)]
pub(super) struct MachineRecord {
    pub(super) id: MachineId,
    pub(super) user: IdpUserId,
    pub(super) slot: Slot,
    pub(super) handle: Handle,
    pub(super) status: Status,
    /// Whether an operator has powered off the server. If so, the machine receives no requests.
    pub(super) is_powered_off: bool,
    pub(super) endpoint: Option<Endpoint>,
    /// The keys that the host had acknowledged when the row was read. [`Machine::update_acknowledged_keys`] does not
    /// change this field, only the cache.
    pub(super) proof_kids: Vec<String>,
    pub(super) created_at: Timestamp,
}

/// A machine's address, its TLS key pin, and when its certificate chain is required.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Endpoint {
    pub(super) ip: Ipv4Addr,
    pub(super) port: u16,
    pub(super) pin: SpkiPin,
    /// The Unix time in seconds from which the certificate chain is required; `None` if never.
    pub(super) chain_required_from: Option<u64>,
}

pub(super) struct Machine {
    pub(super) record: MachineRecord,
    /// Present exactly while requests can be forwarded to the machine.
    pub(super) upstream: Option<Arc<Upstream>>,
    cache: Mutex<ProofCache>,
}

/// The connections to one endpoint. They are closed when the endpoint changes or the machine can no longer receive
/// requests.
pub(super) struct Upstream {
    pub(super) endpoint: Endpoint,
    pub(super) proxy: Proxy,
}

/// The keys that the host has acknowledged, and recently signed proofs.
struct ProofCache {
    kids: Vec<String>,
    proofs: Vec<CachedProof>,
}

struct CachedProof {
    route: Route,
    app: Option<String>,
    /// The Unix time in seconds.
    signed_at: i64,
    header: HeaderValue,
}

impl Machine {
    pub(super) fn new(record: MachineRecord, upstream: Option<Arc<Upstream>>) -> Self {
        let cache = ProofCache { kids: record.proof_kids.clone(), proofs: Vec::new() };
        Self { record, upstream, cache: Mutex::new(cache) }
    }

    /// Updates the keys that the host has acknowledged; later proofs use them.
    pub(super) fn update_acknowledged_keys(&self, kids: Vec<String>) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.kids != kids {
            *cache = ProofCache { kids, proofs: Vec::new() };
        }
    }

    /// Returns a proof for a request to this machine on behalf of its owner.
    pub(super) fn proof(
        &self,
        route: Route,
        app: Option<&str>,
        keys: &SigningSet,
        now: Timestamp,
    ) -> HeaderValue {
        let now = now.as_second();
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let ProofCache { kids, proofs } = &mut *cache;
        proofs.retain(|cached| (0..PROOF_REUSE_SECONDS).contains(&(now - cached.signed_at)));
        let cached = proofs.iter().find(|cached| cached.route == route && cached.app.as_deref() == app);
        if let Some(cached) = cached {
            return cached.header.clone();
        }
        let header = self.sign(route, app, keys.signer_for(kids), now);
        let app = app.map(str::to_owned);
        proofs.push(CachedProof { route, app, signed_at: now, header: header.clone() });
        header
    }

    fn sign(&self, route: Route, app: Option<&str>, signer: &Signer, now: i64) -> HeaderValue {
        let claims = Claims {
            iss: ISSUER.to_owned(),
            aud: self.record.id,
            sub: self.record.user.clone(),
            handle: self.record.handle.clone(),
            slot: self.record.slot.clone(),
            route,
            app: app.map(str::to_owned),
            method: None,
            path: None,
            jti: None,
            iat: now,
            exp: now + MAX_LIFETIME_SECONDS,
        };
        let token = signer.sign(&claims);
        let mut header = HeaderValue::from_str(&token).expect("a JWT is base64url and dots");
        header.set_sensitive(true);
        header
    }
}

impl Upstream {
    /// Creates an upstream without connections, which are opened on demand.
    ///
    /// # Errors
    /// If the crypto provider supports none of the required TLS versions.
    pub(super) fn new(id: MachineId, endpoint: Endpoint, trust: &HostTrust) -> anyhow::Result<Self> {
        let mut config = trust.client_config(endpoint.pin, endpoint.chain_required_from)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let name = trust.server_name(id, endpoint.ip);
        let dial = PinnedDialer { endpoint, name, connector: TlsConnector::from(Arc::new(config)) };
        Ok(Self { endpoint, proxy: Proxy::new(dial, ProxyLimits::default()) })
    }
}

struct PinnedDialer {
    endpoint: Endpoint,
    name: ServerName<'static>,
    connector: TlsConnector,
}

#[async_trait]
impl Dial for PinnedDialer {
    async fn dial(&self) -> std::io::Result<Box<dyn Io>> {
        let Endpoint { ip, port, .. } = self.endpoint;
        let stream = TcpStream::connect(SocketAddr::from((ip, port))).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(self.connector.connect(self.name.clone(), stream).await?))
    }
}

//! A server certificate that can be replaced without a restart, and the responses to the certificate authority's
//! TLS-ALPN-01 challenges (RFC 8737).

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use anyhow::Context;
use jiff::Timestamp;
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, KeyPair};
use rustls::ServerConfig;
use rustls::client::verify_server_name;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ClientHello, ParsedCertificate, ResolvesServerCert};
use rustls::sign::{CertifiedKey, SigningKey};

use super::tls::{ChainVerifier, Identity, SpkiPin, provider};

/// The ALPN protocol for a TLS-ALPN-01 challenge.
pub const ACME_ALPN: &[u8] = b"acme-tls/1";

/// Maximum size of a PEM certificate chain.
pub const MAX_CHAIN_BYTES: usize = 64 << 10;

/// The reason a certificate chain cannot be used. Each message completes the sentence "the certificate chain …".
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    #[error("is larger than {MAX_CHAIN_BYTES} bytes")]
    TooLarge,
    #[error("contains no PEM certificate")]
    NoCertificate,
    #[error("contains a certificate that cannot be parsed")]
    Unreadable,
    #[error(
        "is for a different key: request the certificate with this machine's key (`svc-gateway certificate-request` prints the CSR)"
    )]
    WrongKey,
    #[error("is not for the name {0}")]
    WrongName(String),
    #[error("expired at {0}")]
    Expired(Timestamp),
    #[error("is not valid before {0}")]
    NotYetValid(Timestamp),
}

/// A certificate chain, leaf first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    certificates: Vec<CertificateDer<'static>>,
    pin: SpkiPin,
    not_before: Timestamp,
    not_after: Timestamp,
}

impl Chain {
    /// Parses a PEM chain. Does not check its key, names or validity period.
    ///
    /// # Errors
    /// `TooLarge` if the text is longer than [`MAX_CHAIN_BYTES`]; `NoCertificate` if it is not PEM or contains no
    /// certificate; `Unreadable` if the leaf certificate cannot be parsed.
    pub fn from_pem(pem: &[u8]) -> Result<Self, ChainError> {
        if pem.len() > MAX_CHAIN_BYTES {
            return Err(ChainError::TooLarge);
        }
        let certificates = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
        let certificates = certificates.map_err(|_| ChainError::NoCertificate)?;
        let leaf = certificates.first().ok_or(ChainError::NoCertificate)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(leaf).map_err(|_| ChainError::Unreadable)?;
        let time = |seconds: i64| Timestamp::from_second(seconds).map_err(|_| ChainError::Unreadable);
        let validity = parsed.validity();
        let (not_before, not_after) =
            (time(validity.not_before.timestamp())?, time(validity.not_after.timestamp())?);
        let pin = SpkiPin::of_certificate(leaf).map_err(|_| ChainError::Unreadable)?;
        Ok(Self { certificates, pin, not_before, not_after })
    }

    pub fn not_before(&self) -> Timestamp {
        self.not_before
    }

    pub fn not_after(&self) -> Timestamp {
        self.not_after
    }

    /// Checks that a server with this key may present the chain for this name now.
    ///
    /// # Errors
    /// `WrongKey`, `WrongName`, `Expired` or `NotYetValid`, for the first check that fails.
    pub fn check(&self, pin: SpkiPin, name: &str, now: Timestamp) -> Result<(), ChainError> {
        self.check_key(pin)?;
        if !self.is_valid_for(name) {
            return Err(ChainError::WrongName(name.to_owned()));
        }
        if now >= self.not_after {
            return Err(ChainError::Expired(self.not_after));
        }
        if now < self.not_before {
            return Err(ChainError::NotYetValid(self.not_before));
        }
        Ok(())
    }

    /// Checks that the chain is for this key.
    ///
    /// # Errors
    /// [`ChainError::WrongKey`] if it is for a different key.
    pub fn check_key(&self, pin: SpkiPin) -> Result<(), ChainError> {
        if self.pin == pin { Ok(()) } else { Err(ChainError::WrongKey) }
    }

    fn is_valid_for(&self, name: &str) -> bool {
        let (Some(leaf), Ok(name)) = (self.certificates.first(), ServerName::try_from(name)) else {
            return false;
        };
        ParsedCertificate::try_from(leaf).is_ok_and(|leaf| verify_server_name(&leaf, &name).is_ok())
    }

    /// Checks that a client with the verifier's roots accepts the chain for this name at this time.
    ///
    /// # Errors
    /// A message that says why the client would reject the chain.
    pub fn verify(&self, verifier: &ChainVerifier, name: &str, at: Timestamp) -> Result<(), String> {
        let server = ServerName::try_from(name).map_err(|error| error.to_string())?;
        let seconds = u64::try_from(at.as_second()).unwrap_or_default();
        let at = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        verifier.verify(&self.certificates, &server, at).map_err(|error| error.to_string())
    }
}

/// The certificate that a server presents, and the response to a challenge, if one is in progress. The certificate's
/// key never changes.
pub struct CertificateResolver {
    key: Arc<dyn SigningKey>,
    current: RwLock<Arc<CertifiedKey>>,
    challenge: RwLock<Option<Challenge>>,
}

struct Challenge {
    name: String,
    certificate: Arc<CertifiedKey>,
}

impl CertificateResolver {
    /// Creates a resolver that presents the identity's certificate.
    ///
    /// # Errors
    /// If the certificate or the key cannot be parsed, or they do not match.
    pub fn new(identity: &Identity) -> anyhow::Result<Arc<Self>> {
        // The PEM error could quote the key, so it is dropped.
        let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes())
            .map_err(|_| anyhow::anyhow!("the private key is not PEM"))?;
        let key = any_supported_type(&key).context("cannot read the private key")?;
        let chain = Chain::from_pem(identity.cert_pem.as_bytes()).context("cannot read the certificate")?;
        let current = CertifiedKey::new(chain.certificates, Arc::clone(&key));
        current.keys_match().context("cannot confirm that the certificate matches the private key")?;
        let current = RwLock::new(Arc::new(current));
        Ok(Arc::new(Self { key, current, challenge: RwLock::default() }))
    }

    /// Presents this chain to new connections. The chain must be for the same key: see [`Chain::check`].
    pub fn present(&self, chain: Chain) {
        let certified = CertifiedKey::new(chain.certificates, Arc::clone(&self.key));
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(certified);
    }

    /// Responds to challenges for this name until the guard is dropped. A later call replaces an earlier call's
    /// response.
    ///
    /// # Errors
    /// If the certificate cannot be created.
    pub fn respond_to_challenge(
        self: &Arc<Self>,
        name: &str,
        key_authorization_digest: &[u8],
    ) -> anyhow::Result<ChallengeGuard> {
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        params.custom_extensions = vec![CustomExtension::new_acme_identifier(key_authorization_digest)];
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        let signing_key = any_supported_type(&PrivateKeyDer::Pkcs8(key.serialize_der().into()))?;
        let certificate = Arc::new(CertifiedKey::new(vec![certificate.der().clone()], signing_key));
        let challenge = Challenge { name: name.to_owned(), certificate };
        *self.challenge.write().unwrap_or_else(PoisonError::into_inner) = Some(challenge);
        Ok(ChallengeGuard(Arc::clone(self)))
    }

    /// Returns a server configuration for HTTP/1.1 and challenges.
    ///
    /// # Errors
    /// If the crypto provider does not support the default TLS versions.
    pub fn server_config(self: &Arc<Self>) -> anyhow::Result<ServerConfig> {
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(self) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"http/1.1".to_vec(), ACME_ALPN.to_vec()];
        Ok(config)
    }
}

/// Dropping the guard ends the response to the challenge, even if a later call of
/// [`CertificateResolver::respond_to_challenge`] has replaced that response.
pub struct ChallengeGuard(Arc<CertificateResolver>);

impl Drop for ChallengeGuard {
    fn drop(&mut self) {
        *self.0.challenge.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl fmt::Debug for CertificateResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CertificateResolver")
    }
}

impl ResolvesServerCert for CertificateResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let is_challenge =
            hello.alpn().is_some_and(|mut offered| offered.any(|protocol| protocol == ACME_ALPN));
        if !is_challenge {
            return Some(Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner)));
        }
        // The handshake fails if no challenge is in progress, or if it is for a different name.
        let challenge = self.challenge.read().unwrap_or_else(PoisonError::into_inner);
        let challenge = challenge.as_ref()?;
        let matches_name = hello.server_name().is_some_and(|name| name.eq_ignore_ascii_case(&challenge.name));
        matches_name.then(|| Arc::clone(&challenge.certificate))
    }
}

/// Creates a signing request for a certificate with this name and key.
///
/// # Errors
/// If the key cannot be parsed, or the name is invalid.
pub fn create_signing_request(name: &str, key_pem: &str) -> anyhow::Result<SigningRequest> {
    let key = KeyPair::from_pem(key_pem).map_err(|_| anyhow::anyhow!("the private key cannot be parsed"))?;
    let mut params = CertificateParams::new(vec![name.to_owned()])?;
    params.distinguished_name = DistinguishedName::new();
    let request = params.serialize_request(&key)?;
    Ok(SigningRequest { pem: request.pem()?, der: request.der().to_vec() })
}

/// A certificate signing request.
pub struct SigningRequest {
    pub pem: String,
    pub der: Vec<u8>,
}

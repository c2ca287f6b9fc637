//! TLS with rustls and ring: the process-wide crypto provider, self-signed certificates, and verification by pinned
//! key.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::vars;
use anyhow::{Context, ensure};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use sha2::{Digest, Sha256};

/// SHA-256 of a certificate's SubjectPublicKeyInfo in DER (RFC 7469, section 2.4); hex on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpkiPin(pub [u8; 32]);

impl SpkiPin {
    /// # Errors
    /// If `cert` is not a certificate.
    pub fn of_certificate(cert: &CertificateDer<'_>) -> Result<Self, rustls::Error> {
        let (_, parsed) = x509_parser::parse_x509_certificate(cert)
            .map_err(|_| rustls::Error::InvalidCertificate(rustls::CertificateError::BadEncoding))?;
        Ok(Self(Sha256::digest(parsed.tbs_certificate.subject_pki.raw).into()))
    }
}

impl fmt::Display for SpkiPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for SpkiPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for SpkiPin {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut pin = [0; 32];
        hex::decode_to_slice(text, &mut pin).map_err(|_| "must be 64 hexadecimal digits")?;
        Ok(Self(pin))
    }
}

/// Makes ring the process-wide crypto provider. Later calls have no effect.
pub fn install_provider() {
    let _ = ring::default_provider().install_default();
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Loads the public root certificates and, if `SSL_CERT_FILE` is set, those in the PEM file that it names.
///
/// # Errors
/// If that file cannot be read, contains malformed PEM, or has no usable certificate.
pub fn load_roots() -> anyhow::Result<RootCertStore> {
    load_roots_with(vars::SSL_CERT_FILE.env_value().map(PathBuf::from))
}

fn load_roots_with(file: Option<PathBuf>) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    if let Some(path) = file {
        let pem = std::fs::read(&path).map_err(anyhow::Error::from);
        pem.and_then(|pem| add_roots(&mut roots, &pem)).with_context(|| {
            format!("cannot read the root certificates in {} (SSL_CERT_FILE)", path.display())
        })?;
    }
    Ok(roots)
}

/// Adds the certificates of `SSL_CERT_FILE`. Like other programs, ignores those that cannot be used.
///
/// # Errors
/// If it contains malformed PEM, or no certificate can be used.
fn add_roots(roots: &mut RootCertStore, pem: &[u8]) -> anyhow::Result<()> {
    let certs = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>()?;
    let (added, ignored) = roots.add_parsable_certificates(certs);
    // A DER file also fails here, because it contains no PEM section.
    ensure!(added > 0, "it has no usable certificate in PEM");
    if ignored > 0 {
        tracing::warn!(ignored, "ignored certificates in SSL_CERT_FILE that cannot be used");
    }
    Ok(())
}

/// Returns a client configuration with ordinary chain verification.
///
/// # Errors
/// If the root certificates cannot be loaded, or the crypto provider does not support TLS.
pub fn client_config() -> anyhow::Result<ClientConfig> {
    Ok(ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(load_roots()?)
        .with_no_client_auth())
}

/// Verifies certificate chains against the trusted roots, which are read once.
#[derive(Debug, Clone)]
pub struct ChainVerifier(Arc<WebPkiServerVerifier>);

impl ChainVerifier {
    /// Trusts the public roots and, if `file` (the value of `SSL_CERT_FILE`) is set, those in that file.
    ///
    /// # Errors
    /// If the file cannot be read, contains malformed PEM, or has no usable certificate.
    pub fn new(file: Option<PathBuf>) -> anyhow::Result<Self> {
        let roots = Arc::new(load_roots_with(file)?);
        Ok(Self(WebPkiServerVerifier::builder_with_provider(roots, provider()).build()?))
    }

    /// Verifies a chain (leaf first) for a server name at this time.
    ///
    /// # Errors
    /// The reason a client with these roots would reject the chain.
    pub fn verify(
        &self,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        at: UnixTime,
    ) -> Result<(), rustls::Error> {
        let empty_chain = rustls::Error::InvalidCertificate(rustls::CertificateError::BadEncoding);
        let (leaf, intermediates) = chain.split_first().ok_or(empty_chain)?;
        self.0.verify_server_cert(leaf, intermediates, name, &[], at).map(drop)
    }
}

/// Whether a pinned certificate must also chain to a trusted root (`CUSTOMER_VPS_TLS_VERIFY`).
#[derive(Debug, Clone)]
pub enum ChainCheck {
    PinOnly,
    /// From the time `from`, also checks the chain; until then, the pin is enough.
    PinAndChain {
        verifier: ChainVerifier,
        from: UnixTime,
    },
}

/// Returns a client configuration that accepts only a server with the pinned key.
///
/// # Errors
/// If the crypto provider does not support TLS.
pub fn pinned_client_config(pin: SpkiPin, check: ChainCheck) -> anyhow::Result<ClientConfig> {
    let algorithms = provider().signature_verification_algorithms;
    let checks_chain = matches!(check, ChainCheck::PinAndChain { .. });
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinVerifier { pin, check, algorithms }))
        .with_no_client_auth();
    config.resumption = if checks_chain {
        // A resumed session could outlive the certificate that was verified for it.
        Resumption::disabled()
    } else {
        // There is one server for each pin.
        Resumption::in_memory_sessions(1)
    };
    Ok(config)
}

/// Compares the server's key with the pin, and verifies the handshake signature so that a copied certificate is
/// rejected.
#[derive(Debug)]
struct PinVerifier {
    pin: SpkiPin,
    check: ChainCheck,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for PinVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if SpkiPin::of_certificate(end_entity)? != self.pin {
            return Err(rustls::Error::General("the server's key is not the pinned one".to_owned()));
        }
        match &self.check {
            ChainCheck::PinAndChain { verifier, from } if now >= *from => {
                verifier.0.verify_server_cert(end_entity, intermediates, server_name, ocsp, now)
            }
            ChainCheck::PinAndChain { .. } | ChainCheck::PinOnly => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// A certificate chain and its key, both in PEM.
pub struct Identity {
    pub cert_pem: String,
    pub key_pem: String,
}

/// Generates a key and a self-signed certificate for the given names or addresses.
///
/// # Errors
/// If a name is invalid, or the key cannot be generated.
pub fn generate_self_signed(names: &[String]) -> Result<Identity, rcgen::Error> {
    let generated = rcgen::generate_simple_self_signed(names)?;
    Ok(Identity { cert_pem: generated.cert.pem(), key_pem: generated.signing_key.serialize_pem() })
}

impl Identity {
    /// # Errors
    /// If a file cannot be read.
    pub fn read(cert: &Path, key: &Path) -> io::Result<Self> {
        Ok(Self { cert_pem: std::fs::read_to_string(cert)?, key_pem: std::fs::read_to_string(key)? })
    }

    /// # Errors
    /// If the PEM contains no certificate, or an invalid one.
    pub fn pin(&self) -> anyhow::Result<SpkiPin> {
        let cert = CertificateDer::from_pem_slice(self.cert_pem.as_bytes())
            .context("cannot read the certificate")?;
        Ok(SpkiPin::of_certificate(&cert)?)
    }

    /// Returns a server configuration for HTTP/1.1.
    ///
    /// # Errors
    /// If the certificate or key is invalid, or they do not match.
    pub fn server_config(&self) -> anyhow::Result<ServerConfig> {
        let chain = CertificateDer::pem_slice_iter(self.cert_pem.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .context("cannot read the certificate chain")?;
        // The PEM error could quote the key, so it is dropped.
        let key = PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes())
            .map_err(|_| anyhow::anyhow!("the private key is not PEM"))?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn add_roots_refuses_file_without_usable_certificate() {
        let mut roots = RootCertStore::empty();
        let pem = generate_self_signed(&["localhost".to_owned()]).unwrap().cert_pem;
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let trusted = pem.replace("CERTIFICATE", "TRUSTED CERTIFICATE");
        let damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for content in [&der[..], trusted.as_bytes(), damaged.as_bytes(), b""] {
            let error = add_roots(&mut roots, content).unwrap_err().to_string();
            assert!(error.contains("no usable certificate"), "{error}");
        }
        add_roots(&mut roots, format!("{damaged}{pem}").as_bytes()).unwrap();
        assert_eq!(roots.len(), 1);
    }
}

//! A certificate authority for tests.
//!
//! ```no_run
//! # fn f() -> anyhow::Result<()> {
//! let ca = kit::ca::Ca::new()?;
//! let (certificate_pem, key_pem) = ca.issue(&["app.example.test", "*.example.test", "127.0.0.1"])?;
//! let trusted_root = ca.root_pem();
//! # Ok(()) }
//! ```

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// A self-signed root with an ECDSA P-256 key, which issues server certificates.
pub struct Ca {
    root: CertifiedIssuer<'static, KeyPair>,
}

impl Ca {
    pub fn new() -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, format!("kit test CA {}", uuid::Uuid::new_v4()));
        Ok(Self { root: CertifiedIssuer::self_signed(params, KeyPair::generate()?)? })
    }

    /// Issues a server certificate for these names and addresses. Returns the certificate, without the root, and its
    /// PKCS#8 key, both in PEM.
    pub fn issue(&self, names: &[&str]) -> Result<(String, String)> {
        let key = KeyPair::generate()?;
        Ok((self.certify(names, &key, None)?, key.serialize_pem()))
    }

    /// Issues a server certificate for an existing key, valid from an hour ago until `lifetime` from now.
    pub fn issue_for(&self, names: &[&str], key_pem: &str, lifetime: jiff::SignedDuration) -> Result<String> {
        self.certify(names, &KeyPair::from_pem(key_pem)?, Some(lifetime))
    }

    fn certify(
        &self,
        names: &[&str],
        key: &KeyPair,
        lifetime: Option<jiff::SignedDuration>,
    ) -> Result<String> {
        let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        params.distinguished_name.push(DnType::CommonName, names.first().copied().unwrap_or("kit"));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        if let Some(lifetime) = lifetime {
            let now = std::time::SystemTime::now();
            params.not_before = (now - std::time::Duration::from_secs(3600)).into();
            let end = jiff::Timestamp::try_from(now)? + lifetime;
            params.not_after = std::time::SystemTime::from(end).into();
        }
        Ok(params.signed_by(key, &self.root)?.pem())
    }

    /// Returns the root certificate in PEM.
    pub fn root_pem(&self) -> String {
        self.root.pem()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, RootCertStore, ServerConfig};
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    /// Whether a client that trusts `trusted` and connects to `name` accepts a certificate that `issuer` issued for
    /// `names`.
    async fn accepts(issuer: &Ca, names: &[&str], trusted: &Ca, name: &str) -> Result<bool> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let (certificate, key) = issuer.issue(names)?;
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(
                vec![CertificateDer::from_pem_slice(certificate.as_bytes())?],
                PrivateKeyDer::from_pem_slice(key.as_bytes())?,
            )?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(trusted.root_pem().as_bytes())?)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let (client_side, server_side) = tokio::io::duplex(64 * 1024);
        let server_task = tokio::spawn(TlsAcceptor::from(Arc::new(server)).accept(server_side));
        let connected = TlsConnector::from(Arc::new(client))
            .connect(ServerName::try_from(name.to_owned())?, client_side)
            .await
            .is_ok();
        server_task.await?.ok();
        Ok(connected)
    }

    #[tokio::test]
    async fn client_accepts_only_matching_root_and_name() -> Result<()> {
        let (ca, unrelated_ca) = (Ca::new()?, Ca::new()?);
        let names = ["app.example.test", "*.code.test", "127.0.0.7"];
        for name in ["app.example.test", "one.code.test", "127.0.0.7"] {
            assert!(accepts(&ca, &names, &ca, name).await?, "{name}");
        }
        assert!(!accepts(&ca, &names, &ca, "elsewhere.test").await?, "a different name");
        assert!(!accepts(&ca, &names, &ca, "127.0.0.8").await?, "a different address");
        assert!(!accepts(&ca, &names, &unrelated_ca, "app.example.test").await?, "a different root");
        Ok(())
    }
}

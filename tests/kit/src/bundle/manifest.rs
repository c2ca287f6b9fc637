//! A bundle's signed manifest: `….tar.gz.json`, and `….tar.gz.json.sig` with Ed25519 signatures.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp};
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use serde::Serialize;
use sha2::{Digest, Sha256};

/// Prefix of the signed bytes, for domain separation.
const CONTEXT: &[u8] = b"svc-host-bundle-manifest-v1\n";

/// The fields of the file, in order.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub version: u32,
    pub image_version: String,
    pub sha256: String,
    pub size_bytes: u64,
    /// The oldest release that can update to this one; `None` allows all.
    pub min_version: Option<String>,
    pub created_at: String,
    pub expires_at: String,
    /// Keys that hosts trust once this release is healthy on them; `None` keeps the current set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trusted_keys: Option<KeySet>,
    /// Parts of earlier releases that this one removes on purpose.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub removes: Vec<String>,
}

/// Keys that hosts trust, with the sequence number of the set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeySet {
    pub sequence: u32,
    /// Raw Ed25519 keys in base64.
    pub keys: Vec<String>,
}

impl Manifest {
    /// Renders the file: one JSON object and a newline.
    pub fn render(&self) -> Result<String> {
        Ok(format!("{}\n", serde_json::to_string(self)?))
    }
}

/// Formats a time as in a manifest.
pub fn format_time(time: Timestamp) -> String {
    format!("{time:.3}")
}

pub fn add_days(time: Timestamp, days: u32) -> Result<Timestamp> {
    Ok(time.checked_add(SignedDuration::from_hours(24 * i64::from(days)))?)
}

/// A private key that signs manifests.
pub struct SigningKey {
    pair: Ed25519KeyPair,
}

impl SigningKey {
    /// Reads a key file created by `openssl genpkey -algorithm ed25519`.
    pub fn read(path: &Path) -> Result<Self> {
        let pem = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::from_pem(&pem)
            .with_context(|| format!("{} is not an Ed25519 key in PKCS#8 PEM", path.display()))
    }

    pub fn from_pem(pem: &[u8]) -> Result<Self> {
        let der = PrivatePkcs8KeyDer::from_pem_slice(pem).map_err(|error| anyhow!("{error}"))?;
        // OpenSSL omits the public key, which `from_pkcs8` requires.
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der.secret_pkcs8_der())
            .map_err(|error| anyhow!("{error}"))?;
        Ok(Self { pair })
    }

    pub fn public_key(&self) -> &[u8] {
        self.pair.public_key().as_ref()
    }

    /// Returns the public key in the format that `BUNDLE_PUBLIC_KEYS` uses.
    pub fn public_key_base64(&self) -> String {
        STANDARD.encode(self.public_key())
    }

    /// Returns the first 16 hexadecimal digits of the public key's SHA-256.
    pub fn id(&self) -> String {
        hex::encode(Sha256::digest(self.public_key()))[..16].to_owned()
    }

    /// Returns the `.sig` file's line for a manifest.
    pub fn signature_line(&self, manifest: &[u8]) -> String {
        let signature = self.pair.sign(&[CONTEXT, manifest].concat());
        format!("{} {}\n", self.id(), STANDARD.encode(signature.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &[u8] = include_bytes!("ed25519-test-only.txt");

    fn sample() -> Manifest {
        Manifest {
            version: 1,
            image_version: "1.4.0".to_owned(),
            sha256: "a".repeat(64),
            size_bytes: 123,
            min_version: None,
            created_at: "2026-01-02T03:04:05.000Z".to_owned(),
            expires_at: "2027-01-02T03:04:05.000Z".to_owned(),
            trusted_keys: None,
            removes: Vec::new(),
        }
    }

    #[test]
    fn render_returns_one_json_line() {
        assert_eq!(
            sample().render().unwrap(),
            format!(
                "{{\"version\":1,\"imageVersion\":\"1.4.0\",\"sha256\":\"{}\",\"sizeBytes\":123,\"minVersion\":null,\
                 \"createdAt\":\"2026-01-02T03:04:05.000Z\",\"expiresAt\":\"2027-01-02T03:04:05.000Z\"}}\n",
                "a".repeat(64)
            )
        );
    }

    /// The expected values are from OpenSSL 3: `openssl genpkey -algorithm ed25519`, `openssl pkey -pubout -outform DER
    /// | tail -c 32`, and `openssl pkeyutl -sign -rawin -inkey KEY -in FILE` over the context line and the sample
    /// above.
    #[test]
    fn signature_matches_openssl() {
        let key = SigningKey::from_pem(KEY).unwrap();
        assert_eq!(key.public_key_base64(), "WtxURLNJAYCP61tmwP8WL0BM8LhargbjuIxJwP8EXW0=");
        assert_eq!(key.id(), "63617f15e8f62763");
        let line = key.signature_line(sample().render().unwrap().as_bytes());
        assert_eq!(
            line,
            "63617f15e8f62763 HJqXtA2WYqLrBxqMnPlvM321AIBiOSkq1lhFZ015Pb03KkaeWrP2ZLuQ8pFNgi3o5K5l6u/Md9VAprijzqokAw==\n"
        );
    }

    #[test]
    fn from_pem_rejects_malformed_keys() {
        assert!(
            SigningKey::from_pem(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n").is_err()
        );
        assert!(SigningKey::from_pem(b"").is_err());
    }
}

//! The issuer's keys: the current key for each algorithm, and older keys that are still published.

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ring::rand::SystemRandom;
use ring::rsa::PublicKeyComponents;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256, RsaKeyPair,
};
use serde_json::{Value, json};

/// One of the issuer's signature algorithms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Alg {
    EdDsa,
    Es256,
    /// The algorithm that most identity providers use for sessions.
    #[default]
    Rs256,
}

impl Alg {
    pub const ALL: [Self; 3] = [Self::EdDsa, Self::Es256, Self::Rs256];

    /// Returns the name used in a token's header.
    pub fn name(self) -> &'static str {
        match self {
            Self::EdDsa => "EdDSA",
            Self::Es256 => "ES256",
            Self::Rs256 => "RS256",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|alg| alg.name() == name)
    }
}

pub(super) struct Key {
    pub(super) kid: String,
    pub(super) alg: Alg,
    signer: Signer,
}

enum Signer {
    Ed25519(Ed25519KeyPair),
    P256(EcdsaKeyPair),
    Rsa(Box<RsaKeyPair>),
}

/// Keys, newest first.
#[derive(Default)]
pub(super) struct KeySet(Vec<Key>);

impl KeySet {
    pub(super) fn generate() -> Result<Self> {
        Ok(Self(Alg::ALL.into_iter().map(Key::generate).collect::<Result<_>>()?))
    }

    pub(super) fn followed_by(mut self, older: Self) -> Self {
        self.0.extend(older.0);
        self
    }

    pub(super) fn current(&self, alg: Alg) -> &Key {
        self.0.iter().find(|key| key.alg == alg).expect("a set has a key for each algorithm")
    }

    /// Returns the JWKS (RFC 7517).
    pub(super) fn jwks(&self) -> Value {
        json!({ "keys": self.0.iter().map(Key::jwk).collect::<Vec<_>>() })
    }
}

impl Key {
    fn generate(alg: Alg) -> Result<Self> {
        let random = SystemRandom::new();
        let signer = match alg {
            Alg::EdDsa => {
                let key = Ed25519KeyPair::generate_pkcs8(&random)?;
                Signer::Ed25519(Ed25519KeyPair::from_pkcs8(key.as_ref())?)
            }
            Alg::Es256 => {
                let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
                let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random)?;
                Signer::P256(EcdsaKeyPair::from_pkcs8(algorithm, key.as_ref(), &random)?)
            }
            Alg::Rs256 => {
                // ring cannot generate RSA keys.
                let key: String = include_str!("rsa-test-only.txt").lines().skip(1).collect();
                Signer::Rsa(Box::new(
                    RsaKeyPair::from_pkcs8(&STANDARD.decode(key)?)
                        .context("cannot parse the test RSA key")?,
                ))
            }
        };
        let kid = format!("{}-{}", alg.name().to_lowercase(), uuid::Uuid::new_v4().simple());
        Ok(Self { kid, alg, signer })
    }

    pub(super) fn sign(&self, message: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match &self.signer {
            Signer::Ed25519(key) => key.sign(message).as_ref().to_vec(),
            Signer::P256(key) => {
                key.sign(&random, message).expect("the P-256 key can sign").as_ref().to_vec()
            }
            Signer::Rsa(key) => {
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &random, message, &mut signature)
                    .expect("the buffer has the modulus length");
                signature
            }
        }
    }

    /// Returns the public key's bytes, which a faulty verifier could use as an HMAC secret.
    pub(super) fn public_bytes(&self) -> &[u8] {
        match &self.signer {
            Signer::Ed25519(key) => key.public_key().as_ref(),
            Signer::P256(key) => key.public_key().as_ref(),
            Signer::Rsa(key) => key.public().as_ref(),
        }
    }

    fn jwk(&self) -> Value {
        let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let (kid, alg) = (&self.kid, self.alg.name());
        match &self.signer {
            Signer::Ed25519(key) => {
                let x = encode(key.public_key().as_ref());
                json!({ "kty": "OKP", "crv": "Ed25519", "use": "sig", "alg": alg, "kid": kid, "x": x })
            }
            Signer::P256(key) => {
                // An uncompressed point: 0x04, x, y.
                let (x, y) = key.public_key().as_ref()[1..].split_at(32);
                let (x, y) = (encode(x), encode(y));
                json!({ "kty": "EC", "crv": "P-256", "use": "sig", "alg": alg, "kid": kid, "x": x, "y": y })
            }
            Signer::Rsa(key) => {
                let public = PublicKeyComponents::<Vec<u8>>::from(key.public());
                let (n, e) = (encode(&public.n), encode(&public.e));
                json!({ "kty": "RSA", "use": "sig", "alg": alg, "kid": kid, "n": n, "e": e })
            }
        }
    }
}

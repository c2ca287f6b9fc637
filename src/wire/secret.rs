//! Serializes secrets in plaintext, for fields whose `Debug` output stays redacted.

use secrecy::{ExposeSecret, SecretString};
use serde::Serializer;

/// Serializes a secret as a string.
pub fn expose<S: Serializer>(secret: &SecretString, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(secret.expose_secret())
}

/// Serializes a secret as a string, and `None` as `null`.
pub fn expose_option<S: Serializer>(secret: &Option<SecretString>, out: S) -> Result<S::Ok, S::Error> {
    match secret {
        Some(secret) => expose(secret, out),
        None => out.serialize_none(),
    }
}

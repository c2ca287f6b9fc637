//! Release authenticity: the manifest and its signature lines.

use std::sync::LazyLock;

use jiff::Timestamp;
use kit::bundle::SigningKey;
use proptest::prelude::*;
use svc::store::bundle::{
    KeySet, Manifest, SignedManifest, TrustedKeys, parse_digest, parse_signatures, verify,
};

use super::Target;

const VERSION: &str = "2026.11.21-1";
const NOW: &str = "2026-12-01T00:00:00Z";
const MANIFEST: &str = "{\"version\":1,\"imageVersion\":\"2026.11.21-1\",\
    \"sha256\":\"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\",\"sizeBytes\":7,\
    \"minVersion\":null,\"createdAt\":\"2026-11-21T00:00:00.000Z\",\"expiresAt\":\"2027-11-21T00:00:00.000Z\"}\n";

struct Publisher {
    key: SigningKey,
    trusted: TrustedKeys,
    /// The publisher's signature line for [`MANIFEST`].
    signature_line: String,
}

static PUBLISHER: LazyLock<Publisher> = LazyLock::new(|| {
    let key = SigningKey::from_pem(include_bytes!("../../kit/src/bundle/ed25519-test-only.txt"))
        .expect("the key is valid");
    let trusted = key.public_key_base64().parse().expect("the key is valid");
    let signature_line = key.signature_line(MANIFEST.as_bytes());
    Publisher { key, trusted, signature_line }
});

fn now() -> Timestamp {
    NOW.parse().expect("the time is valid")
}

fn accept(manifest: &[u8], signature: &[u8]) -> Option<Manifest> {
    let signed = SignedManifest { manifest: manifest.to_vec(), signature: signature.to_vec() };
    let version = VERSION.parse().expect("the version is valid");
    verify(&signed, &PUBLISHER.trusted, &version, now()).ok().map(|verified| verified.manifest().clone())
}

pub fn manifest() -> Target {
    Target {
        name: "manifest",
        valid: manifests().boxed(),
        check_any: check_any_manifest,
        check_valid: check_valid_manifest,
        cases: 800,
    }
}

fn manifests() -> impl Strategy<Value = Vec<u8>> {
    let version = || "[0-9]{1,4}(\\.[0-9a-z]{1,3}){0,3}";
    let created_ms = 1_767_323_045_678..1_800_000_000_000_i64;
    let sequence = prop::option::of(1..=u32::MAX);
    let lifetime_ms = 0..4_000_000_000_000_i64;
    (any::<[u8; 32]>(), any::<u64>(), prop::option::of(version()), created_ms, lifetime_ms, sequence)
        .prop_map(|(digest, size_bytes, min_version, created_ms, lifetime_ms, sequence)| {
            let timestamp = |millis| Timestamp::from_millisecond(millis).expect("the time is in range");
            let manifest = Manifest {
                version: 1,
                image_version: VERSION.parse().expect("the version is valid"),
                sha256: hex::encode(digest),
                size_bytes,
                min_version: min_version.map(|text| text.parse().expect("the version is valid")),
                created_at: timestamp(created_ms),
                // At least 1 ms after `NOW`.
                expires_at: timestamp(now().as_millisecond() + 1 + lifetime_ms),
                trusted_keys: sequence.map(|sequence| KeySet { sequence, keys: PUBLISHER.trusted.clone() }),
                removes: sequence.map(|sequence| format!("agents/{sequence}")).into_iter().collect(),
            };
            serde_json::to_vec(&manifest).expect("a manifest serializes to JSON")
        })
}

/// Checks that the rules hold even if the publisher signs arbitrary content, and that a signature is valid only for its
/// own manifest.
fn check_any_manifest(bytes: &[u8]) -> Result<(), String> {
    if bytes != MANIFEST.as_bytes() && accept(bytes, PUBLISHER.signature_line.as_bytes()).is_some() {
        return Err("a signature for a different manifest was accepted".to_owned());
    }
    let signature_line = PUBLISHER.key.signature_line(bytes);
    let Some(manifest) = accept(bytes, signature_line.as_bytes()) else { return Ok(()) };
    if manifest.version != 1 || manifest.image_version.as_str() != VERSION || manifest.expires_at <= now() {
        return Err(format!("{manifest:?} was accepted"));
    }
    if parse_digest(&manifest.sha256).as_deref() != Some(&*manifest.sha256) {
        return Err(format!("{:?} is not a SHA-256", manifest.sha256));
    }
    if let Some(set) = &manifest.trusted_keys
        && (set.sequence == 0 || !set.keys.ids().contains(&PUBLISHER.key.id()))
    {
        return Err(format!(
            "{set:?} was accepted with sequence 0, or without a signature by one of its keys"
        ));
    }
    manifest.min_version.as_ref().map_or(Ok(()), |version| check_version(version.as_str()))
}

/// Checks a version, which becomes a segment of paths and keys.
fn check_version(version: &str) -> Result<(), String> {
    let is_unsafe =
        version.contains('/') || version.contains("..") || version.starts_with('.') || version.is_empty();
    if is_unsafe { Err(format!("{version:?} was accepted as a version")) } else { Ok(()) }
}

fn check_valid_manifest(bytes: &[u8]) -> Result<(), String> {
    let signature_line = PUBLISHER.key.signature_line(bytes);
    let parsed = accept(bytes, signature_line.as_bytes()).ok_or("the manifest was rejected")?;
    let expected: Manifest = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if parsed == expected { Ok(()) } else { Err(format!("parsed as {parsed:?}")) }
}

pub fn signature() -> Target {
    Target {
        name: "signature",
        valid: signature_files().boxed(),
        check_any: check_any_signature,
        check_valid: check_valid_signature,
        cases: 800,
    }
}

/// Generates the publisher's line, with up to two lines from other publishers before it and after it.
fn signature_files() -> impl Strategy<Value = Vec<u8>> {
    use base64::Engine;
    let foreign_line = (any::<[u8; 8]>(), any::<[u8; 32]>(), any::<[u8; 32]>()).prop_map(|(id, r, s)| {
        let signature = base64::engine::general_purpose::STANDARD.encode([r, s].concat());
        format!("{} {signature}\n", hex::encode(id))
    });
    let foreign_lines = || prop::collection::vec(foreign_line.clone(), 0..3);
    (foreign_lines(), foreign_lines()).prop_map(|(before, after)| {
        [before.concat(), PUBLISHER.signature_line.clone(), after.concat()].concat().into_bytes()
    })
}

fn publisher_signature() -> (String, Vec<u8>) {
    parse_signatures(PUBLISHER.signature_line.as_bytes()).expect("the publisher's line is valid").remove(0)
}

/// Checks that a file is accepted only if it contains the publisher's own signature and no other signature by the same
/// key.
fn check_any_signature(bytes: &[u8]) -> Result<(), String> {
    let lines = parse_signatures(bytes).ok();
    for (id, signature) in lines.iter().flatten() {
        if id.len() != 16 || signature.len() != 64 {
            return Err(format!("{id} has a signature of {} bytes", signature.len()));
        }
    }
    if accept(MANIFEST.as_bytes(), bytes).is_none() {
        return Ok(());
    }
    let own = publisher_signature();
    let own_lines: Vec<_> = lines.iter().flatten().filter(|(id, _)| *id == own.0).collect();
    if own_lines.is_empty() || own_lines.iter().any(|line| **line != own) {
        return Err(
            "accepted without the publisher's signature, or with another signature by its key".to_owned()
        );
    }
    Ok(())
}

fn check_valid_signature(bytes: &[u8]) -> Result<(), String> {
    let lines = parse_signatures(bytes).map_err(|error| error.to_string())?;
    if lines.len() != bytes.iter().filter(|&&byte| byte == b'\n').count()
        || !lines.contains(&publisher_signature())
    {
        return Err(format!("parsed as {lines:?}"));
    }
    accept(MANIFEST.as_bytes(), bytes).map(|_| ()).ok_or_else(|| "the file was rejected".to_owned())
}

//! Finds registered secrets, and any text that looks like a secret.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD as B64, URL_SAFE_NO_PAD as B64URL};

/// Shorter secrets would match by accident.
const MIN_SECRET_BYTES: usize = 12;

/// The only locations in which a secret may appear: the secret, the location, and the reason.
pub const ALLOWED: [(&str, &str, &str); 1] =
    [("value of a row", "table of svc-", "the owner's rows are in the database of the owner's host")];

/// Searches text for registered secrets.
#[derive(Debug, Default)]
pub struct Detector {
    /// Each secret's encodings, by the secret's name.
    encodings: BTreeMap<String, Vec<String>>,
}

/// A secret that was found.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Leak {
    /// The secret's name, or the kind of text that looks like a secret.
    pub secret: String,
    pub location: String,
    /// Surrounding text, with the secret removed.
    pub context: String,
}

impl Detector {
    pub fn register(&mut self, name: impl Into<String>, value: &str) {
        let name = name.into();
        assert!(value.len() >= MIN_SECRET_BYTES, "{name} is too short to search for");
        let json_escaped = value.replace('/', "\\/");
        let url_encoded: String = url_encode(value);
        let mut encodings = vec![
            value.to_owned(),
            hex::encode(value),
            B64.encode(value).trim_end_matches('=').to_owned(),
            B64URL.encode(value),
            json_escaped,
            url_encoded,
        ];
        encodings.sort();
        encodings.dedup();
        self.encodings.entry(name).or_default().extend(encodings);
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.encodings.keys().map(String::as_str)
    }

    /// Finds registered secrets in all encodings, and text that looks like a secret.
    pub fn scan(&self, location: &str, text: &str) -> Vec<Leak> {
        let mut leaks = Vec::new();
        for (name, encodings) in &self.encodings {
            let found =
                encodings.iter().find_map(|encoded| text.find(encoded).map(|offset| (offset, encoded.len())));
            leaks.extend(found.map(|(offset, size)| describe_leak(name, location, text, offset, size)));
        }
        leaks.extend(
            find_secret_patterns(text)
                .into_iter()
                .map(|(name, offset, size)| describe_leak(name, location, text, offset, size)),
        );
        leaks.retain(|leak| {
            !ALLOWED
                .iter()
                .any(|(secret, location, _)| leak.secret == *secret && leak.location.contains(location))
        });
        leaks
    }
}

/// Finds signed JWTs, hosts' tokens, private keys, password verifiers, and URLs with a password. Returns the name,
/// offset and size of each.
fn find_secret_patterns(text: &str) -> Vec<(&'static str, usize, usize)> {
    let mut found = Vec::new();
    let is_token_char = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    for (offset, _) in text.match_indices("eyJ") {
        let token: &str = text[offset..].split(|c| !is_token_char(c)).next().unwrap_or_default();
        let parts: Vec<&str> = token.split('.').collect();
        if parts.len() == 3 && parts[1].starts_with("eyJ") && parts[2].len() >= 32 {
            found.push(("a JWT", offset, token.len()));
        }
    }
    for (prefix, name) in [("svcr_", "a registration token"), ("svcu_", "an upgrade token")] {
        for (offset, _) in text.match_indices(prefix) {
            let token = text[offset..].split(|c| !is_token_char(c)).next().unwrap_or_default();
            if token.len() >= 40 {
                found.push((name, offset, token.len()));
            }
        }
    }
    found.extend(text.find("PRIVATE KEY-----").map(|offset| ("a private key", offset, text.len() - offset)));
    found.extend(text.find("SCRAM-SHA-256$").map(|offset| ("a password verifier", offset, 140)));
    for (offset, scheme) in text.match_indices("postgres://") {
        let rest = &text[offset + scheme.len()..];
        let authority = rest.split(['/', ' ', '"', '\n']).next().unwrap_or_default();
        if authority.split_once('@').is_some_and(|(user, _)| user.contains(':')) {
            found.push(("a database password", offset, scheme.len() + authority.len()));
        }
    }
    found
}

fn describe_leak(secret: &str, location: &str, text: &str, offset: usize, size: usize) -> Leak {
    let size = size.min(text.len() - offset);
    let excerpt = |from: usize, to: usize| -> String {
        String::from_utf8_lossy(&text.as_bytes()[from..to]).replace('\n', " ")
    };
    let (before, after) = (offset.saturating_sub(80), (offset + size + 40).min(text.len()));
    let context = format!("{}[…]{}", excerpt(before, offset), excerpt(offset + size, after));
    Leak { secret: secret.to_owned(), location: location.to_owned(), context }
}

fn url_encode(value: &str) -> String {
    url::form_urlencoded::byte_serialize(value.as_bytes()).collect()
}

#[test]
fn detector_finds_secrets_in_every_encoding_and_by_pattern() {
    let mut detector = Detector::default();
    let secret = "a/known+secret==";
    detector.register("registered", secret);
    for text in [
        format!("x {secret} y"),
        format!("\\x{}", hex::encode(secret)),
        B64.encode(secret),
        B64URL.encode(secret),
        "a\\/known+secret==".to_owned(),
        "a%2Fknown%2Bsecret%3D%3D".to_owned(),
    ] {
        let leaks = detector.scan("log", &text);
        assert!(leaks.iter().any(|leak| leak.secret == "registered"), "{text}");
        assert!(!format!("{leaks:?}").contains(secret), "the leak exposes the secret");
    }
    let jwt = format!("eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJ1c2VyIn0.{}", "s".repeat(86));
    let token = format!("svcu_{}", "a".repeat(60));
    for text in [
        format!("proof={jwt}"),
        format!("token {token}"),
        "-----BEGIN PRIVATE KEY-----".to_owned(),
        "ALTER ROLE x PASSWORD 'SCRAM-SHA-256$4096:c2FsdA=='".to_owned(),
        "postgres://me:word@localhost/x".to_owned(),
    ] {
        assert_eq!(detector.scan("log", &text).len(), 1, "{text}");
    }
    for text in ["eyJ", "svcu_ and svcr_", "postgres://me@localhost/x", "an innocent line"] {
        assert_eq!(detector.scan("log", text), [], "{text}");
    }
}

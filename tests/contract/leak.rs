//! Finds text that an error response or page must not contain: secrets and internal details.

/// Lowercase substrings that no error response or page may contain.
const FORBIDDEN_SUBSTRINGS: [&str; 34] = [
    "svcu_",
    "svcr_",
    "svca_",
    "eyj",
    "bearer ey",
    "password",
    "select ",
    "insert into",
    "update user_",
    "delete from",
    "relation \"",
    "sqlstate",
    "postgres",
    "pg_",
    "deadpool",
    "hetzner",
    "simulator",
    "scripted",
    "amazonaws",
    "accessdenied",
    "nosuchkey",
    "s3://",
    "/tmp/",
    "/home/",
    "/opt/",
    "/var/",
    "/run/",
    ".rs:",
    "panicked",
    "reqwest",
    "hyper",
    "tokio",
    "os error",
    "connection refused",
];

/// Returns the first forbidden substring, secret or address that the text contains.
pub fn find_leak(text: &str, secrets: &[String]) -> Option<String> {
    // An owner may see the path of the home directory.
    let lower = text.to_lowercase().replace("/home/svc/home", "").replace("/home/svc", "");
    let word = FORBIDDEN_SUBSTRINGS.iter().find(|word| lower.contains(**word)).map(|word| (*word).to_owned());
    word.or_else(|| secrets.iter().find(|secret| text.contains(secret.as_str())).cloned())
        .or_else(|| find_address(text))
}

/// Returns the first IPv4 address in dotted form.
fn find_address(text: &str) -> Option<String> {
    let words = text.split(|c: char| !c.is_ascii_digit() && c != '.');
    let is_address = |word: &&str| {
        let parts: Vec<&str> = word.trim_matches('.').split('.').collect();
        parts.len() == 4 && parts.iter().all(|part| part.parse::<u8>().is_ok())
    };
    words.into_iter().find(is_address).map(str::to_owned)
}

#[test]
fn find_leak_detects_internals_and_secrets() {
    let secrets = ["hunter2".to_owned()];
    for bad in [
        "connect to 10.0.0.7:5432",
        "error in SELECT 1",
        "open /var/lib/svc/x",
        "the secret is hunter2.",
        "svcu_0190_1_abcd",
    ] {
        assert!(find_leak(bad, &secrets).is_some(), "{bad}");
    }
    for good in
        ["The machine is running, but must be failed.", "version 1.2.3", "at 2026-01-02T03:04:05.678Z"]
    {
        assert_eq!(find_leak(good, &secrets), None);
    }
}

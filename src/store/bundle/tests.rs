//! Tests for manifests signed by OpenSSL, and for each reason to reject one.

use proptest::prelude::*;

use super::*;

/// Created by `openssl genpkey -algorithm ed25519` and `openssl pkeyutl -sign -rawin`.
const KEY: &str = "SYI72Ti3RJxzEy9+gM7OSAARF8/NglUPYX3o0A/AaLQ=";
const OTHER_KEY: &str = "eORXKO6/E/hnhpWscq+rlYmslv94xGDwuVdmREQ7pMk=";
const SIGNATURE: &str = "614c4b637b092e93 zCISR8RHX0TRoNu5CRc4EvCgdXVdl87pP3jr4BV1nvqsp1Dy8ymK8iEpfHcWTsU7hvzFgPDbS0zPhw7Ut1avBw==\n";
const OTHER_SIGNATURE: &str = "9a7121682c555618 ZnjWP+ihYuRfUr1UkNJrEwj037njLJsHcqqVS9/fR7JaDrledN44poK+PIBfF7qM8TR6pgG1y0/GU2SDJ+1WAQ==\n";
const MANIFEST: &str = "{\"version\":1,\"imageVersion\":\"2026.11.21-1\",\"sha256\":\"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\",\"sizeBytes\":0,\"minVersion\":\"2026.1.0\",\"createdAt\":\"2026-11-21T00:00:00.000Z\",\"expiresAt\":\"2027-11-21T00:00:00.000Z\"}\n";

fn keys(text: &str) -> TrustedKeys {
    text.parse().unwrap()
}

fn check_at(
    manifest: &str,
    signature: &str,
    trusted: &TrustedKeys,
    now: &str,
) -> Result<VerifiedManifest, ManifestError> {
    let signed = SignedManifest { manifest: manifest.into(), signature: signature.into() };
    verify(&signed, trusted, &"2026.11.21-1".parse().unwrap(), now.parse().unwrap())
}

fn check(manifest: &str, signature: &str, trusted: &TrustedKeys) -> Result<VerifiedManifest, ManifestError> {
    check_at(manifest, signature, trusted, "2026-12-01T00:00:00Z")
}

#[test]
fn verify_accepts_a_manifest_signed_by_openssl() {
    let verified = check(MANIFEST, SIGNATURE, &keys(KEY)).unwrap();
    let manifest = verified.manifest();
    assert_eq!(manifest.min_version.as_ref().unwrap().as_str(), "2026.1.0");
    manifest.check_archive("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 0).unwrap();
    let both = format!("{OTHER_SIGNATURE}{SIGNATURE}");
    for trusted in [KEY.to_owned(), OTHER_KEY.to_owned(), format!("{OTHER_KEY}, {KEY}")] {
        check(MANIFEST, &both, &keys(&trusted)).unwrap();
    }
}

#[test]
fn verify_refuses_each_defect_with_its_own_error() {
    let trusted = keys(KEY);
    fn expect_refusal(manifest: &str, signature: &str, trusted: &TrustedKeys) -> ManifestError {
        check(manifest, signature, trusted).unwrap_err()
    }
    assert_eq!(expect_refusal(MANIFEST, SIGNATURE, &TrustedKeys::default()), ManifestError::NoKeys);
    let ids = vec!["9a7121682c555618".to_owned()];
    assert_eq!(expect_refusal(MANIFEST, OTHER_SIGNATURE, &trusted), ManifestError::UnknownKey { ids });
    let wrong = ManifestError::InvalidSignature { id: "614c4b637b092e93".to_owned() };
    assert_eq!(
        expect_refusal(&MANIFEST.replace("\"sizeBytes\":0", "\"sizeBytes\":1"), SIGNATURE, &trusted),
        wrong
    );
    // A valid signature does not make up for an invalid one from another trusted key.
    let swapped = format!("{SIGNATURE}{}", OTHER_SIGNATURE.replace("ZnjW", "znjW"));
    let error = expect_refusal(MANIFEST, &swapped, &keys(&format!("{KEY},{OTHER_KEY}")));
    assert_eq!(error, ManifestError::InvalidSignature { id: "9a7121682c555618".to_owned() });
    for malformed in ["", "\n", "614c4b637b092e93", "614c4b637b092e93 AAAA\n", &SIGNATURE.to_uppercase()] {
        assert_eq!(
            expect_refusal(MANIFEST, malformed, &trusted),
            ManifestError::MalformedSignature,
            "{malformed:?}"
        );
    }
    let expired = check_at(MANIFEST, SIGNATURE, &trusted, "2027-11-21T00:00:00Z").unwrap_err();
    assert!(matches!(expired, ManifestError::Expired { .. }));
    check_at(MANIFEST, SIGNATURE, &trusted, "2027-11-20T23:59:59Z").unwrap();
    let signed = SignedManifest { manifest: MANIFEST.into(), signature: SIGNATURE.into() };
    let other = verify(&signed, &trusted, &"2".parse().unwrap(), Timestamp::UNIX_EPOCH).unwrap_err();
    assert!(matches!(other, ManifestError::WrongVersion { .. }), "{other}");
    let manifest = Manifest::parse(MANIFEST.as_bytes()).unwrap();
    assert!(matches!(manifest.check_archive(&"0".repeat(64), 0), Err(ManifestError::WrongDigest { .. })));
    assert!(matches!(manifest.check_archive(&manifest.sha256, 1), Err(ManifestError::WrongSize { .. })));
    let newer = MANIFEST.replace("\"version\":1", "\"version\":2");
    assert_eq!(Manifest::parse(newer.as_bytes()), Err(ManifestError::WrongFormat { found: 2 }));
    let upper = MANIFEST.replace("e3b0", "E3B0");
    assert!(matches!(Manifest::parse(upper.as_bytes()), Err(ManifestError::Malformed { .. })));
}

#[test]
fn trusted_keys_parses_only_a_short_list_of_32_byte_keys() {
    for bad in ["", "AAAA", &format!("{KEY},"), &vec![KEY; 17].join(",")] {
        assert!(bad.parse::<TrustedKeys>().is_err(), "{bad:?}");
    }
    assert_eq!(format!("{:?}", keys(KEY)), "[\"614c4b637b092e93\"]");
}

proptest! {
    #[test]
    fn verify_detects_a_flipped_bit_in_the_manifest(bit in 0..MANIFEST.len() * 8) {
        let mut manifest = MANIFEST.as_bytes().to_vec();
        manifest[bit / 8] ^= 1 << (bit % 8);
        let signed = SignedManifest { manifest, signature: SIGNATURE.into() };
        let result = verify(&signed, &keys(KEY), &"2026.11.21-1".parse().unwrap(), Timestamp::UNIX_EPOCH);
        prop_assert_eq!(result.unwrap_err(), ManifestError::InvalidSignature { id: "614c4b637b092e93".to_owned() });
    }

    #[test]
    fn verify_detects_a_flipped_bit_in_the_signature(bit in 0..SIGNATURE.len() * 8) {
        let mut signature = SIGNATURE.as_bytes().to_vec();
        signature[bit / 8] ^= 1 << (bit % 8);
        let signed = SignedManifest { manifest: MANIFEST.into(), signature };
        let result = verify(&signed, &keys(KEY), &"2026.11.21-1".parse().unwrap(), Timestamp::UNIX_EPOCH);
        // A flipped bit can turn the newline into other whitespace, which does not change the signature.
        prop_assert!(result.is_err() || bit / 8 == SIGNATURE.len() - 1);
    }

    #[test]
    fn parsers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = Manifest::parse(&bytes);
        let _ = parse_signatures(&bytes);
    }
}

#[test]
fn verify_requires_a_signature_by_a_key_in_the_new_set() {
    let signer = include_bytes!("../../../tests/kit/src/bundle/ed25519-test-only.txt");
    let signer = kit::bundle::SigningKey::from_pem(signer).unwrap();
    let own = signer.public_key_base64();
    let check_with = |set: &str| {
        let manifest = MANIFEST.replace("}\n", &format!(",\"trustedKeys\":{set}}}\n"));
        let signature = signer.signature_line(manifest.as_bytes());
        check(&manifest, &signature, &keys(&own)).map(|verified| verified.manifest().trusted_keys.clone())
    };
    let set = check_with(&format!("{{\"sequence\":1,\"keys\":[\"{KEY}\",\"{own}\"]}}")).unwrap().unwrap();
    assert_eq!((set.sequence, set.keys), (1, keys(&format!("{KEY},{own}"))));
    let unproven = check_with(&format!("{{\"sequence\":1,\"keys\":[\"{KEY}\"]}}")).unwrap_err();
    assert!(matches!(unproven, ManifestError::KeySet(KeySetError::Unproven { .. })), "{unproven}");
    let empty = check_with("{\"sequence\":1,\"keys\":[]}").unwrap_err();
    assert!(matches!(empty, ManifestError::Malformed { .. }), "{empty}");
}

//! A crypto provider for jsonwebtoken that uses ring. It only verifies signatures, with RS256, ES256 and EdDSA.

use jsonwebtoken::crypto::{CryptoProvider, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{Error, ErrorKind};
use jsonwebtoken::signature::{self, Verifier};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
};

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(ErrorKind::UnsupportedAlgorithm.into()),
    verifier_factory: create_verifier,
    key_utils: KeyUtils::new_unimplemented(),
};

/// Installs the process-wide provider. A later call has no effect; its error is ignored, because no other provider is
/// ever installed.
pub(super) fn install() {
    let _ = PROVIDER.install_default();
}

fn create_verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>, Error> {
    let key = match (algorithm, key.kind()) {
        (Algorithm::RS256, DecodingKeyKind::RsaModulusExponent { n, e }) => {
            Key::Rsa(RsaPublicKeyComponents { n: n.clone(), e: e.clone() })
        }
        (Algorithm::ES256, DecodingKeyKind::SecretOrDer(point)) => {
            Key::Point(UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point.clone()))
        }
        (Algorithm::EdDSA, DecodingKeyKind::SecretOrDer(point)) => {
            Key::Point(UnparsedPublicKey::new(&ED25519, point.clone()))
        }
        _ => return Err(ErrorKind::UnsupportedAlgorithm.into()),
    };
    Ok(Box::new(RingVerifier { algorithm: *algorithm, key }))
}

enum Key {
    Rsa(RsaPublicKeyComponents<Vec<u8>>),
    Point(UnparsedPublicKey<Vec<u8>>),
}

struct RingVerifier {
    algorithm: Algorithm,
    key: Key,
}

impl Verifier<Vec<u8>> for RingVerifier {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), signature::Error> {
        match &self.key {
            Key::Rsa(key) => key.verify(&RSA_PKCS1_2048_8192_SHA256, message, signature),
            Key::Point(key) => key.verify(message, signature),
        }
        .map_err(|_| signature::Error::new())
    }
}

impl JwtVerifier for RingVerifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::crypto::verify;

    use super::*;

    /// A signing input and its signature.
    struct TestVector(&'static str, &'static str);

    const PAYLOAD_A: &str =
        "eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ";

    fn check(vector: &TestVector, key: &DecodingKey, algorithm: Algorithm) {
        install();
        let TestVector(input, signature) = vector;
        assert!(verify(signature, input.as_bytes(), key, algorithm).unwrap());
        let other = input.replacen('e', "f", 1);
        assert!(!verify(signature, other.as_bytes(), key, algorithm).unwrap(), "accepted a changed message");
        let flipped = format!("{}{}", if signature.starts_with('A') { 'B' } else { 'A' }, &signature[1..]);
        assert!(!verify(&flipped, input.as_bytes(), key, algorithm).unwrap(), "accepted a changed signature");
    }

    #[test]
    fn verify_accepts_rs256_example_from_rfc_7515_a_2() {
        let input = format!("eyJhbGciOiJSUzI1NiJ9.{PAYLOAD_A}");
        let n = "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-y\
                 RT-SFd2lZS-pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-\
                 KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9\
                 _h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ";
        let signature = "cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W2Fp\
                         5jujGbds9uJdbF9CUAr7t1dnZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkSjtQBM\
                         Hlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12jzDwusC-eOkHWEsqtFZESc6BfI7noOPqvhJ1phCnvWh6IeYI\
                         2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUPQGe77Rw";
        let key = DecodingKey::from_rsa_components(n, "AQAB").unwrap();
        check(&TestVector(input.leak(), signature), &key, Algorithm::RS256);
    }

    #[test]
    fn verify_accepts_es256_example_from_rfc_7515_a_3() {
        let input = format!("eyJhbGciOiJFUzI1NiJ9.{PAYLOAD_A}");
        let signature =
            "DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFCgfTjDxw5djxLa8ISlSApmWQxfKTUJqPP3-Kg6NU1Q";
        let key = DecodingKey::from_ec_components(
            "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
            "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0",
        );
        check(&TestVector(input.leak(), signature), &key.unwrap(), Algorithm::ES256);
    }

    #[test]
    fn verify_accepts_eddsa_example_from_rfc_8037_a_4() {
        let input = "eyJhbGciOiJFZERTQSJ9.RXhhbXBsZSBvZiBFZDI1NTE5IHNpZ25pbmc";
        let signature =
            "hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg";
        let key = DecodingKey::from_ed_components("11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo").unwrap();
        check(&TestVector(input, signature), &key, Algorithm::EdDSA);
    }

    #[test]
    fn verify_rejects_a_key_for_a_different_algorithm() {
        install();
        let rsa = DecodingKey::from_rsa_components("AQAB", "AQAB").unwrap();
        let point = DecodingKey::from_ed_components("11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo").unwrap();
        for algorithm in [Algorithm::ES256, Algorithm::EdDSA, Algorithm::HS256] {
            assert!(verify("AA", b"m", &rsa, algorithm).is_err(), "{algorithm:?}");
        }
        for algorithm in [Algorithm::RS256, Algorithm::HS256, Algorithm::PS256, Algorithm::ES384] {
            assert!(verify("AA", b"m", &point, algorithm).is_err(), "{algorithm:?}");
        }
    }
}

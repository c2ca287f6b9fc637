//! Verifies the checksums that a client sends with an upload, in headers or trailers.
//!
//! s3s verifies the SHA-256 in the signature.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum, Crc32, Crc32c, Crc64Nvme, Md5, Sha1, Sha256};
use s3s::{S3Request, S3Result, TrailingHeaders, s3_error};

const MD5_HEADER: &str = "content-md5";
const CHECKSUM_HEADERS: [&str; 5] = [
    "x-amz-checksum-crc32",
    "x-amz-checksum-crc32c",
    "x-amz-checksum-crc64nvme",
    "x-amz-checksum-sha1",
    "x-amz-checksum-sha256",
];

/// The checksums provided by a request. Trailing values are known only after the body has been read.
pub(super) struct ProvidedChecksums {
    headers: HeaderMap,
    /// Names announced in `x-amz-trailer`.
    announced: Vec<String>,
    trailers: Option<TrailingHeaders>,
}

/// Computes all provided checksums while the body is read.
pub(super) struct Hasher {
    md5: Option<Md5>,
    checksums: ChecksumHasher,
}

impl ProvidedChecksums {
    pub(super) fn from_request<T>(request: &S3Request<T>) -> Self {
        let announced =
            request.headers.get_all("x-amz-trailer").iter().filter_map(|value| value.to_str().ok());
        Self {
            headers: request.headers.clone(),
            announced: announced
                .flat_map(|v| v.split(','))
                .map(|name| name.trim().to_ascii_lowercase())
                .collect(),
            trailers: request.trailing_headers.clone(),
        }
    }

    fn provides(&self, name: &str) -> bool {
        self.headers.contains_key(name) || self.announced.iter().any(|announced| announced == name)
    }

    pub(super) fn hasher(&self) -> Hasher {
        let [crc32, crc32c, crc64nvme, sha1, sha256] = CHECKSUM_HEADERS.map(|name| self.provides(name));
        Hasher {
            md5: self.provides(MD5_HEADER).then(Md5::new),
            checksums: ChecksumHasher {
                crc32: crc32.then(Crc32::new),
                crc32c: crc32c.then(Crc32c::new),
                crc64nvme: crc64nvme.then(Crc64Nvme::new),
                sha1: sha1.then(Sha1::new),
                sha256: sha256.then(Sha256::new),
            },
        }
    }

    /// Rejects a body that does not match its checksums, or whose announced checksum is missing.
    pub(super) fn verify(&self, hasher: Hasher) -> S3Result<()> {
        let trailers = self.trailers.as_ref().and_then(TrailingHeaders::take).unwrap_or_default();
        let provided = |name: &str| {
            let value = self.headers.get(name).or_else(|| trailers.get(name));
            value.and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        let computed = hasher.checksums.finalize();
        let values = [
            computed.checksum_crc32,
            computed.checksum_crc32c,
            computed.checksum_crc64nvme,
            computed.checksum_sha1,
            computed.checksum_sha256,
        ];
        let md5 = hasher.md5.map(|md5| STANDARD.encode(md5.finalize()));
        for (name, value) in CHECKSUM_HEADERS.into_iter().zip(values).chain([(MD5_HEADER, md5)]) {
            if let Some(value) = value
                && provided(name).as_ref() != Some(&value)
            {
                return Err(s3_error!(BadDigest, "{name} is {value}, which differs from the provided value"));
            }
        }
        Ok(())
    }
}

impl Hasher {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.checksums.update(bytes);
        if let Some(md5) = &mut self.md5 {
            md5.update(bytes);
        }
    }
}

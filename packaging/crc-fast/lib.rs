//! Replaces the crate `crc-fast` (`[patch.crates-io]` in `Cargo.toml`), whose tables for 24 algorithms take 450 KiB.
//! `object_store` uses only CRC-64/NVME, and only if that checksum is configured; svc configures SHA-256. The S3 server
//! in the tests uses the two CRC-32 algorithms.

use crc::{CRC_32_ISCSI, CRC_32_ISO_HDLC, CRC_64_NVME, Crc, Table};

static ISO_HDLC: Crc<u32, Table<1>> = Crc::<u32, Table<1>>::new(&CRC_32_ISO_HDLC);
static ISCSI: Crc<u32, Table<1>> = Crc::<u32, Table<1>>::new(&CRC_32_ISCSI);
static NVME: Crc<u64, Table<1>> = Crc::<u64, Table<1>>::new(&CRC_64_NVME);

#[derive(Debug, Clone, Copy)]
pub enum CrcAlgorithm {
    Crc32IsoHdlc,
    Crc32Iscsi,
    Crc64Nvme,
}

/// The checksum of the bytes hashed so far.
#[derive(Clone)]
pub struct Digest(State);

#[derive(Clone)]
enum State {
    Crc32(crc::Digest<'static, u32, Table<1>>),
    Crc64(crc::Digest<'static, u64, Table<1>>),
}

impl Digest {
    #[must_use]
    pub fn new(algorithm: CrcAlgorithm) -> Self {
        Self(match algorithm {
            CrcAlgorithm::Crc32IsoHdlc => State::Crc32(ISO_HDLC.digest()),
            CrcAlgorithm::Crc32Iscsi => State::Crc32(ISCSI.digest()),
            CrcAlgorithm::Crc64Nvme => State::Crc64(NVME.digest()),
        })
    }

    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            State::Crc32(digest) => digest.update(bytes),
            State::Crc64(digest) => digest.update(bytes),
        }
    }

    /// Returns the checksum. A 32-bit checksum is in the lower half.
    #[must_use]
    pub fn finalize(&self) -> u64 {
        match self.0.clone() {
            State::Crc32(digest) => digest.finalize().into(),
            State::Crc64(digest) => digest.finalize(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finalize_returns_check_values_of_crc_catalogue() {
        for (algorithm, expected) in [
            (CrcAlgorithm::Crc32IsoHdlc, 0xcbf4_3926),
            (CrcAlgorithm::Crc32Iscsi, 0xe306_9283),
            (CrcAlgorithm::Crc64Nvme, 0xae8b_1486_0a79_9888),
        ] {
            let mut digest = Digest::new(algorithm);
            digest.update(b"1234");
            digest.update(b"56789");
            assert_eq!(digest.finalize(), expected, "{algorithm:?}");
        }
    }
}

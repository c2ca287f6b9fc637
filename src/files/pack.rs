//! Packs bundle encrypted blobs into one object. The blobs are followed by an encrypted header, which lists the type,
//! length and id of each blob, and by the header length in the last 4 bytes.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::FilesError;
use crate::id::Id;
use crate::key::{EncryptionKey, OVERHEAD_BYTES};

/// Packs are finished once they reach this size. `restic` uses 16 MiB; smaller packs take less memory.
const TARGET_PACK_BYTES: usize = 8 << 20;
/// Maximum number of blobs per pack, to keep the header small.
pub(crate) const MAX_PACK_BLOBS: usize = 8192;
/// `restic`'s default zstd level.
pub(crate) const ZSTD_LEVEL: i32 = 3;
/// Maximum uncompressed size of a blob. File chunks are at most 8 MiB; directory trees may be larger.
pub(crate) const MAX_BLOB_BYTES: usize = 128 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BlobType {
    /// A chunk of a file's content.
    Data,
    /// A directory.
    Tree,
}

/// A blob's location in its pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PackedBlob {
    pub id: Id,
    #[serde(rename = "type")]
    pub blob_type: BlobType,
    pub offset: u32,
    /// Length of the encrypted blob.
    pub length: u32,
    /// Length before compression; absent or 0 for uncompressed blobs.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub uncompressed_length: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// A pack ready for upload.
#[derive(Debug, Clone)]
pub(crate) struct FinishedPack {
    pub id: Id,
    pub bytes: Bytes,
    pub blobs: Vec<PackedBlob>,
}

/// Builds packs from blobs of a single type.
pub(crate) struct PackWriter {
    key: EncryptionKey,
    blob_type: BlobType,
    buffer: Vec<u8>,
    blobs: Vec<PackedBlob>,
    compressor: zstd::bulk::Compressor<'static>,
}

impl PackWriter {
    /// Creates an empty writer.
    ///
    /// # Errors
    /// If zstd fails to allocate memory.
    pub(crate) fn new(key: EncryptionKey, blob_type: BlobType) -> Result<Self, FilesError> {
        let compressor =
            zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(|error| FilesError::encode("blob", &error))?;
        Ok(Self { key, blob_type, buffer: Vec::new(), blobs: Vec::new(), compressor })
    }

    /// Adds a blob. Returns the pack once it's full.
    ///
    /// # Errors
    /// If compression or encryption fails, or if the pack would exceed 4 GiB.
    pub(crate) fn add(&mut self, id: Id, content: &[u8]) -> Result<Option<FinishedPack>, FilesError> {
        let compressed =
            self.compressor.compress(content).map_err(|error| FilesError::encode("blob", &error))?;
        let is_smaller = compressed.len() < content.len();
        let stored = if is_smaller { &compressed[..] } else { content };
        let offset = self.buffer.len();
        self.key.encrypt_into(stored, &mut self.buffer)?;
        self.blobs.push(PackedBlob {
            id,
            blob_type: self.blob_type,
            offset: to_u32(offset)?,
            length: to_u32(self.buffer.len() - offset)?,
            uncompressed_length: if is_smaller { to_u32(content.len())? } else { 0 },
        });
        self.finish_if_full()
    }

    /// Adds an already encrypted blob from another pack. Returns the new pack once it's full.
    ///
    /// # Errors
    /// If encrypting the header fails, or if the pack would exceed 4 GiB.
    pub(crate) fn add_sealed(
        &mut self,
        blob: PackedBlob,
        sealed: &[u8],
    ) -> Result<Option<FinishedPack>, FilesError> {
        self.blobs.push(PackedBlob { offset: to_u32(self.buffer.len())?, ..blob });
        self.buffer.extend_from_slice(sealed);
        self.finish_if_full()
    }

    fn finish_if_full(&mut self) -> Result<Option<FinishedPack>, FilesError> {
        let is_full = self.buffer.len() >= TARGET_PACK_BYTES || self.blobs.len() >= MAX_PACK_BLOBS;
        if is_full { self.finish() } else { Ok(None) }
    }

    /// Returns a pack of the blobs added since the last one, or `None` if there are none.
    ///
    /// # Errors
    /// If encrypting the header fails.
    pub(crate) fn finish(&mut self) -> Result<Option<FinishedPack>, FilesError> {
        if self.blobs.is_empty() {
            return Ok(None);
        }
        let (mut bytes, blobs) = (std::mem::take(&mut self.buffer), std::mem::take(&mut self.blobs));
        let header = encode_header(&blobs);
        let start = bytes.len();
        self.key.encrypt_into(&header, &mut bytes)?;
        let header_length = to_u32(bytes.len() - start)?;
        bytes.extend_from_slice(&header_length.to_le_bytes());
        let bytes = Bytes::from(bytes);
        Ok(Some(FinishedPack { id: Id::of(&bytes), bytes, blobs }))
    }
}

fn to_u32(length: usize) -> Result<u32, FilesError> {
    u32::try_from(length).map_err(|_| FilesError::encode("pack", &"larger than 4 GiB"))
}

fn encode_header(blobs: &[PackedBlob]) -> Vec<u8> {
    let mut header = Vec::with_capacity(blobs.len() * (1 + 4 + 4 + Id::BYTES));
    for blob in blobs {
        let is_compressed = blob.uncompressed_length > 0;
        header.push(match (blob.blob_type, is_compressed) {
            (BlobType::Data, false) => 0,
            (BlobType::Tree, false) => 1,
            (BlobType::Data, true) => 2,
            (BlobType::Tree, true) => 3,
        });
        header.extend_from_slice(&blob.length.to_le_bytes());
        if is_compressed {
            header.extend_from_slice(&blob.uncompressed_length.to_le_bytes());
        }
        header.extend_from_slice(blob.id.as_bytes());
    }
    header
}

/// Decrypts, decompresses and verifies a blob.
///
/// # Errors
/// [`FilesError::Corrupt`] if decryption or decompression fails, the recorded uncompressed length is wrong or exceeds
/// `MAX_BLOB_BYTES`, or the content doesn't match the id.
pub(crate) fn open_blob(
    key: &EncryptionKey,
    blob: &PackedBlob,
    sealed: &[u8],
) -> Result<Vec<u8>, FilesError> {
    let corrupt = |reason: &str| FilesError::corrupt(format!("blob {}", blob.id), &reason);
    let stored = key.decrypt(sealed).ok_or_else(|| corrupt("decryption failed"))?;
    let content = match blob.uncompressed_length as usize {
        0 => stored,
        length if length > MAX_BLOB_BYTES => return Err(corrupt("implausible uncompressed length")),
        length => zstd::bulk::decompress(&stored, length).map_err(|_| corrupt("decompression failed"))?,
    };
    // Restores compute file offsets from the recorded lengths.
    if blob.uncompressed_length > 0 && content.len() != blob.uncompressed_length as usize {
        return Err(corrupt("uncompressed length mismatch"));
    }
    if Id::of(&content) != blob.id {
        return Err(corrupt("its content does not match its hash"));
    }
    Ok(content)
}

/// Parses the header of a complete pack and checks that it covers all of the pack's bytes.
///
/// # Errors
/// [`FilesError::Corrupt`] if the header is invalid or doesn't cover the whole pack.
pub(crate) fn parse_header(
    key: &EncryptionKey,
    pack: Id,
    bytes: &[u8],
) -> Result<Vec<PackedBlob>, FilesError> {
    parse_header_at_end(key, pack, bytes, bytes.len() as u64)
}

/// Returns the length of the header plus its 4-byte length footer, or `None` if `end` is shorter than the footer.
pub(crate) fn header_and_footer_length(end: &[u8]) -> Option<u64> {
    let (_, length) = end.split_last_chunk::<4>()?;
    Some(u64::from(u32::from_le_bytes(*length)) + 4)
}

/// Like [`parse_header`], but takes only the end of a pack of `size` bytes.
///
/// # Errors
/// [`FilesError::Corrupt`] if the header is invalid, doesn't cover the whole pack, or isn't completely in `end`.
pub(crate) fn parse_header_at_end(
    key: &EncryptionKey,
    pack: Id,
    end: &[u8],
    size: u64,
) -> Result<Vec<PackedBlob>, FilesError> {
    let corrupt = |reason: &str| FilesError::corrupt(format!("pack {pack}"), &reason);
    let (rest, length) = end.split_last_chunk::<4>().ok_or_else(|| corrupt("too short"))?;
    let start = rest.len().checked_sub(u32::from_le_bytes(*length) as usize);
    let (start, sealed) =
        start.and_then(|start| Some((start, rest.get(start..)?))).ok_or_else(|| corrupt("too short"))?;
    let blobs_end = size.saturating_sub((end.len() - start) as u64);
    let header = key.decrypt(sealed).ok_or_else(|| corrupt("header decryption failed"))?;
    let (mut blobs, mut offset, mut entries) = (Vec::new(), 0_u32, &header[..]);
    while !entries.is_empty() {
        let (blob, rest) = parse_entry(entries, offset).ok_or_else(|| corrupt("invalid header"))?;
        offset = offset.checked_add(blob.length).ok_or_else(|| corrupt("blobs exceed 4 GiB"))?;
        blobs.push(blob);
        entries = rest;
    }
    if u64::from(offset) != blobs_end {
        return Err(corrupt("header does not cover the whole pack"));
    }
    Ok(blobs)
}

fn parse_entry(entries: &[u8], offset: u32) -> Option<(PackedBlob, &[u8])> {
    let (&kind, rest) = entries.split_first()?;
    let (blob_type, is_compressed) = match kind {
        0 => (BlobType::Data, false),
        1 => (BlobType::Tree, false),
        2 => (BlobType::Data, true),
        3 => (BlobType::Tree, true),
        _ => return None,
    };
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let (uncompressed_length, rest) = if is_compressed {
        let (length, rest) = rest.split_first_chunk::<4>()?;
        (u32::from_le_bytes(*length), rest)
    } else {
        (0, rest)
    };
    let (id, rest) = rest.split_first_chunk::<{ Id::BYTES }>()?;
    let length = u32::from_le_bytes(*length);
    let is_plausible = length as usize >= OVERHEAD_BYTES;
    let blob = PackedBlob { id: Id::from_bytes(*id), blob_type, offset, length, uncompressed_length };
    is_plausible.then_some((blob, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::key::RepositoryKey;

    proptest! {
        #[test]
        fn pack_round_trips_all_blobs(
            contents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..20),
        ) {
            let key = RepositoryKey::generate().unwrap().derive_master_key();
            let mut writer = PackWriter::new(key.clone(), BlobType::Data).unwrap();
            for content in &contents {
                prop_assert!(writer.add(Id::of(content), content).unwrap().is_none());
            }
            let pack = writer.finish().unwrap().unwrap();
            prop_assert_eq!(&parse_header(&key, pack.id, &pack.bytes).unwrap(), &pack.blobs);
            let size = pack.bytes.len() as u64;
            let end = &pack.bytes[pack.bytes.len() - header_and_footer_length(&pack.bytes).unwrap() as usize..];
            prop_assert_eq!(&parse_header_at_end(&key, pack.id, end, size).unwrap(), &pack.blobs);
            prop_assert!(parse_header_at_end(&key, pack.id, end, size + 1).is_err());
            prop_assert!(parse_header_at_end(&key, pack.id, &end[1..], size).is_err());
            for (blob, content) in pack.blobs.iter().zip(&contents) {
                let sealed = &pack.bytes[blob.offset as usize..(blob.offset + blob.length) as usize];
                prop_assert_eq!(&open_blob(&key, blob, sealed).unwrap(), content);
            }
            prop_assert!(writer.finish().unwrap().is_none());
        }

        #[test]
        fn corrupt_pack_is_rejected(
            position in any::<prop::sample::Index>(), bit in 0..8_u32, is_truncated in any::<bool>(),
        ) {
            let key = RepositoryKey::generate().unwrap().derive_master_key();
            let mut writer = PackWriter::new(key.clone(), BlobType::Tree).unwrap();
            let content = [7; 1000];
            writer.add(Id::of(&content), &content).unwrap();
            let pack = writer.finish().unwrap().unwrap();
            let mut bytes = pack.bytes.to_vec();
            let index = position.index(bytes.len());
            if is_truncated { bytes.truncate(index) } else { bytes[index] ^= 1 << bit }
            let blob = &pack.blobs[0];
            let read_blob = |bytes: &[u8]| {
                parse_header(&key, pack.id, bytes)?;
                let sealed = bytes.get(blob.offset as usize..(blob.offset + blob.length) as usize);
                open_blob(&key, blob, sealed.unwrap_or_default())
            };
            prop_assert!(read_blob(&bytes).is_err(), "byte {index}");
            prop_assert!(read_blob(&pack.bytes).is_ok());
        }
    }

    #[test]
    fn open_blob_rejects_wrong_length() {
        let key = RepositoryKey::generate().unwrap().derive_master_key();
        let mut writer = PackWriter::new(key.clone(), BlobType::Data).unwrap();
        let content = [7; 1000];
        writer.add(Id::of(&content), &content).unwrap();
        let pack = writer.finish().unwrap().unwrap();
        let blob = pack.blobs[0];
        let sealed = &pack.bytes[..blob.length as usize];
        for (uncompressed_length, is_valid) in [(999, false), (1000, true), (1001, false), (2000, false)] {
            let opened = open_blob(&key, &PackedBlob { uncompressed_length, ..blob }, sealed);
            assert_eq!(opened.is_ok(), is_valid, "{uncompressed_length}");
        }
    }
}

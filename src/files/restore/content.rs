//! Reads chunks pack by pack and writes each to every file position where it occurs.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};

use super::RestoreProgress;
use super::batch::{Batch, ChunkPlacement, PlannedEntry};
use super::target::Target;
use crate::blocking::run_blocking;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::BlobLocations;
use crate::key::EncryptionKey;
use crate::pack::{BlobType, open_blob};
use crate::repository::Repository;

/// Ranges of a pack with at most this gap between them are coalesced into one read.
const MAX_GAP_BYTES: u64 = 256 << 10;
/// Memory limit per request. A single chunk may be larger.
const MAX_READ_BYTES: u64 = 4 << 20;
const MAX_CONCURRENT_READS: usize = 4;
/// The smallest hole that common file systems support.
const BLOCK_BYTES: u64 = 4096;

/// A ranged read and the placements it serves.
struct RangeRead {
    pack: Id,
    range: Range<u64>,
    placements: Vec<ChunkPlacement>,
}

/// Writes the content of a batch's files, which must already exist. Returns the batch without its placements. With
/// `should_skip_damaged`, files with a corrupt or missing chunk are written without it and listed in
/// [`Batch::damaged`].
pub(super) async fn write_contents(
    repository: &Repository,
    locations: &BlobLocations,
    mut batch: Batch,
    target: &Path,
    should_skip_damaged: bool,
    progress: &RestoreProgress,
) -> Result<Batch, FilesError> {
    let mut placements = std::mem::take(&mut batch.placements);
    placements.sort_unstable_by_key(|placement| (placement.location.pack, placement.location.offset));
    let files = Arc::new(std::mem::take(&mut batch.files));
    let reads = plan_reads(locations, &placements);
    drop(placements);
    let process_read = |read: RangeRead| {
        let (files, target, key) = (Arc::clone(&files), target.to_owned(), repository.key.clone());
        async move {
            let read = Arc::new(read);
            let fetch_and_write = async |read: Arc<RangeRead>| {
                let bytes = repository.read_pack(read.pack, read.range.clone()).await?;
                let (files, target, key) = (Arc::clone(&files), target.clone(), key.clone());
                run_blocking(move || write_chunks(&key, &read, &bytes, &files, &target)).await
            };
            let mut damaged: Vec<u32> = Vec::new();
            let written = match fetch_and_write(Arc::clone(&read)).await {
                Err(error) if error.is_damage() => {
                    let mut written = 0;
                    for placements in read.placements.chunk_by(|a, b| a.location == b.location) {
                        match write_first_intact_copy(locations, placements, &fetch_and_write, &error).await {
                            Err(error) if should_skip_damaged && error.is_damage() => {
                                tracing::warn!(%error, "damaged chunk; skipping the files that contain it");
                                damaged.extend(placements.iter().map(|placement| placement.file));
                            }
                            result => written += result?,
                        }
                    }
                    written
                }
                result => result?,
            };
            progress.written_bytes.fetch_add(written, Ordering::Relaxed);
            Ok::<Vec<u32>, FilesError>(damaged)
        }
    };
    let damaged: Vec<u32> = stream::iter(reads.into_iter().map(process_read))
        .buffer_unordered(MAX_CONCURRENT_READS)
        .try_concat()
        .await?;
    batch.damaged.extend(damaged);
    batch.files = Arc::into_inner(files).expect("all tasks have finished, so this is the last reference");
    Ok(batch)
}

/// Writes a chunk from its first intact copy of the planned length, on which the offsets of the file's other chunks
/// depend. `error` comes from the read that contained the chunk.
async fn write_first_intact_copy(
    locations: &BlobLocations,
    placements: &[ChunkPlacement],
    fetch_and_write: &impl AsyncFn(Arc<RangeRead>) -> Result<u64, FilesError>,
    error: &FilesError,
) -> Result<u64, FilesError> {
    let (id, planned) = (placements[0].id, placements[0].location);
    let copies = [planned].into_iter().chain(locations.find_others(BlobType::Data, id));
    for location in copies {
        if location.content_length() != planned.content_length() {
            continue;
        }
        let placements =
            placements.iter().map(|placement| ChunkPlacement { location, ..*placement }).collect();
        let read = RangeRead { pack: locations.pack(location).id, range: location.range(), placements };
        match fetch_and_write(Arc::new(read)).await {
            Err(error) if error.is_damage() => tracing::warn!(%error, "a copy of a chunk is damaged"),
            result => return result,
        }
    }
    Err(FilesError::corrupt(format!("chunk {id}"), error))
}

/// Coalesces placements, sorted by pack and offset, into reads.
fn plan_reads(locations: &BlobLocations, placements: &[ChunkPlacement]) -> Vec<RangeRead> {
    let mut reads: Vec<RangeRead> = Vec::new();
    for placement in placements {
        let (pack, range) = (locations.pack(placement.location).id, placement.location.range());
        match reads.last_mut() {
            // A chunk longer than `MAX_READ_BYTES` may occur several times.
            Some(last)
                if last.pack == pack
                    && (range.end <= last.range.end
                        || range.start <= last.range.end + MAX_GAP_BYTES
                            && range.end - last.range.start <= MAX_READ_BYTES) =>
            {
                last.range.end = last.range.end.max(range.end);
                last.placements.push(*placement);
            }
            _ => reads.push(RangeRead { pack, range, placements: vec![*placement] }),
        }
    }
    reads
}

/// Decrypts a read's chunks and writes each to every file position where it occurs. Returns the number of bytes
/// written, including holes.
fn write_chunks(
    key: &EncryptionKey,
    read: &RangeRead,
    bytes: &Bytes,
    files: &[PlannedEntry],
    target: &Path,
) -> Result<u64, FilesError> {
    let mut written = 0;
    let mut target = Target::open(target).map_err(FilesError::io("open", target))?;
    for placements in read.placements.chunk_by(|a, b| a.location == b.location) {
        let (id, location) = (placements[0].id, placements[0].location);
        let range = location.range();
        let sealed = usize::try_from(range.start - read.range.start)
            .ok()
            .and_then(|start| bytes.get(start..start + location.length as usize))
            .unwrap_or_default();
        let content = open_blob(key, &location.to_packed(BlobType::Data, id), sealed)?;
        written += content.len() as u64 * placements.len() as u64;
        // The file already has its full size, so skipped zeros become a hole. A large hole is thousands of placements
        // of one chunk, which we check only once.
        if content.iter().all(|byte| *byte == 0) {
            continue;
        }
        for placement in placements {
            let path = &files[placement.file as usize].path;
            let file = target.open_for_writing(path).map_err(FilesError::io("open", path))?;
            for range in nonzero_ranges(&content, placement.file_offset) {
                let offset = placement.file_offset + range.start as u64;
                file.write_all_at(&content[range], offset).map_err(FilesError::io("write", path))?;
            }
        }
    }
    Ok(written)
}

/// Returns the ranges of `content` with nonzero bytes, extended to file block boundaries. `file_offset` is the offset
/// of `content` in the file.
fn nonzero_ranges(content: &[u8], file_offset: u64) -> impl Iterator<Item = Range<usize>> {
    let mut position = 0;
    std::iter::from_fn(move || {
        let next_block = |position: usize| {
            let to_boundary = BLOCK_BYTES - (file_offset + position as u64) % BLOCK_BYTES;
            content.len().min(position + to_boundary as usize)
        };
        let is_zero = |range: Range<usize>| content[range].iter().all(|byte| *byte == 0);
        while position < content.len() && is_zero(position..next_block(position)) {
            position = next_block(position);
        }
        let start = position;
        while position < content.len() && !is_zero(position..next_block(position)) {
            position = next_block(position);
        }
        (start < position).then_some(start..position)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{IndexFile, IndexedPack};
    use crate::pack::PackedBlob;

    #[test]
    fn oversized_chunk_is_read_once() {
        let blob = |name: &[u8], offset| PackedBlob {
            id: Id::of(name),
            blob_type: BlobType::Data,
            offset,
            length: 5 << 20,
            uncompressed_length: 0,
        };
        let blobs = vec![blob(b"first", 0), blob(b"second", 5 << 20)];
        let mut locations = BlobLocations::default();
        let packs = vec![IndexedPack { id: Id::of(b"pack"), blobs, time: None }];
        locations.load(&IndexFile { packs, ..IndexFile::default() });
        let locations = locations.finish_loading();
        let placement = |name: &[u8], file| {
            let id = Id::of(name);
            let location = locations.find(BlobType::Data, id).unwrap();
            ChunkPlacement { location, id, file, file_offset: 0 }
        };
        let placements = [placement(b"first", 0), placement(b"first", 1), placement(b"second", 0)];
        let reads = plan_reads(&locations, &placements);
        let counts: Vec<usize> = reads.iter().map(|read| read.placements.len()).collect();
        assert_eq!(counts, [2, 1]);
    }

    #[test]
    fn nonzero_ranges_align_to_file_blocks() {
        let mut content = vec![0; 5 * 4096];
        let ranges = |content: &[u8], offset| -> Vec<(usize, usize)> {
            nonzero_ranges(content, offset).map(|range| (range.start, range.end)).collect()
        };
        assert!(ranges(&content, 0).is_empty());
        assert!(ranges(&[], 7).is_empty());
        content[4096] = 1;
        content[3 * 4096 - 1] = 1;
        assert_eq!(ranges(&content, 0), [(4096, 3 * 4096)]);
        // The file's blocks start 96 bytes before the content's.
        assert_eq!(ranges(&content, 96), [(4000, 8096), (12192, 16288)]);
        assert_eq!(ranges(&[1; 10], 4090), [(0, 10)]);
    }
}

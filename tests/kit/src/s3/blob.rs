//! The immutable bytes of objects: small ones in memory, others in files that are deleted when they are no longer used.

use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use s3s::dto::StreamingBlob;
use s3s::{S3Result, s3_error};
use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};
use tokio_util::io::ReaderStream;

use super::checksum::ProvidedChecksums;

const MAX_IN_MEMORY_BYTES: usize = 64 * 1024;
const FILE_CHUNK_BYTES: usize = 256 * 1024;

#[derive(Debug)]
pub(super) struct Blob {
    len: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Memory(Bytes),
    File(PathBuf),
}

impl Drop for Blob {
    fn drop(&mut self) {
        if let Content::File(path) = &self.content {
            std::fs::remove_file(path).ok();
        }
    }
}

pub(super) struct ReceivedBlob {
    pub(super) blob: Arc<Blob>,
    pub(super) sha256: [u8; 32],
}

impl Blob {
    pub(super) fn in_memory(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        Self { len: bytes.len() as u64, content: Content::Memory(bytes) }
    }

    /// Receives a request's body, with at most [`MAX_IN_MEMORY_BYTES`] and a few chunks in memory.
    pub(super) async fn receive(
        dir: &Path,
        body: Option<StreamingBlob>,
        checksums: &ProvidedChecksums,
    ) -> S3Result<ReceivedBlob> {
        let mut sha256 = ring::digest::Context::new(&ring::digest::SHA256);
        let mut hasher = checksums.hasher();
        let mut buffer = BytesMut::new();
        let mut spill: Option<Spill> = None;
        let mut body = body.unwrap_or_else(|| s3s::Body::empty().into());
        while let Some(chunk) = body.next().await {
            let chunk = chunk.map_err(|e| upload_error(&e))?;
            sha256.update(&chunk);
            hasher.update(&chunk);
            if spill.is_none() && buffer.len() + chunk.len() > MAX_IN_MEMORY_BYTES {
                let mut new_spill = Spill::new(dir).await.map_err(|e| s3_error!(e, InternalError))?;
                new_spill.write(&buffer).await.map_err(|e| s3_error!(e, InternalError))?;
                spill = Some(new_spill);
            }
            match &mut spill {
                Some(spill) => spill.write(&chunk).await.map_err(|e| s3_error!(e, InternalError))?,
                None => buffer.extend_from_slice(&chunk),
            }
        }
        let blob = match spill {
            Some(spill) => spill.finish().await.map_err(|e| s3_error!(e, InternalError))?,
            None => Self::in_memory(buffer),
        };
        checksums.verify(hasher)?;
        let mut digest = [0; 32];
        digest.copy_from_slice(sha256.finish().as_ref());
        Ok(ReceivedBlob { blob: Arc::new(blob), sha256: digest })
    }
}

/// Maps an error from reading the body. s3s checks the body against the signed length and SHA-256 while reading. Its
/// error type is private, so a mismatch is recognized by the error's text.
fn upload_error(error: &s3s::StdError) -> s3s::S3Error {
    let text = error.to_string();
    if text.contains("Sha256Mismatch") {
        return s3_error!(BadDigest, "the body's SHA-256 does not match the signed one");
    }
    s3_error!(IncompleteBody, "the body is incomplete: {text}")
}

/// A blob that is being written to a file. The file is deleted unless the write completes.
struct Spill {
    blob: Blob,
    file: tokio::io::BufWriter<tokio::fs::File>,
}

impl Spill {
    async fn new(dir: &Path) -> io::Result<Self> {
        let path = dir.join(uuid::Uuid::new_v4().simple().to_string());
        let file =
            tokio::io::BufWriter::with_capacity(FILE_CHUNK_BYTES, tokio::fs::File::create_new(&path).await?);
        Ok(Self { blob: Blob { len: 0, content: Content::File(path) }, file })
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.blob.len += bytes.len() as u64;
        self.file.write_all(bytes).await
    }

    async fn finish(mut self) -> io::Result<Blob> {
        self.file.flush().await?;
        Ok(self.blob)
    }
}

/// An object's content: the uploaded parts in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Body(Vec<Arc<Blob>>);

impl Body {
    pub(super) fn new(parts: Vec<Arc<Blob>>) -> Self {
        Self(parts)
    }

    pub(super) fn len(&self) -> u64 {
        self.0.iter().map(|blob| blob.len).sum()
    }

    pub(super) fn stream(&self, range: Range<u64>) -> StreamingBlob {
        let mut start = 0;
        let mut pieces = Vec::new();
        for blob in &self.0 {
            let end = start + blob.len;
            let piece = range.start.clamp(start, end) - start..range.end.clamp(start, end) - start;
            if !piece.is_empty() {
                pieces.push((Arc::clone(blob), piece));
            }
            start = end;
        }
        StreamingBlob::wrap(
            stream::iter(pieces).map(Ok).and_then(|(blob, piece)| open(blob, piece)).try_flatten(),
        )
    }

    pub(super) fn read(&self) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        for blob in &self.0 {
            match &blob.content {
                Content::Memory(bytes) => content.extend_from_slice(bytes),
                Content::File(path) => {
                    std::fs::File::open(path)?.read_to_end(&mut content)?;
                }
            }
        }
        Ok(content)
    }
}

type ByteStream = std::pin::Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send + Sync>>;

async fn open(blob: Arc<Blob>, range: Range<u64>) -> io::Result<ByteStream> {
    match &blob.content {
        Content::Memory(bytes) => {
            let index = |offset: u64| usize::try_from(offset).map_err(io::Error::other);
            let piece = bytes.slice(index(range.start)?..index(range.end)?);
            Ok(Box::pin(stream::iter([Ok(piece)])))
        }
        Content::File(path) => {
            let mut file = tokio::fs::File::open(path).await?;
            file.seek(io::SeekFrom::Start(range.start)).await?;
            Ok(Box::pin(ReaderStream::with_capacity(file.take(range.end - range.start), FILE_CHUNK_BYTES)))
        }
    }
}

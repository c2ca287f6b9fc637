//! Serves files over HTTP: conditional and range requests, entity tags, compression, media types and percent-decoding.
//!
//! A file is served from a descriptor or from memory, never from a path: the caller decides which file a URL names, and
//! whether it may be opened.

use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::stream::{self, Stream};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, header};
use http_serve::{BoxError, Entity};
use sha2::{Digest, Sha256};

use super::problem::{Code, Problem};

const CHUNK_BYTES: u64 = 128 * 1024;
/// Smaller files are not compressed.
const MIN_GZIP_BYTES: u64 = 1024;

/// A file that can be served many times.
#[derive(Debug, Clone)]
pub struct StaticFile {
    content: Content,
    media_type: &'static str,
    tag: HeaderValue,
    encoding: Option<HeaderValue>,
}

#[derive(Debug, Clone)]
enum Content {
    Open { file: Arc<File>, bytes: u64 },
    Memory(Bytes),
}

impl StaticFile {
    /// Wraps a regular file that is open for reading. `name` determines the media type.
    pub fn from_file(file: File, meta: &Metadata, name: &Path) -> Self {
        let tag = format!("\"{:x}-{:x}-{:x}-{:x}\"", meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len());
        Self {
            content: Content::Open { file: Arc::new(file), bytes: meta.len() },
            media_type: media_type(name),
            tag: tag_value(&tag),
            encoding: None,
        }
    }

    /// Wraps content that is held in memory.
    pub fn in_memory(content: impl Into<Bytes>, media_type: &'static str) -> Self {
        let content = content.into();
        let tag = format!("\"{}\"", hex::encode(&Sha256::digest(&content)[..12]));
        Self { content: Content::Memory(content), media_type, tag: tag_value(&tag), encoding: None }
    }

    pub fn media_type(&self) -> &'static str {
        self.media_type
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        match &self.content {
            Content::Open { bytes, .. } => *bytes,
            Content::Memory(content) => content.len() as u64,
        }
    }

    /// Returns the content's entity tag.
    pub fn tag(&self) -> &HeaderValue {
        &self.tag
    }

    /// Returns whether the file is text and large enough to compress.
    pub fn is_compressible(&self) -> bool {
        let kind = self.media_type;
        let is_text =
            kind.starts_with("text/") || ["json", "svg", "xml"].iter().any(|part| kind.contains(part));
        is_text && self.size() >= MIN_GZIP_BYTES
    }

    /// Returns the file compressed in memory, with a separate entity tag; `None` if the result is not smaller. Blocks.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn gzip(&self, level: Compression) -> io::Result<Option<Self>> {
        let mut encoder = GzEncoder::new(Vec::new(), level);
        match &self.content {
            Content::Memory(content) => encoder.write_all(content)?,
            Content::Open { file, bytes } => {
                let mut content = vec![0; usize::try_from(*bytes).map_err(io::Error::other)?];
                file.read_exact_at(&mut content, 0)?;
                encoder.write_all(&content)?;
            }
        }
        let compressed = encoder.finish()?;
        if compressed.len() as u64 >= self.size() {
            return Ok(None);
        }
        let tag = self.tag.to_str().unwrap_or_default().trim_end_matches('"');
        Ok(Some(Self {
            tag: tag_value(&format!("{tag}-gzip\"")),
            content: Content::Memory(compressed.into()),
            media_type: self.media_type,
            encoding: Some(HeaderValue::from_static("gzip")),
        }))
    }
}

fn tag_value(tag: &str) -> HeaderValue {
    HeaderValue::from_str(tag).unwrap_or_else(|_| HeaderValue::from_static("\"\""))
}

impl Entity for StaticFile {
    type Error = BoxError;
    type Data = Bytes;

    fn len(&self) -> u64 {
        self.size()
    }

    fn get_range(
        &self,
        range: Range<u64>,
    ) -> Pin<Box<dyn Stream<Item = Result<Bytes, BoxError>> + Send + Sync>> {
        match &self.content {
            Content::Memory(content) => {
                let bounds =
                    usize::try_from(range.start).and_then(|start| Ok(start..usize::try_from(range.end)?));
                let part = bounds.map(|bounds| content.slice(bounds)).map_err(BoxError::from);
                Box::pin(stream::iter([part]))
            }
            Content::Open { file, .. } => Box::pin(read_chunks(file.clone(), range)),
        }
    }

    fn add_headers(&self, headers: &mut HeaderMap) {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.media_type));
        if let Some(encoding) = &self.encoding {
            headers.insert(header::CONTENT_ENCODING, encoding.clone());
        }
    }

    fn etag(&self) -> Option<HeaderValue> {
        Some(self.tag.clone())
    }

    /// Always returns `None`: entity tags are more precise than times in seconds.
    fn last_modified(&self) -> Option<SystemTime> {
        None
    }
}

/// Reads the range on a blocking thread, one chunk at a time. If the file was truncated, the stream ends with an error.
fn read_chunks(
    file: Arc<File>,
    range: Range<u64>,
) -> impl Stream<Item = Result<Bytes, BoxError>> + Send + Sync {
    stream::try_unfold(range, move |rest| {
        let file = file.clone();
        async move {
            if rest.is_empty() {
                return Ok(None);
            }
            let size = CHUNK_BYTES.min(rest.end - rest.start);
            let read = tokio::task::spawn_blocking(move || {
                let mut chunk = vec![0; usize::try_from(size).unwrap_or_default()];
                file.read_exact_at(&mut chunk, rest.start).map(|()| chunk)
            });
            let chunk = read.await??;
            Ok(Some((Bytes::from(chunk), rest.start + size..rest.end)))
        }
    })
}

/// How a browser may cache a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caching {
    /// The browser must revalidate the file each time.
    Revalidate,
    /// The content never changes under this name.
    Immutable,
}

/// Responds to a `GET` or `HEAD` request with a file, or with its compressed version `gzip` if there is one and the
/// client accepts it.
pub fn respond(request: &Parts, plain: StaticFile, gzip: Option<StaticFile>, caching: Caching) -> Response {
    let varies_by_encoding = plain.is_compressible();
    let file = gzip.filter(|_| http_serve::should_gzip(&request.headers)).unwrap_or(plain);
    let mut conditional = Request::new(());
    conditional.method_mut().clone_from(&request.method);
    conditional.headers_mut().clone_from(&request.headers);
    let mut response = http_serve::serve(file, &conditional).map(Body::new);
    let headers = response.headers_mut();
    let cache_control = match caching {
        Caching::Revalidate => "private, no-cache",
        Caching::Immutable => "private, max-age=31536000, immutable",
    };
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(cache_control));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if varies_by_encoding {
        headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    }
    response
}

/// Returns the response to a request whose method is neither `GET` nor `HEAD`.
pub fn method_not_allowed() -> Response {
    let mut response =
        Problem::new(Code::MethodNotAllowed, "Files can only be read: use GET or HEAD.").into_response();
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
    response
}

/// Returns whether a method is `GET` or `HEAD`.
pub fn is_read_method(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

/// Percent-decodes a path; `None` if an escape is malformed or the result is not UTF-8.
pub fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digit = |byte: Option<u8>| char::from(byte?).to_digit(16).and_then(|d| u8::try_from(d).ok());
            bytes.push(digit(rest.next())? * 16 + digit(rest.next())?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

/// Returns the media type for the path's extension.
pub fn media_type(path: &Path) -> &'static str {
    let extension =
        path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_ascii_lowercase();
    match extension.as_str() {
        "html" | "htm" => "text/html; charset=utf-8",
        "xhtml" => "application/xhtml+xml",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "json" | "map" => "application/json",
        "webmanifest" => "application/manifest+json",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "avif" => "image/avif",
        "ico" => "image/x-icon",
        "woff" => "font/woff",
        "woff2" => "font/woff2",
        "ttf" => "font/ttf",
        "otf" => "font/otf",
        "txt" | "md" => "text/plain; charset=utf-8",
        "csv" => "text/csv; charset=utf-8",
        "xml" => "application/xml",
        "pdf" => "application/pdf",
        "wasm" => "application/wasm",
        "mp3" => "audio/mpeg",
        "ogg" => "audio/ogg",
        "wav" => "audio/wav",
        "mp4" => "video/mp4",
        "webm" => "video/webm",
        _ => "application/octet-stream",
    }
}

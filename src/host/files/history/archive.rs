//! Archives of earlier versions of the owner's files, generated on the fly.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use futures_util::{Stream, StreamExt, stream};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use svc_base::error_chain::format_chain;
use svc_files::FilesError;
use svc_files::hard_link_paths::HardLinkPaths;
use svc_files::history::{Entry, EntryKind, History};
use svc_files::path_stack::PathStack;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use zip::write::{SimpleFileOptions, StreamWriter};
use zip::{CompressionMethod, ZipWriter};

const BUFFER_BYTES: usize = 128 << 10;
/// Maximum number of buffers queued for the client.
const MAX_PENDING_BUFFERS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArchiveFormat {
    Tar,
    Zip,
}

impl ArchiveFormat {
    pub fn extension(self) -> &'static str {
        match self {
            Self::Tar => ".tar",
            Self::Zip => ".zip",
        }
    }

    pub fn media_type(self) -> &'static str {
        match self {
            Self::Tar => "application/x-tar",
            Self::Zip => "application/zip",
        }
    }
}

/// Streams an archive of an entry and everything below it. If the archive can't be completed, the body ends with an
/// error so that clients don't mistake it for a complete one.
pub fn stream_archive(history: History, entry: Entry, name: OsString, format: ArchiveFormat) -> Body {
    let (sender, buffers) = mpsc::channel::<io::Result<Vec<u8>>>(MAX_PENDING_BUFFERS);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let (errors, has_failed) = (sender.clone(), Arc::new(AtomicBool::new(false)));
        let channel = ChannelWriter { buffers: sender, has_failed: Arc::clone(&has_failed) };
        let output = BufWriter::with_capacity(BUFFER_BYTES, channel);
        let mut writer = match format {
            ArchiveFormat::Tar => {
                ArchiveWriter::Tar(Box::new(tar::Builder::new(output)), HardLinkPaths::default())
            }
            ArchiveFormat::Zip => ArchiveWriter::Zip(Box::new(ZipWriter::new_stream(output))),
        };
        let written = match write_entries(&history, &entry, &name, &mut writer, &runtime) {
            Ok(()) => writer.finish(),
            Err(error) => {
                // Both libraries finish the archive when their writer is dropped.
                has_failed.store(true, Ordering::Relaxed);
                drop(writer);
                Err(error)
            }
        };
        if let Err(error) = written {
            tracing::warn!(error = %format_chain(&error), "incomplete archive of the owner's files");
            // Fails if the client has disconnected.
            let _ = errors.blocking_send(Err(error));
        }
    });
    Body::from_stream(stream::unfold(buffers, async |mut buffers| {
        buffers.recv().await.map(|buffer| (buffer, buffers))
    }))
}

struct ChannelWriter {
    buffers: mpsc::Sender<io::Result<Vec<u8>>>,
    has_failed: Arc<AtomicBool>,
}

impl Write for ChannelWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.has_failed.load(Ordering::Relaxed) {
            return Err(io::Error::other("the archive is incomplete"));
        }
        let disconnected = |_| io::Error::new(io::ErrorKind::BrokenPipe, "client disconnected");
        self.buffers.blocking_send(Ok(bytes.to_vec())).map_err(disconnected)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes an archive in either format.
enum ArchiveWriter<W: Write> {
    /// [`HardLinkPaths`] maps each hard-linked file to its first path. Later paths become links to it.
    Tar(Box<tar::Builder<W>>, HardLinkPaths),
    Zip(Box<ZipWriter<StreamWriter<W>>>),
}

fn write_entries<W: Write>(
    history: &History,
    entry: &Entry,
    name: &OsStr,
    writer: &mut ArchiveWriter<W>,
    runtime: &Handle,
) -> io::Result<()> {
    // Storing the full path of each entry would take too much memory in deep directories.
    let (mut pending_paths, mut pending) = (PathStack::default(), vec![entry.clone()]);
    pending_paths.push(Path::new(name));
    while let (Some(path), Some(entry)) = (pending_paths.pop(), pending.pop()) {
        match entry.kind() {
            EntryKind::Directory => {
                writer.add_directory(&path, &entry)?;
                let children = runtime.block_on(history.list(&entry)).map_err(io::Error::other)?;
                // Reversed, since the stack pops the last entry first.
                for child in children.into_iter().rev() {
                    pending_paths.push(&path.join(child.name()));
                    pending.push(child);
                }
            }
            EntryKind::File => {
                let content = ContentReader {
                    chunks: Box::pin(history.read_content(&entry)),
                    chunk: io::Cursor::new(Vec::new()),
                    remaining: entry.size(),
                    runtime,
                };
                writer.add_file(&path, &entry, content)?;
            }
            EntryKind::Symlink => {
                if let Some(target) = entry.link_target() {
                    writer.add_symlink(&path, &entry, &target)?;
                }
            }
            EntryKind::Special => {}
        }
    }
    Ok(())
}

impl<W: Write> ArchiveWriter<W> {
    fn add_directory(&mut self, path: &Path, entry: &Entry) -> io::Result<()> {
        match self {
            Self::Tar(tar, _) => {
                let mut header = tar_header(entry, tar::EntryType::Directory);
                tar.append_data(&mut header, path, io::empty())
            }
            Self::Zip(zip) => Ok(zip.add_directory(zip_name(path), zip_options(entry))?),
        }
    }

    fn add_file(&mut self, path: &Path, entry: &Entry, mut content: impl Read) -> io::Result<()> {
        match self {
            Self::Tar(tar, hard_link_paths) => {
                let key = entry.hard_link_key();
                if let Some(first) = key.and_then(|key| hard_link_paths.find_or_insert(path, key)) {
                    let mut header = tar_header(entry, tar::EntryType::Link);
                    header.set_size(0);
                    return tar.append_link(&mut header, path, first);
                }
                let mut header = tar_header(entry, tar::EntryType::Regular);
                header.set_size(entry.size());
                tar.append_data(&mut header, path, content)
            }
            Self::Zip(zip) => {
                zip.start_file(zip_name(path), zip_options(entry))?;
                io::copy(&mut content, zip).map(drop)
            }
        }
    }

    fn add_symlink(&mut self, path: &Path, entry: &Entry, target: &OsStr) -> io::Result<()> {
        match self {
            Self::Tar(tar, _) => {
                let mut header = tar_header(entry, tar::EntryType::Symlink);
                // `append_link` would normalize the target: `./a` and `a/` would become `a`.
                if header.set_link_name_literal(target.as_bytes()).is_err() {
                    append_long_link(tar, target.as_bytes())?;
                }
                tar.append_data(&mut header, path, io::empty())
            }
            Self::Zip(zip) => {
                let target = target.to_str().map_or_else(|| zip_name(Path::new(target)), str::to_owned);
                Ok(zip.add_symlink(zip_name(path), target, zip_options(entry))?)
            }
        }
    }

    fn finish(self) -> io::Result<()> {
        let mut output = match self {
            Self::Tar(tar, _) => tar.into_inner()?,
            Self::Zip(zip) => zip.finish()?.into_inner(),
        };
        output.flush()
    }
}

fn tar_header(entry: &Entry, kind: tar::EntryType) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(entry.mode());
    header.set_mtime(u64::try_from(entry.modified_at().as_second()).unwrap_or(0));
    header.set_size(0);
    header
}

/// Appends a GNU long-link entry, for a link target too long for the next entry's header.
fn append_long_link<W: Write>(tar: &mut tar::Builder<W>, target: &[u8]) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_path("././@LongLink")?;
    header.set_entry_type(tar::EntryType::GNULongLink);
    header.set_mode(0o644);
    header.set_size(target.len() as u64 + 1);
    header.set_cksum();
    tar.append(&header, target.chain([0].as_slice()))
}

fn zip_options(entry: &Entry) -> SimpleFileOptions {
    SimpleFileOptions::default()
        .compression_method(CompressionMethod::Deflated)
        .unix_permissions(entry.mode() & 0o777)
        .large_file(true)
        .last_modified_time(zip_time(entry.modified_at()).unwrap_or_default())
}

/// Converts a time to a zip timestamp in UTC, with two-second resolution. Returns `None` outside the years 1980 to
/// 2107.
fn zip_time(time: Timestamp) -> Option<zip::DateTime> {
    let time = time.to_zoned(TimeZone::UTC);
    let part = |number: i8| u8::try_from(number).ok();
    zip::DateTime::from_date_and_time(
        u16::try_from(time.year()).ok()?,
        part(time.month())?,
        part(time.day())?,
        part(time.hour())?,
        part(time.minute())?,
        part(time.second())?,
    )
    .ok()
}

/// Encodes a path as text. Each invalid UTF-8 byte, and each byte of U+FFFD itself, becomes U+FFFD followed by two hex
/// digits. So does `\`, which could escape the target directory on Windows. The encoding is reversible, so distinct
/// paths never collide ([`ZipWriter`] rejects duplicate names). Percent-encoding would also have to change valid names
/// containing `%`.
fn zip_name(path: &Path) -> String {
    use std::fmt::Write as _;
    let mut name = String::new();
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        let valid = chunk.valid().replace('\u{FFFD}', "\u{FFFD}EF\u{FFFD}BF\u{FFFD}BD");
        name.push_str(&valid.replace('\\', "\u{FFFD}5C"));
        for byte in chunk.invalid() {
            let _ = write!(name, "\u{FFFD}{byte:02X}");
        }
    }
    name
}

type Chunks<'a> = Pin<Box<dyn Stream<Item = Result<Vec<u8>, FilesError>> + 'a>>;

/// Reads a file's content. Fails if its size differs from the recorded one, which is already in the tar entry's header.
struct ContentReader<'a> {
    chunks: Chunks<'a>,
    chunk: io::Cursor<Vec<u8>>,
    /// Bytes of the recorded size not yet read.
    remaining: u64,
    runtime: &'a Handle,
}

impl Read for ContentReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.chunk.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let Some(chunk) = self.runtime.block_on(self.chunks.next()) else {
                return if self.remaining == 0 {
                    Ok(0)
                } else {
                    Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "file is shorter than its recorded size",
                    ))
                };
            };
            let chunk = chunk.map_err(io::Error::other)?;
            let too_long = || io::Error::other("file is longer than its recorded size");
            self.remaining = self.remaining.checked_sub(chunk.len() as u64).ok_or_else(too_long)?;
            self.chunk = io::Cursor::new(chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zip_names_are_unique_and_preserve_valid_names() {
        for (path, expected) in [
            (&b"a/%E9 \xC3\xBC"[..], "a/%E9 \u{FC}"),
            (&b"a/\xE9 \xC3\xBC"[..], "a/\u{FFFD}E9 \u{FC}"),
            (br"a/..\x", "a/..\u{FFFD}5Cx"),
            ("a/\u{FFFD}E9 \u{FC}".as_bytes(), "a/\u{FFFD}EF\u{FFFD}BF\u{FFFD}BDE9 \u{FC}"),
        ] {
            assert_eq!(zip_name(Path::new(OsStr::from_bytes(path))), expected);
        }
    }
}

//! A resumable download with a running SHA-256. Resuming rehashes the existing part, so the digest matches what is
//! actually in the file.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::fsx::FileError;

/// A partially downloaded file and the hash of its content.
pub struct PartialFile {
    path: PathBuf,
    file: File,
    length: u64,
    digest: Sha256,
}

impl PartialFile {
    /// Opens the file, or creates it readable only by its owner, and hashes its content. A file longer than `size`, the
    /// length of the complete download, is truncated to zero.
    pub fn open(path: PathBuf, size: u64) -> Result<Self, FileError> {
        let open_and_hash = || -> std::io::Result<(File, u64, Sha256)> {
            let mut options = File::options();
            let options = options.create(true).truncate(false).read(true).write(true).mode(0o600);
            let mut file = options.open(&path)?;
            if file.metadata()?.len() > size {
                file.set_len(0)?;
            }
            let (mut digest, mut length, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 18]);
            loop {
                match file.read(&mut buffer)? {
                    0 => return Ok((file, length, digest)),
                    read => {
                        digest.update(&buffer[..read]);
                        length += read as u64;
                    }
                }
            }
        };
        let (file, length, digest) = open_and_hash().map_err(FileError::wrap("read", &path))?;
        Ok(Self { path, file, length, digest })
    }

    /// Bytes downloaded so far.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Hex-encoded SHA-256 of the content so far.
    pub fn sha256(&self) -> String {
        hex::encode(self.digest.clone().finalize())
    }

    pub fn append(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.file.write_all(bytes).map_err(FileError::wrap("write", &self.path))?;
        self.digest.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Discards the content and starts over.
    pub fn restart(&mut self) -> Result<(), FileError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(FileError::wrap("truncate", &self.path))?;
        self.length = 0;
        self.digest = Sha256::new();
        Ok(())
    }

    /// Makes the content durable.
    pub fn sync(&self) -> Result<(), FileError> {
        self.file.sync_all().map_err(FileError::wrap("sync", &self.path))
    }
}

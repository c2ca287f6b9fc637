//! A deterministic archive that resembles a real bundle in file count, size and compressibility.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

pub const FILE_COUNT: u32 = 5_232;
pub const TOTAL_BYTES: u64 = 460_000_000;
pub const VERSION: &str = "bench-1";
/// Sizes of a few large programs, such as a language runtime and the product's binary.
const LARGE_FILE_BYTES: [u64; 4] = [96 << 20, 48 << 20, 24 << 20, 12 << 20];
/// Each block starts with random bytes, and text fills the rest. This yields the compression ratio of real bundles:
/// 178 MB for 460 MB.
const BLOCK_BYTES: usize = 4096;
const NOISE_BYTES: usize = 952;

/// Returns the archive's path and SHA-256. Creates the archive if it is missing.
pub fn locate_or_create(dir: &Path) -> Result<(PathBuf, String)> {
    let path = dir.join("bundle.tar.gz");
    if !path.exists() {
        println!("  creating an archive of {FILE_COUNT} files (only once)");
        fs::create_dir_all(dir)?;
        let partial = dir.join(".bundle.tar.gz");
        write_archive(BufWriter::new(File::create(&partial)?))?;
        fs::rename(&partial, &path)?;
    }
    let digest = kit::fetch::sha256(&path)?;
    Ok((path, digest))
}

fn write_archive(output: impl Write) -> Result<()> {
    let encoder = GzBuilder::new().write(output, Compression::new(6));
    let mut archive = Builder::new(encoder);
    let mut generator = ContentGenerator(0x5376_6342_656e_6368);
    let mut add = |path: &str, content: &[u8], mode: u32| -> Result<()> {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_size(content.len() as u64);
        header.set_mode(mode);
        header.set_mtime(0);
        archive.append_data(&mut header, path, content)?;
        Ok(())
    };
    let release = format!("{{\"version\":1,\"imageVersion\":\"{VERSION}\",\"components\":[]}}\n");
    add("release.json", release.as_bytes(), 0o644)?;
    add("bin/svc", b"#!/bin/sh\n", 0o755)?;
    let mut remaining = TOTAL_BYTES;
    for (n, size) in LARGE_FILE_BYTES.into_iter().enumerate() {
        add(&format!("runtime/large/{n}"), &generator.content(size), 0o755)?;
        remaining -= size;
    }
    let small_files = u64::from(FILE_COUNT) - LARGE_FILE_BYTES.len() as u64 - 2;
    for n in 0..small_files {
        // Sizes range from 0.1 to 1.9 times the mean of the remaining files.
        let mean = remaining / (small_files - n);
        let size = if n + 1 == small_files {
            remaining
        } else {
            mean / 10 + generator.next() % (mean * 9 / 5).max(1)
        };
        let size = size.min(remaining);
        add(&format!("runtime/node_modules/m{}/lib/f{n}.js", n % 331), &generator.content(size), 0o644)?;
        remaining -= size;
    }
    archive.into_inner()?.finish()?.flush()?;
    Ok(())
}

/// xorshift64*, identical on all platforms.
struct ContentGenerator(u64);

impl ContentGenerator {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn content(&mut self, size: u64) -> Vec<u8> {
        let size = usize::try_from(size).unwrap_or_default();
        let mut content = Vec::with_capacity(size + BLOCK_BYTES);
        while content.len() < size {
            let noise_end = content.len() + NOISE_BYTES;
            while content.len() < noise_end {
                content.extend_from_slice(&self.next().to_le_bytes());
            }
            let block_end = noise_end - NOISE_BYTES + BLOCK_BYTES;
            while content.len() < block_end {
                let n = self.next();
                content.extend_from_slice(WORDS[(n % WORDS.len() as u64) as usize].as_bytes());
                content.extend_from_slice(if n & 0x700 == 0 { b"\n    " } else { b" " });
            }
        }
        content.truncate(size);
        content
    }
}

const WORDS: [&str; 24] = [
    "const",
    "function",
    "return",
    "export",
    "default",
    "await",
    "import",
    "from",
    "module.exports",
    "require(",
    "=>",
    "{",
    "}",
    "undefined",
    "this.options",
    "prototype",
    "Object.keys(",
    "length",
    "index",
    "callback",
    "error",
    "throw new Error(",
    "if (",
    "else",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_deterministic_and_has_requested_length() {
        let (mut first, mut second) = (ContentGenerator(7), ContentGenerator(7));
        assert_eq!(first.content(10_000), second.content(10_000));
        assert_eq!(first.content(12_345).len(), 12_345);
    }
}

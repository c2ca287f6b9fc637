//! An archive like a real bundle: as many files, as large, as compressible; the same bytes in every run.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

pub const FILES: u32 = 5_232;
pub const BYTES: u64 = 460_000_000;
pub const VERSION: &str = "bench-1";
/// A few large programs, as a language runtime and our own binary are.
const LARGE: [u64; 4] = [96 << 20, 48 << 20, 24 << 20, 12 << 20];
/// Of a block that text fills; the rest is noise. It gives what was measured of real bundles: 460 MB from 178 MB.
const BLOCK: usize = 4096;
const NOISE: usize = 952;

/// The archive, made where it is not there yet, with its SHA-256.
pub fn made(dir: &Path) -> Result<(PathBuf, String)> {
    let path = dir.join("bundle.tar.gz");
    if !path.exists() {
        println!("  making an archive of {FILES} files, once");
        fs::create_dir_all(dir)?;
        let partial = dir.join(".bundle.tar.gz");
        write(BufWriter::new(File::create(&partial)?))?;
        fs::rename(&partial, &path)?;
    }
    let digest = crate::fetch::sha256(&path)?;
    Ok((path, digest))
}

fn write(to: impl Write) -> Result<()> {
    let packed = GzBuilder::new().write(to, Compression::new(6));
    let mut archive = Builder::new(packed);
    let mut source = Source(0x5376_6342_656e_6368);
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
    let mut left = BYTES;
    for (n, size) in LARGE.into_iter().enumerate() {
        add(&format!("runtime/large/{n}"), &source.content(size), 0o755)?;
        left -= size;
    }
    let small = u64::from(FILES) - LARGE.len() as u64 - 2;
    for n in 0..small {
        // From a tenth of the mean to almost twice of it.
        let mean = left / (small - n);
        let size = if n + 1 == small { left } else { mean / 10 + source.next() % (mean * 9 / 5).max(1) };
        let size = size.min(left);
        add(&format!("runtime/node_modules/m{}/lib/f{n}.js", n % 331), &source.content(size), 0o644)?;
        left -= size;
    }
    archive.into_inner()?.finish()?.flush()?;
    Ok(())
}

/// xorshift64*: the same everywhere.
struct Source(u64);

impl Source {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn content(&mut self, size: u64) -> Vec<u8> {
        let size = usize::try_from(size).unwrap_or_default();
        let mut content = Vec::with_capacity(size + BLOCK);
        while content.len() < size {
            let noise = content.len() + NOISE;
            while content.len() < noise {
                content.extend_from_slice(&self.next().to_le_bytes());
            }
            let block = noise - NOISE + BLOCK;
            while content.len() < block {
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
    fn content_is_the_same_each_time_and_as_long_as_asked() {
        let (mut one, mut other) = (Source(7), Source(7));
        assert_eq!(one.content(10_000), other.content(10_000));
        assert_eq!(one.content(12_345).len(), 12_345);
    }
}

//! A bundle's entries, sorted by path. The content of source files stays on disk until it is written.
//!
//! Packing fails, with an error that names the entry, for a link that is absolute or dangling or that leads out of the
//! bundle, and for anything other than a file, a directory or a link, because a host would refuse to unpack it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use tar::{EntryType, Header};

/// A host rejects an archive with more entries.
const MAX_ENTRIES: usize = 200_000;

enum Entry {
    Directory,
    Bytes(Vec<u8>),
    File { source: PathBuf, is_executable: bool },
    Link(String),
}

/// A bundle's entries, by path.
#[derive(Default)]
pub struct Tree {
    entries: BTreeMap<String, Entry>,
}

impl Tree {
    pub fn add_directory(&mut self, path: &str) {
        self.entries.entry(path.to_owned()).or_insert(Entry::Directory);
    }

    pub fn add_bytes(&mut self, path: impl Into<String>, content: impl Into<Vec<u8>>) {
        self.entries.insert(path.into(), Entry::Bytes(content.into()));
    }

    pub fn add_executable(&mut self, path: impl Into<String>, source: PathBuf) {
        self.entries.insert(path.into(), Entry::File { source, is_executable: true });
    }

    pub fn add_link(&mut self, path: impl Into<String>, target: impl Into<String>) {
        self.entries.insert(path.into(), Entry::Link(target.into()));
    }

    /// Adds everything under `source` as `path/…`.
    pub fn add_tree(&mut self, path: &str, source: &Path) -> Result<()> {
        self.add_directory(path);
        let entries = fs::read_dir(source).with_context(|| format!("cannot read {}", source.display()))?;
        for entry in entries {
            let entry = entry?;
            let from = entry.path();
            let Ok(name) = entry.file_name().into_string() else {
                bail!("{} is not UTF-8", from.display());
            };
            let to = format!("{path}/{name}");
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.add_tree(&to, &from)?;
            } else if kind.is_symlink() {
                let target = fs::read_link(&from)?;
                let Some(target) = target.to_str() else {
                    bail!("{} links to a path that is not UTF-8", from.display())
                };
                self.add_link(to, target);
            } else if kind.is_file() {
                let is_executable = entry.metadata()?.permissions().mode() & 0o111 != 0;
                self.entries.insert(to, Entry::File { source: from, is_executable });
            } else {
                bail!("{} is not a file, a directory or a link", from.display());
            }
        }
        Ok(())
    }

    /// Writes a tar archive with sorted entries, without times or owners.
    pub fn write(mut self, out: impl Write) -> Result<()> {
        let parents: Vec<String> = self.entries.keys().flat_map(|path| parent_paths(path)).collect();
        for parent in parents {
            self.add_directory(&parent);
        }
        ensure!(
            self.entries.len() <= MAX_ENTRIES,
            "too many entries (maximum {MAX_ENTRIES}): {}",
            self.entries.len()
        );
        self.check_links()?;
        let mut archive = tar::Builder::new(out);
        for (path, entry) in &self.entries {
            append(&mut archive, path, entry).with_context(|| format!("cannot pack {path}"))?;
        }
        archive.into_inner()?;
        Ok(())
    }

    fn check_links(&self) -> Result<()> {
        for (path, entry) in &self.entries {
            if let Entry::Link(target) = entry {
                let destination = self.resolve_link(path, target, 0);
                ensure!(destination.is_some(), "{path} is a link to {target}, which is not in the bundle");
            }
        }
        Ok(())
    }

    /// Resolves a link, following intermediate links; `None` if the destination is not in the tree.
    fn resolve_link(&self, link: &str, target: &str, depth: usize) -> Option<String> {
        if depth > 16 {
            return None;
        }
        let mut segments: Vec<String> = link.split('/').map(str::to_owned).collect();
        segments.pop();
        for part in Path::new(target).components() {
            match part {
                Component::Normal(name) => segments.push(name.to_str()?.to_owned()),
                Component::CurDir => continue,
                Component::ParentDir => drop(segments.pop()?),
                Component::RootDir | Component::Prefix(_) => return None,
            }
            let path = segments.join("/");
            match self.entries.get(&path) {
                Some(Entry::Link(next)) => {
                    let destination = self.resolve_link(&path, next, depth + 1)?;
                    segments = destination.split('/').map(str::to_owned).collect();
                }
                Some(_) => {}
                None if segments.is_empty() => {}
                None => return None,
            }
        }
        Some(segments.join("/"))
    }
}

fn parent_paths(path: &str) -> Vec<String> {
    path.match_indices('/').map(|(index, _)| path[..index].to_owned()).collect()
}

fn append(archive: &mut tar::Builder<impl Write>, path: &str, entry: &Entry) -> Result<()> {
    let mut header = Header::new_gnu();
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    match entry {
        Entry::Directory => {
            header.set_entry_type(EntryType::Directory);
            header.set_mode(0o755);
            archive.append_data(&mut header, format!("{path}/"), io::empty())?;
        }
        Entry::Bytes(content) => {
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            archive.append_data(&mut header, path, content.as_slice())?;
        }
        Entry::File { source, is_executable } => {
            let file = File::open(source).with_context(|| format!("cannot open {}", source.display()))?;
            let size = file.metadata()?.len();
            header.set_mode(if *is_executable { 0o755 } else { 0o644 });
            header.set_size(size);
            let mut content = CountingReader { inner: file.take(size), count: 0 };
            archive.append_data(&mut header, path, &mut content)?;
            ensure!(content.count == size, "{} was truncated during packing", source.display());
        }
        Entry::Link(target) => {
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(0o777);
            archive.append_link(&mut header, path, target)?;
        }
    }
    Ok(())
}

struct CountingReader<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(into)?;
        self.count += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn pack(source: &Path) -> Result<Vec<u8>> {
        let mut tree = Tree::default();
        tree.add_tree("runtime/x", source)?;
        let mut out = Vec::new();
        tree.write(&mut out)?;
        Ok(out)
    }

    #[test]
    fn pack_preserves_links_executable_bits_and_long_names() {
        let dir = tempfile::tempdir().unwrap();
        let long = format!("{}/{}", "deep".repeat(30), "name".repeat(30));
        fs::create_dir_all(dir.path().join("lib").join("deep".repeat(30))).unwrap();
        fs::write(dir.path().join("lib").join(&long), b"content").unwrap();
        fs::set_permissions(dir.path().join("lib").join(&long), fs::Permissions::from_mode(0o750)).unwrap();
        fs::create_dir(dir.path().join("bin")).unwrap();
        symlink(format!("../lib/{long}"), dir.path().join("bin/run")).unwrap();
        symlink("bin", dir.path().join("also")).unwrap();
        symlink("also/run", dir.path().join("through")).unwrap();
        let bytes = pack(dir.path()).unwrap();
        let into = tempfile::tempdir().unwrap();
        tar::Archive::new(bytes.as_slice()).unpack(into.path()).unwrap();
        let run = into.path().join("runtime/x/through");
        assert_eq!(fs::read(&run).unwrap(), b"content");
        assert_eq!(fs::metadata(&run).unwrap().permissions().mode() & 0o777, 0o755);
    }

    #[test]
    fn pack_rejects_dangling_absolute_and_cyclic_links() {
        for target in ["nothing", "/etc/passwd", "../../../../etc/passwd", "loop"] {
            let dir = tempfile::tempdir().unwrap();
            symlink(target, dir.path().join("loop")).unwrap();
            let error = pack(dir.path()).unwrap_err().to_string();
            assert!(error.contains("runtime/x/loop") && error.contains(target), "{error}");
        }
    }
}

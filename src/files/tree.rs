//! Trees: directories serialized as JSON, with one node per entry.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use svc_base::untrusted_text::truncate_printable;

use crate::error::FilesError;
use crate::escape::{escape_name, unescape_name};
use crate::id::Id;

/// Bits of Go's file modes, as stored by `restic`. The low nine bits match Unix.
mod go_mode {
    pub(super) const DIR: u32 = 1 << 31;
    pub(super) const SYMLINK: u32 = 1 << 27;
    pub(super) const SETUID: u32 = 1 << 23;
    pub(super) const SETGID: u32 = 1 << 22;
    pub(super) const STICKY: u32 = 1 << 20;
}

/// Typical and minimum sizes of a serialized node excluding name, target, attributes and chunks, and the size of a
/// chunk id, in bytes.
pub(crate) const TYPICAL_NODE_BYTES: usize = 450;
const MIN_NODE_BYTES: usize = 250;
const CHUNK_ID_BYTES: usize = 67;

/// Maximum length of a name and a symlink target on Linux.
const MAX_NAME_BYTES: usize = 255;
const MAX_TARGET_BYTES: usize = 4095;

const UNIX_SETUID: u32 = 0o4000;
const UNIX_SETGID: u32 = 0o2000;
const UNIX_STICKY: u32 = 0o1000;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tree {
    /// Sorted bytewise by name.
    #[serde(deserialize_with = "null_as_default")]
    pub nodes: Vec<Node>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeType {
    File,
    Dir,
    Symlink,
    /// A device, FIFO or socket. Neither saved nor restored.
    #[serde(rename = "socket", alias = "fifo", alias = "dev", alias = "chardev", alias = "irregular")]
    Special,
}

/// A directory entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Escaped. Use [`Node::file_name`] for the actual name.
    name: String,
    #[serde(rename = "type")]
    pub node_type: NodeType,
    /// In Go's format. Use [`Node::unix_mode`] for the Unix mode.
    #[serde(default)]
    mode: u32,
    pub mtime: Timestamp,
    /// Set to `mtime`. Always written, because `restic` restores it.
    #[serde(default)]
    atime: Timestamp,
    #[serde(default)]
    pub ctime: Timestamp,
    #[serde(default)]
    pub uid: u32,
    #[serde(default)]
    pub gid: u32,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub user: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub group: String,
    #[serde(default)]
    pub inode: u64,
    #[serde(default)]
    pub device_id: u64,
    /// File size in bytes.
    #[serde(default)]
    pub size: u64,
    /// Disk space used by a sparse file when it was saved, if much less than its size. Our own field, which `restic`
    /// ignores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated_bytes: Option<u64>,
    /// Hard link count.
    #[serde(default)]
    pub links: u64,
    /// Symlink target, with invalid UTF-8 replaced by U+FFFD.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    linktarget: String,
    /// Base64-encoded symlink target, if it isn't valid UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    linktarget_raw: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub extended_attributes: Vec<ExtendedAttribute>,
    /// A file's chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Vec<Id>>,
    /// A directory's tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subtree: Option<Id>,
}

/// Device, inode and content of a hard-linked file. The inode isn't enough: an incremental save may visit only some of
/// a file's names, so its names in a snapshot can refer to different versions of the content.
pub type HardLinkKey = (u64, u64, Id);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtendedAttribute {
    /// Invalid UTF-8 is replaced by U+FFFD, as in `restic`.
    pub name: String,
    /// Base64-encoded name, if it isn't valid UTF-8. Our own field, which `restic` ignores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name_raw: Option<String>,
    /// Base64-encoded.
    #[serde(default)]
    value: Option<String>,
}

impl ExtendedAttribute {
    pub fn new(name: &[u8], value: &[u8]) -> Self {
        Self {
            name: String::from_utf8_lossy(name).into_owned(),
            name_raw: std::str::from_utf8(name).is_err().then(|| BASE64_STANDARD.encode(name)),
            value: Some(BASE64_STANDARD.encode(value)),
        }
    }

    /// Returns the name's bytes, or `None` if `name_raw` isn't valid base64.
    pub fn raw_name(&self) -> Option<Vec<u8>> {
        match &self.name_raw {
            Some(raw) => BASE64_STANDARD.decode(raw).ok(),
            None => Some(self.name.as_bytes().to_vec()),
        }
    }

    /// Returns the decoded value, or `None` if it isn't valid base64.
    pub fn value(&self) -> Option<Vec<u8>> {
        BASE64_STANDARD.decode(self.value.as_deref().unwrap_or_default()).ok()
    }
}

fn null_as_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: serde::Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Node {
    /// Returns a lower bound on the node's serialized size.
    pub(crate) fn min_bytes(&self) -> usize {
        let raw = self.linktarget_raw.as_ref().map_or(0, String::len);
        let attributes = self
            .extended_attributes
            .iter()
            .map(|attribute| attribute.name.len() + attribute.value.as_ref().map_or(0, String::len));
        let chunks = self.content.as_ref().map_or(0, Vec::len);
        MIN_NODE_BYTES
            + self.name.len()
            + self.linktarget.len()
            + raw
            + attributes.sum::<usize>()
            + chunks * CHUNK_ID_BYTES
    }

    /// Creates a node without content, owner or times.
    pub fn new(name: &OsStr, node_type: NodeType, unix_mode: u32) -> Self {
        Self {
            name: escape_name(name),
            node_type,
            mode: to_go_mode(node_type, unix_mode),
            mtime: Timestamp::UNIX_EPOCH,
            atime: Timestamp::UNIX_EPOCH,
            ctime: Timestamp::UNIX_EPOCH,
            uid: 0,
            gid: 0,
            user: String::new(),
            group: String::new(),
            inode: 0,
            device_id: 0,
            size: 0,
            allocated_bytes: None,
            links: 0,
            linktarget: String::new(),
            linktarget_raw: None,
            extended_attributes: Vec::new(),
            content: None,
            subtree: None,
        }
    }

    /// Returns the node with a different name.
    #[must_use]
    pub(crate) fn with_name(self, name: &OsStr) -> Self {
        Self { name: escape_name(name), ..self }
    }

    pub fn set_times(&mut self, mtime: Timestamp, ctime: Timestamp) {
        (self.mtime, self.atime, self.ctime) = (mtime, mtime, ctime);
    }

    /// Returns the unescaped name, or `None` if the escapes are invalid or it isn't a valid entry name, such as `..`,
    /// `a/b` or an overlong name.
    pub fn file_name(&self) -> Option<OsString> {
        let name = unescape_name(&self.name)?;
        let bytes = name.as_bytes();
        let is_plain = !matches!(bytes, b"" | b"." | b"..") && !bytes.contains(&b'/') && !bytes.contains(&0);
        (is_plain && bytes.len() <= MAX_NAME_BYTES).then_some(name)
    }

    /// Identifies a hard-linked file: entries of a snapshot with the same key are links to the same file. `None` for
    /// other entries, or if the inode is unknown.
    pub(crate) fn hard_link_key(&self) -> Option<HardLinkKey> {
        let has_other_names = self.node_type == NodeType::File && self.links > 1 && self.inode != 0;
        has_other_names
            .then(|| (self.device_id, self.inode, Id::of_all(self.content.as_deref().unwrap_or_default())))
    }

    /// Estimates the heap memory used by strings and attributes, in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        let strings = [&self.name, &self.user, &self.group, &self.linktarget];
        let string_bytes = strings.into_iter().chain(&self.linktarget_raw).map(String::len).sum::<usize>();
        let attributes = self.extended_attributes.iter().map(|attribute| {
            let strings = std::iter::once(&attribute.name).chain(&attribute.name_raw).chain(&attribute.value);
            size_of::<ExtendedAttribute>() + strings.map(String::len).sum::<usize>()
        });
        string_bytes + attributes.sum::<usize>()
    }

    /// Returns the low 12 bits of the Unix mode.
    pub fn unix_mode(&self) -> u32 {
        let bit = |go, unix| if self.mode & go != 0 { unix } else { 0 };
        self.mode & 0o777
            | bit(go_mode::SETUID, UNIX_SETUID)
            | bit(go_mode::SETGID, UNIX_SETGID)
            | bit(go_mode::STICKY, UNIX_STICKY)
    }

    pub fn set_link_target(&mut self, target: &OsStr) {
        self.linktarget = target.to_string_lossy().into_owned();
        self.linktarget_raw = target.to_str().is_none().then(|| BASE64_STANDARD.encode(target.as_bytes()));
    }

    /// Returns the symlink target, or `None` if it is empty, too long, contains a NUL byte, or isn't valid base64.
    pub fn link_target(&self) -> Option<OsString> {
        let target = match &self.linktarget_raw {
            Some(raw) => OsString::from_vec(BASE64_STANDARD.decode(raw).ok()?),
            None => OsString::from(&self.linktarget),
        };
        let is_valid = (1..=MAX_TARGET_BYTES).contains(&target.len()) && !target.as_bytes().contains(&0);
        is_valid.then_some(target)
    }
}

fn to_go_mode(node_type: NodeType, unix_mode: u32) -> u32 {
    let bit = |unix, go| if unix_mode & unix != 0 { go } else { 0 };
    let kind = match node_type {
        NodeType::Dir => go_mode::DIR,
        NodeType::Symlink => go_mode::SYMLINK,
        NodeType::File | NodeType::Special => 0,
    };
    kind | unix_mode & 0o777
        | bit(UNIX_SETUID, go_mode::SETUID)
        | bit(UNIX_SETGID, go_mode::SETGID)
        | bit(UNIX_STICKY, go_mode::STICKY)
}

impl Tree {
    /// Serializes the tree as `restic` does, with a trailing newline.
    pub(crate) fn to_json(&self) -> Result<Vec<u8>, FilesError> {
        let mut json = serde_json::to_vec(self).map_err(|error| FilesError::encode("tree", &error))?;
        json.push(b'\n');
        Ok(json)
    }

    /// Parses a tree, and checks that entry names are unique and can't escape the directory.
    ///
    /// # Errors
    /// [`FilesError::Corrupt`] if the JSON or a name is invalid, or there are duplicate names.
    pub(crate) fn parse(id: Id, json: &[u8]) -> Result<Self, FilesError> {
        let corrupt = |reason: &dyn std::fmt::Display| FilesError::corrupt(format!("tree {id}"), &reason);
        let tree: Self = serde_json::from_slice(json).map_err(|error| corrupt(&error))?;
        let invalid = |kind: &str, name: &str| format!("{kind} entry name {:?}", truncate_printable(name));
        let mut names = std::collections::HashSet::with_capacity(tree.nodes.len());
        for node in &tree.nodes {
            let name = node.file_name().ok_or_else(|| corrupt(&invalid("invalid", &node.name)))?;
            if !names.insert(name) {
                return Err(corrupt(&invalid("duplicate", &node.name)));
            }
        }
        Ok(tree)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree_with_names(names: &[&str]) -> Vec<u8> {
        let nodes = names.iter().map(|name| Node::new(OsStr::new(name), NodeType::File, 0o644)).collect();
        Tree { nodes }.to_json().unwrap()
    }

    #[test]
    fn parse_rejects_unsafe_and_duplicate_names() {
        for names in
            [&[".."][..], &["."], &[""], &["a/b"], &["/etc"], &["a\0"], &["a", "b", "a"], &[&"n".repeat(256)]]
        {
            let json = tree_with_names(names);
            assert!(Tree::parse(Id::of(&json), &json).is_err(), "{names:?}");
        }
        let json = tree_with_names(&["a", "...", "b c", "\"", "\\x2e"]);
        assert_eq!(Tree::parse(Id::of(&json), &json).unwrap().nodes.len(), 5);
    }

    #[test]
    fn mode_preserves_special_bits() {
        for mode in [0o644, 0o7777, 0o4755, 0o2750, 0o1777, 0] {
            assert_eq!(Node::new(OsStr::new("a"), NodeType::Dir, mode).unix_mode(), mode, "{mode:o}");
        }
    }

    #[test]
    fn link_target_preserves_invalid_utf8() {
        let mut node = Node::new(OsStr::new("a"), NodeType::Symlink, 0o777);
        for target in [&b"../b"[..], b"\xff\xfe", "ä".as_bytes()] {
            node.set_link_target(OsStr::from_bytes(target));
            let json = serde_json::to_string(&node).unwrap();
            let parsed: Node = serde_json::from_str(&json).unwrap();
            assert_eq!(parsed.link_target().unwrap().as_bytes(), target);
        }
    }

    #[test]
    fn attribute_preserves_invalid_utf8_name() {
        for (name, shown) in [(&b"user.\xe9"[..], "user.\u{fffd}"), ("user.é".as_bytes(), "user.é")] {
            let json = serde_json::to_string(&ExtendedAttribute::new(name, b"v")).unwrap();
            let parsed: ExtendedAttribute = serde_json::from_str(&json).unwrap();
            assert_eq!((parsed.raw_name().as_deref(), parsed.name.as_str()), (Some(name), shown));
        }
    }

    #[test]
    fn parse_accepts_restic_tree() {
        // From `restic cat blob`, version 0.14.
        let json = br#"{"nodes":[{"name":"a","type":"file","mode":420,"mtime":"2026-11-27T10:00:00.5+01:00",
            "atime":"2026-11-27T10:00:00+01:00","ctime":"2026-11-27T10:00:00+01:00","uid":0,"gid":0,"user":"root",
            "group":"root","device_id":2049,"size":0,"content":null},
            {"name":"s","type":"socket","mode":16777645,"mtime":"2026-11-27T10:00:00Z","content":null}]}"#;
        let tree = Tree::parse(Id::of(json), json).unwrap();
        assert_eq!(tree.nodes[0].unix_mode(), 0o644);
        assert_eq!(tree.nodes[0].mtime.to_string(), "2026-11-27T09:00:00.5Z");
        assert_eq!((tree.nodes[0].content.clone(), tree.nodes[1].node_type), (None, NodeType::Special));
    }
}

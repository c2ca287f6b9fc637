//! Parses a tree's blob references.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};

use crate::error::FilesError;
use crate::id::Id;

/// Blobs referenced by a tree's entries. Takes 32 bytes of memory per reference, versus several hundred per entry for a
/// [`crate::tree::Tree`]. This matters because trees are written by machines and can have millions of entries.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TreeReferences {
    pub(crate) subtrees: Vec<Id>,
    pub(crate) chunks: Vec<Id>,
}

impl TreeReferences {
    /// Parses a tree without checking entry names.
    ///
    /// # Errors
    /// [`FilesError::Corrupt`] if the JSON is invalid.
    pub(crate) fn parse(id: Id, json: &[u8]) -> Result<Self, FilesError> {
        #[derive(Deserialize)]
        struct TreeFile {
            // Required, but may be null.
            #[serde(deserialize_with = "Option::deserialize")]
            nodes: Option<Nodes>,
        }
        let tree: TreeFile = serde_json::from_slice(json)
            .map_err(|error| FilesError::corrupt(format!("tree {id}"), &error))?;
        Ok(tree.nodes.map(|nodes| nodes.0).unwrap_or_default())
    }
}

struct Nodes(TreeReferences);

impl<'de> Deserialize<'de> for Nodes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(NodesVisitor)
    }
}

struct NodesVisitor;

impl<'de> Visitor<'de> for NodesVisitor {
    type Value = Nodes;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an array of directory entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut nodes: A) -> Result<Nodes, A::Error> {
        #[derive(Deserialize)]
        struct NodeReferences {
            // Every entry has a name; JSON without names isn't a tree.
            #[serde(rename = "name")]
            _name: IgnoredAny,
            content: Option<Vec<Id>>,
            subtree: Option<Id>,
        }
        let mut references = TreeReferences::default();
        while let Some(NodeReferences { content, subtree, .. }) = nodes.next_element()? {
            references.subtrees.extend(subtree);
            references.chunks.extend(content.into_iter().flatten());
        }
        Ok(Nodes(references))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;
    use crate::tree::{Node, NodeType, Tree};

    #[test]
    fn parse_returns_references_of_all_entries() {
        let ids: Vec<Id> = (0..4_u8).map(|n| Id::of(&[n])).collect();
        let node = |name: &str, content: Option<&[Id]>, subtree| {
            let mut node = Node::new(OsStr::new(name), NodeType::File, 0o644);
            (node.content, node.subtree) = (content.map(<[Id]>::to_vec), subtree);
            node
        };
        let tree = Tree {
            nodes: vec![
                node("a", Some(&ids[..2]), None),
                node("b", None, Some(ids[2])),
                node("c", Some(&[]), None),
                node("d", Some(&ids[3..]), None),
            ],
        };
        let json = tree.to_json().unwrap();
        let expected = TreeReferences { subtrees: vec![ids[2]], chunks: vec![ids[0], ids[1], ids[3]] };
        assert_eq!(TreeReferences::parse(ids[0], &json).unwrap(), expected);
        let empty = TreeReferences::parse(ids[0], br#"{"nodes":null}"#).unwrap();
        assert_eq!(empty, TreeReferences::default());
        for invalid in
            ["", "[]", r#"{"nodes":[{"content":[]}]}"#, r#"{"nodes":[{"name":"a","content":["x"]}]}"#]
        {
            assert!(TreeReferences::parse(ids[0], invalid.as_bytes()).is_err(), "{invalid}");
        }
    }
}

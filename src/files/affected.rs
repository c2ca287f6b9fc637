//! Finds the files that need damaged blobs, and the moments at which they did.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use jiff::Timestamp;

use crate::error::FilesError;
use crate::id::Id;
use crate::index::BlobLocations;
use crate::repository::Repository;
use crate::tree_reader::TreeReader;

/// Maximum number of paths that are named.
const MAX_PATHS: usize = 20;

/// What damaged blobs affect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Affected {
    /// The first of the affected files, and of the directories whose entries are unknown.
    pub paths: Vec<AffectedPath>,
    /// The number of snapshots that need a damaged blob.
    pub snapshots: u64,
}

/// A path below the home directory, and the first and last snapshot in which it is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AffectedPath {
    pub path: PathBuf,
    pub first: Timestamp,
    pub last: Timestamp,
}

/// Searches all snapshots. Each directory is read once, however many snapshots share it.
///
/// # Errors
/// The errors of the store. Damaged directories and snapshots are part of the result.
pub async fn find_affected(repository: &Repository, damaged: &HashSet<Id>) -> Result<Affected, FilesError> {
    let (snapshots, _) = repository.list_sound_snapshots().await?;
    let locations = repository.load_tree_locations().await?;
    let mut search = Search::new(repository, &locations, damaged);
    let mut affected = Affected::default();
    let mut found: BTreeMap<PathBuf, (Timestamp, Timestamp)> = BTreeMap::new();
    for (_, snapshot) in snapshots {
        let paths = search.find_below(snapshot.tree).await?;
        affected.snapshots += u64::from(!paths.is_empty());
        for path in paths.iter() {
            if found.len() >= MAX_PATHS && !found.contains_key(path) {
                continue;
            }
            let times = found.entry(path.clone()).or_insert((snapshot.time, snapshot.time));
            *times = (times.0.min(snapshot.time), times.1.max(snapshot.time));
        }
    }
    affected.paths =
        found.into_iter().map(|(path, (first, last))| AffectedPath { path, first, last }).collect();
    Ok(affected)
}

struct Search<'a> {
    damaged: &'a HashSet<Id>,
    trees: TreeReader<'a>,
    /// The affected paths below each tree.
    known: HashMap<Id, Paths>,
    none: Paths,
}

type Paths = Arc<[PathBuf]>;
type Found<'s> = Pin<Box<dyn Future<Output = Result<Paths, FilesError>> + Send + 's>>;

impl<'a> Search<'a> {
    fn new(repository: &'a Repository, locations: &'a BlobLocations, damaged: &'a HashSet<Id>) -> Self {
        let trees = TreeReader::without_caching(repository, locations);
        Self { damaged, trees, known: HashMap::new(), none: Arc::from([]) }
    }

    /// Returns the first of the affected paths below a tree; the empty path if the tree itself is damaged.
    fn find_below(&mut self, id: Id) -> Found<'_> {
        Box::pin(async move {
            if let Some(known) = self.known.get(&id) {
                return Ok(Arc::clone(known));
            }
            let read = if self.damaged.contains(&id) {
                // The cache can have it, but no other machine does.
                Err(FilesError::corrupt(format!("tree {id}"), &"its pack is damaged"))
            } else {
                self.trees.read(id).await
            };
            let paths = match read {
                Ok(tree) => {
                    let mut paths = Vec::new();
                    for node in tree.nodes {
                        let Some(name) = node.file_name() else { continue };
                        let has_damage = |chunks: &[Id]| chunks.iter().any(|id| self.damaged.contains(id));
                        if node.content.as_deref().is_some_and(has_damage) {
                            paths.push(PathBuf::from(&name));
                        }
                        if let Some(subtree) = node.subtree {
                            let below = self.find_below(subtree).await?;
                            paths.extend(below.iter().map(|path| join(&name, path)));
                        }
                        if paths.len() >= MAX_PATHS {
                            paths.truncate(MAX_PATHS);
                            break;
                        }
                    }
                    paths
                }
                Err(error) if error.is_damage() => vec![PathBuf::new()],
                Err(error) => return Err(error),
            };
            let paths = if paths.is_empty() { Arc::clone(&self.none) } else { Arc::from(paths) };
            self.known.insert(id, Arc::clone(&paths));
            Ok(paths)
        })
    }
}

/// A damaged directory's own path has no further name.
fn join(name: &std::ffi::OsStr, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() { PathBuf::from(name) } else { Path::new(name).join(below) }
}

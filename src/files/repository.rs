//! An encrypted repository in the object store: its configuration and objects.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use svc_store::bucket::Condition;
use svc_store::{Bucket, StoreError};

use crate::cache::Cache;
use crate::chunker::{self, Polynomial};
use crate::error::FilesError;
use crate::id::Id;
use crate::key::{EncryptionKey, RepositoryKey};
use crate::pack::{FinishedPack, PackedBlob, ZSTD_LEVEL, open_blob};
use crate::random::fill_random;
use crate::snapshot::Snapshot;
use crate::tree::Tree;

/// Repository format version. Version 2 added compression.
const FORMAT_VERSION: u32 = 2;
/// Maximum sizes of packs and other objects, bounded because the platform reads objects written by machines.
pub(crate) const MAX_PACK_BYTES: u64 = 256 << 20;
const MAX_OBJECT_BYTES: u64 = 64 << 20;
const MAX_KEY_FILE_BYTES: u64 = 4 << 10;
/// Maximum number of key files to try, as in `restic`.
const MAX_KEY_FILES: usize = 20;
/// Maximum size of a snapshot, compressed or not. Saves write less than 1 KiB, and all snapshots of a slot are held in
/// memory together.
const MAX_SNAPSHOT_BYTES: usize = 64 << 10;
/// First byte of compressed JSON.
const COMPRESSED: u8 = 2;
/// Maximum size of decompressed JSON.
pub(crate) const MAX_JSON_BYTES: usize = if cfg!(test) { 16 << 20 } else { 128 << 20 };
/// Maximum number of concurrent snapshot reads, pack reads or deletions.
pub(crate) const MAX_CONCURRENT_REQUESTS: usize = 16;
/// Timeout for a single ranged read, deletion or listing entry.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Serialize, Deserialize)]
struct Config {
    version: u32,
    id: Id,
    #[serde(rename = "chunker_polynomial", with = "chunker::hex_polynomial")]
    polynomial: Polynomial,
}

/// Kinds of encrypted JSON objects named by their hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectKind {
    Index,
    Snapshot,
}

impl ObjectKind {
    fn dir(self) -> &'static str {
        match self {
            Self::Index => "index",
            Self::Snapshot => "snapshots",
        }
    }

    fn noun(self) -> &'static str {
        match self {
            Self::Index => "index file",
            Self::Snapshot => "snapshot",
        }
    }

    fn max_object_bytes(self) -> u64 {
        match self {
            Self::Index => MAX_OBJECT_BYTES,
            Self::Snapshot => MAX_SNAPSHOT_BYTES as u64,
        }
    }

    fn max_json_bytes(self) -> usize {
        match self {
            Self::Index => MAX_JSON_BYTES,
            Self::Snapshot => MAX_SNAPSHOT_BYTES,
        }
    }
}

/// An open repository.
#[derive(Clone)]
pub struct Repository {
    pub(crate) bucket: Bucket,
    root: Path,
    repository_key: RepositoryKey,
    pub(crate) key: EncryptionKey,
    pub(crate) polynomial: Polynomial,
    cache: Cache,
    pub(crate) outage_timeout: Duration,
}

impl Repository {
    /// Opens the repository under `root`. Returns `None` if there is none.
    ///
    /// # Errors
    /// [`FilesError::WrongKey`] if the configuration can't be decrypted; [`FilesError::Corrupt`] if it's invalid;
    /// [`FilesError::UnsupportedVersion`] if its format version isn't 2; [`FilesError::Store`] if the store fails.
    pub async fn open(
        bucket: Bucket,
        root: Path,
        key: &RepositoryKey,
        cache: Cache,
    ) -> Result<Option<Self>, FilesError> {
        let Some(sealed) = bucket.get(&root.clone().join("config"), MAX_OBJECT_BYTES).await? else {
            return Ok(None);
        };
        let (repository_key, key) = (key.clone(), key.derive_master_key());
        let plain = key.decrypt(&sealed.value).ok_or(FilesError::WrongKey)?;
        let config: Config =
            serde_json::from_slice(&plain).map_err(|error| FilesError::corrupt("config", &error))?;
        if config.version != FORMAT_VERSION {
            return Err(FilesError::UnsupportedVersion(config.version));
        }
        let (polynomial, outage_timeout) = (config.polynomial, Duration::ZERO);
        Ok(Some(Self { bucket, root, repository_key, key, polynomial, cache, outage_timeout }))
    }

    /// Opens the repository, creating it if necessary. Concurrent creators end up with the same repository.
    ///
    /// # Errors
    /// Those of [`Self::open`]; [`FilesError::NoRandomness`] if the system's random number generator fails.
    pub async fn open_or_create(
        bucket: Bucket,
        root: Path,
        key: &RepositoryKey,
        cache: Cache,
    ) -> Result<Self, FilesError> {
        if let Some(opened) = Self::open(bucket.clone(), root.clone(), key, cache.clone()).await? {
            if opened.check_key_file().await.is_err_and(|error| error.is_damage()) {
                tracing::warn!("the file-backup repository has no valid key file; writing a new one");
                write_key_file(&bucket, &root, key).await?;
            }
            return Ok(opened);
        }
        // Write the key file first, so that `restic` can open any repository that has a configuration.
        write_key_file(&bucket, &root, key).await?;
        let master = key.derive_master_key();
        let mut id = [0; Id::BYTES];
        fill_random(&mut id)?;
        let polynomial = chunker::generate_polynomial()?;
        let config = Config { version: FORMAT_VERSION, id: Id::from_bytes(id), polynomial };
        let json = serde_json::to_vec(&config).map_err(|error| FilesError::encode("config", &error))?;
        let sealed = master.encrypt(&json)?;
        put_if_absent(&bucket, &root.clone().join("config"), sealed).await?;
        Self::open(bucket, root.clone(), key, cache)
            .await?
            .ok_or_else(|| StoreError::NotFound { key: root.join("config").to_string() }.into())
    }

    /// Checks that our key opens one of the first 20 key files, which is as many as `restic` tries.
    ///
    /// # Errors
    /// If the store fails; [`FilesError::Corrupt`] if there is no valid key file.
    pub async fn check_key_file(&self) -> Result<(), FilesError> {
        let key_files = list_objects(&self.bucket, &self.root.clone().join("keys")).await?;
        for meta in key_files.into_iter().take(MAX_KEY_FILES) {
            let content = match self.bucket.get(&meta.location, MAX_KEY_FILE_BYTES).await {
                // Object too large.
                Err(StoreError::Corrupt { .. }) => continue,
                content => content?,
            };
            let name = meta.location.filename().and_then(|name| name.parse::<Id>().ok());
            let is_valid = |text: &[u8]| name == Some(Id::of(text)) && self.repository_key.can_open(text);
            if content.is_some_and(|content| is_valid(&content.value)) {
                return Ok(());
            }
        }
        let reason = "no valid key file found; `restic` cannot open the repository";
        Err(FilesError::corrupt("key file", &reason))
    }

    pub(crate) fn path(&self, kind: ObjectKind, id: Id) -> Path {
        self.root.clone().join(kind.dir()).join(id.to_string())
    }

    pub(crate) fn pack_path(&self, id: Id) -> Path {
        let name = id.to_string();
        self.root.clone().join("data").join(&name[..2]).join(name)
    }

    pub(crate) async fn list(&self, kind: ObjectKind) -> Result<Vec<Id>, FilesError> {
        let dir = self.root.clone().join(kind.dir());
        let objects = list_objects(&self.bucket, &dir).await?;
        Ok(objects.iter().filter_map(|meta| find_id(&meta.location, |id| self.path(kind, id))).collect())
    }

    pub(crate) async fn read_json<T: DeserializeOwned>(
        &self,
        kind: ObjectKind,
        id: Id,
    ) -> Result<T, FilesError> {
        let sealed = self.read_sealed(kind, id).await?;
        self.open_json(kind, id, &sealed)
    }

    /// Reads an encrypted object, from the cache if possible.
    pub(crate) async fn read_sealed(&self, kind: ObjectKind, id: Id) -> Result<Bytes, FilesError> {
        let what = || format!("{} {id}", kind.noun());
        Ok(if let Some(cached) = self.cache.read(kind.dir(), id) {
            Bytes::from(cached)
        } else {
            let path = self.path(kind, id);
            let object = match self.bucket.get(&path, kind.max_object_bytes()).await {
                // Object too large.
                Err(StoreError::Corrupt { reason, .. }) => return Err(FilesError::corrupt(what(), &reason)),
                object => object?,
            };
            let sealed = object.ok_or_else(|| StoreError::NotFound { key: path.to_string() })?.value;
            if Id::of(&sealed) != id {
                return Err(FilesError::corrupt(what(), &"its content does not match its hash"));
            }
            self.cache.write(kind.dir(), id, &sealed);
            sealed
        })
    }

    /// Decrypts and parses an object.
    pub(crate) fn open_json<T: DeserializeOwned>(
        &self,
        kind: ObjectKind,
        id: Id,
        sealed: &[u8],
    ) -> Result<T, FilesError> {
        let what = || format!("{} {id}", kind.noun());
        let plain =
            self.key.decrypt(sealed).ok_or_else(|| FilesError::corrupt(what(), &"decryption failed"))?;
        let json = match plain.split_first() {
            Some((&COMPRESSED, compressed)) => decompress(compressed, kind.max_json_bytes())
                .map_err(|error| FilesError::corrupt(what(), &error))?,
            _ => plain,
        };
        serde_json::from_slice(&json).map_err(|error| FilesError::corrupt(what(), &error))
    }

    /// Writes an object, unless [`Self::read_json`] would reject it.
    pub(crate) async fn write_json(
        &self,
        kind: ObjectKind,
        value: &impl Serialize,
    ) -> Result<Id, FilesError> {
        let what = kind.noun();
        let json = serde_json::to_vec(value).map_err(|error| FilesError::encode(what, &error))?;
        let compressed =
            zstd::bulk::compress(&json, ZSTD_LEVEL).map_err(|error| FilesError::encode(what, &error))?;
        let mut plain = Vec::with_capacity(1 + compressed.len());
        plain.push(COMPRESSED);
        plain.extend_from_slice(&compressed);
        let sealed = self.key.encrypt(&plain)?;
        if json.len() > kind.max_json_bytes() || sealed.len() as u64 > MAX_OBJECT_BYTES {
            return Err(FilesError::encode(what, &"too large to read back"));
        }
        let id = Id::of(&sealed);
        self.create(&self.path(kind, id), sealed.clone()).await?;
        self.cache.write(kind.dir(), id, &sealed);
        Ok(id)
    }

    pub(crate) async fn write_pack(&self, pack: &FinishedPack) -> Result<(), FilesError> {
        self.create(&self.pack_path(pack.id), pack.bytes.clone()).await
    }

    /// Writes a content-addressed object. Hosts aren't permitted to overwrite these.
    async fn create(&self, path: &Path, content: impl Into<Bytes>) -> Result<(), FilesError> {
        Ok(put_if_absent(&self.bucket, path, content).await?)
    }

    /// Reads a whole pack. Returns `None` if it doesn't exist.
    pub(crate) async fn read_whole_pack(&self, id: Id) -> Result<Option<Bytes>, FilesError> {
        let object = self.bucket.get(&self.pack_path(id), MAX_PACK_BYTES).await?;
        Ok(object.map(|object| object.value))
    }

    /// Lists all packs with their upload times, by the store's clock.
    pub(crate) async fn list_packs(&self) -> Result<Vec<(Id, Timestamp)>, FilesError> {
        self.list_uploads(&self.root.clone().join("data"), |id| self.pack_path(id)).await
    }

    /// Deletes an object if it exists. Only the platform's credentials permit deletions.
    pub(crate) async fn delete(&self, path: &Path) -> Result<(), FilesError> {
        let deletion = async {
            match self.bucket.raw().delete(path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(StoreError::classify(path, error)),
            }
        };
        Ok(self.bucket.run_with_timeout(path, REQUEST_TIMEOUT, deletion).await?)
    }

    pub(crate) fn open_blob(&self, blob: &PackedBlob, sealed: &[u8]) -> Result<Vec<u8>, FilesError> {
        open_blob(&self.key, blob, sealed)
    }

    /// Reads a tree from the cache. Returns `None` if it's missing or the cached copy is corrupt.
    ///
    /// # Errors
    /// [`FilesError::Corrupt`] if the blob with this id isn't a valid tree.
    pub(crate) fn read_cached_tree(&self, id: Id) -> Result<Option<Tree>, FilesError> {
        let Some(compressed) = self.cache.read_unverified("trees", id) else { return Ok(None) };
        let json = decompress(&compressed, MAX_JSON_BYTES).ok().filter(|json| Id::of(json) == id);
        json.map(|json| Tree::parse(id, &json)).transpose()
    }

    pub(crate) fn cache_tree(&self, id: Id, json: &[u8]) {
        if let Ok(compressed) = zstd::bulk::compress(json, 1) {
            self.cache.write("trees", id, &compressed);
        }
    }

    /// Evicts cached trees that aren't in `used`.
    pub(crate) fn retain_cached_trees(&self, used: &HashSet<Id>) {
        self.cache.retain("trees", |id| used.contains(&id));
    }

    /// Evicts cached index files that are no longer in the repository.
    pub(crate) fn retain_cached_index_files(&self, files: &HashSet<Id>) {
        self.cache.retain(ObjectKind::Index.dir(), |id| files.contains(&id));
    }

    /// Reads a snapshot.
    ///
    /// # Errors
    /// If the store fails or the snapshot is missing; [`FilesError::Corrupt`] if it's corrupt.
    pub async fn read_snapshot(&self, id: Id) -> Result<Snapshot, FilesError> {
        self.read_json(ObjectKind::Snapshot, id).await
    }

    /// Reads all snapshots, newest first. Omits their paths, host and user names, and all tags except the machine tag.
    ///
    /// # Errors
    /// If the store fails; [`FilesError::Corrupt`] if a snapshot is corrupt.
    pub async fn list_snapshots(&self) -> Result<Vec<(Id, Snapshot)>, FilesError> {
        let snapshots = self.list_snapshot_uploads().await?;
        Ok(snapshots.into_iter().map(|(id, snapshot, _)| (id, snapshot)).collect())
    }

    /// Reads all intact snapshots, newest first, and returns the ids of corrupt ones. Also evicts snapshots that no
    /// longer exist from the cache.
    pub(crate) async fn list_intact_snapshots(&self) -> Result<(Vec<(Id, Snapshot)>, Vec<Id>), FilesError> {
        let ids = self.list(ObjectKind::Snapshot).await?;
        let present: HashSet<Id> = ids.iter().copied().collect();
        self.cache.retain(ObjectKind::Snapshot.dir(), |id| present.contains(&id));
        let read = |id: Id| {
            let repository = self.clone();
            async move { (id, repository.read_snapshot(id).await) }
        };
        let mut reads = stream::iter(ids).map(read).buffer_unordered(MAX_CONCURRENT_REQUESTS);
        let (mut snapshots, mut damaged) = (Vec::new(), Vec::new());
        while let Some((id, snapshot)) = reads.next().await {
            match snapshot {
                Ok(snapshot) => snapshots.push((id, snapshot)),
                // Pruned since the listing.
                Err(FilesError::Store(StoreError::NotFound { .. })) => {}
                Err(error @ FilesError::Corrupt { .. }) => {
                    tracing::warn!(%error, "corrupt file-backup snapshot");
                    damaged.push(id);
                }
                Err(error) => return Err(error),
            }
        }
        snapshots.sort_by_key(|(id, snapshot)| (std::cmp::Reverse(snapshot.time), *id));
        Ok((snapshots, damaged))
    }

    /// Like [`Self::list_snapshots`], but also returns the upload times, by the store's clock.
    pub(crate) async fn list_snapshot_uploads(&self) -> Result<Vec<(Id, Snapshot, Timestamp)>, FilesError> {
        let dir = self.root.clone().join(ObjectKind::Snapshot.dir());
        let uploads = self.list_uploads(&dir, |id| self.path(ObjectKind::Snapshot, id)).await?;
        let read = |(id, uploaded): (Id, Timestamp)| {
            let repository = self.clone();
            async move {
                let mut snapshot = repository.read_snapshot(id).await?;
                // The rest isn't needed and may be long.
                snapshot.tags = snapshot.machine_tag().map(str::to_owned).into_iter().collect();
                snapshot.paths = Vec::new();
                (snapshot.hostname, snapshot.username) = (String::new(), String::new());
                Ok::<_, FilesError>((id, snapshot, uploaded))
            }
        };
        let mut reads = stream::iter(uploads).map(read).buffer_unordered(MAX_CONCURRENT_REQUESTS);
        let mut snapshots = Vec::new();
        while let Some(read) = reads.next().await {
            snapshots.push(read?);
        }
        snapshots.sort_by_key(|(id, snapshot, _)| (std::cmp::Reverse(snapshot.time), *id));
        Ok(snapshots)
    }

    /// Lists the objects of a directory with their upload times, by the store's clock.
    async fn list_uploads(
        &self,
        dir: &Path,
        path_of: impl Fn(Id) -> Path,
    ) -> Result<Vec<(Id, Timestamp)>, FilesError> {
        let mut uploads = Vec::new();
        for meta in list_objects(&self.bucket, dir).await? {
            let id = find_id(&meta.location, &path_of);
            let nanoseconds = i32::try_from(meta.last_modified.timestamp_subsec_nanos()).unwrap_or(0);
            let time = Timestamp::new(meta.last_modified.timestamp(), nanoseconds).unwrap_or(Timestamp::MAX);
            uploads.extend(id.map(|id| (id, time)));
        }
        Ok(uploads)
    }

    /// Deletes objects concurrently.
    pub(crate) async fn delete_all(&self, paths: Vec<Path>) -> Result<(), FilesError> {
        let delete = |path: Path| {
            let repository = self.clone();
            async move { repository.delete(&path).await }
        };
        let mut deletions = stream::iter(paths).map(delete).buffer_unordered(MAX_CONCURRENT_REQUESTS);
        while let Some(deleted) = deletions.next().await {
            deleted?;
        }
        Ok(())
    }
}

/// Writes an object unless it exists: another process may have created it, or an earlier attempt of ours whose response
/// was lost.
async fn put_if_absent(bucket: &Bucket, path: &Path, content: impl Into<Bytes>) -> Result<(), StoreError> {
    match bucket.put_if(path, content, Condition::Absent).await {
        Ok(()) | Err(StoreError::Precondition { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Lists all objects below a path.
pub(crate) async fn list_objects(bucket: &Bucket, dir: &Path) -> Result<Vec<ObjectMeta>, FilesError> {
    let mut objects = Vec::new();
    for_each_object(bucket, dir, |object| objects.push(object)).await?;
    Ok(objects)
}

async fn write_key_file(bucket: &Bucket, root: &Path, key: &RepositoryKey) -> Result<(), FilesError> {
    let key_file = key.create_key_file(Timestamp::now())?;
    let path = root.clone().join("keys").join(Id::of(&key_file).to_string());
    Ok(put_if_absent(bucket, &path, key_file).await?)
}

/// Parses the id from an object's name if `path_of` maps it back to the object's path. Skips other objects, such as a
/// directory store's temporary files and objects in directories unknown to the format.
fn find_id(object: &Path, path_of: impl FnOnce(Id) -> Path) -> Option<Id> {
    let id = object.filename()?.parse().ok()?;
    (path_of(id) == *object).then_some(id)
}

/// Calls `add` for each object below a path.
pub(crate) async fn for_each_object(
    bucket: &Bucket,
    dir: &Path,
    mut add: impl FnMut(ObjectMeta),
) -> Result<(), FilesError> {
    let mut listing = bucket.raw().list(Some(dir));
    loop {
        let next = async { listing.try_next().await.map_err(|error| StoreError::classify(dir, error)) };
        match bucket.run_with_timeout(dir, REQUEST_TIMEOUT, next).await? {
            Some(meta) => add(meta),
            None => return Ok(()),
        }
    }
}

fn decompress(bytes: &[u8], max_bytes: usize) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut output = Vec::new();
    zstd::stream::read::Decoder::new(bytes)?.take(max_bytes as u64 + 1).read_to_end(&mut output)?;
    if output.len() > max_bytes {
        return Err(std::io::Error::other("decompressed content too long"));
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decompress_rejects_oversized_content() {
        let decompressed_length = |length: usize| {
            let compressed = zstd::bulk::compress(&vec![0; length], 1).unwrap();
            decompress(&compressed, MAX_JSON_BYTES).map(|output| output.len()).ok()
        };
        assert_eq!(decompressed_length(MAX_JSON_BYTES), Some(MAX_JSON_BYTES));
        assert_eq!(decompressed_length(MAX_JSON_BYTES + 1), None);
    }
}

//! Saves and restores real directories, and compares them independently of the code under test.

mod affected;
mod damage;
mod databases;
mod edge_cases;
mod faulty_store;
mod git;
mod history;
mod kills;
mod large_index;
mod memory_maps;
mod merging;
mod pruning;
mod randomized;
mod restic;
mod sparse;
mod writer_process;

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kit::restic::Restic;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use rustix::fs::XattrFlags;
use secrecy::ExposeSecret;

use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_store::Bucket;

use faulty_store::{Faults, FaultyStore};

use crate::restore::{RestoreOptions, RestoreProgress, RestoreReport, restore};
use crate::save::{ChangeSet, SaveOptions, SaveResult, Saver};
use crate::{Cache, FilesError, Id, Repository, RepositoryKey, Snapshot, SnapshotOrigin};

/// A home directory and its repository.
struct Fixture {
    dir: tempfile::TempDir,
    bucket: Bucket,
    key: RepositoryKey,
    /// The last snapshot, used as the next one's parent.
    last: Option<(Id, Snapshot)>,
    saver: Saver,
    /// Object directory, unless the store is in memory.
    store: Option<tempfile::TempDir>,
    /// Faults injected into the store. Child processes open the store without them.
    faults: Arc<Faults>,
}

impl Fixture {
    async fn new() -> Self {
        Self::with_bucket(Bucket::new(Arc::new(InMemory::new()))).await
    }

    async fn with_bucket(bucket: Bucket) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("home")).unwrap();
        let key = RepositoryKey::generate().unwrap();
        let saver = saver(dir.path(), &bucket, &key).await;
        Self { dir, bucket, key, last: None, saver, store: None, faults: Arc::default() }
    }

    /// Creates a fixture with an on-disk store that other processes can open.
    async fn in_directory() -> Self {
        Self::with_faults(0).await
    }

    /// Like [`Self::in_directory`], but after [`Faults::set_percent`], requests fail at random based on `seed`.
    async fn with_faults(seed: u64) -> Self {
        let store = tempfile::tempdir().unwrap();
        let objects = Arc::new(LocalFileSystem::new_with_prefix(store.path()).unwrap());
        let (objects, faults) = FaultyStore::new(objects, seed);
        let bucket = Bucket::new(Arc::new(objects));
        Self { store: Some(store), faults, ..Self::with_bucket(bucket).await }
    }

    /// Returns stock `restic` for the repository of an [`Self::in_directory`] fixture.
    fn restic(&self) -> Restic {
        let store = self.store.as_ref().expect("the store is a directory").path();
        let password = self.key.password().expose_secret();
        Restic::for_directory(&store.join(root().to_string()), password).unwrap()
    }

    fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    fn write(&self, path: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.home().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    async fn save(&mut self) -> SaveResult {
        let saved = self.saver.save(self.last.clone()).await.unwrap();
        self.last = Some((saved.id, saved.snapshot.clone()));
        saved
    }

    /// Restores a snapshot from a freshly opened repository without a cache.
    async fn restore(&self, snapshot: &Snapshot) -> (tempfile::TempDir, RestoreReport) {
        self.try_restore(snapshot).await.unwrap()
    }

    async fn try_restore(
        &self,
        snapshot: &Snapshot,
    ) -> Result<(tempfile::TempDir, RestoreReport), FilesError> {
        let target = tempfile::tempdir().unwrap();
        let repository = self.open(&self.key).await?.unwrap();
        let options = RestoreOptions::new(target.path().to_owned(), "/".into());
        let restored = restore(&repository, snapshot, &options, &RestoreProgress::default()).await?;
        Ok((target, restored))
    }

    async fn open(&self, key: &RepositoryKey) -> Result<Option<Repository>, FilesError> {
        Repository::open(self.bucket.clone(), root(), key, Cache::none()).await
    }

    /// Simulates a restart on a machine without a cache.
    async fn restart(&mut self) {
        // The cache doesn't exist before the first save.
        let _ = fs::remove_dir_all(self.dir.path().join("cache"));
        self.saver = saver(self.dir.path(), &self.bucket, &self.key).await;
    }
}

fn root() -> Key {
    Key::from("user_1/primary/files")
}

async fn saver(dir: &Path, bucket: &Bucket, key: &RepositoryKey) -> Saver {
    let cache = Cache::new(dir.join("cache"));
    let repository = Repository::open_or_create(bucket.clone(), root(), key, cache).await.unwrap();
    let origin = SnapshotOrigin { machine: MachineId(uuid()), epoch: Epoch(1) };
    Saver::new(repository, SaveOptions::new(dir.join("home"), origin))
}

fn uuid() -> uuid::Uuid {
    uuid::Uuid::from_u128(7)
}

/// Properties that a restore must reproduce, by path: kind, content, hard link count, mode, owner, modification time
/// and extended attribute names.
type Description = BTreeMap<Vec<u8>, String>;

fn describe(dir: &Path) -> Description {
    let mut entries = Description::new();
    describe_into(dir, dir, &mut entries);
    entries
}

fn describe_into(root: &Path, dir: &Path, entries: &mut Description) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::symlink_metadata(&path).unwrap();
        let content = if meta.is_symlink() {
            format!("link to {:?}", fs::read_link(&path).unwrap())
        } else if meta.is_dir() {
            describe_into(root, &path, entries);
            "directory".to_owned()
        } else if !meta.is_file() {
            "special".to_owned()
        } else {
            let content = fs::read(&path).unwrap();
            format!("file of {} bytes with hash {}, {} links", meta.len(), Id::of(&content), meta.nlink())
        };
        let mut names = vec![0; 4096];
        let length = rustix::fs::llistxattr(&path, &mut names[..]).unwrap_or(0);
        // Restores clear the setuid and setgid bits of files.
        let mode = if meta.is_file() { meta.mode() & !0o6000 } else { meta.mode() };
        let (uid, gid) = (meta.uid(), meta.gid());
        let description = format!(
            "{content}, mode {mode:o}, owner {uid}:{gid}, time {}.{:09}, attributes {:?}",
            meta.mtime(),
            meta.mtime_nsec(),
            String::from_utf8_lossy(&names[..length])
        );
        entries.insert(path.strip_prefix(root).unwrap().as_os_str().as_bytes().to_vec(), description);
    }
}

#[track_caller]
fn assert_same(actual: &Description, expected: &Description) {
    for (path, description) in expected {
        assert_eq!(actual.get(path), Some(description), "{}", String::from_utf8_lossy(path));
    }
    for path in actual.keys() {
        assert!(expected.contains_key(path), "{} should not exist", String::from_utf8_lossy(path));
    }
}

fn random_bytes(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn restored_home_equals_saved_home() {
    let mut fixture = Fixture::new().await;
    fixture.write("projects/site/index.html", "<p>");
    fixture.write("empty", "");
    fixture.write("large", random_bytes(5 << 20));
    fixture.write("zeros", vec![0; 9 << 20]);
    let odd = std::ffi::OsStr::from_bytes(b"odd \xff \"\\\n name");
    fs::write(fixture.home().join(odd), "odd").unwrap();
    symlink(odd, fixture.home().join("link")).unwrap();
    symlink("/etc/passwd", fixture.home().join("out")).unwrap();
    let secret = fixture.write("secrets/key", "secret");
    fs::set_permissions(&secret, Permissions::from_mode(0o400)).unwrap();
    fs::set_permissions(secret.parent().unwrap(), Permissions::from_mode(0o2700)).unwrap();
    fs::hard_link(&secret, fixture.home().join("same")).unwrap();
    let old = SystemTime::UNIX_EPOCH - Duration::new(5, 250_000_001);
    File::options().write(true).open(fixture.write("old", "1969")).unwrap().set_modified(old).unwrap();
    fs::create_dir(fixture.home().join("nothing")).unwrap();
    let tagged = fixture.write("tagged", "x");
    // tmpfs supports user attributes only since Linux 6.6.
    let has_attributes = rustix::fs::setxattr(&tagged, "user.tag", b"v", XattrFlags::empty()).is_ok();
    let _socket = std::os::unix::net::UnixListener::bind(fixture.home().join("socket")).unwrap();

    let saved = fixture.save().await;
    assert_eq!((saved.counts.special, saved.counts.unreadable, saved.counts.unstable), (1, 0, 0));
    assert_eq!(saved.counts.notes, ["special file: socket"]);
    let (target, restored) = fixture.restore(&saved.snapshot).await;
    assert_eq!((restored.incomplete, restored.first_incomplete), (0, None));
    assert_eq!(
        (restored.files, restored.bytes),
        (saved.counts.files, saved.counts.bytes - "secret".len() as u64),
        "the content of a file with several hard links is restored once"
    );
    let mut expected = describe(&fixture.home());
    expected.remove(&b"socket"[..]).unwrap();
    assert_same(&describe(target.path()), &expected);
    let zeros = fs::metadata(target.path().join("zeros")).unwrap();
    assert!(zeros.blocks() * 512 < zeros.len() / 2, "zeros take {} blocks", zeros.blocks());
    let restored_tagged = target.path().join("tagged");
    assert_eq!(rustix::fs::getxattr(&restored_tagged, "user.tag", &mut [0; 9][..]).is_ok(), has_attributes);
}

#[tokio::test]
async fn save_of_unchanged_home_uploads_nothing() {
    let mut fixture = Fixture::new().await;
    fixture.write("a/b", "content");
    let first = fixture.save().await;
    let second = fixture.save().await;
    assert!(second.is_unchanged);
    assert_eq!((second.id, second.uploaded_bytes, second.counts.files_read), (first.id, 0, 0));
    // The same holds after a restart without a cache, when trees are read from the store.
    fixture.restart().await;
    let third = fixture.save().await;
    assert_eq!((third.is_unchanged, third.uploaded_bytes, third.counts.files_read), (true, 0, 0));
}

#[tokio::test]
async fn moved_directory_is_not_reuploaded() {
    let mut fixture = Fixture::new().await;
    for n in 0..20 {
        fixture.write(&format!("tree/{n}/file"), random_bytes(50_000));
    }
    let first = fixture.save().await;
    assert!(first.uploaded_bytes > 1_000_000);
    fs::rename(fixture.home().join("tree"), fixture.home().join("moved")).unwrap();
    let second = fixture.save().await;
    assert!(second.uploaded_bytes < 20_000, "{} bytes", second.uploaded_bytes);
    fixture.restart().await;
    fs::rename(fixture.home().join("moved"), fixture.home().join("again")).unwrap();
    let third = fixture.save().await;
    assert!(third.uploaded_bytes < 20_000, "{} bytes", third.uploaded_bytes);
    let (target, _) = fixture.restore(&third.snapshot).await;
    assert_same(&describe(target.path()), &describe(&fixture.home()));
}

#[tokio::test]
async fn save_changes_visits_only_marked_directories() {
    let mut fixture = Fixture::new().await;
    for path in ["a/b/file", "a/c/file", "d/e/file", "f"] {
        fixture.write(path, path);
    }
    fixture.save().await;
    fixture.write("a/b/file", "changed");
    fixture.write("a/new/deep/file", "new");
    fs::remove_dir_all(fixture.home().join("d/e")).unwrap();
    let expected = describe(&fixture.home());
    let mut changes = ChangeSet::default();
    for directory in ["a/b", "a", "d"] {
        changes.mark_directory(Path::new(directory));
    }
    let saved = fixture.saver.save_changes(fixture.last.clone().unwrap(), changes).await.unwrap();
    // The home directory, a, a/b, a/new, a/new/deep and d, but not a/c.
    assert_eq!((saved.counts.directories, saved.counts.files_read), (6, 2));
    let (target, _) = fixture.restore(&saved.snapshot).await;
    assert_same(&describe(target.path()), &expected);

    // Unmarked changes aren't detected until the whole home directory is saved.
    fixture.last = Some((saved.id, saved.snapshot));
    fixture.write("f", "unmarked");
    let mut changes = ChangeSet::default();
    changes.mark_subtree(Path::new("a"));
    let saved = fixture.saver.save_changes(fixture.last.clone().unwrap(), changes).await.unwrap();
    assert!(saved.is_unchanged);
    let saved = fixture.save().await;
    assert_eq!((saved.is_unchanged, saved.counts.files_read), (false, 1));
}

#[tokio::test]
async fn restore_reproduces_every_snapshot() {
    let mut fixture = Fixture::new().await;
    let mut saved_states = Vec::new();
    for round in 0..6_u8 {
        fixture.write("counter", [round]);
        fixture.write(&format!("round/{round}"), vec![round; 100]);
        if round % 2 == 1 {
            fs::remove_file(fixture.home().join(format!("round/{}", round - 1))).unwrap();
        }
        let log = File::options().create(true).append(true).open(fixture.home().join("log")).unwrap();
        (&log).write_all(&random_bytes(700_000)).unwrap();
        saved_states.push((fixture.save().await.snapshot, describe(&fixture.home())));
    }
    for (snapshot, expected) in &saved_states {
        let (target, _) = fixture.restore(snapshot).await;
        assert_same(&describe(target.path()), expected);
    }
}

#[tokio::test]
async fn save_detects_change_with_same_size_and_mtime() {
    let mut fixture = Fixture::new().await;
    let path = fixture.write("a", "first");
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    fixture.save().await;
    // Saves wait until any later change would get a different ctime, so even this immediate change is detected.
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"other", 0).unwrap();
    file.set_modified(time).unwrap();
    let saved = fixture.save().await;
    assert_eq!((saved.is_unchanged, saved.counts.files_read), (false, 1));
    let (target, _) = fixture.restore(&saved.snapshot).await;
    assert_eq!(fs::read(target.path().join("a")).unwrap(), b"other");
}

#[tokio::test]
async fn save_skips_caches_and_excluded_directories() {
    let mut fixture = Fixture::new().await;
    fixture.write("target/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n# a cache");
    fixture.write("target/debug/large", "x");
    fixture.write("no-cache/CACHEDIR.TAG", "Signature: wrong");
    fixture.write("no-cache/file", "x");
    fixture.write("app/node_modules/file", "x");
    fixture.write("app/code", "x");
    fixture.write("notes/node_modules", "a file of this name");
    let exclusions = &mut fixture.saver.options_mut().exclusions;
    let invalid = exclusions.set_rules(&["node_modules/"], "", std::path::Path::new("home"), Vec::new());
    assert!(invalid.is_empty());
    exclusions.paths.push("app/code".into());
    fixture.write("app/node_modules/deep/er", [1; 1000]);
    fixture.saver.options_mut().should_measure_excluded = true;
    let saved = fixture.save().await;
    let sizes = saved.counts.excluded_sizes.unwrap();
    assert_eq!((sizes.entries, sizes.bytes, sizes.is_partial), (7, 1003, false));
    let largest: Vec<_> =
        sizes.largest.iter().map(|entry| (entry.path.to_str().unwrap(), entry.bytes)).collect();
    assert_eq!(largest, [("app/node_modules", 1001), ("app/code", 1), ("target/debug", 1)]);
    let (target, _) = fixture.restore(&saved.snapshot).await;
    let paths: Vec<_> =
        describe(target.path()).into_keys().map(|path| String::from_utf8(path).unwrap()).collect();
    let expected =
        ["app", "no-cache", "no-cache/CACHEDIR.TAG", "no-cache/file", "notes", "notes/node_modules"];
    assert_eq!(paths[..6], expected);
    assert_eq!(paths[6..], ["target", "target/CACHEDIR.TAG"]);
    assert_eq!(saved.counts.excluded, 3);
}

#[tokio::test]
async fn save_does_not_follow_symlinks_out_of_home() {
    let mut fixture = Fixture::new().await;
    let outside = fixture.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret of another user").unwrap();
    symlink(&outside, fixture.home().join("directory")).unwrap();
    symlink(outside.join("secret"), fixture.home().join("file")).unwrap();
    let saved = fixture.save().await;
    assert_eq!((saved.counts.files, saved.counts.bytes), (0, 0));
    let (target, _) = fixture.restore(&saved.snapshot).await;
    assert!(fs::symlink_metadata(target.path().join("directory")).unwrap().is_symlink());
}

#[tokio::test]
async fn open_rejects_wrong_key() {
    let fixture = Fixture::new().await;
    let error = fixture.open(&RepositoryKey::generate().unwrap()).await.err().unwrap();
    assert!(matches!(error, FilesError::WrongKey), "{error}");
    let elsewhere = Key::from("user_2/primary/files");
    let absent = Repository::open(fixture.bucket.clone(), elsewhere, &fixture.key, Cache::none()).await;
    assert!(absent.unwrap().is_none());
}

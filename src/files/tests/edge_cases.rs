//! Edge cases in which a simpler implementation would lose data or never terminate.

use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use jiff::{SignedDuration, Timestamp};
use kit::disk::SmallDisk;

use super::*;
use crate::history::History;
use crate::index::{IndexFile, IndexedPack};
use crate::pack::BlobType;
use crate::repository::{ObjectKind, list_objects};

pub(super) fn changes_in(directories: &[&str]) -> ChangeSet {
    let mut changes = ChangeSet::default();
    directories.iter().for_each(|directory| changes.mark_directory(Path::new(directory)));
    changes
}

impl Fixture {
    pub(super) async fn save_changes(&mut self, changes: ChangeSet) -> SaveResult {
        let saved = self.saver.save_changes(self.last.clone().unwrap(), changes).await.unwrap();
        self.last = Some((saved.id, saved.snapshot.clone()));
        saved
    }

    pub(super) async fn assert_restores(&self, saved: &SaveResult) {
        let (target, _) = self.restore(&saved.snapshot).await;
        assert_same(&describe(target.path()), &describe(&self.home()));
    }
}

#[tokio::test]
async fn retried_writes_succeed() {
    let (store, faults) = FaultyStore::new(Arc::new(InMemory::new()), 0);
    faults.duplicate_writes();
    let mut fixture = Fixture::with_bucket(Bucket::new(Arc::new(store))).await;
    let keys = list_objects(&fixture.bucket, &root().join("keys")).await.unwrap();
    assert_eq!(keys.len(), 1);
    fixture.write("a", "a");
    let saved = fixture.save().await;
    fixture.assert_restores(&saved).await;
}

#[tokio::test]
async fn directory_moved_away_and_back_is_visited() {
    let mut fixture = Fixture::new().await;
    fixture.write("d/old", "old");
    fixture.save().await;
    fs::rename(fixture.home().join("d"), fixture.home().join("e")).unwrap();
    fixture.write("e/new", "new");
    fs::rename(fixture.home().join("e"), fixture.home().join("d")).unwrap();
    let saved = fixture.save_changes(changes_in(&["", "e"])).await;
    fixture.assert_restores(&saved).await;
}

#[tokio::test]
async fn directory_with_reused_inode_is_visited() {
    let mut fixture = Fixture::new().await;
    fs::create_dir(fixture.home().join("d")).unwrap();
    fixture.save().await;
    fs::remove_dir(fixture.home().join("d")).unwrap();
    fixture.write("x/file", "in the new directory");
    fs::rename(fixture.home().join("x"), fixture.home().join("d")).unwrap();
    let saved = fixture.save_changes(changes_in(&["", "x"])).await;
    fixture.assert_restores(&saved).await;
}

#[tokio::test]
async fn incremental_save_may_split_hard_link() {
    let mut fixture = Fixture::new().await;
    let first = fixture.write("a/x", "old content");
    fs::create_dir(fixture.home().join("b")).unwrap();
    fs::hard_link(&first, fixture.home().join("b/x")).unwrap();
    fixture.save().await;
    let file = File::options().write(true).open(fixture.home().join("b/x")).unwrap();
    file.write_all_at(b"new content", 0).unwrap();
    let saved = fixture.save_changes(changes_in(&["b"])).await;
    let (target, _) = fixture.restore(&saved.snapshot).await;
    assert_eq!(fs::read(target.path().join("b/x")).unwrap(), b"new content");
    // Downloads must not link them either.
    let history =
        History::open_with_contents(fixture.open(&fixture.key).await.unwrap().unwrap(), None).await.unwrap();
    let a = history.find(&saved.snapshot, Path::new("a/x")).await.unwrap().unwrap();
    let b = history.find(&saved.snapshot, Path::new("b/x")).await.unwrap().unwrap();
    assert!(a.hard_link_key().is_some());
    assert_ne!(a.hard_link_key(), b.hard_link_key());
    let saved = fixture.save().await;
    fixture.assert_restores(&saved).await;
}

#[tokio::test]
async fn cache_tag_applies_to_incremental_saves() {
    let mut fixture = Fixture::new().await;
    fixture.write("target/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55");
    fixture.write("target/debug/a", "a");
    fixture.save().await;
    fixture.write("target/debug/b", random_bytes(500_000));
    let saved = fixture.save_changes(changes_in(&["target/debug"])).await;
    assert!(saved.uploaded_bytes < 20_000, "{} bytes", saved.uploaded_bytes);
    fixture.write("CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55");
    fixture.write("kept", "kept");
    let saved = fixture.save().await;
    let (target, _) = fixture.restore(&saved.snapshot).await;
    assert!(target.path().join("kept").exists(), "a tag in the home directory itself is ignored");
}

/// In tests, `MAX_DIRECTORY_ENTRIES` is 2000.
#[tokio::test]
async fn only_directories_over_the_entry_limit_are_skipped() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "kept");
    fixture.write("cache/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55");
    for number in 0..2001 {
        fixture.write(&format!("cache/{number}"), "");
        fixture.write(&format!("large/{number}"), "");
    }
    let saved = fixture.save().await;
    assert_eq!((saved.counts.unreadable, saved.counts.excluded), (1, 2001));
    let reason = saved.counts.first_unreadable.unwrap();
    assert!(reason.starts_with("large: its first 2001 entries take about"), "{reason}");
    let (target, _) = fixture.restore(&saved.snapshot).await;
    let paths = describe(target.path()).into_keys();
    let paths: Vec<_> = paths.map(|path| String::from_utf8(path).unwrap()).collect();
    assert_eq!(paths, ["cache", "cache/CACHEDIR.TAG", "file"]);
}

#[tokio::test]
async fn sparse_file_is_saved_quickly_and_restored_sparse() {
    let mut fixture = Fixture::new().await;
    let path = fixture.write("sparse", "start");
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(300 << 30).unwrap();
    file.write_all_at(b"middle", (100 << 30) + 12_345).unwrap();
    file.write_all_at(b"end", (300 << 30) - 3).unwrap();
    let started = Instant::now();
    let saved = fixture.save().await;
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    assert_eq!(saved.counts.bytes, 300 << 30);
    let (target, _) = fixture.restore(&saved.snapshot).await;
    let restored = File::open(target.path().join("sparse")).unwrap();
    assert_eq!(restored.metadata().unwrap().len(), 300 << 30);
    assert!(restored.metadata().unwrap().blocks() * 512 < 64 << 20);
    for (text, offset) in [("start", 0), ("middle", (100 << 30) + 12_345), ("end", (300 << 30) - 3)] {
        let mut content = vec![0; text.len()];
        restored.read_exact_at(&mut content, offset).unwrap();
        assert_eq!(content, text.as_bytes());
    }
}

#[tokio::test]
async fn implausibly_large_file_is_reported() {
    let mut fixture = Fixture::new().await;
    let path = fixture.write("huge", "");
    if File::options().write(true).open(&path).unwrap().set_len(2 << 40).is_err() {
        eprintln!("skipped: the file system doesn't support 2 TiB files");
        return;
    }
    fixture.write("small", "small");
    let saved = fixture.save().await;
    assert_eq!((saved.counts.unreadable, saved.counts.files), (1, 1));
    assert!(saved.counts.first_unreadable.unwrap().starts_with("huge: larger than"));
    assert!(!saved.retry.is_empty());
}

/// Retrying just the file would save a database without a journal created since the failed save.
#[tokio::test]
async fn retry_includes_parent_of_unreadable_file() {
    let mut fixture = Fixture::new().await;
    let path = fixture.write("app/data.db", "");
    let file = File::options().write(true).open(&path).unwrap();
    if file.set_len(2 << 40).is_err() {
        eprintln!("skipped: the file system doesn't support 2 TiB files");
        return;
    }
    let saved = fixture.save().await;
    assert_eq!(saved.counts.unreadable, 1);
    file.set_len(0).unwrap();
    fixture.write("app/data.db-journal", "journal");
    let saved = fixture.save_changes(saved.retry).await;
    fixture.assert_restores(&saved).await;
}

#[tokio::test]
async fn cache_holds_only_current_trees_despite_unreadable_entry() {
    let mut fixture = Fixture::new().await;
    fixture.write("kept/below/file", "content");
    fixture.save().await;
    fs::remove_dir_all(fixture.home().join("kept")).unwrap();
    let unreadable = fixture.write("kept", "");
    if File::options().write(true).open(&unreadable).unwrap().set_len(2 << 40).is_err() {
        eprintln!("skipped: the file system doesn't support 2 TiB files");
        return;
    }
    let trees = fixture.dir.path().join("cache/trees");
    let files_in = |dir: &Path| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    for round in 0..3_u8 {
        fixture.write("counter", [round]);
        assert_eq!(fixture.save().await.counts.unreadable, 1);
        let count = files_in(&trees).flat_map(|dir| files_in(&dir)).count();
        assert_eq!(count, 3, "the home directory and the two directories retained from the parent");
    }
}

#[tokio::test]
async fn expired_parent_does_not_make_later_snapshots_incomplete() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", random_bytes(100_000));
    fixture.save().await;
    // Delete the parent's packs and the index, as happens after a very long pause.
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    for (pack, _) in repository.list_packs().await.unwrap() {
        repository.delete(&repository.pack_path(pack)).await.unwrap();
    }
    for file in repository.list(ObjectKind::Index).await.unwrap() {
        repository.delete(&repository.path(ObjectKind::Index, file)).await.unwrap();
    }
    let saved = fixture.save().await;
    fixture.assert_restores(&saved).await;
    fixture.write("other", "other");
    let saved = fixture.save_changes(changes_in(&[""])).await;
    fixture.assert_restores(&saved).await;
}

/// The machine still has every file, so a corrupt tree in the store must not block backups.
#[tokio::test]
async fn corrupt_tree_is_rewritten() {
    let mut fixture = Fixture::new().await;
    fixture.write("directory/file", "content");
    fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    for (_, file) in repository.load_index().await.unwrap() {
        for pack in file.packs.iter().filter(|pack| pack.blobs[0].blob_type == BlobType::Tree) {
            fixture.bucket.put(&repository.pack_path(pack.id), b"damaged".to_vec()).await.unwrap();
        }
    }
    fixture.restart().await;
    fixture.write("directory/other", "more");
    let second_save = fixture.save().await;
    assert_eq!(second_save.counts.files_read, 2, "without trees, every file is reread");
    assert!(second_save.uploaded_bytes > 0);
    // The index still lists the corrupt copies.
    for _ in 0..3 {
        let (target, _) = fixture.restore(&second_save.snapshot).await;
        assert_eq!(fs::read_to_string(target.path().join("directory/file")).unwrap(), "content");
        fixture.restart().await;
    }
    pruning::run_prune(&fixture, &pruning::prune_options_after(3)).await;
    pruning::run_prune(&fixture, &pruning::prune_options_after(9)).await;
    let (target, _) = fixture.restore(&second_save.snapshot).await;
    assert_eq!(fs::read_to_string(target.path().join("directory/other")).unwrap(), "more");
}

#[tokio::test]
async fn small_index_files_are_merged() {
    let mut fixture = Fixture::new().await;
    for n in 0..20_u8 {
        fixture.write("counter", [n]);
        fixture.save().await;
    }
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    assert_eq!(repository.list(ObjectKind::Index).await.unwrap().len(), 20);
    let options = crate::prune::PruneOptions {
        policy: crate::retention::RetentionPolicy::default(),
        ..pruning::prune_options_after(0)
    };
    crate::prune::prune(&repository, &options).await.unwrap();
    assert_eq!(repository.list(ObjectKind::Index).await.unwrap().len(), 1);
    // The saver still has the old index files loaded.
    fixture.write("counter", "more");
    let saved = fixture.save().await;
    fixture.assert_restores(&saved).await;
}

/// Pruning replaces index files when merging them or marking packs for deletion. Marked packs are deleted after a grace
/// period.
#[tokio::test]
async fn long_save_fails_if_pruning_may_delete_its_packs() {
    let (zero, hour) = (Duration::ZERO, Duration::from_secs(3600));
    for (max_duration, marked_hours, should_fail) in
        [(zero, None, false), (zero, Some(1), false), (zero, Some(50), true), (hour, Some(50), false)]
    {
        let mut fixture = Fixture::new().await;
        fixture.write("a", random_bytes(100_000));
        fixture.save().await;
        let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
        let (old, mut file) = repository.load_index().await.unwrap().remove(0);
        if let Some(hours) = marked_hours {
            let time = Some(Timestamp::now() - SignedDuration::from_hours(hours));
            let packs = std::mem::take(&mut file.packs).into_iter();
            file.packs_to_delete = packs.map(|pack| IndexedPack { time, ..pack }).collect();
        }
        let pack_count = repository.list_packs().await.unwrap().len();
        let replacing = async {
            // Saves read the index before uploading any pack.
            while repository.list_packs().await.unwrap().len() == pack_count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            repository.write_json(ObjectKind::Index, &file).await.unwrap();
            repository.delete(&repository.path(ObjectKind::Index, old)).await.unwrap();
        };
        fixture.write("b", random_bytes(100_000));
        // The tree is only a few hundred bytes, so the chunk finishes two seconds after it.
        fixture.saver.options_mut().max_bytes_per_second = NonZeroU64::new(50_000);
        fixture.saver.max_unchecked_duration = max_duration;
        let parent = fixture.last.clone();
        let (saved, ()) = tokio::join!(fixture.saver.save(parent), replacing);
        assert_eq!(matches!(saved, Err(FilesError::SaveTooLong)), should_fail, "{saved:?}");
        assert_eq!(saved.is_err(), should_fail, "{saved:?}");
        // The next save reads the new index.
        fixture.saver.options_mut().max_bytes_per_second = None;
        let saved = fixture.save().await;
        fixture.assert_restores(&saved).await;
    }
}

#[tokio::test]
async fn upload_limit_applies_to_small_saves() {
    let mut fixture = Fixture::new().await;
    fixture.saver.options_mut().max_bytes_per_second = NonZeroU64::new(100_000);
    let started = Instant::now();
    for name in ["a", "b"] {
        fixture.write(name, random_bytes(50_000));
        fixture.save().await;
    }
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
}

#[tokio::test]
async fn load_index_succeeds_while_files_are_replaced() {
    let mut fixture = Fixture::new().await;
    fixture.write("a", "a");
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let (old, file) = repository.load_index().await.unwrap().remove(0);
    // Replace the file far more often than pruning would.
    let replacing = async {
        let mut previous = old;
        for _ in 0..200 {
            let new = repository.write_json(ObjectKind::Index, &IndexFile::clone(&file)).await.unwrap();
            repository.delete(&repository.path(ObjectKind::Index, previous)).await.unwrap();
            previous = new;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let reading = async {
        for _ in 0..20 {
            let index = repository.load_index().await.unwrap();
            assert!(!index.is_empty());
        }
    };
    tokio::join!(replacing, reading);
    fixture.assert_restores(&saved).await;
}

#[tokio::test]
async fn paths_longer_than_path_max_are_saved_and_restored() {
    let mut fixture = Fixture::new().await;
    let mut directory: std::os::fd::OwnedFd = File::open(fixture.home()).unwrap().into();
    let flags = rustix::fs::OFlags::DIRECTORY;
    let name = "n".repeat(200);
    for _ in 0..30 {
        rustix::fs::mkdirat(&directory, &name, rustix::fs::Mode::RWXU).unwrap();
        directory = rustix::fs::openat(&directory, &name, flags, rustix::fs::Mode::empty()).unwrap();
    }
    let create = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
    let file = rustix::fs::openat(&directory, "file", create, rustix::fs::Mode::RUSR).unwrap();
    File::from(file).write_all(b"deep").unwrap();
    let saved = fixture.save().await;
    let (target, restored) = fixture.restore(&saved.snapshot).await;
    assert_eq!((restored.files, restored.directories, restored.incomplete), (1, 30, 0));
    let mut directory: std::os::fd::OwnedFd = File::open(target.path()).unwrap().into();
    for _ in 0..30 {
        directory = rustix::fs::openat(&directory, &name, flags, rustix::fs::Mode::empty()).unwrap();
    }
    let file = rustix::fs::openat(&directory, "file", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty());
    assert_eq!(std::io::read_to_string(File::from(file.unwrap())).unwrap(), "deep");
}

#[tokio::test]
async fn restore_without_enough_space_writes_nothing() {
    let mut fixture = Fixture::new().await;
    // Compressible and duplicate content takes little space in the repository, but its full size on disk.
    let text: String = (0..400_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_string()).collect();
    for name in ["a", "b", "c"] {
        fixture.write(name, &text);
    }
    let sparse = File::create(fixture.home().join("sparse")).unwrap();
    sparse.set_len(1 << 30).unwrap();
    let saved = fixture.save().await;
    let target = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(target.path().to_owned(), 8).unwrap() else { return };
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let options = RestoreOptions::new(target.path().to_owned(), "/".into());
    let restored = restore(&repository, &saved.snapshot, &options, &RestoreProgress::default()).await;
    let error = restored.unwrap_err();
    assert!(
        matches!(error, FilesError::NoSpace { needed, .. } if needed == 3 * (text.len() as u64).next_multiple_of(4096)),
        "{error}"
    );
    assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0);
    for name in ["b", "c"] {
        fs::remove_file(fixture.home().join(name)).unwrap();
    }
    for number in 0..20 {
        fixture.write(&format!("small/{number}"), "");
    }
    let saved = fixture.save().await;
    // The root directory also takes an inode.
    disk.limit_inodes(23).unwrap();
    let restored = restore(&repository, &saved.snapshot, &options, &RestoreProgress::default()).await;
    let error = restored.unwrap_err();
    assert!(matches!(error, FilesError::NoInodes { needed: 23, available: 22 }), "{error}");
    assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0);
    disk.limit_inodes(24).unwrap();
    restore(&repository, &saved.snapshot, &options, &RestoreProgress::default()).await.unwrap();
    assert_same(&describe(target.path()), &describe(&fixture.home()));
}

#[tokio::test]
async fn pack_reads_are_retried_during_outage() {
    let mut fixture = Fixture::with_faults(1).await;
    for number in 0..40 {
        fixture.write(&format!("{}/{number}", number % 7), random_bytes(5_000));
    }
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let locations = repository.load_locations().await.unwrap();
    let pack = locations.pack(locations.find(BlobType::Tree, saved.snapshot.tree).unwrap());
    fixture.faults.set_percent(60);
    let retrying_repository = repository.clone().with_outage_timeout(Duration::from_secs(60));
    for _ in 0..10 {
        retrying_repository.read_pack(pack.id, 0..pack.end).await.unwrap();
    }
    let mut results = Vec::new();
    for _ in 0..10 {
        results.push(repository.read_pack(pack.id, 0..pack.end).await);
    }
    assert!(results.iter().any(|result| result.as_ref().is_err_and(FilesError::is_transient)));
}

/// A file's first name gets its owner and mode in one batch; its other names are linked in later batches.
#[tokio::test]
async fn hard_link_is_restored_across_batches() {
    let mut fixture = Fixture::new().await;
    for directory in 0..30 {
        for file in 0..5 {
            fixture.write(&format!("{directory:02}/{file}"), format!("{directory} {file}"));
        }
    }
    let program = fixture.home().join("00/0");
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(&program, Some(65_534), Some(65_534)).unwrap();
    }
    fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let others = ["15/linked", "29/linked"];
    for other in others {
        fs::hard_link(&program, fixture.home().join(other)).unwrap();
    }
    let saved = fixture.save().await;
    let (target, restored) = fixture.restore(&saved.snapshot).await;
    assert_eq!((restored.files, restored.directories, restored.incomplete), (152, 30, 0));
    assert_same(&describe(target.path()), &describe(&fixture.home()));
    let mode = fs::metadata(target.path().join("00/0")).unwrap().mode();
    assert_eq!(mode & 0o7777, 0o755, "a restored file must not run with its owner's privileges");
    let inode = |name: &str| fs::metadata(target.path().join(name)).unwrap().ino();
    assert!(others.iter().all(|other| inode(other) == inode("00/0")));
}

/// Chunk offsets are computed from index lengths, so a wrong length must not make a restore write at the wrong offset.
#[tokio::test]
async fn restore_rejects_chunk_with_wrong_length() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", [7; 100_000]);
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let (genuine, mut file) = repository.load_index().await.unwrap().remove(0);
    for pack in &mut file.packs {
        let data = pack.blobs.iter_mut().filter(|blob| blob.blob_type == BlobType::Data);
        data.for_each(|blob| blob.uncompressed_length += 1000);
    }
    repository.write_json(ObjectKind::Index, &file).await.unwrap();
    repository.delete(&repository.path(ObjectKind::Index, genuine)).await.unwrap();
    let error = fixture.try_restore(&saved.snapshot).await.err().unwrap();
    assert!(error.is_damage(), "{error}");
}

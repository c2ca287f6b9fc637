//! Corruption detection and repair, and restores that skip corrupt entries.

use jiff::Timestamp;

use super::edge_cases::changes_in;
use super::*;
use crate::history::History;
use crate::pack::BlobType;
use crate::prune::{PruneOptions, prune};
use crate::repository::{ObjectKind, list_objects};
use crate::retention::RetentionPolicy;
use crate::verify::{find_unindexed_blob, find_unusable_snapshot};

/// Flips a bit of a stored blob.
pub(super) async fn damage(fixture: &Fixture, blob_type: BlobType, id: Id) {
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let locations = repository.load_locations().await.unwrap();
    let location = locations.find(blob_type, id).unwrap();
    let path = repository.pack_path(locations.pack(location).id);
    let mut bytes = fixture.bucket.get(&path, 1 << 30).await.unwrap().unwrap().value.to_vec();
    bytes[location.offset as usize + 5] ^= 1;
    fixture.bucket.put(&path, bytes).await.unwrap();
}

#[tokio::test]
async fn restore_skips_only_corrupt_entries() {
    let mut fixture = Fixture::new().await;
    for number in 0..100 {
        fixture.write(&format!("many/{number}"), number.to_string());
    }
    let lost = fixture.write("lost", random_bytes(200_000));
    fs::create_dir(fixture.home().join("names")).unwrap();
    fs::hard_link(&lost, fixture.home().join("names/lost")).unwrap();
    fixture.write("projects/app/main.rs", "x");
    fixture.write("projects/other", "kept");
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let history = History::open_for_restore(repository.clone()).await.unwrap();
    let lost = history.find(&saved.snapshot, Path::new("lost")).await.unwrap().unwrap();
    let app = history.find(&saved.snapshot, Path::new("projects/app")).await.unwrap().unwrap();
    damage(&fixture, BlobType::Data, lost.node.content.unwrap()[0]).await;
    damage(&fixture, BlobType::Tree, app.node.subtree.unwrap()).await;
    assert!(fixture.try_restore(&saved.snapshot).await.is_err_and(|error| error.is_damage()));

    let target = tempfile::tempdir().unwrap();
    let options = RestoreOptions {
        should_skip_damaged: true,
        ..RestoreOptions::new(target.path().to_owned(), "/".into())
    };
    let progress = RestoreProgress::default();
    let mut restored = restore(&repository, &saved.snapshot, &options, &progress).await.unwrap();
    restored.damaged.first_paths.sort_unstable();
    let damaged = ["lost", "names/lost", "projects/app"].map(PathBuf::from);
    assert_eq!((restored.damaged.count, restored.damaged.first_paths), (3, damaged.to_vec()));
    let mut expected = describe(&fixture.home());
    for path in ["lost", "names/lost", "projects/app/main.rs"] {
        expected.remove(path.as_bytes()).unwrap();
    }
    assert_same(&describe(target.path()), &expected);

    // Without the root directory, nothing would be restored.
    damage(&fixture, BlobType::Tree, saved.snapshot.tree).await;
    let target = tempfile::tempdir().unwrap();
    let options = RestoreOptions { target: target.path().to_owned(), ..options };
    let error = restore(&repository, &saved.snapshot, &options, &progress).await.unwrap_err();
    assert!(error.is_damage(), "{error}");
}

#[tokio::test]
async fn snapshot_with_lost_root_directory_is_detected() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "x");
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    assert!(find_unusable_snapshot(&repository, &repository).await.unwrap().is_none());
    let time = saved.snapshot.time + jiff::SignedDuration::from_secs(1);
    let lost = Snapshot { tree: Id::of(b"lost"), time, ..saved.snapshot.clone() };
    let id = repository.write_json(ObjectKind::Snapshot, &lost).await.unwrap();
    let error = find_unusable_snapshot(&repository, &repository).await.unwrap().unwrap().to_string();
    assert!(error.contains(&id.to_string()) && error.contains("restic forget"), "{error}");
    repository.read_snapshot(saved.id).await.expect("the latest snapshot is intact");
    let history = History::open(repository.clone()).await.unwrap();
    assert_eq!(history.find_snapshot(None).unwrap().0, id);
    assert_eq!(
        history.find_readable_snapshot(Path::new(""), Timestamp::MAX).await.unwrap().unwrap().0,
        saved.id
    );
    assert!(find_unindexed_blob(&repository, &repository, &saved.snapshot).await.unwrap().is_none());
}

#[tokio::test]
async fn lost_key_file_and_index_are_detected_and_rewritten() {
    let mut fixture = Fixture::in_directory().await;
    fixture.write("dir/file", "content");
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    assert!(find_unindexed_blob(&repository, &repository, &saved.snapshot).await.unwrap().is_none());
    repository.check_key_file().await.unwrap();
    for dir in ["keys", "index"] {
        for object in list_objects(&fixture.bucket, &root().join(dir)).await.unwrap() {
            repository.delete(&object.location).await.unwrap();
        }
    }
    let error = find_unindexed_blob(&repository, &repository, &saved.snapshot).await.unwrap().unwrap();
    assert!(error.is_damage() && error.to_string().contains("rebuild-index"), "{error}");
    // Anyone with the slot's store credentials can create such objects.
    let other_key = RepositoryKey::generate().unwrap().create_key_file(jiff::Timestamp::now()).unwrap();
    let mut too_long = other_key.clone();
    too_long.resize(1 << 20, b' ');
    for forged in [br#"{"kdf":"","salt":"","data":""}"#.to_vec(), other_key, too_long] {
        let path = root().join("keys").join(Id::of(&forged).to_string());
        fixture.bucket.put(&path, forged).await.unwrap();
        assert!(repository.check_key_file().await.unwrap_err().is_damage());
        // `restic` aborts on key files it can't parse.
        repository.delete(&path).await.unwrap();
    }
    // Same steps as the service after a restart.
    let bucket = fixture.bucket.clone();
    Repository::open_or_create(bucket, root(), &fixture.key, Cache::none()).await.unwrap();
    fixture.restart().await;
    let saved = fixture.save().await;
    repository.check_key_file().await.unwrap();
    assert!(find_unindexed_blob(&repository, &repository, &saved.snapshot).await.unwrap().is_none());
    fixture.restic().check().unwrap();
}

/// The now unreadable entry is still in the lost snapshot's trees.
#[tokio::test]
async fn replacement_of_lost_snapshot_keeps_unreadable_entries() {
    let mut fixture = Fixture::new().await;
    fixture.write("dir/readable", "content");
    let unreadable = fixture.write("dir/unreadable", "earlier content");
    let saved = fixture.save().await;
    if File::options().write(true).open(&unreadable).unwrap().set_len(2 << 40).is_err() {
        eprintln!("skipped: the file system does not support large sparse files");
        return;
    }
    let unchanged = fixture.save().await;
    assert_eq!((unchanged.id, unchanged.counts.unreadable), (saved.id, 1));
    fixture.saver.set_lost_snapshot(Some(saved.id));
    let replaced = fixture.save().await;
    assert_ne!(replaced.id, saved.id);
    assert_eq!(replaced.snapshot.tree, saved.snapshot.tree);
    assert!(fixture.save().await.is_unchanged, "only the lost snapshot is replaced");
}

/// A restore that skips corruption would produce an empty directory.
#[tokio::test]
async fn snapshot_with_corrupt_home_directory_is_unreadable() {
    let mut fixture = Fixture::new().await;
    fixture.write("home/file", "1");
    let earlier = fixture.save().await;
    fixture.write("home/file", "2");
    let latest = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let history = History::open(repository).await.unwrap();
    let home = Path::new("home");
    let found = history.find_readable_snapshot(home, Timestamp::MAX).await.unwrap().unwrap();
    assert_eq!(found.0, latest.id);
    assert_eq!(
        history.find_readable_snapshot(home, earlier.snapshot.time).await.unwrap().unwrap().0,
        earlier.id
    );
    let damaged = history.find(&latest.snapshot, home).await.unwrap().unwrap();
    damage(&fixture, BlobType::Tree, damaged.node.subtree.unwrap()).await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let history = History::open(repository).await.unwrap();
    assert_eq!(history.find_readable_snapshot(home, Timestamp::MAX).await.unwrap().unwrap().0, earlier.id);
}

/// The machine can repair its latest snapshot, and with it all others sharing the corrupt directory.
#[tokio::test]
async fn prune_does_not_advise_removing_protected_snapshot() {
    let mut fixture = Fixture::new().await;
    fixture.write("shared/file", "lost");
    let protected = fixture.save().await;
    fixture.write("other", "later");
    fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let history = History::open(repository.clone()).await.unwrap();
    let lost = history.find(&protected.snapshot, Path::new("shared")).await.unwrap().unwrap();
    damage(&fixture, BlobType::Tree, lost.node.subtree.unwrap()).await;
    let policy = RetentionPolicy::default();
    let options = PruneOptions { policy, protected: vec![protected.id], ..pruning::prune_options_after(0) };
    let error = prune(&repository, &options).await.unwrap_err();
    let text = error.to_string();
    assert!(error.is_damage() && text.contains(&format!("snapshot {}", protected.id)), "{text}");
    assert!(text.contains("verify --all") && !text.contains("restic forget"), "{text}");
    let options = PruneOptions { search_deadline: Some(std::time::Instant::now()), ..options };
    let error = prune(&repository, &options).await.unwrap_err();
    assert!(error.is_damage() && !error.to_string().contains("snapshot "), "no time is left: {error}");
}

/// Operators can't remove the snapshot without its id.
#[tokio::test]
async fn prune_names_snapshot_with_lost_directory() {
    let mut fixture = Fixture::new().await;
    fixture.write("projects/app/main.rs", "lost");
    let earlier = fixture.save().await;
    fixture.write("projects/app/main.rs", "intact");
    fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let history = History::open(repository.clone()).await.unwrap();
    let lost = history.find(&earlier.snapshot, Path::new("projects/app")).await.unwrap().unwrap();
    damage(&fixture, BlobType::Tree, lost.node.subtree.unwrap()).await;
    let policy = RetentionPolicy::default();
    let options = PruneOptions { policy, is_dry_run: true, ..pruning::prune_options_after(0) };
    let error = prune(&repository, &options).await.unwrap_err();
    assert!(error.is_damage(), "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("snapshot {}", earlier.id)) && text.contains("restic forget"), "{text}");
}

/// Anyone with the slot's store credentials can create such objects.
#[tokio::test]
async fn objects_in_other_directories_are_ignored() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "content");
    let saved = fixture.save().await;
    let name = "a".repeat(64);
    for dir in ["index", "snapshots", "data"] {
        let object = format!("{}/{dir}/x/{name}", root());
        fixture.bucket.put(&object.into(), "forged").await.unwrap();
    }
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    assert!(find_unindexed_blob(&repository, &repository, &saved.snapshot).await.unwrap().is_none());
    assert!(find_unusable_snapshot(&repository, &repository).await.unwrap().is_none());
    assert!(repository.list_packs().await.unwrap().iter().all(|(id, _)| id.to_string() != name));
    fixture.assert_restores(&saved).await;
}

/// Other saves don't check the index, because that means listing its files: one per save since the last prune.
#[tokio::test]
async fn index_is_checked_by_full_saves_and_after_interval() {
    let hour = Duration::from_secs(3600);
    for (interval, is_full, is_detected) in
        [(hour, false, false), (Duration::ZERO, false, true), (hour, true, true)]
    {
        let mut fixture = Fixture::new().await;
        fixture.saver.index_check_interval = interval;
        let content = random_bytes(100_000);
        fixture.write("unchanged/a", &content);
        fixture.save().await;
        let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
        for (id, _) in repository.load_index().await.unwrap() {
            repository.delete(&repository.path(ObjectKind::Index, id)).await.unwrap();
        }
        let parent = fixture.last.clone().unwrap();
        let saved = if is_full {
            fixture.saver.save(Some(parent)).await.unwrap()
        } else {
            fixture.saver.save_changes(parent, changes_in(&[""])).await.unwrap()
        };
        assert_eq!(saved.uploaded_bytes > 100_000, is_detected, "{interval:?} {is_full}");
    }
}

/// Reading all entries of such a directory could exhaust memory.
#[tokio::test]
async fn directory_with_long_link_targets_is_unreadable() {
    let mut fixture = Fixture::new().await;
    fixture.write("readable", "content");
    fs::create_dir(fixture.home().join("links")).unwrap();
    for number in 0..1950 {
        symlink("x".repeat(4000), fixture.home().join(format!("links/{number}"))).unwrap();
    }
    fixture.write("links/zz", "not read, because the links already take too much memory");
    let saved = fixture.save().await;
    assert_eq!((saved.counts.unreadable, saved.counts.files, saved.counts.files_read), (1, 1, 1));
    let reason = saved.counts.first_unreadable.unwrap();
    assert!(reason.contains("links: entries exceed"), "{reason}");
}

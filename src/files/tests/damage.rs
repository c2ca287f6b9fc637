//! Restores that leave out damaged entries.

use super::*;
use crate::history::History;
use crate::pack::BlobType;
use crate::repository::ObjectKind;
use crate::verify::{find_unusable_snapshot, verify_index};

/// Flips a bit of a blob in the store.
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
async fn restore_leaves_out_only_damaged_entries() {
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
    restored.damaged.first.sort_unstable();
    let damaged = ["lost", "names/lost", "projects/app"].map(PathBuf::from);
    assert_eq!((restored.damaged.count, restored.damaged.first), (3, damaged.to_vec()));
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
async fn snapshot_whose_root_directory_is_lost_is_found() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "x");
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    assert!(find_unusable_snapshot(&repository).await.unwrap().is_none());
    let lost = Snapshot { tree: Id::of(b"lost"), ..saved.snapshot };
    let id = repository.write_json(ObjectKind::Snapshot, &lost).await.unwrap();
    let error = find_unusable_snapshot(&repository).await.unwrap().unwrap().to_string();
    assert!(error.contains(&id.to_string()) && error.contains("restic forget"), "{error}");
    repository.read_snapshot(saved.id).await.expect("the latest snapshot is sound");
    verify_index(&repository).await.expect("the index is sound");
}

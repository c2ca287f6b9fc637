//! Indexes near their limits, which are much smaller in tests. Most listed packs don't exist and are unreferenced.

use jiff::Timestamp;

use super::pruning::{prune_options_after, run_prune};
use super::*;
use crate::index::{IndexFile, IndexedPack};
use crate::pack::{BlobType, PackedBlob};
use crate::repository::{MAX_JSON_BYTES, ObjectKind};

/// Returns index entries for `count` packs with `blobs` blobs each.
fn index_entries(name: &str, count: usize, blobs: usize) -> Vec<IndexedPack> {
    let blob = |pack: usize, number: usize| PackedBlob {
        id: Id::of(format!("{name} {pack} {number}").as_bytes()),
        blob_type: BlobType::Data,
        offset: 0,
        length: 40,
        uncompressed_length: 0,
    };
    let pack = |pack: usize| IndexedPack {
        id: Id::of(format!("{name} {pack}").as_bytes()),
        blobs: (0..blobs).map(|number| blob(pack, number)).collect(),
        time: None,
    };
    (0..count).map(pack).collect()
}

/// Returns an index file listing `count` packs with `blobs` blobs each, all marked for deletion at `time`.
fn index_of_marked_packs(name: &str, count: usize, blobs: usize, time: Timestamp) -> IndexFile {
    let packs = index_entries(name, count, blobs).into_iter();
    let packs_to_delete = packs.map(|pack| IndexedPack { time: Some(time), ..pack }).collect();
    IndexFile { packs_to_delete, ..IndexFile::default() }
}

async fn fixture_with_file() -> (Fixture, SaveResult, Repository) {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "content");
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    (fixture, saved, repository)
}

/// An interrupted prune leaves behind both the old index files and their replacements.
#[tokio::test]
async fn packs_in_several_index_files_are_counted_once() {
    let (fixture, saved, repository) = fixture_with_file().await;
    let file = IndexFile { packs: index_entries("repeated", 10, 1_400), ..IndexFile::default() };
    for _ in 0..2 {
        repository.write_json(ObjectKind::Index, &file).await.unwrap();
    }
    fixture.restore(&saved.snapshot).await;
    assert_eq!(repository.list(ObjectKind::Index).await.unwrap().len(), 3);
    run_prune(&fixture, &prune_options_after(0)).await;
    let index = repository.load_index_to_prune().await.unwrap();
    assert!(index.files_with_duplicates.is_empty(), "pruning removes one copy");
    let packs = index.files.iter().flat_map(|(_, file)| &file.packs);
    assert_eq!(packs.filter(|pack| pack.blobs.len() == 1_400).count(), 10);
    fixture.restore(&saved.snapshot).await;
}

/// An earlier prune has written a new index file and is about to delete the old one.
#[tokio::test]
async fn pruning_replaces_files_that_another_run_may_delete() {
    for is_marked in [false, true] {
        let (fixture, saved, repository) = fixture_with_file().await;
        let (_, mut file) = repository.load_index().await.unwrap().remove(0);
        if is_marked {
            let packs = std::mem::take(&mut file.packs).into_iter();
            file.packs_to_delete =
                packs.map(|pack| IndexedPack { time: Some(Timestamp::now()), ..pack }).collect();
        }
        repository.write_json(ObjectKind::Index, &file).await.unwrap();
        let earlier = repository.list(ObjectKind::Index).await.unwrap();
        assert_eq!(earlier.len(), 2);
        run_prune(&fixture, &prune_options_after(0)).await;
        let later = repository.list(ObjectKind::Index).await.unwrap();
        assert!(earlier.iter().all(|id| !later.contains(id)), "marked: {is_marked}");
        fixture.restore(&saved.snapshot).await;
    }
}

#[tokio::test]
async fn pruning_splits_large_index_files() {
    let (fixture, saved, repository) = fixture_with_file().await;
    let deleted = index_of_marked_packs("deleted", 1, 1, Timestamp::UNIX_EPOCH);
    let large = IndexFile { packs: index_entries("large", 100, 100), ..deleted };
    repository.write_json(ObjectKind::Index, &large).await.unwrap();
    run_prune(&fixture, &prune_options_after(0)).await;
    let index = repository.load_index().await.unwrap();
    let counts: Vec<usize> = index.iter().map(|(_, file)| file.blob_count()).collect();
    assert!(counts.iter().all(|count| *count <= 2_000), "{counts:?}");
    assert!(counts.iter().sum::<usize>() > 10_000, "{counts:?}");
    fixture.restore(&saved.snapshot).await;
}

#[tokio::test]
async fn write_json_rejects_objects_too_large_to_read() {
    let (_fixture, _, repository) = fixture_with_file().await;
    // JSON adds two quotes.
    let text = "x".repeat(MAX_JSON_BYTES - 2);
    let id = repository.write_json(ObjectKind::Index, &text).await.unwrap();
    assert_eq!(repository.read_json::<String>(ObjectKind::Index, id).await.unwrap().len(), text.len());
    let error = repository.write_json(ObjectKind::Index, &format!("{text}x")).await.unwrap_err();
    assert!(matches!(error, FilesError::Encode { .. }), "{error}");
}

/// An attacker with a stolen key could list different blobs for a genuine pack.
#[tokio::test]
async fn forged_listing_does_not_replace_genuine_one() {
    let (fixture, saved, repository) = fixture_with_file().await;
    let (_, mut forged) = repository.load_index().await.unwrap().remove(0);
    forged.packs.iter_mut().flat_map(|pack| &mut pack.blobs).for_each(|blob| blob.id = Id::of(b"other"));
    // Some of these files are read before the genuine one.
    for _ in 0..10 {
        repository.write_json(ObjectKind::Index, &forged).await.unwrap();
    }
    fixture.restore(&saved.snapshot).await;
    run_prune(&fixture, &prune_options_after(0)).await;
    fixture.restore(&saved.snapshot).await;
}

#[tokio::test]
async fn pruning_shrinks_index_too_large_to_read() {
    let (fixture, saved, repository) = fixture_with_file().await;
    for name in ["a", "b"] {
        let marked = index_of_marked_packs(name, 10, 1_300, Timestamp::UNIX_EPOCH);
        repository.write_json(ObjectKind::Index, &marked).await.unwrap();
    }
    let error = repository.load_index().await.unwrap_err();
    assert!(matches!(error, FilesError::Corrupt { .. }), "{error}");
    run_prune(&fixture, &prune_options_after(0)).await;
    fixture.restore(&saved.snapshot).await;
}

#[tokio::test]
async fn save_counts_marked_packs_toward_limit() {
    let (mut fixture, _, repository) = fixture_with_file().await;
    let marked = index_of_marked_packs("marked", 20, 1_000, Timestamp::now());
    repository.write_json(ObjectKind::Index, &marked).await.unwrap();
    fixture.restart().await;
    fixture.write("file", "more content");
    let error = fixture.saver.save(fixture.last.clone()).await.unwrap_err();
    assert!(matches!(error, FilesError::TooManyBlobs(_)), "{error}");
}

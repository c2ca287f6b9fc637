//! Pruning merges small packs. Snapshots stay restorable, apart from files in damaged packs.

use super::damage::damage;
use super::pruning::{prune_options_after, run_prune};
use super::*;
use crate::pack::BlobType;
use crate::prune::{MIN_MERGED_PACKS, PruneOptions};
use crate::repository::Repository;

/// Saves often enough for pruning to merge the data packs.
async fn fixture_with_small_packs() -> (Fixture, Repository, SaveResult) {
    let mut fixture = Fixture::new().await;
    for n in 0..MIN_MERGED_PACKS - 1 {
        fixture.write(&format!("file{n}"), random_bytes(1000));
        fixture.save().await;
    }
    fixture.write("last", random_bytes(1000));
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    (fixture, repository, saved)
}

#[tokio::test]
async fn small_packs_are_merged_into_one() {
    let (fixture, repository, saved) = fixture_with_small_packs().await;
    let dry_run = run_prune(&fixture, &PruneOptions { is_dry_run: true, ..prune_options_after(3) }).await;
    let merged = run_prune(&fixture, &prune_options_after(3)).await;
    assert_eq!(dry_run, merged);
    assert_eq!(merged.rewritten_packs, MIN_MERGED_PACKS as u64, "{merged:?}");
    fixture.assert_restores(&saved).await;
    run_prune(&fixture, &prune_options_after(6)).await;
    fixture.assert_restores(&saved).await;
    // One pack holds the chunks, the other the only snapshot's trees.
    assert_eq!(repository.list_packs().await.unwrap().len(), 2);
    let last = run_prune(&fixture, &prune_options_after(9)).await;
    assert_eq!((last.rewritten_packs, last.marked_packs, last.deleted_packs), (0, 0, 0));
}

#[tokio::test]
async fn damaged_pack_is_not_merged() {
    let (mut fixture, repository, _) = fixture_with_small_packs().await;
    // Damaging a pack rewrites its object, making the pack newer than the latest snapshot, so pruning ignores it until
    // after another save.
    damage(&fixture, BlobType::Data, Id::of(&fs::read(fixture.home().join("file3")).unwrap())).await;
    fixture.write("extra", random_bytes(1000));
    let saved = fixture.save().await;
    let merged = run_prune(&fixture, &prune_options_after(3)).await;
    assert_eq!(merged.rewritten_packs, MIN_MERGED_PACKS as u64 + 1, "{merged:?}");
    run_prune(&fixture, &prune_options_after(6)).await;
    assert_eq!(repository.list_packs().await.unwrap().len(), 3, "the damaged pack remains");
    let target = tempfile::tempdir().unwrap();
    let options = RestoreOptions {
        should_skip_damaged: true,
        ..RestoreOptions::new(target.path().to_owned(), "/".into())
    };
    let progress = RestoreProgress::default();
    let restored = restore(&repository, &saved.snapshot, &options, &progress).await.unwrap();
    assert_eq!(restored.damaged.first_paths, [PathBuf::from("file3")]);
}

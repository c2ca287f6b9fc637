//! Pruning never deletes data referenced by a remaining snapshot, even during concurrent saves or after an interrupted
//! run.

use std::collections::HashSet;

use jiff::{SignedDuration, Timestamp};

use super::*;
use crate::affected::{AffectedFiles, AffectedPath, find_affected_files};
use crate::index::{IndexFile, IndexedPack};
use crate::pack::{BlobType, PackWriter, PackedBlob};
use crate::prune::{PruneOptions, PruneReport, prune};
use crate::repository::ObjectKind;
use crate::retention::RetentionPolicy;
use crate::tree_reader::TreeReader;
use crate::verify::{PackShare, verify};

/// Keeps only the newest snapshot.
const KEEP_NEWEST: RetentionPolicy = RetentionPolicy {
    all: SignedDuration::ZERO,
    hourly: SignedDuration::ZERO,
    daily: SignedDuration::ZERO,
    monthly: Some(SignedDuration::ZERO),
    last_of_machine: SignedDuration::ZERO,
    newest: 1,
};

/// Returns options for a run `days` days from now that retains only the newest snapshot.
pub(super) fn prune_options_after(days: i64) -> PruneOptions {
    let hours = SignedDuration::from_hours;
    let (policy, grace_period, now) = (KEEP_NEWEST, hours(48), Timestamp::now() + hours(24 * days));
    PruneOptions {
        policy,
        protected: Vec::new(),
        grace_period,
        now,
        is_dry_run: false,
        search_deadline: None,
    }
}

pub(super) async fn run_prune(fixture: &Fixture, options: &PruneOptions) -> PruneReport {
    prune(&fixture.open(&fixture.key).await.unwrap().unwrap(), options).await.unwrap()
}

async fn bytes_in_packs(fixture: &Fixture) -> u64 {
    verify(&fixture.open(&fixture.key).await.unwrap().unwrap(), PackShare::ALL).await.unwrap().bytes
}

pub(super) async fn fixture_with_history(mut fixture: Fixture) -> Fixture {
    for n in 0..5_u8 {
        fixture.write("kept", "kept");
        fixture.write("replaced", random_bytes(300_000));
        fixture.write(&format!("removed/{n}"), random_bytes(100_000));
        fixture.save().await;
    }
    fs::remove_dir_all(fixture.home().join("removed")).unwrap();
    fixture.save().await;
    fixture
}

#[tokio::test]
async fn pruning_frees_space_in_two_phases() {
    let fixture = fixture_with_history(Fixture::new().await).await;
    let before = bytes_in_packs(&fixture).await;
    assert_eq!(
        run_prune(&fixture, &PruneOptions { is_dry_run: true, ..prune_options_after(3) })
            .await
            .removed_snapshots,
        5
    );
    assert_eq!(fixture.open(&fixture.key).await.unwrap().unwrap().list_snapshots().await.unwrap().len(), 6);

    let young = run_prune(&fixture, &prune_options_after(1)).await;
    assert_eq!((young.removed_snapshots, young.marked_packs, young.deleted_packs), (5, 0, 0));
    let marked = run_prune(&fixture, &prune_options_after(3)).await;
    assert!(marked.marked_packs >= 4 && marked.deleted_packs == 0, "{marked:?}");
    assert_eq!(
        run_prune(&fixture, &prune_options_after(4)).await.deleted_packs,
        0,
        "still within the grace period"
    );
    let deleted = run_prune(&fixture, &prune_options_after(6)).await;
    assert_eq!(deleted.deleted_packs, marked.marked_packs);
    let after = bytes_in_packs(&fixture).await;
    assert!(after < before / 3, "{after} of {before} bytes");
    assert_eq!(
        run_prune(&fixture, &prune_options_after(9)).await,
        PruneReport { kept_snapshots: 1, ..PruneReport::default() }
    );

    let snapshot = fixture.last.clone().unwrap().1;
    let (target, _) = fixture.restore(&snapshot).await;
    assert_same(&describe(target.path()), &describe(&fixture.home()));
}

#[tokio::test]
async fn protected_snapshot_survives_with_its_packs() {
    let fixture = fixture_with_history(Fixture::new().await).await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let (oldest, snapshot) = repository.list_snapshots().await.unwrap().pop().unwrap();
    for days in [3, 6, 9] {
        let pruned =
            run_prune(&fixture, &PruneOptions { protected: vec![oldest], ..prune_options_after(days) }).await;
        assert_eq!(pruned.kept_snapshots, 2);
    }
    let (target, _) = fixture.restore(&snapshot).await;
    assert_eq!(fs::metadata(target.path().join("removed/0")).unwrap().len(), 100_000);
}

/// A machine that starts without its predecessor's files must not expire the predecessor's last snapshot.
#[tokio::test]
async fn last_snapshot_of_earlier_machine_is_kept() {
    let mut fixture = Fixture::new().await;
    let mut last_of_first = None;
    for n in 0..4_u8 {
        if n == 2 {
            fixture.saver.options_mut().origin.machine = MachineId(uuid::Uuid::from_u128(8));
        }
        fixture.write("file", random_bytes(1000 + usize::from(n)));
        let saved = fixture.save().await;
        if n == 1 {
            last_of_first = Some(saved.id);
        }
    }
    let policy = RetentionPolicy { last_of_machine: SignedDuration::from_hours(24 * 90), ..KEEP_NEWEST };
    let pruned = run_prune(&fixture, &PruneOptions { policy, ..prune_options_after(3) }).await;
    assert_eq!((pruned.kept_snapshots, pruned.removed_snapshots), (2, 2));
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let kept = repository.list_snapshots().await.unwrap();
    assert!(kept.iter().any(|(id, _)| Some(*id) == last_of_first));
    assert_eq!(
        run_prune(&fixture, &PruneOptions { policy, ..prune_options_after(91) }).await.removed_snapshots,
        1
    );
}

#[tokio::test]
async fn save_after_marking_does_not_reuse_marked_packs() {
    let mut fixture = Fixture::new().await;
    let content = random_bytes(600_000);
    let path = fixture.write("file", &content);
    fixture.save().await;
    fs::remove_file(&path).unwrap();
    fixture.save().await;
    run_prune(&fixture, &prune_options_after(3)).await;
    // Save the same content again, with a saver that still has the marked blobs in memory.
    fs::write(&path, &content).unwrap();
    let saved = fixture.save().await;
    assert!(saved.uploaded_bytes > 600_000, "{} bytes", saved.uploaded_bytes);
    run_prune(&fixture, &prune_options_after(6)).await;
    let (target, _) = fixture.restore(&saved.snapshot).await;
    assert_eq!(fs::read(target.path().join("file")).unwrap(), content);
}

#[tokio::test]
async fn marked_pack_is_unmarked_once_referenced_again() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", random_bytes(600_000));
    let (id, snapshot) = {
        let saved = fixture.save().await;
        (saved.id, saved.snapshot)
    };
    fs::remove_file(fixture.home().join("file")).unwrap();
    fixture.save().await;
    run_prune(&fixture, &prune_options_after(3)).await;
    // Simulate a save that started before the marking and references the marked packs.
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    repository.write_json(crate::repository::ObjectKind::Snapshot, &snapshot).await.unwrap();
    let protected = repository.list_snapshots().await.unwrap().into_iter().map(|(id, _)| id).collect();
    let pruned = run_prune(&fixture, &PruneOptions { protected, ..prune_options_after(6) }).await;
    assert!(pruned.unmarked_packs > 0 && pruned.deleted_packs == 0, "{pruned:?}");
    let (target, _) = fixture.restore(&snapshot).await;
    assert_eq!(fs::metadata(target.path().join("file")).unwrap().len(), 600_000, "{id}");
}

#[tokio::test]
async fn partially_used_pack_is_rewritten() {
    let mut fixture = Fixture::new().await;
    for n in 0..10 {
        fixture.write(&format!("{n}"), random_bytes(50_000));
    }
    fixture.save().await;
    for n in 1..10 {
        fs::remove_file(fixture.home().join(format!("{n}"))).unwrap();
    }
    let saved = fixture.save().await;
    let pruned = run_prune(&fixture, &prune_options_after(3)).await;
    assert_eq!(pruned.rewritten_packs, 1);
    run_prune(&fixture, &prune_options_after(6)).await;
    let after = bytes_in_packs(&fixture).await;
    assert!((50_000..60_000).contains(&after), "{after} bytes");
    let (target, _) = fixture.restore(&saved.snapshot).await;
    assert_same(&describe(target.path()), &describe(&fixture.home()));
}

/// The new copy survives even if its pack is rewritten in the same run.
#[tokio::test]
async fn marked_pack_is_deleted_while_its_copy_is_rewritten() {
    let mut fixture = Fixture::new().await;
    let content = random_bytes(100_000);
    fixture.write("file", &content);
    fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let first_packs = repository.list_packs().await.unwrap();
    fs::remove_file(fixture.home().join("file")).unwrap();
    fixture.save().await;
    run_prune(&fixture, &prune_options_after(3)).await;
    fixture.write("file", &content);
    fixture.write("large", random_bytes(400_000));
    fixture.save().await;
    fs::remove_file(fixture.home().join("large")).unwrap();
    let saved = fixture.save().await;
    assert_eq!(run_prune(&fixture, &prune_options_after(6)).await.rewritten_packs, 1);
    let packs = repository.list_packs().await.unwrap();
    assert!(first_packs.iter().all(|(id, _)| packs.iter().all(|(pack, _)| pack != id)), "{packs:?}");
    let (target, _) = fixture.restore(&saved.snapshot).await;
    assert_eq!(fs::read(target.path().join("file")).unwrap(), content);
}

#[tokio::test]
async fn damaged_pack_is_reported_with_its_blobs() {
    let fixture = fixture_with_history(Fixture::new().await).await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let intact = verify(&repository, PackShare::ALL).await.unwrap();
    assert!(intact.damaged.is_empty() && intact.packs >= 10, "{intact:?}");
    let shares = async |count: u16| {
        let mut packs = 0;
        for index in 0..count {
            packs += verify(&repository, PackShare { index, count }).await.unwrap().packs;
        }
        packs
    };
    assert_eq!(shares(7).await, intact.packs, "the shares cover every pack");

    let (first, second) = {
        let mut packs = repository.list_packs().await.unwrap().into_iter().map(|(id, _)| id);
        (packs.next().unwrap(), packs.next().unwrap())
    };
    let path = repository.pack_path(first);
    let mut bytes = repository.read_whole_pack(first).await.unwrap().unwrap().to_vec();
    bytes[20] ^= 1;
    fixture.bucket.put(&path, bytes).await.unwrap();
    repository.delete(&repository.pack_path(second)).await.unwrap();
    let damaged = verify(&repository, PackShare::ALL).await.unwrap().damaged;
    let mut expected = [first, second];
    expected.sort_unstable();
    assert_eq!(damaged.iter().map(|damaged| damaged.pack).collect::<Vec<_>>(), expected);
    assert!(damaged.iter().all(|damaged| !damaged.blobs.is_empty()), "{damaged:?}");
    let missing = damaged.iter().find(|damaged| damaged.pack == second).unwrap();
    assert_eq!(missing.reason, "it does not exist");
}

/// The machine still has the content, so the next save rewrites it.
#[tokio::test]
async fn damage_is_traced_to_files_and_repaired() {
    let mut fixture = Fixture::new().await;
    fixture.write("projects/kept", random_bytes(200_000));
    let first = fixture.save().await;
    fixture.write("projects/other", "later");
    let second = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let index = repository.load_index().await.unwrap();
    let packs: Vec<IndexedPack> = index.into_iter().flat_map(|(_, file)| file.packs).collect();
    let has_data = |pack: &&IndexedPack| pack.blobs.iter().any(|blob| blob.length > 50_000);
    let pack = packs.iter().find(has_data).unwrap().id;
    let path = repository.pack_path(pack);
    let mut bytes = repository.read_whole_pack(pack).await.unwrap().unwrap().to_vec();
    bytes[20] ^= 1;
    fixture.bucket.put(&path, bytes).await.unwrap();

    let damaged = verify(&repository, PackShare::ALL).await.unwrap().damaged;
    let blobs: HashSet<Id> = damaged.iter().flat_map(|damaged| damaged.blobs.iter().copied()).collect();
    assert_eq!((damaged.len(), blobs.len()), (1, 1));
    let affected = find_affected_files(&repository, &blobs).await.unwrap();
    let expected =
        AffectedPath { path: "projects/kept".into(), first: first.snapshot.time, last: second.snapshot.time };
    assert_eq!(affected, AffectedFiles { paths: vec![expected], has_more: false, snapshots: 2 });

    let (damaged_pack, lost_blob) = (pack, *blobs.iter().next().unwrap());
    fixture.saver.set_damaged_packs(HashSet::from([pack]));
    let repaired = fixture.save().await;
    let verified = verify(&repository, PackShare::ALL).await.unwrap();
    assert!(verified.damaged.is_empty(), "{verified:?}");
    assert_eq!(verified.recoverable.iter().map(|damaged| damaged.pack).collect::<Vec<_>>(), [pack]);
    for saved in [&first, &second, &repaired] {
        fixture.restore(&saved.snapshot).await;
    }
    // Pruning succeeds and retains the intact copy, even though the damaged pack contains the blob, too.
    for days in [4, 8, 12] {
        run_prune(&fixture, &prune_options_after(days)).await;
        let index = repository.load_index().await.unwrap();
        let has_copy = |pack: &IndexedPack| {
            pack.id != damaged_pack && pack.blobs.iter().any(|blob| blob.id == lost_blob)
        };
        assert!(index.iter().flat_map(|(_, file)| &file.packs).any(has_copy), "after {days} days");
    }
    fixture.restore(&repaired.snapshot).await;
}

/// A save must not mistake a lost blob's corrupt copy in another share's pack for an intact one.
#[tokio::test]
async fn lost_blob_is_reported_for_packs_in_all_shares() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", random_bytes(200_000));
    fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let mut damaged: HashSet<Id> = HashSet::new();
    for _ in 0..2 {
        let index = repository.load_index().await.unwrap();
        let mut packs = index.into_iter().flat_map(|(_, file)| file.packs);
        let has_data = |pack: &IndexedPack| pack.blobs.iter().any(|blob| blob.length > 50_000);
        let pack = packs.find(|pack| has_data(pack) && !damaged.contains(&pack.id)).unwrap().id;
        let mut bytes = repository.read_whole_pack(pack).await.unwrap().unwrap().to_vec();
        bytes[20] ^= 1;
        fixture.bucket.put(&repository.pack_path(pack), bytes).await.unwrap();
        damaged.insert(pack);
        fixture.saver.set_damaged_packs(damaged.clone());
        fixture.save().await;
    }
    let first = *damaged.iter().next().unwrap();
    let [high, low, ..] = first.as_bytes();
    let share = PackShare { index: u16::from_be_bytes([*high, *low]) % 997, count: 997 };
    let report = verify(&repository, share).await.unwrap();
    assert!(report.damaged.is_empty(), "the third pack has an intact copy: {report:?}");

    let index = repository.load_index().await.unwrap();
    let packs = index.into_iter().flat_map(|(_, file)| file.packs);
    let third = packs.filter(|pack| pack.blobs.iter().any(|blob| blob.length > 50_000));
    let third = third.map(|pack| pack.id).find(|id| !damaged.contains(id)).unwrap();
    fixture.bucket.put(&repository.pack_path(third), vec![0; 100]).await.unwrap();
    damaged.insert(third);
    let report = verify(&repository, share).await.unwrap();
    let reported: HashSet<Id> = report.damaged.iter().map(|damaged| damaged.pack).collect();
    assert_eq!(reported, damaged);
    fixture.saver.set_damaged_packs(reported);
    fixture.save().await;
    assert!(verify(&repository, PackShare::ALL).await.unwrap().damaged.is_empty());
}

/// A range beyond the end of a pack is treated as corruption, so that other copies are tried, and not as an outage.
#[tokio::test]
async fn truncated_pack_is_damaged() {
    let mut fixture = Fixture::new().await;
    fixture.write("directory/file", random_bytes(200_000));
    fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let index = repository.load_index().await.unwrap();
    let packs: Vec<IndexedPack> = index.into_iter().flat_map(|(_, file)| file.packs).collect();
    // Trees in the intact part of a truncated pack are readable.
    let trees = packs.iter().find(|pack| pack.blobs[0].blob_type == BlobType::Tree).unwrap();
    let first = trees.blobs.iter().min_by_key(|blob| blob.offset).unwrap();
    let bytes = repository.read_whole_pack(trees.id).await.unwrap().unwrap();
    let end = (first.offset + first.length) as usize;
    fixture.bucket.put(&repository.pack_path(trees.id), bytes.slice(..end)).await.unwrap();
    let locations = repository.load_locations().await.unwrap();
    TreeReader::new(&repository, &locations).read(first.id).await.unwrap();
    for (pack, _) in repository.list_packs().await.unwrap() {
        fixture.bucket.put(&repository.pack_path(pack), b"short".to_vec()).await.unwrap();
        let read = repository.read_pack(pack, 100..200).await;
        assert!(read.as_ref().is_err_and(FilesError::is_damage), "{read:?}");
    }
}

/// Longer headers take a second request.
#[tokio::test]
async fn read_pack_end_finds_headers_of_any_length() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "content");
    fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    for count in [1_u32, 50, 500] {
        let mut writer = PackWriter::new(repository.key.clone(), BlobType::Data).unwrap();
        for content in (0..count).map(u32::to_le_bytes) {
            assert!(writer.add(Id::of(&content), &content).unwrap().is_none());
        }
        let pack = writer.finish().unwrap().unwrap();
        repository.write_pack(&pack).await.unwrap();
        let end = repository.read_pack_end(pack.id).await.unwrap().unwrap();
        assert_eq!(repository.parse_pack_end(end).await.unwrap(), pack.blobs);
    }
    let id = Id::of(b"other");
    assert!(repository.read_pack_end(id).await.unwrap().is_none());
    for content in ["", "abc", "junk"] {
        fixture.bucket.put(&repository.pack_path(id), content.as_bytes().to_vec()).await.unwrap();
        let end = repository.read_pack_end(id).await.unwrap().unwrap();
        assert!(repository.parse_pack_end(end).await.unwrap_err().is_damage(), "{content:?}");
        let start = repository.read_pack_start(id, 1000).await.unwrap();
        assert_eq!(start, content.as_bytes());
    }
}

/// An attacker with a stolen key can add objects, but must not be able to trick the platform into deleting others.
#[tokio::test]
async fn forged_index_does_not_delete_genuine_packs() {
    for is_header_corrupt in [false, true] {
        let mut fixture = Fixture::new().await;
        fixture.write("file", random_bytes(300_000));
        let protected = vec![fixture.save().await.id];
        let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
        if is_header_corrupt {
            // The packs' blobs are still readable.
            for (pack, _) in repository.list_packs().await.unwrap() {
                let mut bytes = repository.read_whole_pack(pack).await.unwrap().unwrap().to_vec();
                *bytes.last_mut().unwrap() ^= 1;
                fixture.bucket.put(&repository.pack_path(pack), bytes).await.unwrap();
            }
        }
        // Packs newer than the latest snapshot aren't marked.
        fixture.write("other", "other");
        fixture.save().await;
        let packs: Vec<Id> = repository.list_packs().await.unwrap().into_iter().map(|(id, _)| id).collect();
        // The forged index claims that a larger pack contains every chunk. Claiming the trees as well would make
        // pruning fail without deleting anything.
        let junk = Id::of(b"junk");
        fixture.bucket.put(&repository.pack_path(junk), b"junk".to_vec()).await.unwrap();
        let mut blobs: Vec<PackedBlob> = Vec::new();
        for (_, file) in repository.load_index().await.unwrap() {
            blobs.extend(file.packs.into_iter().flat_map(|pack| pack.blobs));
        }
        blobs.retain(|blob| blob.blob_type == BlobType::Data);
        blobs.push(PackedBlob { id: Id::of(b"none"), ..blobs[0] });
        let forged =
            IndexFile { packs: vec![IndexedPack { id: junk, blobs, time: None }], ..IndexFile::default() };
        repository.write_json(ObjectKind::Index, &forged).await.unwrap();
        let mut planned_deletions = 0;
        for days in [3, 6, 9, 12] {
            let options = PruneOptions { protected: protected.clone(), ..prune_options_after(days) };
            planned_deletions += run_prune(&fixture, &options).await.deleted_packs;
        }
        assert!(planned_deletions > 0);
        let remaining: Vec<Id> =
            repository.list_packs().await.unwrap().into_iter().map(|(id, _)| id).collect();
        assert!(packs.iter().all(|pack| remaining.contains(pack)), "{packs:?}, remaining {remaining:?}");
    }
}

/// Forged listings must not displace a pack's genuine listing from the index.
#[tokio::test]
async fn forged_listing_does_not_remove_blobs_from_index() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", random_bytes(300_000));
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    // Simulate an earlier forged listing that made the pack appear unused.
    let (old, mut file) = repository.load_index().await.unwrap().remove(0);
    let (data, others): (Vec<_>, Vec<_>) =
        file.packs.into_iter().partition(|pack| pack.blobs[0].blob_type == BlobType::Data);
    let pack = data[0].id;
    let mark = |pack| IndexedPack { time: Some(Timestamp::now()), ..pack };
    (file.packs, file.packs_to_delete) = (others, data.into_iter().map(mark).collect());
    repository.write_json(ObjectKind::Index, &file).await.unwrap();
    repository.delete(&repository.path(ObjectKind::Index, old)).await.unwrap();
    for (round, days) in [0, 3, 6, 9].into_iter().enumerate() {
        let blob = PackedBlob {
            id: Id::of(&round.to_le_bytes()),
            blob_type: BlobType::Data,
            offset: 0,
            length: 40,
            uncompressed_length: 0,
        };
        let packs = vec![IndexedPack { id: pack, blobs: vec![blob], time: None }];
        repository.write_json(ObjectKind::Index, &IndexFile { packs, ..IndexFile::default() }).await.unwrap();
        run_prune(&fixture, &prune_options_after(days)).await;
        let (target, _) = fixture.restore(&saved.snapshot).await;
        assert_same(&describe(target.path()), &describe(&fixture.home()));
    }
}

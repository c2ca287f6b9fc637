//! Version history of individual files and directories.

use std::time::Instant;

use futures_util::TryStreamExt;
use jiff::Timestamp;

use super::*;
use crate::history::{EntryKind, History, VersionPage, VersionQuery};
use crate::restore::restore_entries;

const ALL: VersionQuery = VersionQuery { before: None, limit: 100, max_snapshots: 1000, deadline: None };

impl Fixture {
    async fn history(&self) -> History {
        History::open_with_contents(self.open(&self.key).await.unwrap().unwrap(), None).await.unwrap()
    }

    async fn read(&self, history: &History, snapshot: &Snapshot, path: &str) -> Option<Vec<u8>> {
        let entry = history.find(snapshot, Path::new(path)).await.unwrap()?;
        let chunks: Vec<_> = history.read_content(&entry).try_collect().await.unwrap();
        Some(chunks.concat())
    }
}

/// Returns whether the entry existed in each version.
fn existence_by_version(page: &VersionPage) -> Vec<bool> {
    page.versions.iter().map(|version| version.entry.is_some()).collect()
}

#[tokio::test]
async fn list_versions_starts_new_version_on_each_change() {
    let mut fixture = Fixture::new().await;
    fixture.write("other", "0");
    let mut saved = vec![fixture.save().await];
    for (number, content) in [Some("1"), Some("1"), Some("2"), None, Some("3")].into_iter().enumerate() {
        match content {
            // Don't rewrite the file: a new mtime would be a new version.
            Some("1") if number == 1 => {}
            Some(content) => drop(fixture.write("dir/file", content)),
            None => fs::remove_file(fixture.home().join("dir/file")).unwrap(),
        }
        fixture.write("other", number.to_string());
        saved.push(fixture.save().await);
    }
    let history = fixture.history().await;
    let page = history.list_versions(Path::new("dir/file"), ALL).await.unwrap();
    assert_eq!(existence_by_version(&page), [true, false, true, true], "{page:?}");
    assert_eq!((page.next_before, page.damaged_snapshots), (None, 0));
    let oldest = page.versions.last().unwrap();
    assert_eq!(oldest.first_saved_at, saved[1].snapshot.time);
    assert_eq!((oldest.last_saved_at, oldest.snapshot), (saved[2].snapshot.time, saved[2].id));
    // A directory changes with its entries.
    let page = history.list_versions(Path::new("dir"), ALL).await.unwrap();
    assert_eq!(existence_by_version(&page), [true; 4]);
    assert_eq!(
        existence_by_version(&history.list_versions(Path::new("none"), ALL).await.unwrap()),
        [] as [bool; 0]
    );
    assert_eq!(
        existence_by_version(&history.list_versions(Path::new("dir/file/x"), ALL).await.unwrap()),
        [] as [bool; 0]
    );

    // Each page picks up where the previous one ended, regardless of the limit.
    for limit in 1..=3 {
        let mut versions = Vec::new();
        let mut query = VersionQuery { limit, ..ALL };
        loop {
            let page = history.list_versions(Path::new("dir/file"), query).await.unwrap();
            versions.extend(existence_by_version(&page));
            query.before = page.next_before;
            if page.next_before.is_none() {
                break;
            }
        }
        assert_eq!(versions, [true, false, true, true], "limit {limit}");
    }

    let find_at = |time| history.find_snapshot(Some(time));
    assert_eq!(find_at(saved[3].snapshot.time).unwrap().0, saved[3].id);
    assert_eq!(find_at(Timestamp::UNIX_EPOCH), None);
    let (latest, _) = history.find_snapshot(None).unwrap();
    assert_eq!(*latest, saved[5].id);
    assert_eq!(fixture.read(&history, &saved[3].snapshot, "dir/file").await.unwrap(), b"2");
    assert_eq!(fixture.read(&history, &saved[4].snapshot, "dir/file").await, None);
}

#[tokio::test]
async fn bounded_search_continues_on_next_page() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "1");
    for number in 0..20 {
        fixture.write("other", number.to_string());
        fixture.save().await;
    }
    let history = fixture.history().await;
    let few = VersionQuery { max_snapshots: 16, ..ALL };
    let short = VersionQuery { deadline: Some(Instant::now()), ..ALL };
    for bounded in [few, short] {
        let page = history.list_versions(Path::new("file"), bounded).await.unwrap();
        assert_eq!(page.versions.len(), 1);
        let before = page.next_before.expect("four snapshots remain");
        let rest = VersionQuery { before: Some(before), ..bounded };
        let page = history.list_versions(Path::new("file"), rest).await.unwrap();
        assert_eq!((page.versions.len(), page.next_before), (1, None));
    }
}

#[tokio::test]
async fn read_content_and_list_return_the_saved_state() {
    let mut fixture = Fixture::new().await;
    let large: Vec<u8> =
        (0..5_000_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    fixture.write("dir/large", &large);
    fixture.write("dir/empty", "");
    symlink("large", fixture.home().join("dir/link")).unwrap();
    let saved = fixture.save().await;
    let history = fixture.history().await;
    assert!(fixture.read(&history, &saved.snapshot, "dir/large").await.unwrap() == large);
    assert_eq!(fixture.read(&history, &saved.snapshot, "dir/empty").await.unwrap(), b"");
    let directory = history.find(&saved.snapshot, Path::new("dir")).await.unwrap().unwrap();
    let entries = history.list(&directory).await.unwrap();
    let listed: Vec<_> =
        entries.iter().map(|entry| (entry.name().to_str().unwrap(), entry.kind(), entry.size())).collect();
    let (file, link) = (EntryKind::File, EntryKind::Symlink);
    assert_eq!(listed, [("empty", file, 0), ("large", file, 20_000_000), ("link", link, 0)]);
    let root = history.find(&saved.snapshot, Path::new("")).await.unwrap().unwrap();
    assert_eq!(history.list(&root).await.unwrap().len(), 1);
}

#[tokio::test]
async fn restored_entry_is_complete_and_can_have_another_owner() {
    let mut fixture = Fixture::new().await;
    fixture.write("projects/app/main.rs", "fn main() {}");
    let tool = fixture.write("projects/app/tool", "#!/bin/sh");
    fs::set_permissions(&tool, Permissions::from_mode(0o4755)).unwrap();
    fs::hard_link(&tool, fixture.home().join("projects/app/same-tool")).unwrap();
    symlink("/etc/passwd", fixture.home().join("projects/app/link")).unwrap();
    fixture.write("elsewhere", "x");
    let saved = fixture.save().await;
    let history = fixture.history().await;
    let entry = history.find(&saved.snapshot, Path::new("projects/app")).await.unwrap().unwrap();
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let restore_to = async |owner| {
        let target = tempfile::tempdir().unwrap();
        let options = RestoreOptions { owner, ..RestoreOptions::new(target.path().to_owned(), "/".into()) };
        let progress = RestoreProgress::default();
        let entries = [(&entry, "again".to_owned())];
        let restored = restore_entries(&repository, entries, &options, &progress).await.unwrap();
        (target, restored)
    };
    let (target, restored) = restore_to(None).await;
    assert_eq!((restored.files, restored.incomplete), (3, 0));
    assert_eq!(describe(&target.path().join("again")), describe(&fixture.home().join("projects/app")));
    assert_eq!(fs::read_dir(target.path()).unwrap().count(), 1);

    let own = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
    // Only root can change a file's owner.
    let owner = if own.0 == 0 { (12_345, 12_346) } else { own };
    let (target, restored) = restore_to(Some(owner)).await;
    assert_eq!(restored.incomplete, 0, "{restored:?}");
    for path in ["again", "again/tool", "again/link"] {
        let meta = fs::symlink_metadata(target.path().join(path)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), owner, "{path}");
        assert_eq!(meta.mode() & 0o4000, 0, "{path}");
    }
}

#[tokio::test]
async fn corrupt_snapshot_does_not_hide_others() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "1");
    let first = fixture.save().await;
    fixture.write("file", "2");
    let second = fixture.save().await;
    let path = root().join("snapshots").join(second.id.to_string());
    fixture.bucket.put(&path, b"damaged".to_vec()).await.unwrap();
    let history = fixture.history().await;
    let page = history.list_versions(Path::new("file"), ALL).await.unwrap();
    assert_eq!((page.versions.len(), page.damaged_snapshots), (1, 1));
    assert_eq!(history.find_snapshot(None).unwrap().0, first.id);
}

#[tokio::test]
async fn oversized_snapshot_does_not_hide_others() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "1");
    let saved = fixture.save().await;
    let path = root().join("snapshots").join(Id::of(b"junk").to_string());
    fixture.bucket.put(&path, vec![0; 65 << 10]).await.unwrap();
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let history = History::open_latest(repository, Some(Id::of(b"junk"))).await.unwrap();
    assert_eq!(history.find_snapshot(None).unwrap().0, saved.id);
}

#[tokio::test]
async fn open_latest_reads_one_snapshot_unless_corrupt() {
    let mut fixture = Fixture::new().await;
    fixture.write("file", "1");
    let first = fixture.save().await;
    fixture.write("file", "2");
    let second = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let open = async |latest| History::open_latest(repository.clone(), Some(latest)).await.unwrap();
    let history = open(first.id).await;
    assert_eq!(history.find_snapshot(None).unwrap().0, first.id);
    assert!(history.find_snapshot_by_id(second.id).is_none(), "only one snapshot is read");
    let path = root().join("snapshots").join(first.id.to_string());
    fixture.bucket.put(&path, b"damaged".to_vec()).await.unwrap();
    for corrupt_or_missing in [first.id, Id::of(b"missing")] {
        let history = open(corrupt_or_missing).await;
        assert_eq!(history.find_snapshot(None).unwrap().0, second.id);
    }
}

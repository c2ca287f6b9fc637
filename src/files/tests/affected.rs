//! Tracing corrupt blobs to files and snapshots.

use std::collections::HashSet;

use super::damage::damage;
use super::*;
use crate::affected::{AffectedFiles, AffectedPath, find_affected_files};
use crate::history::History;
use crate::pack::BlobType;
use crate::verify::{PackShare, verify};

/// Each snapshot contains 30 of the 31 affected paths, so the first 20 differ between the two.
#[tokio::test]
async fn affected_files_list_latest_snapshot_first() {
    let mut fixture = Fixture::new().await;
    for number in 1..=30 {
        fixture.write(&format!("f{number:02}"), "same");
    }
    let older = fixture.save().await.snapshot.time;
    fs::remove_file(fixture.home().join("f01")).unwrap();
    fixture.write("f31", "same");
    let newer = fixture.save().await.snapshot.time;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let affected = find_affected_files(&repository, &HashSet::from([Id::of(b"same")])).await.unwrap();
    let expected = (2..=21).map(|number| AffectedPath {
        path: format!("f{number:02}").into(),
        // f21 isn't among the first 20 of the older snapshot.
        first: if number == 21 { newer } else { older },
        last: newer,
    });
    assert_eq!(affected, AffectedFiles { paths: expected.collect(), has_more: true, snapshots: 2 });
}

/// A corrupt directory's entries are unknown, so the directory itself is reported.
#[tokio::test]
async fn affected_files_include_corrupt_directory() {
    let mut fixture = Fixture::new().await;
    fixture.write("projects/app/main.rs", "x");
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let history = History::open(repository.clone()).await.unwrap();
    let app = history.find(&saved.snapshot, Path::new("projects/app")).await.unwrap().unwrap();
    let tree = app.node.subtree.unwrap();
    damage(&fixture, BlobType::Tree, tree).await;
    let damaged = verify(&repository, PackShare::ALL).await.unwrap().damaged;
    assert_eq!(damaged[0].blobs, [tree]);
    // The saver's repository still has the directory cached.
    for repository in [&repository, fixture.saver.repository()] {
        let affected = find_affected_files(repository, &HashSet::from([tree])).await.unwrap();
        assert_eq!(affected.paths[0].path, Path::new("projects/app"));
    }
}

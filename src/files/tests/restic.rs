//! Stock `restic` reads what we write, and we restore what `restic` wrote to the same repository.

use super::*;

fn write_odd_tree(fixture: &Fixture) {
    fixture.write("projects/site/index.html", "<p>");
    fixture.write("empty", "");
    fixture.write("large", random_bytes(3 << 20));
    fs::write(fixture.home().join(std::ffi::OsStr::from_bytes(b"odd \xff \"\\\n\x01 \xc3\xa4")), "odd")
        .unwrap();
    symlink("projects/../empty", fixture.home().join("link")).unwrap();
    let secret = fixture.write("secrets/key", "secret");
    fs::set_permissions(&secret, Permissions::from_mode(0o400)).unwrap();
    fs::set_permissions(secret.parent().unwrap(), Permissions::from_mode(0o2750)).unwrap();
    fs::hard_link(&secret, fixture.home().join("same")).unwrap();
    let old = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    File::options().write(true).open(fixture.write("old", "2001")).unwrap().set_modified(old).unwrap();
}

#[tokio::test]
async fn restic_checks_and_restores_every_snapshot() {
    let mut fixture = Fixture::in_directory().await;
    let restic = fixture.restic();
    let mut saved_states = Vec::new();
    write_odd_tree(&fixture);
    for round in 0..3_u8 {
        fixture.write("changing", [round; 2000]);
        saved_states.push((fixture.save().await, describe(&fixture.home())));
    }
    restic.check().unwrap();
    let listed = restic.run(&["snapshots", "--compact"]).unwrap();
    assert!(listed.contains("3 snapshots"), "{listed}");
    for (saved, expected) in &saved_states {
        let target = tempfile::tempdir().unwrap();
        restic.restore(&saved.id.to_string(), target.path()).unwrap();
        assert_same(&describe(target.path()), expected);
    }
}

#[tokio::test]
async fn restic_checks_a_pruned_repository() {
    let mut fixture = Fixture::in_directory().await;
    let restic = fixture.restic();
    for n in 0..4_u8 {
        fixture.write(&format!("removed/{n}"), random_bytes(50_000));
        fixture.write("kept", "kept");
        fixture.save().await;
        let _ = fs::remove_dir_all(fixture.home().join("removed"));
    }
    fixture.save().await;
    for days in [3, 6] {
        let pruned = pruning::run_prune(&fixture, &pruning::prune_options_after(days)).await;
        assert!(pruned.marked_packs + pruned.deleted_packs > 0);
        restic.check().unwrap();
    }
}

#[tokio::test]
async fn restic_snapshot_is_restored_and_used_as_parent() {
    let mut fixture = Fixture::in_directory().await;
    let restic = fixture.restic();
    write_odd_tree(&fixture);
    let home = fixture.home().display().to_string();
    restic.run(&["backup", &home]).unwrap();
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let (id, _) = repository.list_snapshots().await.unwrap().remove(0);
    let snapshot = repository.read_snapshot(id).await.unwrap();
    assert_eq!(snapshot.paths, std::slice::from_ref(&home));
    let (target, restored) = fixture.restore(&snapshot).await;
    assert_eq!(restored.incomplete, 0);
    let restored = target.path().join(home.trim_start_matches('/'));
    assert_same(&describe(&restored), &describe(&fixture.home()));

    // `restic` saves the directories above the home directory as well, so the trees differ; the chunks are the same.
    fixture.last = Some((id, snapshot));
    let saved = fixture.save().await;
    assert!(saved.uploaded_bytes < 20_000, "{} bytes", saved.uploaded_bytes);
    restic.check().unwrap();
}

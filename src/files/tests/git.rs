//! Saves Git repositories during concurrent commits: every saved reference must come with its objects.

use std::process::{Command, Output};

use super::writer_process::WriterProcess;
use super::*;

/// Commits until stopped, repacking every 40 commits.
const WRITER: &str = r#"
cd "$1" || exit
git init --quiet --initial-branch=main .
git config user.name writer; git config user.email writer@example.com
echo 0 >file; git add file; git commit --quiet --message 0
echo ready
n=0
while :; do
  n=$((n + 1))
  echo $n >file; mkdir -p dir$((n % 7)); echo $n >dir$((n % 7))/file
  git add . && git commit --quiet --message $n
  [ $((n % 40)) != 0 ] || git repack --quiet -a -d
done
"#;

fn git(repository: &Path, arguments: &[&str]) -> Output {
    Command::new("git").arg("-C").arg(repository).args(arguments).output().unwrap()
}

async fn assert_intact(fixture: &Fixture, saved: &SaveResult) {
    let (restored, _) = fixture.restore(&saved.snapshot).await;
    let repository = restored.path().join("repository");
    let checked = git(&repository, &["fsck", "--full", "--no-dangling"]);
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    assert!(git(&repository, &["log", "--oneline"]).status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_save_during_commits_has_intact_repository() {
    let mut fixture = Fixture::new().await;
    let path = fixture.home().join("repository");
    fs::create_dir(&path).unwrap();
    let writer = WriterProcess::start(Command::new("sh").args(["-c", WRITER, "writer"]).arg(&path));
    for _ in 0..6 {
        let saved = fixture.save().await;
        assert_intact(&fixture, &saved).await;
    }
    drop(writer);
}

/// The watcher may report a reference before the objects written with it.
#[tokio::test]
async fn changed_reference_is_saved_with_unmarked_objects() {
    let mut fixture = Fixture::new().await;
    for path in ["HEAD", "refs/heads/main", "objects/aa/first", "objects/pack/pack-1.pack"] {
        fixture.write(&format!("repository/.git/{path}"), path);
    }
    fixture.save().await;
    fixture.write("repository/.git/refs/heads/main", "second");
    fixture.write("repository/.git/objects/bb/second", "second");
    fixture.write("repository/.git/objects/pack/pack-2.pack", "second");
    let mut changes = ChangeSet::default();
    changes.mark_directory(Path::new("repository/.git/refs/heads"));
    let saved = fixture.save_changes(changes).await;
    fixture.assert_restores(&saved).await;

    // `git pack-refs` moves references to `packed-refs`.
    fs::remove_file(fixture.home().join("repository/.git/refs/heads/main")).unwrap();
    fixture.write("repository/.git/packed-refs", "second refs/heads/main");
    let mut changes = ChangeSet::default();
    changes.mark_directory(Path::new("repository/.git/refs/heads"));
    let saved = fixture.save_changes(changes).await;
    fixture.assert_restores(&saved).await;
}

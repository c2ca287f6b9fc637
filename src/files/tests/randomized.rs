//! Randomized tests: random trees and writers, kills, restarts, pruning, store outages and clock jumps. The model, a
//! description of the home directory as of each successful save, is independent of the code under test.

use jiff::{SignedDuration, Timestamp};
use kit::long_tests::Figures;

use super::kills::Action;
use super::*;
use crate::prune::{self, PruneOptions};
use crate::retention::RetentionPolicy;
use crate::save as saving;
use crate::verify::{PackShare, verify};

/// A reproducible random number generator (xorshift64).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit.max(1)
    }

    pub(super) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.below(256) as u8).collect()
    }

    fn choose<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        let index = self.below(from.len());
        from.get(index)
    }
}

/// Randomly modifies a home directory.
struct Writer {
    home: PathBuf,
    random: Random,
    /// Changes since the last save.
    changes: ChangeSet,
    /// Changing a file through one of its names also changes the others, which aren't in `changes`.
    has_hard_links: bool,
}

impl Writer {
    /// Lists all directories, including the home directory itself, and all files.
    fn list_paths(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let (mut directories, mut files) = (vec![PathBuf::new()], Vec::new());
        let mut next = 0;
        while next < directories.len() {
            let directory = directories[next].clone();
            for entry in fs::read_dir(self.home.join(&directory)).into_iter().flatten().flatten() {
                let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
                let list = if is_directory { &mut directories } else { &mut files };
                list.push(directory.join(entry.file_name()));
            }
            next += 1;
        }
        directories.sort();
        files.sort();
        (directories, files)
    }

    fn mark_parent(&mut self, path: &Path) {
        self.changes.mark_directory(path.parent().unwrap_or(Path::new("")));
    }

    /// Makes one random change. Impossible changes are skipped.
    fn change(&mut self) {
        let (directories, files) = self.list_paths();
        let name = format!("n{}", self.random.below(12));
        let new = self.random.choose(&directories).unwrap().join(name);
        let file = self.random.choose(&files).cloned().unwrap_or_else(|| new.clone());
        let (full_new, full_file) = (self.home.join(&new), self.home.join(&file));
        let is_link = fs::symlink_metadata(&full_file).is_ok_and(|meta| meta.is_symlink());
        self.mark_parent(&new);
        self.mark_parent(&file);
        let length = match self.random.below(10) {
            0 => 900_000,
            1 => 0,
            _ => 2000,
        };
        let length = self.random.below(length + 1);
        let content = self.random.bytes(length);
        let is_regular = !is_link && full_file.is_file();
        let result = match self.random.below(13) {
            0..=2 => fs::write(&full_new, content),
            3 if is_regular => {
                File::options().append(true).open(&full_file).and_then(|mut file| file.write_all(&content))
            }
            4 if is_regular => {
                File::options().write(true).open(&full_file).and_then(|file| file.write_all_at(&content, 10))
            }
            5 if is_regular => {
                File::options().write(true).open(&full_file).and_then(|file| file.set_len(length as u64 / 2))
            }
            6 => fs::remove_file(&full_file),
            7 => fs::create_dir(&full_new),
            8 => {
                let directory = self.random.choose(&directories).unwrap();
                let is_home = directory.as_os_str().is_empty();
                self.changes.mark_directory(directory.parent().unwrap_or(Path::new("")));
                if is_home { Ok(()) } else { fs::remove_dir_all(self.home.join(directory)) }
            }
            9 => {
                let from = self.random.choose(&directories).unwrap().clone();
                self.changes.mark_directory(from.parent().unwrap_or(Path::new("")));
                if from.as_os_str().is_empty() {
                    Ok(())
                } else {
                    fs::rename(self.home.join(&from), &full_new)
                }
            }
            10 => fs::rename(&full_file, &full_new),
            11 if is_regular => {
                let mode = [0o600, 0o644, 0o4755, 0o400][self.random.below(4)];
                fs::set_permissions(&full_file, Permissions::from_mode(mode))
            }
            12 if self.random.chance(20) && is_regular => {
                self.has_hard_links = true;
                fs::hard_link(&full_file, &full_new)
            }
            _ => symlink(&file, &full_new),
        };
        // Some changes fail, for example if the name exists or a directory would move into itself.
        drop(result);
    }
}

#[derive(Debug, Default)]
struct Counts {
    saves: u64,
    kills: u64,
    /// Operations that failed because of a store outage.
    failures: u64,
    /// Restored snapshots compared with the home directory as of the save.
    compared: u64,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.saves += other.saves;
        self.kills += other.kills;
        self.failures += other.failures;
        self.compared += other.compared;
    }
}

async fn run_seed(seed: u64) -> Counts {
    let mut fixture = Fixture::with_faults(seed).await;
    let mut random = Random::new(seed);
    let (home, writer_random) = (fixture.home(), Random::new(seed ^ 0xffff));
    let mut writer =
        Writer { home, random: writer_random, changes: ChangeSet::default(), has_hard_links: false };
    let mut saved_states: Vec<(Id, Snapshot, Option<Description>)> = Vec::new();
    let mut counts = Counts::default();
    for round in 0..8 {
        for _ in 0..random.below(if round == 0 { 60 } else { 12 }) {
            writer.change();
        }
        if random.chance(15) {
            fixture.restart().await;
        }
        if random.chance(25) {
            let point = random.choose(saving::FAILPOINTS).unwrap();
            let parent = fixture.last.clone();
            counts.kills += u64::from(fixture.run_killed_at(point, Action::Save { parent }));
        }
        let is_concurrent = random.chance(20);
        fixture.saver.options_mut().time = random.chance(30).then(|| random_time(&mut random));
        counts.failures += save_with_faults(&mut fixture, &mut writer, &mut random, seed).await;
        let saved = save(&mut fixture, &mut writer, is_concurrent, random.chance(60)).await.unwrap();
        counts.saves += 1;
        let description = (!is_concurrent).then(|| describe(&writer.home));
        saved_states.push((saved.id, saved.snapshot, description));
        if random.chance(20) {
            let kept_count = saved_states.len() - random.below(3).min(saved_states.len() - 1);
            saved_states.drain(..saved_states.len() - kept_count);
            let protected: Vec<Id> = saved_states.iter().map(|(id, _, _)| *id).collect();
            let mut options = prune_options(protected.clone(), i64::from(round) * 3 + 3);
            if random.chance(20) {
                options.now = random_time(&mut random);
            }
            if random.chance(40) {
                let point = random.choose(prune::FAILPOINTS).unwrap();
                counts.kills +=
                    u64::from(fixture.run_killed_at(point, Action::Prune { now: options.now, protected }));
            }
            if random.chance(30) {
                fixture.faults.set_percent(1 + random.below(20));
                let pruned = prune::prune(fixture.saver.repository(), &options).await;
                fixture.faults.set_percent(0);
                counts.failures += u64::from(failed_due_to_outage(pruned, seed));
            }
            prune::prune(fixture.saver.repository(), &options).await.unwrap();
        }
    }
    for (id, snapshot, expected) in &saved_states {
        fixture.faults.set_percent(if random.chance(20) { 3 } else { 0 });
        let attempt = fixture.try_restore(snapshot).await;
        fixture.faults.set_percent(0);
        let (target, restored) = match attempt {
            Ok(restored) => restored,
            failed => {
                counts.failures += u64::from(failed_due_to_outage(failed, seed));
                fixture.restore(snapshot).await
            }
        };
        assert_eq!(restored.incomplete, 0, "seed {seed}, {id}: {:?}", restored.first_incomplete);
        if let Some(expected) = expected {
            assert_same(&describe(target.path()), expected);
            counts.compared += 1;
        }
    }
    let damaged = verify(fixture.saver.repository(), PackShare::ALL).await.unwrap().damaged;
    assert!(damaged.is_empty(), "seed {seed}: {damaged:?}");
    fixture.restic().check().unwrap_or_else(|error| panic!("seed {seed}: {error:#}"));
    counts
}

/// Returns a random time for the clock to jump to, from one year ago to two years ahead.
fn random_time(random: &mut Random) -> Timestamp {
    let hours = random.below(3 * 365 * 24) as i64 - 365 * 24;
    Timestamp::now() + SignedDuration::from_hours(hours)
}

/// Returns whether an operation failed because of a store outage.
///
/// # Panics
/// If it failed for any other reason.
fn failed_due_to_outage<T>(result: Result<T, FilesError>, seed: u64) -> bool {
    let error = result.err();
    assert!(error.as_ref().is_none_or(FilesError::is_transient), "seed {seed}: {error:?}");
    error.is_some()
}

fn prune_options(protected: Vec<Id>, days: i64) -> PruneOptions {
    let policy = RetentionPolicy { newest: 0, all: SignedDuration::ZERO, ..RetentionPolicy::default() };
    PruneOptions { protected, policy, ..pruning::prune_options_after(days) }
}

/// Saves a random number of times while the store fails at random. After a failure, the next save uses either the same
/// saver or a new one. Returns the number of failed saves.
async fn save_with_faults(fixture: &mut Fixture, writer: &mut Writer, random: &mut Random, seed: u64) -> u64 {
    let mut failures = 0;
    while random.chance(35) {
        fixture.faults.set_percent(1 + random.below(20));
        let saved = save(fixture, writer, random.chance(20), random.chance(60)).await;
        fixture.faults.set_percent(0);
        if failed_due_to_outage(saved, seed) {
            failures += 1;
            if random.chance(50) {
                fixture.restart().await;
            }
        }
        writer.change();
    }
    failures
}

/// Saves the whole home directory or just the changes, optionally while the writer keeps modifying files. Changes from
/// a failed save carry over to the next one.
async fn save(
    fixture: &mut Fixture,
    writer: &mut Writer,
    is_concurrent: bool,
    is_incremental: bool,
) -> Result<SaveResult, FilesError> {
    let changes = std::mem::take(&mut writer.changes);
    let incremental_parent = fixture.last.clone().filter(|_| is_incremental && !writer.has_hard_links);
    let full_parent = fixture.last.clone();
    let saver = &mut fixture.saver;
    let saved = std::thread::scope(|scope| {
        let running = is_concurrent.then(|| scope.spawn(|| (0..40).for_each(|_| writer.change())));
        let saved = tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async {
                match incremental_parent {
                    Some(parent) => saver.save_changes(parent, changes.clone()).await,
                    None => saver.save(full_parent).await,
                }
            })
        });
        if let Some(thread) = running {
            thread.join().unwrap();
        }
        saved
    });
    match saved {
        Ok(saved) => {
            writer.changes.merge(saved.retry.clone());
            fixture.last = Some((saved.id, saved.snapshot.clone()));
            Ok(saved)
        }
        Err(error) => {
            writer.changes.merge(changes);
            Err(error)
        }
    }
}

async fn run_seeds(first: u64, count: u64) -> Counts {
    let mut total = Counts::default();
    for seed in first..first + count {
        total.add(&run_seed(seed).await);
    }
    println!("{count} seeds from {first}: {total:?}");
    assert!(total.compared > 3 * count && total.kills > count / 2, "{total:?}");
    assert!(total.failures > count / 2, "{total:?}");
    total
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_histories_restore_every_snapshot() {
    run_seeds(0, 8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: 1,000 runs"]
async fn long_random_histories_restore_every_snapshot() {
    let Counts { saves, kills, .. } = run_seeds(1000, 1000).await;
    let figures = Figures { kills_survived: kills, snapshots_taken: saves, ..Figures::new("saved homes") };
    figures.record().unwrap();
}

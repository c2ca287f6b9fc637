//! Store tests: reopening, crashes and invalid lines.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use jiff::Timestamp;

use super::*;
use crate::records::entry::ResultStatus;
use crate::records::writer::Writer;

struct TestStore {
    dir: tempfile::TempDir,
}

impl TestStore {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn logs(&self) -> PathBuf {
        self.dir.path().join("logs")
    }

    fn open(&self) -> (Writer, UsageStore) {
        let writer = Writer::start(self.logs()).unwrap();
        let store =
            UsageStore::open(writer.records(), self.logs(), self.dir.path().join("seals.json")).unwrap();
        (writer, store)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.logs().join(name)).unwrap()
    }
}

fn day(text: &str) -> Date {
    text.parse().unwrap()
}

fn interaction(n: u64) -> Interaction {
    Interaction {
        version: 1,
        id: n.to_string(),
        timestamp: Timestamp::UNIX_EPOCH,
        accepted_at: None,
        started_at: None,
        sender_id: format!("user_{}", n % 3),
        conversation_id: "c".to_owned(),
        model: format!("model-{}", n % 2),
        agent_name: "coder".to_owned(),
        tokens_in: n,
        tokens_out: 1,
        cost: Dollars::from_nanos(n * 1_000_003),
        cost_estimated: false,
        duration_ms: 5,
        tools: Vec::new(),
        status: ResultStatus::Success,
        error: None,
        batch: false,
        batch_id: None,
        batch_size: None,
        fingerprint: None,
    }
}

fn cost(store: &UsageStore) -> Dollars {
    store.report(&UsageQuery::default()).total.cost
}

#[test]
fn reopened_store_recounts_only_unsealed_days() {
    let test = TestStore::new();
    let (writer, store) = test.open();
    for n in 0..100 {
        store.record(day(if n < 60 { "2026-11-21" } else { "2026-11-22" }), &interaction(n)).unwrap();
    }
    let before = store.report(&UsageQuery::default());
    store.seal();
    drop((store, writer));
    assert_eq!(test.read("interactions-2026-11-21.jsonl").lines().count(), 60);
    let usage = test.read("usage.jsonl");
    assert_eq!(usage.lines().count(), 12);

    // A sealed day isn't read, so replacing its lines with garbage of the same length has no effect.
    let path = test.logs().join("interactions-2026-11-21.jsonl");
    let length = fs::metadata(&path).unwrap().len();
    fs::write(&path, "x".repeat(usize::try_from(length).unwrap())).unwrap();
    let (writer, store) = test.open();
    assert_eq!(store.report(&UsageQuery::default()), before);
    store.seal();
    drop((store, writer));
    assert_eq!(test.read("usage.jsonl"), usage, "lines were added for a sealed day");

    // The file has expired, so the day's totals come from usage.jsonl only.
    fs::remove_file(&path).unwrap();
    let (_writer, store) = test.open();
    assert_eq!(store.report(&UsageQuery::default()), before);
}

#[test]
fn crashed_store_is_recounted_from_interactions() {
    let test = TestStore::new();
    let (writer, store) = test.open();
    for n in 0..10 {
        store.record(day("2026-11-22"), &interaction(n)).unwrap();
    }
    store.write();
    for n in 10..20 {
        store.record(day("2026-11-22"), &interaction(n)).unwrap();
    }
    // The day is unsealed, and the last ten interactions are missing from usage.jsonl.
    drop((store, writer));
    let path = test.logs().join("interactions-2026-11-22.jsonl");
    let mut text = fs::read_to_string(&path).unwrap();
    text.push_str("{\"version\":1,\"id\":\"torn");
    fs::write(&path, text).unwrap();
    let (writer, store) = test.open();
    assert_eq!(cost(&store), (0..20).map(|n| interaction(n).cost).sum());
    assert_eq!(
        store.spent("user_1", day("2026-11-01"), day("2026-11-30")),
        (0..20).filter(|n| n % 3 == 1).map(|n| interaction(n).cost).sum()
    );
    store.record(day("2026-11-22"), &interaction(20)).unwrap();
    store.seal();
    drop((store, writer));
    assert_eq!(
        test.read("interactions-2026-11-22.jsonl").lines().count(),
        21,
        "the torn line was not removed"
    );
    // Lost lines reduce the totals, including those in usage.jsonl.
    let first_lines: String =
        test.read("interactions-2026-11-22.jsonl").split_inclusive('\n').take(5).collect();
    fs::write(&path, first_lines).unwrap();
    let (writer, store) = test.open();
    assert_eq!(cost(&store), (0..5).map(|n| interaction(n).cost).sum());
    store.seal();
    drop((store, writer));
    fs::remove_file(path).unwrap();
    let (_writer, store) = test.open();
    assert_eq!(cost(&store), (0..5).map(|n| interaction(n).cost).sum());
}

#[test]
fn seal_without_usage_lines_is_ignored() {
    let test = TestStore::new();
    let (writer, store) = test.open();
    for n in 0..10 {
        store.record(day("2026-11-22"), &interaction(n)).unwrap();
    }
    let before = cost(&store);
    store.seal();
    drop((store, writer));
    fs::remove_file(test.logs().join("usage.jsonl")).unwrap();
    let (writer, store) = test.open();
    assert_eq!(cost(&store), before);
    store.seal();
    drop((store, writer));
    assert_eq!(test.read("usage.jsonl").lines().count(), 6);
}

#[test]
fn invalid_lines_are_ignored() {
    let test = TestStore::new();
    fs::create_dir_all(test.logs()).unwrap();
    fs::write(test.logs().join("usage.jsonl"), "{}\n[]\nnot json\n{\"version\":1,\"gap\":{}}\n").unwrap();
    fs::write(test.logs().join("interactions-2026-11-22.jsonl"), "{\"cost\":-1}\n\n").unwrap();
    fs::create_dir(test.logs().join("interactions-2026-11-23.jsonl")).unwrap();
    let (_writer, store) = test.open();
    assert_eq!(store.report(&UsageQuery::default()), Report::default());
}

#[test]
fn days_stay_unsealed_after_a_failed_sync() {
    let test = TestStore::new();
    let seals = test.dir.path().join("seals.json");
    let is_first = AtomicBool::new(true);
    let sync = move |file: &File| {
        if is_first.swap(false, Ordering::Relaxed) {
            return Err(io::Error::other("sync failed"));
        }
        file.sync_data()
    };
    let writer = Writer::start_with_sync(test.logs(), Box::new(sync)).unwrap();
    let store = UsageStore::open(writer.records(), test.logs(), seals.clone()).unwrap();
    store.record(day("2026-11-22"), &interaction(1)).unwrap();
    store.seal();
    assert_eq!(writer.records().failed_syncs(), 1);
    // A later flush succeeds, but the lines before the failed sync may still be lost.
    assert!(writer.records().flush(Duration::from_secs(20)));
    store.seal();
    assert!(!seals.exists());
    drop((store, writer));
    let (_writer, store) = test.open();
    store.seal();
    assert!(seals.exists());
}

/// A restore on a live machine replaces the records while the store has them open.
#[test]
fn restored_records_are_reloaded() {
    let earlier = TestStore::new();
    let (writer, store) = earlier.open();
    for n in 0..3 {
        store.record(day("2026-11-22"), &interaction(n)).unwrap();
    }
    store.record(day("2026-08-01"), &interaction(3)).unwrap();
    store.seal();
    drop((store, writer));
    let expected = earlier.open().1.report(&UsageQuery::default());
    fs::remove_file(earlier.logs().join("interactions-2026-08-01.jsonl")).unwrap();

    let test = TestStore::new();
    let outcome_file = test.dir.path().join("restored.json");
    let (writer, store) = test.open();
    let store = store.with_restore_detector(RestoreDetector::new(outcome_file.clone()));
    // The restored file replaces this record.
    store.record(day("2026-11-22"), &interaction(9)).unwrap();
    store.write();
    assert!(writer.records().flush(Duration::from_secs(20)));
    for entry in fs::read_dir(earlier.logs()).unwrap().map(Result::unwrap) {
        let new = test.dir.path().join("new");
        fs::copy(entry.path(), &new).unwrap();
        fs::rename(new, test.logs().join(entry.file_name())).unwrap();
    }
    fs::write(&outcome_file, "{}").unwrap();
    // Compacting without a reload would delete the usage for 2026-08-01, which is recorded nowhere else.
    store.compact();
    assert_eq!(store.report(&UsageQuery::default()), expected);
    store.seal();
    drop(store);
    assert_eq!(test.open().1.report(&UsageQuery::default()), expected);
}

#[test]
fn compaction_keeps_totals() {
    let test = TestStore::new();
    let (writer, store) = test.open();
    for round in 0..40 {
        for n in 0..6 {
            store.record(day("2026-11-22"), &interaction(round * 6 + n)).unwrap();
        }
        store.write();
    }
    let before = store.report(&UsageQuery::default());
    assert!(writer.records().flush(Duration::from_secs(20)));
    assert_eq!(test.read("usage.jsonl").lines().count(), 240);
    store.compact();
    assert_eq!(test.read("usage.jsonl").lines().count(), 6);
    assert!(!test.logs().join(NEW_USAGE_FILE).exists());
    store.record(day("2026-11-22"), &interaction(0)).unwrap();
    store.seal();
    assert_eq!(test.read("usage.jsonl").lines().count(), 7);
    drop((store, writer));
    // The temporary file of an interrupted compaction is removed.
    fs::write(test.logs().join(NEW_USAGE_FILE), "{\"version\":1,\"da").unwrap();
    fs::remove_file(test.logs().join("interactions-2026-11-22.jsonl")).unwrap();
    let (_writer, store) = test.open();
    assert_eq!(store.report(&UsageQuery::default()).total.cost, before.total.cost + interaction(0).cost);
    assert!(!test.logs().join(NEW_USAGE_FILE).exists());
}

#[test]
fn usage_with_many_obsolete_lines_is_compacted() {
    let test = TestStore::new();
    fs::create_dir_all(test.logs()).unwrap();
    let line = r#"{"version":1,"date":"2026-01-02","userId":"u","model":"m","cost":0.5,"tokensIn":1,"tokensOut":1,"dispatches":1,"seq":1}"#;
    let text = format!("{line}\n").repeat(usize::try_from(MAX_OBSOLETE_LINES).unwrap() + 2);
    fs::write(test.logs().join("usage.jsonl"), &text).unwrap();
    let (_writer, store) = test.open();
    store.write();
    assert_eq!(test.read("usage.jsonl"), text, "compacted before exceeding the maximum");
    for _ in 0..3 {
        store.record(day("2026-01-02"), &interaction(1)).unwrap();
        store.write();
    }
    assert_eq!(test.read("usage.jsonl").lines().count(), 2);
    let added_cost = Dollars::from_nanos(3 * interaction(1).cost.nanos());
    assert_eq!(cost(&store), Dollars::from_nanos(500_000_000) + added_cost);
}

#[test]
fn oversized_line_is_not_buffered() {
    let test = TestStore::new();
    fs::create_dir_all(test.logs()).unwrap();
    let path = test.logs().join("interactions-2026-11-22.jsonl");
    let file = fs::File::create(&path).unwrap();
    // Sparse file with a 100 MiB first line.
    file.set_len(100 << 20).unwrap();
    let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"\n").unwrap();
    serde_json::to_writer(&file, &interaction(5)).unwrap();
    let mut longest = 0;
    for_each_line(&path, |line| longest = longest.max(line.len())).unwrap();
    assert!(longest as u64 <= MAX_LINE_BYTES, "{longest}");
    let (_writer, store) = test.open();
    assert_eq!(cost(&store), interaction(5).cost);
}

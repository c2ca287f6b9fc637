//! Tests the writer with renamed, deleted, torn and unwritable files.

use std::fs;
use std::path::Path;

use jiff::civil::Date;
use serde_json::{Value, json};

use super::*;

const TIMEOUT: Duration = Duration::from_secs(20);

fn read_lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn read_numbers(path: &Path) -> Vec<u64> {
    read_lines(path).iter().filter_map(|line| line["n"].as_u64()).collect()
}

#[test]
fn accepted_lines_are_written_in_order_at_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let writer = Writer::start(dir.path().join("logs")).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let records = writer.records();
            scope.spawn(move || {
                for n in 0..5000 {
                    records.append(LogFile::Audit, &json!({"thread": thread, "n": n})).unwrap();
                }
            });
        }
    });
    writer.records().note("two lines\nin one").unwrap();
    drop(writer);
    let found = read_lines(&dir.path().join("logs/audit.jsonl"));
    for thread in 0..4 {
        let thread_lines = found.iter().filter(|line| line["thread"] == thread);
        assert!(thread_lines.map(|line| line["n"].as_u64().unwrap()).eq(0..5000), "thread {thread}");
    }
    let activity = fs::read_to_string(dir.path().join("logs/activity.log")).unwrap();
    assert!(activity.ends_with(" two lines in one\n") && activity.lines().count() == 1, "{activity}");
}

#[test]
fn lines_are_written_without_a_flush() {
    let dir = tempfile::tempdir().unwrap();
    let writer = Writer::start(dir.path().to_owned()).unwrap();
    let day = "2026-11-22".parse().unwrap();
    writer.records().append(LogFile::Interactions(day), &json!({"n": 1})).unwrap();
    let (path, start) = (dir.path().join("interactions-2026-11-22.jsonl"), Instant::now());
    while fs::read(&path).is_ok_and(|text| text.is_empty()) || !path.exists() {
        assert!(start.elapsed() < TIMEOUT, "no line was written");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(read_numbers(&path), [1]);
}

#[test]
fn lines_after_rename_or_delete_are_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let writer = Writer::start(dir.path().to_owned()).unwrap();
    let (records, path) = (writer.records(), dir.path().join("audit.jsonl"));
    let write = |n: u64| {
        records.append(LogFile::Audit, &json!({"n": n})).unwrap();
        assert!(records.flush(TIMEOUT));
    };
    write(1);
    fs::rename(&path, dir.path().join("audit-2026-11-21.jsonl")).unwrap();
    write(2);
    assert_eq!(read_numbers(&path), [2]);
    fs::remove_file(&path).unwrap();
    write(3);
    assert_eq!(read_numbers(&path), [3]);
    // A torn line from another program.
    fs::write(&path, "{\"n\":4}\n{\"n\":").unwrap();
    write(5);
    fs::write(&path, "").unwrap();
    write(6);
    assert_eq!(read_numbers(&dir.path().join("audit-2026-11-21.jsonl")), [1]);
    assert_eq!(read_numbers(&path), [6]);
    assert_eq!(records.unwritten_bytes(), 0);
}

#[test]
fn torn_text_is_kept_and_terminated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("activity.log");
    fs::write(&path, "2026-11-22T00:00:00.000Z half a li").unwrap();
    let writer = Writer::start(dir.path().to_owned()).unwrap();
    writer.records().note("whole").unwrap();
    drop(writer);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with("2026-11-22T00:00:00.000Z half a li\n2"), "{text}");
}

/// A directory in the file's place makes every write fail: as on a full disk, lines are queued, then rejected.
#[test]
fn rejected_lines_are_counted_and_reported_as_a_gap() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    fs::create_dir(&path).unwrap();
    let writer = Writer::start(dir.path().to_owned()).unwrap();
    let records = writer.records();
    let text = "x".repeat(10_000);
    let mut accepted = 0;
    while records.append(LogFile::Audit, &json!({"n": accepted, "text": text})).is_ok() {
        accepted += 1;
    }
    for n in 0..9 {
        records.append(LogFile::Audit, &json!({"n": n, "text": text})).unwrap_err();
    }
    assert!(
        accepted as usize * 10_000 <= MAX_QUEUED_BYTES / 4
            && records.unwritten_bytes() <= MAX_QUEUED_BYTES / 4
    );
    // Interactions and usage still have room.
    let day: Date = "2026-11-22".parse().unwrap();
    records.append(LogFile::Interactions(day), &json!({"n": 1})).unwrap();
    records.append(LogFile::Usage, &json!({"n": 1})).unwrap();
    assert!(!records.flush(Duration::from_millis(100)) && records.is_write_failing());
    assert_eq!(read_numbers(&dir.path().join("usage.jsonl")), [1]);
    fs::remove_dir(&path).unwrap();
    assert!(records.flush(TIMEOUT) && !records.is_write_failing());
    // The gap is reported even if no further lines arrive.
    let start = Instant::now();
    while read_lines(&path).len() as u64 <= accepted {
        assert!(start.elapsed() < TIMEOUT, "the gap was not reported");
        std::thread::sleep(Duration::from_millis(1));
    }
    records.append(LogFile::Audit, &json!({"n": accepted})).unwrap();
    drop(writer);
    records.append(LogFile::Audit, &json!({"n": 0})).unwrap_err();
    assert!(!records.flush(TIMEOUT), "flush succeeded after the writer stopped");
    let found = read_lines(&path);
    assert_eq!(found.len() as u64, accepted + 2);
    assert_eq!(found[accepted as usize]["gap"]["lost"], 10);
    let numbers = read_numbers(&path);
    assert!(numbers.iter().copied().eq(0..=accepted), "{}", numbers.len());
}

#[test]
fn blocked_interactions_delay_only_usage() {
    let dir = tempfile::tempdir().unwrap();
    let day: Date = "2026-11-22".parse().unwrap();
    let blocked = dir.path().join("interactions-2026-11-22.jsonl");
    fs::create_dir(&blocked).unwrap();
    let writer = Writer::start(dir.path().to_owned()).unwrap();
    let records = writer.records();
    records.append(LogFile::Interactions(day), &json!({"n": 1})).unwrap();
    records.append(LogFile::Usage, &json!({"n": 1})).unwrap();
    records.append(LogFile::Audit, &json!({"n": 1})).unwrap();
    assert!(!records.flush(Duration::from_millis(300)));
    assert_eq!(read_numbers(&dir.path().join("audit.jsonl")), [1]);
    assert!(!dir.path().join("usage.jsonl").exists());
    fs::remove_dir(&blocked).unwrap();
    assert!(records.flush(TIMEOUT));
    assert_eq!(read_numbers(&dir.path().join("usage.jsonl")), [1]);
}

/// Returns a writer with blocking syncs, a sender that lets one sync succeed or fail, and a receiver notified when each
/// sync starts. Once the sender is dropped, all syncs succeed.
fn writer_with_blocked_syncs(logs: &Path) -> (Writer, mpsc::Sender<bool>, mpsc::Receiver<()>) {
    let (release, released) = mpsc::channel();
    let (started, starts) = mpsc::channel();
    let sync: SyncFn = Box::new(move |file| {
        started.send(()).ok();
        match released.recv() {
            Ok(false) => Err(std::io::Error::other("sync failed")),
            _ => file.sync_data(),
        }
    });
    (Writer::start_with_sync(logs.to_owned(), sync).unwrap(), release, starts)
}

#[test]
fn lines_are_written_while_a_sync_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let (writer, release, starts) = writer_with_blocked_syncs(dir.path());
    let (records, path) = (writer.records(), dir.path().join("audit.jsonl"));
    let append = |n: u64| records.append(LogFile::Audit, &json!({"n": n})).unwrap();
    append(0);
    assert!(!records.flush(Duration::from_millis(1)), "flush succeeded while the sync hangs");
    starts.recv_timeout(TIMEOUT).unwrap();
    for n in 1..20 {
        let accepted = Instant::now();
        append(n);
        while read_numbers(&path).len() as u64 <= n {
            assert!(accepted.elapsed() < TIMEOUT, "line {n} is waiting for the sync");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(!records.flush(Duration::from_millis(20)), "flush succeeded while the sync still hangs");
    assert!(!records.is_write_failing());
    drop(release);
    assert!(records.flush(TIMEOUT));
}

#[test]
fn failed_sync_fails_the_flush_and_is_not_retried() {
    let dir = tempfile::tempdir().unwrap();
    let (writer, release, starts) = writer_with_blocked_syncs(dir.path());
    let records = writer.records();
    records.append(LogFile::Audit, &json!({"n": 1})).unwrap();
    release.send(false).unwrap();
    assert!(!records.flush(TIMEOUT));
    assert_eq!((records.failed_syncs(), starts.try_iter().count()), (1, 1));
    // Later lines are unaffected.
    records.append(LogFile::Audit, &json!({"n": 2})).unwrap();
    release.send(true).unwrap();
    assert!(records.flush(TIMEOUT));
    assert_eq!((records.failed_syncs(), starts.try_iter().count()), (1, 1));
}

#[test]
fn shutdown_waits_for_the_sync() {
    let dir = tempfile::tempdir().unwrap();
    let (writer, release, starts) = writer_with_blocked_syncs(dir.path());
    let records = writer.records();
    records.append(LogFile::Audit, &json!({"n": 1})).unwrap();
    let shutdown = std::thread::spawn(move || drop(writer));
    starts.recv_timeout(TIMEOUT).unwrap();
    assert!(!shutdown.is_finished() && !records.flush(Duration::from_millis(20)));
    assert_eq!(read_numbers(&dir.path().join("audit.jsonl")), [1]);
    drop(release);
    shutdown.join().unwrap();
}

#[test]
fn file_is_replaced_only_if_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let writer = Writer::start(dir.path().to_owned()).unwrap();
    let (records, path, new) = (writer.records(), dir.path().join("usage.jsonl"), dir.path().join("new"));
    let append = |n: u64| {
        records.append(LogFile::Usage, &json!({"n": n})).unwrap();
        assert!(records.flush(TIMEOUT));
    };
    append(1);
    let before = FileStamp::of_file(&File::open(&path).unwrap()).unwrap();
    append(2);
    fs::write(&new, "{\"n\":3}\n").unwrap();
    assert!(!records.replace(LogFile::Usage, new.clone(), before).unwrap());
    assert_eq!(read_numbers(&path), [1, 2]);
    let before = FileStamp::of_file(&File::open(&path).unwrap()).unwrap();
    assert!(records.replace(LogFile::Usage, new, before).unwrap());
    append(4);
    assert_eq!(read_numbers(&path), [3, 4]);
    records.replace(LogFile::Usage, dir.path().join("nothing"), before).unwrap();
    let current = FileStamp::of_file(&File::open(&path).unwrap()).unwrap();
    records.replace(LogFile::Usage, dir.path().join("nothing"), current).unwrap_err();
    drop(writer);
    assert!(!records.replace(LogFile::Usage, dir.path().join("nothing"), current).unwrap());
    assert_eq!(read_numbers(&path), [3, 4]);
}

#[test]
fn writer_resumes_after_full_disk_and_reports_the_gap() {
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().join("logs");
    let Some(disk) = kit::disk::SmallDisk::mount(logs.clone(), 8).unwrap() else { return };
    disk.fill(50_000).unwrap();
    let writer = Writer::start(logs.clone()).unwrap();
    let (records, path, text) = (writer.records(), logs.join("audit.jsonl"), "x".repeat(9_001));
    let (mut accepted, mut lost) = (0, 0);
    while lost < 10 {
        match records.append(LogFile::Audit, &json!({"n": accepted, "text": text})) {
            Ok(()) => accepted += 1,
            Err(LineDropped) => lost += 1,
        }
    }
    let start = Instant::now();
    while !records.is_write_failing() {
        assert!(start.elapsed() < TIMEOUT, "no write failed on the full disk");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!records.flush(Duration::from_millis(10)));
    // The next writer repairs the state left by a kill at this point.
    let torn = fs::read(&path).unwrap();
    let next_logs = tempfile::tempdir().unwrap();
    fs::write(next_logs.path().join("audit.jsonl"), &torn).unwrap();
    let next_writer = Writer::start(next_logs.path().to_owned()).unwrap();
    next_writer.records().append(LogFile::Audit, &json!({"n": 99})).unwrap();
    drop(next_writer);
    let complete_lines = torn.iter().filter(|&&byte| byte == b'\n').count() as u64;
    assert!((1..7).contains(&complete_lines), "{complete_lines} lines fit");
    let repaired = read_numbers(&next_logs.path().join("audit.jsonl"));
    assert!(repaired.into_iter().eq((0..complete_lines).chain([99])));
    disk.delete_filler().unwrap();
    assert!(records.flush(TIMEOUT) && !records.is_write_failing());
    records.append(LogFile::Audit, &json!({"n": accepted})).unwrap();
    drop(writer);
    let gaps: Vec<u64> = read_lines(&path).iter().filter_map(|line| line["gap"]["lost"].as_u64()).collect();
    assert_eq!(gaps.iter().sum::<u64>(), lost);
    assert!(read_numbers(&path).into_iter().eq(0..=accepted), "lines missing, duplicated or out of order");
}

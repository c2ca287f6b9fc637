//! Runs `svc-heartbeat` on a machine with a database: log files rotate and expire, storage is measured once a day, and
//! the next run completes the work of a killed run.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::time::SystemTime;

use anyhow::Result;
use jiff::{Timestamp, ToSpan};

use crate::host::machine::{Machine, start_store};

const LOGS: &str = "home/svc/home/system/logs";

/// Writes a log file that was last modified this many days before `now`. Each test reads the clock only once, because
/// it may run past midnight.
fn write_log_file(machine: &Machine, now: Timestamp, name: &str, days_ago: i32) -> Result<()> {
    let modified_at = now.checked_sub((24 * days_ago).hours())?;
    let path = machine.path(LOGS).join(name);
    fs::create_dir_all(machine.path(LOGS))?;
    let text = if name.ends_with(".log") {
        format!("{modified_at} up\n")
    } else {
        format!("{{\"timestamp\":\"{modified_at}\"}}\n")
    };
    fs::write(&path, text)?;
    File::options().append(true).open(&path)?.set_modified(SystemTime::from(modified_at))?;
    Ok(())
}

fn date_days_ago(now: Timestamp, days_ago: i32) -> Result<String> {
    let day = now.to_zoned(jiff::tz::TimeZone::UTC).date();
    Ok(day.checked_sub(days_ago.days())?.to_string())
}

fn read_files(dir: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files.insert(name, fs::read_to_string(&path)?);
    }
    Ok(files)
}

fn add_old_log_files(machine: &Machine, now: Timestamp) -> Result<()> {
    write_log_file(machine, now, "activity.log", 2)?;
    write_log_file(machine, now, "audit.jsonl", 1)?;
    for old in ["activity-2020-01-01.log", "audit-2020-01-01.jsonl", "interactions-2020-01-01.jsonl"] {
        write_log_file(machine, now, old, 40)?;
    }
    write_log_file(machine, now, &format!("interactions-{}.jsonl", date_days_ago(now, 30)?), 30)
}

/// Asserts the result of a day's first run, which must be the same after an interruption.
fn assert_rotated(machine: &Machine, now: Timestamp) -> Result<()> {
    let files = read_files(&machine.path(LOGS))?;
    let (two, one, thirty) = (date_days_ago(now, 2)?, date_days_ago(now, 1)?, date_days_ago(now, 30)?);
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let expected = [
        format!("activity-{two}.log"),
        format!("audit-{one}.jsonl"),
        format!("interactions-{thirty}.jsonl"),
        "storage.jsonl".to_owned(),
    ];
    assert_eq!(names, expected);
    assert_eq!(files["storage.jsonl"].lines().count(), 1, "there must be one line per day");
    Ok(())
}

#[tokio::test]
async fn run_rotates_expires_and_measures_once_a_day() -> Result<()> {
    let machine = Machine::in_use(&start_store()?, 1).await?;
    let now = Timestamp::now();
    add_old_log_files(&machine, now)?;
    fs::create_dir_all(machine.path("home/svc/home/apps/notes"))?;
    fs::write(machine.path("home/svc/home/apps/notes/big"), vec![7; 300_000])?;
    let tables =
        "CREATE SCHEMA app_notes; CREATE SCHEMA app_to_do; CREATE SCHEMA applied; CREATE TABLE applied.t ();
        CREATE TABLE app_notes.t AS SELECT g AS id, repeat('x', 90) AS text FROM generate_series(1, 5000) g;
        CREATE INDEX ON app_notes.t (id)";
    machine.client().await?.batch_execute(tables).await?;
    machine.run(&["svc-heartbeat"])?.expect(0);
    assert_rotated(&machine, now)?;
    let line: serde_json::Value = serde_json::from_str(&read_files(&machine.path(LOGS))?["storage.jsonl"])?;
    assert_eq!((&line["version"], &line["date"]), (&1.into(), &date_days_ago(now, 0)?.into()));
    let bytes = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("{name} in {line}"));
    assert!((300_000..400_000).contains(&bytes("appsBytes")), "{line}");
    assert!(bytes("homeBytes") > bytes("appsBytes") && bytes("logsBytes") > 0, "{line}");
    assert!(bytes("databaseBytes") > 1 << 20, "{line}");
    assert!(bytes("diskBytes") > bytes("diskFreeBytes") && bytes("diskFreeBytes") > 0, "{line}");
    let apps = line["apps"].as_array().cloned().unwrap_or_default();
    let slugs: Vec<_> = apps.iter().filter_map(|app| app["slug"].as_str()).collect();
    assert_eq!(slugs, ["notes", "to-do"], "{line}");
    let app_bytes = |name: &str| apps[0][name].as_u64().unwrap_or_else(|| panic!("{name} in {line}"));
    assert!((300_000..400_000).contains(&app_bytes("filesBytes")), "{line}");
    // Includes the table and its index.
    assert!((700_000..1_500_000).contains(&app_bytes("databaseBytes")), "{line}");
    assert_eq!(apps[1]["databaseBytes"], 0, "{line}");
    let before = read_files(&machine.path(LOGS))?;
    machine.run(&["svc-heartbeat"])?.expect(0);
    assert_eq!(read_files(&machine.path(LOGS))?, before);
    Ok(())
}

#[tokio::test]
async fn killed_run_is_completed_by_the_next_run() -> Result<()> {
    let machine = Machine::in_use(&start_store()?, 1).await?;
    let now = Timestamp::now();
    for point in svc::host::retention::FAILPOINTS {
        fs::remove_dir_all(machine.path(LOGS)).ok();
        add_old_log_files(&machine, now)?;
        let kill = format!("{point}=return(kill)");
        machine.run_with(&["svc-heartbeat"], &[("FAILPOINTS", &kill)])?.expect_killed();
        machine.run(&["svc-heartbeat"])?.expect(0);
        assert_rotated(&machine, now)?;
    }
    Ok(())
}

#[tokio::test]
async fn log_files_rotate_without_a_database() -> Result<()> {
    let mut machine = Machine::in_use(&start_store()?, 1).await?;
    let now = Timestamp::now();
    add_old_log_files(&machine, now)?;
    machine.postgres.take();
    machine.run(&["svc-heartbeat"])?.expect(69);
    let files = read_files(&machine.path(LOGS))?;
    assert!(files.contains_key(&format!("activity-{}.log", date_days_ago(now, 2)?)), "{files:?}");
    assert!(
        !files.contains_key("storage.jsonl") && !files.contains_key("audit-2020-01-01.jsonl"),
        "{files:?}"
    );
    Ok(())
}

#[tokio::test]
async fn concurrent_run_exits_with_75() -> Result<()> {
    let machine = Machine::in_use(&start_store()?, 1).await?;
    let now = Timestamp::now();
    add_old_log_files(&machine, now)?;
    let slow = [("FAILPOINTS", "heartbeat.begin=sleep(1500)")];
    let first = machine.spawn(&["svc-heartbeat"], &slow)?;
    let second = machine.spawn(&["svc-heartbeat"], &slow)?;
    let mut exit_codes = [first.wait()?.exit_code, second.wait()?.exit_code];
    exit_codes.sort_unstable();
    assert_eq!(exit_codes, [Some(0), Some(75)]);
    assert_rotated(&machine, now)
}

/// Log files with a different owner are rotated; a directory in place of an expired one does not prevent the deletion
/// of others.
#[tokio::test]
async fn log_file_with_different_owner_is_rotated() -> Result<()> {
    let machine = Machine::in_use(&start_store()?, 1).await?;
    let now = Timestamp::now();
    add_old_log_files(&machine, now)?;
    if nix::unistd::geteuid().is_root() {
        for name in ["audit.jsonl", "audit-2020-01-01.jsonl"] {
            std::os::unix::fs::chown(machine.path(LOGS).join(name), Some(12_345), Some(12_345))?;
        }
    } else {
        kit::skip::record("only root can change the owner of a log file");
    }
    machine.run(&["svc-heartbeat"])?.expect(0);
    assert_rotated(&machine, now)?;
    let directory = machine.path(LOGS).join("activity-2020-01-01.log");
    fs::create_dir(&directory)?;
    write_log_file(&machine, now, "interactions-2020-01-02.jsonl", 40)?;
    let output = machine.run(&["svc-heartbeat"])?.expect(70);
    assert!(output.stderr.contains("activity-2020-01-01.log"), "{}", output.stderr);
    fs::remove_dir(directory)?;
    assert_rotated(&machine, now)
}

/// If `config.json` is invalid, the time zone in the last valid settings still determines the owner's date.
#[tokio::test]
async fn invalid_config_does_not_change_time_zone() -> Result<()> {
    let machine = Machine::in_use(&start_store()?, 1).await?;
    let now = Timestamp::now();
    let zone = if now.to_zoned(jiff::tz::TimeZone::UTC).hour() < 12 { "Etc/GMT+12" } else { "Etc/GMT-14" };
    fs::create_dir_all(machine.path("home/svc/home/system"))?;
    fs::create_dir_all(machine.path("var/lib/svc"))?;
    fs::write(machine.path("home/svc/home/system/config.json"), "{ broken")?;
    fs::write(
        machine.path("var/lib/svc/good-config.json"),
        format!("{{\"costLimits\": {{\"timeZone\": \"{zone}\"}}}}"),
    )?;
    machine.run(&["svc-heartbeat"])?.expect(0);
    let line: serde_json::Value = serde_json::from_str(&read_files(&machine.path(LOGS))?["storage.jsonl"])?;
    let expected = now.in_tz(zone)?.date().to_string();
    assert_ne!(expected, date_days_ago(now, 0)?);
    assert_eq!(line["date"], expected);
    Ok(())
}

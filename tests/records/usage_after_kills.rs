//! Dispatches recorded by a process that is killed repeatedly. Usage always equals the sum of the stored interactions,
//! and only the newest acknowledged interactions may be missing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use jiff::civil::Date;
use kit::child::{self, OwnedChild};
use kit::long_tests::Figures;
use serde_json::Value;
use svc::host::records::entry::{Interaction, ResultStatus};
use svc::host::records::ledger::{GroupBy, Report, UsageQuery};
use svc::host::records::money::Dollars;
use svc::host::records::usage_store::{FAILPOINTS, UsageStore};
use svc::host::records::writer::Writer;
use svc::host::system::layout::Layout;

use super::sum::{self, UsageKey, UsageSum};

/// Environment variables of the victim process: its directory, its first dispatch, and the number after its last one.
const DIR_VAR: &str = "SVC_RECORDS_VICTIM_DIR";
const FIRST_VAR: &str = "SVC_RECORDS_VICTIM_FIRST";
const END_VAR: &str = "SVC_RECORDS_VICTIM_END";
const DISPATCH_INTERVAL: Duration = Duration::from_micros(300);

/// A deterministic hash that makes the numbers look random.
fn hash(n: u64) -> u64 {
    let mut z = n.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn dispatch(n: u64) -> (Date, Interaction) {
    let random = hash(n);
    let day = Date::constant(2026, 11, if random.is_multiple_of(16) { 21 } else { 22 });
    let interaction = Interaction {
        version: Interaction::FORMAT_VERSION,
        id: n.to_string(),
        timestamp: jiff::Timestamp::UNIX_EPOCH,
        accepted_at: None,
        started_at: None,
        sender_id: format!("user_{}", random % 53),
        conversation_id: "c".to_owned(),
        model: format!("model-{}", (random >> 8) % 11),
        agent_name: "coder".to_owned(),
        tokens_in: (random >> 16) % 200_000,
        tokens_out: (random >> 24) % 8_000,
        // Includes costs of zero, and costs with up to nine decimal places.
        cost: Dollars::from_nanos(if random.is_multiple_of(7) { 0 } else { (random >> 32) % 3_000_000_000 }),
        cost_estimated: false,
        duration_ms: 5,
        tools: Vec::new(),
        status: ResultStatus::Success,
        error: None,
        batch: false,
        batch_id: None,
        batch_size: None,
        fingerprint: None,
    };
    (day, interaction)
}

fn now_nanos() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    u64::try_from(since.as_nanos()).unwrap()
}

fn parse_variable(name: &str) -> u64 {
    std::env::var(name).unwrap().parse().unwrap()
}

#[test]
#[ignore = "not a test: the victim process for the tests below"]
fn victim() {
    let Some(dir) = std::env::var_os(DIR_VAR) else { return };
    svc::failpoint::arm();
    let layout = Layout::new(dir);
    let writer = Writer::start(layout.logs()).unwrap();
    let store = UsageStore::open(writer.records(), layout.logs(), layout.usage_seals()).unwrap();
    let acknowledged = File::options().write(true).open(layout.root().join("acknowledged")).unwrap();
    println!("started");
    std::thread::scope(|scope| {
        let recorder = scope.spawn(|| {
            for n in parse_variable(FIRST_VAR)..parse_variable(END_VAR) {
                let (day, interaction) = dispatch(n);
                store.record(day, &interaction).unwrap();
                acknowledged.write_all_at(&now_nanos().to_le_bytes(), n * 8).unwrap();
                std::thread::sleep(DISPATCH_INTERVAL);
            }
        });
        // In production, a timer triggers writes and seals, and a write compacts the file only if it has many obsolete
        // lines. Here, all three run much more often.
        for turn in 0_u32.. {
            if recorder.is_finished() {
                break;
            }
            match turn % 4 {
                0 => store.compact(),
                2 => store.seal(),
                _ => store.write(),
            }
            std::thread::sleep(Duration::from_millis(7));
        }
    });
    store.seal();
    drop((store, writer));
    println!("done");
}

/// A directory of log files whose writer is killed repeatedly, and the observed results.
struct KillTest {
    layout: Layout,
    dispatches: u64,
    kills: u64,
    /// The age of the oldest interaction that was lost in a kill.
    max_lost_age: Duration,
    lost: BTreeSet<u64>,
    _dir: tempfile::TempDir,
}

impl KillTest {
    fn new(dispatches: u64) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let layout = Layout::new(dir.path());
        fs::create_dir_all(layout.logs())?;
        fs::create_dir_all(layout.usage_seals().parent().context("the path has no parent")?)?;
        fs::write(dir.path().join("acknowledged"), vec![0; usize::try_from(dispatches * 8)?])?;
        Ok(Self {
            layout,
            dispatches,
            kills: 0,
            max_lost_age: Duration::ZERO,
            lost: BTreeSet::new(),
            _dir: dir,
        })
    }

    /// Reads the acknowledgement time of each dispatch. Dispatches without one are omitted.
    fn read_acknowledgements(&self) -> Result<BTreeMap<u64, u64>> {
        let times = fs::read(self.layout.root().join("acknowledged"))?;
        let times = times.chunks_exact(8).map(|time| u64::from_le_bytes(time.try_into().unwrap_or_default()));
        Ok((0..).zip(times).filter(|(_, time)| *time > 0).collect())
    }

    fn next_dispatch(&self) -> Result<u64> {
        Ok(self.read_acknowledgements()?.last_key_value().map_or(0, |(last, _)| last + 1))
    }

    fn start(&self, failpoints: &str) -> Result<OwnedChild> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--ignored", "--exact", "--nocapture", "records::usage_after_kills::victim"]);
        command.env(DIR_VAR, self.layout.root()).env(FIRST_VAR, self.next_dispatch()?.to_string());
        command.env(END_VAR, self.dispatches.to_string()).env("FAILPOINTS", failpoints);
        Ok(OwnedChild::spawn(command.stdout(Stdio::piped()).stderr(Stdio::null()))?)
    }

    /// Kills a process `delay` after it was spawned or, if `should_wait_for_start`, after it reported its start.
    /// Returns `false` if it had already finished.
    fn kill_after(&mut self, delay: Duration, should_wait_for_start: bool) -> Result<bool> {
        let mut child = self.start("")?;
        if should_wait_for_start {
            wait_for_line(&mut child, "started")?;
        }
        let status = child.wait(delay);
        let killed_at = now_nanos();
        let status = status.map_or_else(|| child.kill(), Ok)?;
        if status.success() {
            return Ok(false);
        }
        self.record_losses(killed_at)?;
        Ok(true)
    }

    /// Records which acknowledged interactions are missing after a kill, and the age of the oldest.
    fn record_losses(&mut self, killed_at: u64) -> Result<()> {
        self.kills += 1;
        let (_, stored) = sum::sum_interactions(&self.layout.logs())?;
        let unique: BTreeSet<u64> = stored.iter().copied().collect();
        ensure!(unique.len() == stored.len(), "a line is duplicated");
        for (n, acknowledged_at) in self.read_acknowledgements()? {
            if !unique.contains(&n) && self.lost.insert(n) {
                let age = Duration::from_nanos(killed_at.saturating_sub(acknowledged_at));
                self.max_lost_age = self.max_lost_age.max(age);
            }
        }
        Ok(())
    }

    /// Runs the process to its end, without a kill.
    fn finish(&mut self) -> Result<()> {
        let mut child = self.start("")?;
        wait_for_line(&mut child, "done")?;
        let status = child.wait(Duration::from_secs(60));
        ensure!(status.is_some_and(|status| status.success()), "the process failed: {status:?}");
        Ok(())
    }

    /// Checks that usage equals the sum of the interactions in every report.
    fn assert_usage_is_exact(&self) -> Result<()> {
        let logs = self.layout.logs();
        let (sums, stored) = sum::sum_interactions(&logs)?;
        ensure!(!sums.is_empty(), "there are no interactions");
        ensure!(
            stored.len() as u64 + self.lost.len() as u64 >= self.next_dispatch()?,
            "interactions are missing that were not lost in a kill"
        );
        let writer = Writer::start(logs.clone())?;
        let store = UsageStore::open(writer.records(), logs.clone(), self.layout.usage_seals())?;
        for (group_by, group_name) in
            [(GroupBy::Day, "day"), (GroupBy::Model, "model"), (GroupBy::User, "user")]
        {
            let expected = group_sums(&sums, group_by);
            let report = store.report(&UsageQuery { group_by, ..UsageQuery::default() });
            ensure!(
                report_sums(&report) == expected,
                "the usage store, grouped by {group_name}: {report:?}\nexpected: {expected:?}"
            );
            let reported = self.read_usage_report(group_name)?;
            ensure!(
                reported == (expected, sum::total(&sums)),
                "`svc-gateway usage`, grouped by {group_name}: {reported:?}"
            );
        }
        store.seal();
        drop((store, writer));
        ensure!(sum::read_usage_sums(&logs)? == sums, "usage.jsonl differs from the interactions");
        Ok(())
    }

    /// Reads the report of `svc-gateway usage --json`.
    fn read_usage_report(&self, group_name: &str) -> Result<(BTreeMap<String, UsageSum>, UsageSum)> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
        command
            .args(["svc-gateway", "usage", "--json", "--by", group_name])
            .env("SVC_ROOT", self.layout.root());
        let text = child::run(command, Duration::from_secs(60))?;
        let report: Value = serde_json::from_str(&text)?;
        let read_sum = |group: &Value, names: [&str; 4]| -> Result<UsageSum> {
            let number = |name: &str| {
                group[name].as_u64().map(u128::from).with_context(|| format!("{group} has no {name}"))
            };
            let [cost, tokens_in, tokens_out, dispatches] = names;
            Ok(UsageSum {
                cost_nanos: sum::parse_cost_nanos(&group[cost].to_string())?,
                tokens_in: number(tokens_in)?,
                tokens_out: number(tokens_out)?,
                dispatches: number(dispatches)?,
            })
        };
        let mut groups = BTreeMap::new();
        for entry in report["entries"].as_array().context("the report has no entries")? {
            let name = ["model", "userId", "date"].iter().find_map(|name| entry[*name].as_str());
            let sum = read_sum(entry, ["cost", "tokensIn", "tokensOut", "dispatches"])?;
            groups.insert(name.context("an entry has no name")?.to_owned(), sum);
        }
        let total = read_sum(&report, ["totalCost", "totalTokensIn", "totalTokensOut", "totalDispatches"])?;
        Ok((groups, total))
    }

    fn record_figures(&self, name: &str) -> Result<()> {
        println!(
            "{name}: {} dispatches, {} kills, {} lost, the oldest {} ms before its kill",
            self.dispatches,
            self.kills,
            self.lost.len(),
            self.max_lost_age.as_millis()
        );
        Figures { kills_survived: self.kills, ..Figures::new(name) }.record()
    }
}

fn wait_for_line(child: &mut OwnedChild, suffix: &str) -> Result<()> {
    let lines = BufReader::new(child.stdout().context("the process has no stdout")?).lines();
    let mut matching = lines.map_while(Result::ok).filter(|line| line.ends_with(suffix));
    matching.next().map(|_| ()).with_context(|| format!("the process did not print {suffix}"))
}

fn group_sums(sums: &BTreeMap<UsageKey, UsageSum>, group_by: GroupBy) -> BTreeMap<String, UsageSum> {
    let mut groups = BTreeMap::<String, UsageSum>::new();
    for ((day, user, model), sum) in sums {
        let name = match group_by {
            GroupBy::User => user,
            GroupBy::Model => model,
            _ => day,
        };
        groups.entry(name.clone()).or_default().add(sum);
    }
    groups
}

fn report_sums(report: &Report) -> BTreeMap<String, UsageSum> {
    let entries = report.entries.iter().map(|entry| {
        let name = entry.model.clone().or(entry.user_id.clone()).unwrap_or_else(|| entry.date.to_string());
        let totals = &entry.totals;
        let sum = UsageSum {
            cost_nanos: totals.cost.nanos().into(),
            tokens_in: totals.tokens_in.into(),
            tokens_out: totals.tokens_out.into(),
            dispatches: totals.dispatches.into(),
        };
        (name, sum)
    });
    entries.collect()
}

/// Kills the process at random times, then lets it finish.
fn run_with_kills(dispatches: u64, kills: u64, seed: u64) -> Result<KillTest> {
    let mut test = KillTest::new(dispatches)?;
    let mean_interval = DISPATCH_INTERVAL * u32::try_from(dispatches / kills)?;
    let mut turn = seed;
    while test.kills < kills {
        turn += 1;
        // One in eight delays begins when the process is spawned, so the kill can interrupt the loading of the records.
        let should_wait_for_start = !hash(turn).is_multiple_of(8);
        let delay = mean_interval.mul_f64((hash(turn) >> 40) as f64 / f64::from(1 << 24) * 2.0);
        if !test.kill_after(delay.max(Duration::from_millis(1)), should_wait_for_start)? {
            break;
        }
    }
    test.finish()?;
    test.assert_usage_is_exact()?;
    Ok(test)
}

#[test]
fn usage_is_exact_after_random_kills() -> Result<()> {
    let test = run_with_kills(3_000, 8, 1)?;
    test.record_figures("kills of the usage writer")?;
    // The limit allows for a busy machine; the long test has a stricter one.
    ensure!(test.max_lost_age < Duration::from_secs(2), "{:?}", test.max_lost_age);
    ensure!(test.kills >= 4, "{} kills", test.kills);
    Ok(())
}

#[test]
fn usage_is_exact_after_kill_at_each_compaction_step() -> Result<()> {
    // Enough dispatches for six compactions per step, even if the compacting thread gets little CPU time.
    let mut test = KillTest::new(8_000)?;
    for point in FAILPOINTS {
        let mut child = test.start(&format!("{point}=5*off->return(kill)"))?;
        let status = child.wait(Duration::from_secs(60));
        let killed_at = now_nanos();
        ensure!(status.is_some_and(|status| !status.success()), "{point}: {status:?}");
        test.record_losses(killed_at)?;
        test.assert_usage_is_exact().with_context(|| point.to_string())?;
    }
    test.finish()?;
    test.assert_usage_is_exact()?;
    test.record_figures("kills during compaction")
}

#[test]
#[ignore = "long: 100 kills during 100,000 dispatches"]
fn long_usage_of_100_000_dispatches_survives_100_kills() -> Result<()> {
    let test = run_with_kills(100_000, 100, now_nanos())?;
    test.record_figures("100 kills of the usage writer")?;
    ensure!(test.kills >= 90, "{} kills", test.kills);
    ensure!(test.max_lost_age <= Duration::from_millis(200), "{:?}", test.max_lost_age);
    Ok(())
}

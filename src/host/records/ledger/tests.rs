//! Ledger tests: grouping, line format, and random histories with crashes.

use proptest::prelude::*;

use super::*;

fn date(text: &str) -> Date {
    text.parse().unwrap()
}

fn cents(cents: u64) -> Totals {
    Totals::for_dispatch(Dollars::from_nanos(cents * 10_000_000), 10, 1)
}

fn grouped(ledger: &Ledger, group_by: GroupBy) -> Vec<(String, u64)> {
    let report = ledger.report(&UsageQuery { group_by, ..UsageQuery::default() });
    let name =
        |entry: &ReportEntry| entry.model.clone().or(entry.user_id.clone()).unwrap_or(entry.date.to_string());
    report.entries.iter().map(|entry| (name(entry), entry.totals.dispatches)).collect()
}

#[test]
fn report_groups_by_period_model_or_user() {
    let mut ledger = Ledger::default();
    // A Sunday, a Monday, and the first of a month.
    for (day, user, model) in [
        ("2026-11-22", "ada", "big"),
        ("2026-11-22", "bob", "small"),
        ("2026-11-23", "ada", "small"),
        ("2026-12-01", "ada", "big"),
    ] {
        ledger.count(date(day), user, model, &cents(150));
    }
    let pairs = |pairs: &[(&str, u64)]| -> Vec<(String, u64)> {
        pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    };
    assert_eq!(
        grouped(&ledger, GroupBy::Day),
        pairs(&[("2026-11-22", 2), ("2026-11-23", 1), ("2026-12-01", 1)])
    );
    assert_eq!(
        grouped(&ledger, GroupBy::Week),
        pairs(&[("2026-11-16", 2), ("2026-11-23", 1), ("2026-11-30", 1)])
    );
    assert_eq!(grouped(&ledger, GroupBy::Month), pairs(&[("2026-11-01", 3), ("2026-12-01", 1)]));
    assert_eq!(grouped(&ledger, GroupBy::Model), pairs(&[("big", 2), ("small", 2)]));
    assert_eq!(grouped(&ledger, GroupBy::User), pairs(&[("ada", 3), ("bob", 1)]));
    let query = UsageQuery {
        user_id: Some("ada".to_owned()),
        start: Some(date("2026-11-23")),
        end: Some(date("2026-11-30")),
        ..UsageQuery::default()
    };
    assert_eq!(ledger.report(&query).total, cents(150));
    assert_eq!(
        ledger.report(&UsageQuery { user_id: Some("eve".to_owned()), ..UsageQuery::default() }),
        Report::default()
    );
    let inverted = UsageQuery {
        start: Some(date("2026-12-01")),
        end: Some(date("2026-11-01")),
        ..UsageQuery::default()
    };
    assert_eq!(ledger.report(&inverted), Report::default());
    assert_eq!(
        ledger.spent("ada", date("2026-11-01"), date("2026-11-30")),
        Dollars::from_nanos(3_000_000_000)
    );
}

#[test]
fn line_is_written_once_and_reads_back() {
    let mut ledger = Ledger::default();
    ledger.count(date("2026-11-22"), "ada", "big", &cents(1));
    ledger.count(date("2026-11-22"), "ada", "big", &cents(2));
    let text = serde_json::to_string(&ledger.unwritten_lines().next().unwrap()).unwrap();
    assert_eq!(
        text,
        r#"{"version":1,"date":"2026-11-22","userId":"ada","model":"big","cost":0.03,"tokensIn":20,"tokensOut":2,"dispatches":2,"seq":2}"#
    );
    let parsed = serde_json::from_str::<UsageLine<'_>>(&text).unwrap();
    assert_eq!(Some(&parsed), ledger.unwritten_lines().next().as_ref());
    ledger.apply_line(&parsed);
    assert_eq!(ledger.unwritten_lines().count(), 0);
    assert_eq!(ledger.day_lines(date("2026-11-22")).next(), Some(parsed));
}

/// An event in a history.
#[derive(Debug, Clone)]
enum Event {
    /// A dispatch finishes.
    DispatchEnded { day: u8, user: u8, model: u8, nanos: u64 },
    /// Unwritten lines are appended to `usage.jsonl`.
    Written,
    /// `usage.jsonl` is rewritten from the ledger.
    Compacted,
    /// The process crashes, losing the last lines, and restarts from its files.
    Crashed { lines_lost: usize, interactions_lost: usize },
}

fn into_owned(line: UsageLine<'_>) -> UsageLine<'static> {
    let (user_id, model) = (line.user_id.into_owned().into(), line.model.into_owned().into());
    UsageLine { user_id, model, ..line }
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => (0_u8..4, 0_u8..3, 0_u8..3, 0_u64..3_000_000_000).prop_map(|(day, user, model, nanos)| Event::DispatchEnded { day, user, model, nanos }),
        2 => Just(Event::Written),
        1 => Just(Event::Compacted),
        1 => (0_usize..4, 0_usize..4).prop_map(|(lines_lost, interactions_lost)| Event::Crashed { lines_lost, interactions_lost }),
    ]
}

proptest! {
    #[test]
    fn totals_equal_the_sum_of_interactions_after_any_crash(events in prop::collection::vec(any_event(), 0..60)) {
        let day = |n: u8| date("2026-11-20").checked_add(jiff::Span::new().days(n)).unwrap();
        let mut interactions: Vec<(Date, String, String, Totals)> = Vec::new();
        let mut file: Vec<UsageLine<'static>> = Vec::new();
        let mut ledger = Ledger::default();
        for event in events {
            match event {
                Event::DispatchEnded { day: n, user, model, nanos } => {
                    let totals = Totals::for_dispatch(Dollars::from_nanos(nanos), nanos % 97, nanos % 89);
                    ledger.count(day(n), &format!("u{user}"), &format!("m{model}"), &totals);
                    interactions.push((day(n), format!("u{user}"), format!("m{model}"), totals));
                }
                Event::Written => {
                    let lines: Vec<_> = ledger.unwritten_lines().map(into_owned).collect();
                    ledger.mark_written(lines.len());
                    file.extend(lines);
                }
                Event::Compacted => {
                    file = ledger.dates().into_iter().flat_map(|date| ledger.day_lines(date)).map(into_owned).collect();
                }
                Event::Crashed { lines_lost, interactions_lost } => {
                    file.truncate(file.len().saturating_sub(lines_lost));
                    interactions.truncate(interactions.len().saturating_sub(interactions_lost));
                    ledger = Ledger::default();
                    file.iter().for_each(|line| ledger.apply_line(line));
                    for n in 0..4 {
                        let day_interactions = interactions.iter().filter(|(date, ..)| *date == day(n));
                        let mut recount = ledger.begin_recount(day(n));
                        day_interactions.for_each(|(_, user, model, totals)| {
                            ledger.add_to_recount(&mut recount, user, model, totals);
                        });
                        ledger.finish_recount(recount);
                    }
                }
            }
            let sum = interactions.iter().fold(Totals::default(), |mut sum, (.., totals)| { sum.add(totals); sum });
            prop_assert_eq!(ledger.report(&UsageQuery::default()).total, sum);
            // Write all lines now and read them back.
            let mut reread = Ledger::default();
            let mut lines = file.clone();
            lines.extend(ledger.unwritten_lines().map(into_owned));
            lines.iter().for_each(|line| reread.apply_line(line));
            for group_by in [GroupBy::Day, GroupBy::Model, GroupBy::User] {
                let query = UsageQuery { group_by, ..UsageQuery::default() };
                prop_assert_eq!(reread.report(&query), ledger.report(&query));
            }
        }
    }
}

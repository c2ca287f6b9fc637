//! Usage by day, user and model: pure. A line of `usage.jsonl` has the totals of one key; the last line of a key wins.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::civil::{Date, Weekday};
use serde::{Deserialize, Serialize};

use super::money::Dollars;
pub use svc_http::usage::{GroupBy, UsageQuery};
use svc_wire::usage::{UsageEntry, UsageReport};

/// Index of an interned user or model name.
type Name = u32;

/// A user and a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct UsageKey {
    user: Name,
    model: Name,
}

/// The totals of a key on one day.
#[derive(Debug, Clone, Copy)]
struct KeyTotals {
    key: UsageKey,
    totals: Totals,
}

/// A day's keys, sorted and contiguous, so that years are scanned in milliseconds.
#[derive(Debug, Default)]
struct Day {
    all: Vec<KeyTotals>,
    /// Interactions counted.
    counted: u64,
}

impl Day {
    fn entry(&mut self, key: UsageKey) -> &mut Totals {
        // Lines of a file are mostly sorted.
        let at = match self.all.last() {
            Some(last) if last.key >= key => self.all.binary_search_by_key(&key, |one| one.key),
            _ => Err(self.all.len()),
        };
        let at = at.unwrap_or_else(|at| {
            self.all.insert(at, KeyTotals { key, totals: Totals::default() });
            at
        });
        &mut self.all[at].totals
    }

    fn totals(&self, key: UsageKey) -> Totals {
        let found = self.all.binary_search_by_key(&key, |one| one.key);
        found.map_or_else(|_| Totals::default(), |at| self.all[at].totals)
    }

    /// The keys of a user, or all.
    fn keys_of(&self, user: Option<Name>) -> &[KeyTotals] {
        let Some(user) = user else { return &self.all };
        let from = self.all.partition_point(|one| one.key.user < user);
        let length = self.all[from..].partition_point(|one| one.key.user == user);
        &self.all[from..from + length]
    }
}

/// Sums of dispatches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Totals {
    pub cost: Dollars,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub dispatches: u64,
}

impl Totals {
    /// The totals of one dispatch.
    pub fn one(cost: Dollars, tokens_in: u64, tokens_out: u64) -> Self {
        Self { cost, tokens_in, tokens_out, dispatches: 1 }
    }

    fn add(&mut self, other: &Self) {
        self.cost += other.cost;
        self.tokens_in = self.tokens_in.saturating_add(other.tokens_in);
        self.tokens_out = self.tokens_out.saturating_add(other.tokens_out);
        self.dispatches = self.dispatches.saturating_add(other.dispatches);
    }
}

/// A line of `usage.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageLine<'a> {
    pub version: u32,
    pub date: Date,
    #[serde(borrow)]
    pub user_id: Cow<'a, str>,
    #[serde(borrow)]
    pub model: Cow<'a, str>,
    pub cost: Dollars,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub dispatches: u64,
    /// Interactions of the day, of all users, that were counted when this line was written.
    pub seq: u64,
}

impl UsageLine<'_> {
    pub const VERSION: u32 = 1;

    fn totals(&self) -> Totals {
        let Self { cost, tokens_in, tokens_out, dispatches, .. } = *self;
        Totals { cost, tokens_in, tokens_out, dispatches }
    }
}

/// A group of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The day, or the first day of the week or month; for a model or user, the day of its first dispatch.
    pub date: Date,
    pub model: Option<String>,
    pub user_id: Option<String>,
    pub totals: Totals,
}

/// Groups, ordered by day or name, and the sum of all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    pub total: Totals,
    pub entries: Vec<Entry>,
}

impl From<Report> for UsageReport {
    fn from(Report { total, entries }: Report) -> Self {
        let entry = |Entry { date, model, user_id, totals }| {
            let Totals { cost, tokens_in, tokens_out, dispatches } = totals;
            UsageEntry {
                date: date.into(),
                model,
                user_id,
                cost: cost.as_f64(),
                tokens_in,
                tokens_out,
                dispatches,
            }
        };
        Self {
            total_cost: total.cost.as_f64(),
            total_tokens_in: total.tokens_in,
            total_tokens_out: total.tokens_out,
            total_dispatches: total.dispatches,
            entries: entries.into_iter().map(entry).collect(),
        }
    }
}

/// All known usage.
#[derive(Debug, Default)]
pub struct Ledger {
    names: Vec<String>,
    by_name: HashMap<String, Name>,
    days: BTreeMap<Date, Day>,
    /// Keys that `usage.jsonl` lacks.
    unwritten: BTreeSet<(Date, UsageKey)>,
}

/// A day being recounted.
pub struct Recount {
    date: Date,
    found: BTreeMap<UsageKey, Totals>,
    counted: u64,
}

impl Ledger {
    fn intern(&mut self, text: &str) -> Name {
        if let Some(name) = self.by_name.get(text) {
            return *name;
        }
        let name = Name::try_from(self.names.len()).expect("fewer names than a 32-bit count");
        self.names.push(text.to_owned());
        self.by_name.insert(text.to_owned(), name);
        name
    }

    fn key(&mut self, user: &str, model: &str) -> UsageKey {
        UsageKey { user: self.intern(user), model: self.intern(model) }
    }

    fn name(&self, name: Name) -> &str {
        &self.names[name as usize]
    }

    /// Counts an ended dispatch.
    pub fn count(&mut self, date: Date, user: &str, model: &str, one: &Totals) {
        let key = self.key(user, model);
        let day = self.days.entry(date).or_default();
        day.entry(key).add(one);
        day.counted += one.dispatches;
        self.unwritten.insert((date, key));
    }

    /// Applies a line of `usage.jsonl`; lines must come in file order.
    pub fn apply_line(&mut self, line: &UsageLine<'_>) {
        let key = self.key(&line.user_id, &line.model);
        let day = self.days.entry(line.date).or_default();
        *day.entry(key) = line.totals();
        day.counted = line.seq.max(day.counted);
        self.unwritten.remove(&(line.date, key));
    }

    /// Starts a recount of a day.
    pub fn begin_recount(&self, date: Date) -> Recount {
        Recount { date, found: BTreeMap::new(), counted: 0 }
    }

    /// Adds an interaction to a recount.
    pub fn add_to_recount(&mut self, day: &mut Recount, user: &str, model: &str, one: &Totals) {
        day.found.entry(self.key(user, model)).or_default().add(one);
        day.counted += one.dispatches;
    }

    /// Replaces the day by its recount.
    pub fn finish_recount(&mut self, day: Recount) {
        let Recount { date, mut found, counted } = day;
        let before = self.days.entry(date).or_default();
        for one in &before.all {
            // A key without interactions becomes zero, since it still has lines.
            found.entry(one.key).or_default();
        }
        before.counted = counted;
        for (key, totals) in found {
            // A new key has no line yet, even with zero totals.
            let is_new = before.all.binary_search_by_key(&key, |one| one.key).is_err();
            let entry = before.entry(key);
            if is_new || *entry != totals {
                *entry = totals;
                self.unwritten.insert((date, key));
            }
        }
    }

    /// Frees excess memory after reading.
    pub fn trim(&mut self) {
        self.days.values_mut().for_each(|day| day.all.shrink_to_fit());
    }

    /// The totals of a day.
    pub fn day(&self, date: Date) -> Totals {
        let mut sum = Totals::default();
        self.days.get(&date).into_iter().flat_map(|day| &day.all).for_each(|one| sum.add(&one.totals));
        sum
    }

    fn range(&self, start: Option<Date>, end: Option<Date>) -> impl Iterator<Item = (&Date, &Day)> {
        let (from, to) = (start.unwrap_or(Date::MIN), end.unwrap_or(Date::MAX));
        // An inverted range would panic.
        (from <= to).then(|| self.days.range(from..=to)).into_iter().flatten()
    }

    /// Days with keys that `usage.jsonl` lacks.
    pub fn unwritten_days(&self) -> BTreeSet<Date> {
        self.unwritten.iter().map(|(date, _)| *date).collect()
    }

    fn line(&self, date: Date, key: UsageKey, totals: Totals, seq: u64) -> UsageLine<'_> {
        let Totals { cost, tokens_in, tokens_out, dispatches } = totals;
        let (user_id, model) = (self.name(key.user).into(), self.name(key.model).into());
        UsageLine {
            version: UsageLine::VERSION,
            date,
            user_id,
            model,
            cost,
            tokens_in,
            tokens_out,
            dispatches,
            seq,
        }
    }

    /// The lines that `usage.jsonl` lacks. Report written ones to [`Ledger::mark_written`].
    pub fn lines(&self) -> impl Iterator<Item = UsageLine<'_>> {
        self.unwritten.iter().map(|(date, key)| {
            let day = self.days.get(date);
            let (totals, seq) = day.map(|day| (day.totals(*key), day.counted)).unwrap_or_default();
            self.line(*date, *key, totals, seq)
        })
    }

    /// Marks the first `lines` of [`Ledger::lines`] as written.
    pub fn mark_written(&mut self, lines: usize) {
        for _ in 0..lines {
            self.unwritten.pop_first();
        }
    }

    /// The days, in order.
    pub fn dates(&self) -> Vec<Date> {
        self.days.keys().copied().collect()
    }

    /// The lines of a whole day.
    pub fn lines_of(&self, date: Date) -> impl Iterator<Item = UsageLine<'_>> {
        let day = self.days.get(&date);
        day.into_iter().flat_map(move |day| {
            let all = day.all.iter().filter(|one| one.totals != Totals::default());
            all.map(move |one| self.line(date, one.key, one.totals, day.counted))
        })
    }

    /// The number of keys.
    pub fn keys(&self) -> usize {
        self.days.values().map(|day| day.all.len()).sum()
    }

    /// The amount that a user spent in these days, both inclusive.
    pub fn spent(&self, user: &str, start: Date, end: Date) -> Dollars {
        let Some(user) = self.by_name.get(user) else { return Dollars::ZERO };
        let days = self.range(Some(start), Some(end));
        days.flat_map(|(_, day)| day.keys_of(Some(*user))).map(|one| one.totals.cost).sum()
    }

    /// Users with dispatches on or after this day.
    pub fn users_since(&self, start: Date) -> BTreeSet<&str> {
        let all = self.range(Some(start), None).flat_map(|(_, day)| &day.all);
        all.filter(|one| one.totals.dispatches > 0).map(|one| self.name(one.key.user)).collect()
    }

    pub fn report(&self, query: &UsageQuery) -> Report {
        let user = query.user_id.as_deref().map(|user| self.by_name.get(user).copied());
        // An unknown user has no usage.
        let Some(user) = user.map_or(Some(None), |user| user.map(Some)) else { return Report::default() };
        let days = self.range(query.start, query.end).map(|(date, day)| (*date, day.keys_of(user)));
        match query.group_by {
            GroupBy::Day => by_periods(days, |date| date),
            GroupBy::Week => by_periods(days, monday),
            GroupBy::Month => by_periods(days, Date::first_of_month),
            GroupBy::Model => self.by_names(days, |key| key.model, |name| (Some(name), None)),
            GroupBy::User => self.by_names(days, |key| key.user, |name| (None, Some(name))),
        }
    }

    fn by_names<'a>(
        &self,
        days: impl Iterator<Item = (Date, &'a [KeyTotals])>,
        group_of: impl Fn(UsageKey) -> Name,
        labels: impl Fn(String) -> (Option<String>, Option<String>),
    ) -> Report {
        let mut total = Totals::default();
        // Indexed by name: names are dense and few.
        let mut groups: Vec<Option<(Date, Totals)>> = vec![None; self.names.len()];
        for (date, all) in days {
            for one in all.iter().filter(|one| one.totals.dispatches > 0) {
                // Days are sorted: the first date of a group is its earliest.
                let group = &mut groups[group_of(one.key) as usize];
                group.get_or_insert_with(|| (date, Totals::default())).1.add(&one.totals);
            }
        }
        let found = self.names.iter().zip(groups).filter_map(|(name, group)| Some((name, group?)));
        let mut entries: Vec<Entry> = found
            .map(|(name, (date, totals))| {
                total.add(&totals);
                let (model, user_id) = labels(name.clone());
                Entry { date, model, user_id, totals }
            })
            .collect();
        entries.sort_by(|a, b| (&a.model, &a.user_id).cmp(&(&b.model, &b.user_id)));
        Report { total, entries }
    }
}

/// Groups by period; days are sorted, and so are their periods.
fn by_periods<'a>(
    days: impl Iterator<Item = (Date, &'a [KeyTotals])>,
    start_of_period: impl Fn(Date) -> Date,
) -> Report {
    let mut report = Report::default();
    for (date, all) in days {
        let mut of_day = Totals::default();
        all.iter().for_each(|one| of_day.add(&one.totals));
        if of_day.dispatches == 0 {
            continue;
        }
        report.total.add(&of_day);
        let period = start_of_period(date);
        match report.entries.last_mut() {
            Some(entry) if entry.date == period => entry.totals.add(&of_day),
            _ => report.entries.push(Entry { date: period, model: None, user_id: None, totals: of_day }),
        }
    }
    report
}

fn monday(date: Date) -> Date {
    let back = date.weekday().since(Weekday::Monday);
    date.checked_sub(jiff::Span::new().days(back)).unwrap_or(date)
}

#[cfg(test)]
mod tests;

//! Tracks usage by day, user and model, without performing I/O. Each line in `usage.jsonl` holds the totals for one
//! day, user and model, and supersedes earlier lines for the same combination.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::civil::{Date, Weekday};
use serde::{Deserialize, Serialize};

use super::money::Dollars;
pub use svc_http::usage::{GroupBy, UsageQuery};
use svc_wire::usage::{UsageEntry, UsageReport};

/// Index of an interned user or model name.
type NameId = u32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct UsageKey {
    user: NameId,
    model: NameId,
}

/// A key's totals for one day.
#[derive(Debug, Clone, Copy)]
struct KeyTotals {
    key: UsageKey,
    totals: Totals,
}

/// A day's totals, sorted by key and contiguous in memory so that scanning years takes milliseconds.
#[derive(Debug, Default)]
struct DayUsage {
    entries: Vec<KeyTotals>,
    /// Number of counted interactions.
    interaction_count: u64,
}

impl DayUsage {
    fn totals_mut(&mut self, key: UsageKey) -> &mut Totals {
        // Lines in a file are mostly sorted, so a new key usually goes at the end.
        let position = match self.entries.last() {
            Some(last) if last.key >= key => self.entries.binary_search_by_key(&key, |entry| entry.key),
            _ => Err(self.entries.len()),
        };
        let index = position.unwrap_or_else(|index| {
            self.entries.insert(index, KeyTotals { key, totals: Totals::default() });
            index
        });
        &mut self.entries[index].totals
    }

    fn totals(&self, key: UsageKey) -> Totals {
        let position = self.entries.binary_search_by_key(&key, |entry| entry.key);
        position.map_or_else(|_| Totals::default(), |index| self.entries[index].totals)
    }

    /// Returns the entries for `user`, or all entries if it's `None`.
    fn entries_for_user(&self, user: Option<NameId>) -> &[KeyTotals] {
        let Some(user) = user else { return &self.entries };
        let from = self.entries.partition_point(|entry| entry.key.user < user);
        let length = self.entries[from..].partition_point(|entry| entry.key.user == user);
        &self.entries[from..from + length]
    }
}

/// Usage totals across dispatches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Totals {
    pub cost: Dollars,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub dispatches: u64,
}

impl Totals {
    pub fn for_dispatch(cost: Dollars, tokens_in: u64, tokens_out: u64) -> Self {
        Self { cost, tokens_in, tokens_out, dispatches: 1 }
    }

    fn add(&mut self, other: &Self) {
        self.cost += other.cost;
        self.tokens_in = self.tokens_in.saturating_add(other.tokens_in);
        self.tokens_out = self.tokens_out.saturating_add(other.tokens_out);
        self.dispatches = self.dispatches.saturating_add(other.dispatches);
    }
}

/// A line in `usage.jsonl`.
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
    /// Number of the day's interactions, across all users, counted by the time this line was written.
    pub seq: u64,
}

impl UsageLine<'_> {
    pub const FORMAT_VERSION: u32 = 1;

    fn totals(&self) -> Totals {
        let Self { cost, tokens_in, tokens_out, dispatches, .. } = *self;
        Totals { cost, tokens_in, tokens_out, dispatches }
    }
}

/// A group in a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportEntry {
    /// The day, or the first day of the week or month. When grouping by model or user, the day of the group's first
    /// dispatch in the report.
    pub date: Date,
    pub model: Option<String>,
    pub user_id: Option<String>,
    pub totals: Totals,
}

/// Groups sorted by day or name, and their total.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    pub total: Totals,
    pub entries: Vec<ReportEntry>,
}

impl From<Report> for UsageReport {
    fn from(Report { total, entries }: Report) -> Self {
        let entry = |ReportEntry { date, model, user_id, totals }| {
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

/// Usage across all days.
#[derive(Debug, Default)]
pub struct Ledger {
    names: Vec<String>,
    ids: HashMap<String, NameId>,
    days: BTreeMap<Date, DayUsage>,
    /// Keys whose current totals haven't been written to `usage.jsonl`.
    unwritten: BTreeSet<(Date, UsageKey)>,
}

/// An in-progress recount of a day's totals from its interactions.
pub struct Recount {
    date: Date,
    totals: BTreeMap<UsageKey, Totals>,
    interaction_count: u64,
}

impl Ledger {
    fn intern(&mut self, name: &str) -> NameId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        let id = NameId::try_from(self.names.len()).expect("the number of names fits in 32 bits");
        self.names.push(name.to_owned());
        self.ids.insert(name.to_owned(), id);
        id
    }

    fn intern_key(&mut self, user: &str, model: &str) -> UsageKey {
        UsageKey { user: self.intern(user), model: self.intern(model) }
    }

    fn name(&self, id: NameId) -> &str {
        &self.names[id as usize]
    }

    /// Counts a finished dispatch.
    pub fn count(&mut self, date: Date, user: &str, model: &str, totals: &Totals) {
        let key = self.intern_key(user, model);
        let day = self.days.entry(date).or_default();
        day.totals_mut(key).add(totals);
        day.interaction_count += totals.dispatches;
        self.unwritten.insert((date, key));
    }

    /// Applies a line from `usage.jsonl`; lines must be applied in file order.
    pub fn apply_line(&mut self, line: &UsageLine<'_>) {
        let key = self.intern_key(&line.user_id, &line.model);
        let day = self.days.entry(line.date).or_default();
        *day.totals_mut(key) = line.totals();
        day.interaction_count = line.seq.max(day.interaction_count);
        self.unwritten.remove(&(line.date, key));
    }

    pub fn begin_recount(&self, date: Date) -> Recount {
        Recount { date, totals: BTreeMap::new(), interaction_count: 0 }
    }

    pub fn add_to_recount(&mut self, recount: &mut Recount, user: &str, model: &str, totals: &Totals) {
        recount.totals.entry(self.intern_key(user, model)).or_default().add(totals);
        recount.interaction_count += totals.dispatches;
    }

    /// Replaces the day's totals with the recounted ones.
    pub fn finish_recount(&mut self, recount: Recount) {
        let Recount { date, totals: mut recounted, interaction_count } = recount;
        let day = self.days.entry(date).or_default();
        for entry in &day.entries {
            // Zero out keys without interactions, as usage.jsonl still has lines for them.
            recounted.entry(entry.key).or_default();
        }
        day.interaction_count = interaction_count;
        for (key, totals) in recounted {
            // A new key doesn't have a line yet, even if its totals are zero.
            let is_new = day.entries.binary_search_by_key(&key, |entry| entry.key).is_err();
            let current = day.totals_mut(key);
            if is_new || *current != totals {
                *current = totals;
                self.unwritten.insert((date, key));
            }
        }
    }

    /// Frees excess capacity. Call after reading the files.
    pub fn shrink_to_fit(&mut self) {
        self.days.values_mut().for_each(|day| day.entries.shrink_to_fit());
    }

    pub fn day_totals(&self, date: Date) -> Totals {
        let mut sum = Totals::default();
        self.days
            .get(&date)
            .into_iter()
            .flat_map(|day| &day.entries)
            .for_each(|entry| sum.add(&entry.totals));
        sum
    }

    fn days_between(
        &self,
        start: Option<Date>,
        end: Option<Date>,
    ) -> impl Iterator<Item = (&Date, &DayUsage)> {
        let (from, to) = (start.unwrap_or(Date::MIN), end.unwrap_or(Date::MAX));
        // `range` panics on inverted bounds.
        (from <= to).then(|| self.days.range(from..=to)).into_iter().flatten()
    }

    /// Returns the days with unwritten totals.
    pub fn unwritten_days(&self) -> BTreeSet<Date> {
        self.unwritten.iter().map(|(date, _)| *date).collect()
    }

    fn build_line(&self, date: Date, key: UsageKey, totals: Totals, seq: u64) -> UsageLine<'_> {
        let Totals { cost, tokens_in, tokens_out, dispatches } = totals;
        let (user_id, model) = (self.name(key.user).into(), self.name(key.model).into());
        UsageLine {
            version: UsageLine::FORMAT_VERSION,
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

    /// Returns the lines not yet in `usage.jsonl`. Call [`Ledger::mark_written`] after writing them.
    pub fn unwritten_lines(&self) -> impl Iterator<Item = UsageLine<'_>> {
        self.unwritten.iter().map(|(date, key)| {
            let day = self.days.get(date);
            let (totals, seq) = day.map(|day| (day.totals(*key), day.interaction_count)).unwrap_or_default();
            self.build_line(*date, *key, totals, seq)
        })
    }

    /// Marks the first `count` of [`Ledger::unwritten_lines`] as written.
    pub fn mark_written(&mut self, count: usize) {
        for _ in 0..count {
            self.unwritten.pop_first();
        }
    }

    /// Returns the days, in order.
    pub fn dates(&self) -> Vec<Date> {
        self.days.keys().copied().collect()
    }

    /// Returns a line for each key with usage on this day.
    pub fn day_lines(&self, date: Date) -> impl Iterator<Item = UsageLine<'_>> {
        let day = self.days.get(&date);
        day.into_iter().flat_map(move |day| {
            let used = day.entries.iter().filter(|entry| entry.totals != Totals::default());
            used.map(move |entry| self.build_line(date, entry.key, entry.totals, day.interaction_count))
        })
    }

    pub fn key_count(&self) -> usize {
        self.days.values().map(|day| day.entries.len()).sum()
    }

    /// Returns the amount spent by a user from `start` to `end`, inclusive.
    pub fn spent(&self, user: &str, start: Date, end: Date) -> Dollars {
        let Some(user) = self.ids.get(user) else { return Dollars::ZERO };
        let days = self.days_between(Some(start), Some(end));
        days.flat_map(|(_, day)| day.entries_for_user(Some(*user))).map(|entry| entry.totals.cost).sum()
    }

    /// Returns the users with dispatches on or after `start`.
    pub fn users_since(&self, start: Date) -> BTreeSet<&str> {
        let all = self.days_between(Some(start), None).flat_map(|(_, day)| &day.entries);
        all.filter(|entry| entry.totals.dispatches > 0).map(|entry| self.name(entry.key.user)).collect()
    }

    pub fn report(&self, query: &UsageQuery) -> Report {
        let user = query.user_id.as_deref().map(|user| self.ids.get(user).copied());
        // Unknown users don't have any usage.
        let Some(user) = user.map_or(Some(None), |user| user.map(Some)) else { return Report::default() };
        let days =
            self.days_between(query.start, query.end).map(|(date, day)| (*date, day.entries_for_user(user)));
        match query.group_by {
            GroupBy::Day => group_by_period(days, |date| date),
            GroupBy::Week => group_by_period(days, first_of_week),
            GroupBy::Month => group_by_period(days, Date::first_of_month),
            GroupBy::Model => self.group_by_name(days, |key| key.model, |name| (Some(name), None)),
            GroupBy::User => self.group_by_name(days, |key| key.user, |name| (None, Some(name))),
        }
    }

    fn group_by_name<'a>(
        &self,
        days: impl Iterator<Item = (Date, &'a [KeyTotals])>,
        group_of: impl Fn(UsageKey) -> NameId,
        labels: impl Fn(String) -> (Option<String>, Option<String>),
    ) -> Report {
        let mut total = Totals::default();
        // Indexed by name id; the ids are dense and few.
        let mut groups: Vec<Option<(Date, Totals)>> = vec![None; self.names.len()];
        for (date, all) in days {
            for entry in all.iter().filter(|entry| entry.totals.dispatches > 0) {
                // Days are sorted, so a group's first date is its earliest.
                let group = &mut groups[group_of(entry.key) as usize];
                group.get_or_insert_with(|| (date, Totals::default())).1.add(&entry.totals);
            }
        }
        let found = self.names.iter().zip(groups).filter_map(|(name, group)| Some((name, group?)));
        let mut entries: Vec<ReportEntry> = found
            .map(|(name, (date, totals))| {
                total.add(&totals);
                let (model, user_id) = labels(name.clone());
                ReportEntry { date, model, user_id, totals }
            })
            .collect();
        entries.sort_by(|a, b| (&a.model, &a.user_id).cmp(&(&b.model, &b.user_id)));
        Report { total, entries }
    }
}

/// Groups usage by period. `days` must be sorted.
fn group_by_period<'a>(
    days: impl Iterator<Item = (Date, &'a [KeyTotals])>,
    start_of_period: impl Fn(Date) -> Date,
) -> Report {
    let mut report = Report::default();
    for (date, all) in days {
        let mut day_totals = Totals::default();
        all.iter().for_each(|entry| day_totals.add(&entry.totals));
        if day_totals.dispatches == 0 {
            continue;
        }
        report.total.add(&day_totals);
        let period = start_of_period(date);
        match report.entries.last_mut() {
            Some(entry) if entry.date == period => entry.totals.add(&day_totals),
            _ => {
                let entry = ReportEntry { date: period, model: None, user_id: None, totals: day_totals };
                report.entries.push(entry);
            }
        }
    }
    report
}

/// Returns the Monday of the date's week.
fn first_of_week(date: Date) -> Date {
    let days_since_monday = date.weekday().since(Weekday::Monday);
    date.checked_sub(jiff::Span::new().days(days_since_monday)).unwrap_or(date)
}

#[cfg(test)]
mod tests;

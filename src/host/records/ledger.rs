//! What was spent, by day, user and model: pure. A line of `usage.jsonl` says it of one key; the last line of a key wins.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::civil::{Date, Weekday};
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use super::money::Dollars;
pub use crate::http::usage::{GroupBy, UsageQuery};

/// A user or a model; names are many times the same.
type Name = u32;

/// Whose dispatches, by which model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Who {
    user: Name,
    model: Name,
}

/// One key of a day.
#[derive(Debug, Clone, Copy)]
struct Of {
    who: Who,
    totals: Totals,
}

/// The keys of a day in their order, side by side: years of them are looked through in milliseconds.
#[derive(Debug, Default)]
struct Day {
    all: Vec<Of>,
    /// Interactions counted.
    counted: u64,
}

impl Day {
    fn of(&mut self, who: Who) -> &mut Totals {
        // Lines of a file come in order, mostly.
        let at = match self.all.last() {
            Some(last) if last.who >= who => self.all.binary_search_by_key(&who, |of| of.who),
            _ => Err(self.all.len()),
        };
        let at = at.unwrap_or_else(|at| {
            self.all.insert(at, Of { who, totals: Totals::default() });
            at
        });
        &mut self.all[at].totals
    }

    fn totals(&self, who: Who) -> Totals {
        let found = self.all.binary_search_by_key(&who, |of| of.who);
        found.map_or_else(|_| Totals::default(), |at| self.all[at].totals)
    }

    /// Those of a user, or all.
    fn those(&self, user: Option<Name>) -> &[Of] {
        let Some(user) = user else { return &self.all };
        let from = self.all.partition_point(|of| of.who.user < user);
        let length = self.all[from..].partition_point(|of| of.who.user == user);
        &self.all[from..from + length]
    }
}

/// What is summed up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Totals {
    pub cost: Dollars,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub dispatches: u64,
}

impl Totals {
    /// Of one dispatch.
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
    /// How many interactions of the day were counted when this was written, whosever they are.
    pub seq: u64,
}

impl UsageLine<'_> {
    pub const VERSION: u32 = 1;

    fn totals(&self) -> Totals {
        let Self { cost, tokens_in, tokens_out, dispatches, .. } = *self;
        Totals { cost, tokens_in, tokens_out, dispatches }
    }
}

/// One group of a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The day, or the first day of the week or month; of a model's or a user's, the first on which there was a dispatch.
    pub date: Date,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
    #[serde(flatten)]
    pub totals: Totals,
}

/// Groups in the order of their days, or names, and the sum of all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    #[serde(flatten, serialize_with = "as_total")]
    pub total: Totals,
    pub entries: Vec<Entry>,
}

/// The specification's names of the sums of all.
fn as_total<S: Serializer>(total: &Totals, out: S) -> Result<S::Ok, S::Error> {
    let mut sums = out.serialize_map(None)?;
    sums.serialize_entry("totalCost", &total.cost)?;
    sums.serialize_entry("totalTokensIn", &total.tokens_in)?;
    sums.serialize_entry("totalTokensOut", &total.tokens_out)?;
    sums.serialize_entry("totalDispatches", &total.dispatches)?;
    sums.end()
}

/// All that is known to have been spent.
#[derive(Debug, Default)]
pub struct Ledger {
    names: Vec<String>,
    by_name: HashMap<String, Name>,
    days: BTreeMap<Date, Day>,
    /// What no line of `usage.jsonl` says yet.
    unwritten: BTreeSet<(Date, Who)>,
}

/// A day that is counted anew.
pub struct Recount {
    date: Date,
    found: BTreeMap<Who, Totals>,
    counted: u64,
}

impl Ledger {
    fn name(&mut self, text: &str) -> Name {
        if let Some(name) = self.by_name.get(text) {
            return *name;
        }
        let name = Name::try_from(self.names.len()).expect("fewer names than a 32-bit count");
        self.names.push(text.to_owned());
        self.by_name.insert(text.to_owned(), name);
        name
    }

    fn who(&mut self, user: &str, model: &str) -> Who {
        Who { user: self.name(user), model: self.name(model) }
    }

    fn known(&self, name: Name) -> &str {
        &self.names[name as usize]
    }

    /// A dispatch has ended.
    pub fn count(&mut self, date: Date, user: &str, model: &str, one: &Totals) {
        let who = self.who(user, model);
        let day = self.days.entry(date).or_default();
        day.of(who).add(one);
        day.counted += one.dispatches;
        self.unwritten.insert((date, who));
    }

    /// What a line of `usage.jsonl` says; lines come in their order.
    pub fn settle(&mut self, line: &UsageLine<'_>) {
        let who = self.who(&line.user_id, &line.model);
        let day = self.days.entry(line.date).or_default();
        *day.of(who) = line.totals();
        day.counted = line.seq.max(day.counted);
        self.unwritten.remove(&(line.date, who));
    }

    /// Begins to count a day anew.
    pub fn recount(&self, date: Date) -> Recount {
        Recount { date, found: BTreeMap::new(), counted: 0 }
    }

    /// An interaction of a day that is counted anew.
    pub fn counted(&mut self, day: &mut Recount, user: &str, model: &str, one: &Totals) {
        day.found.entry(self.who(user, model)).or_default().add(one);
        day.counted += one.dispatches;
    }

    /// The day is what was counted, whatever was known of it before.
    pub fn recounted(&mut self, day: Recount) {
        let Recount { date, mut found, counted } = day;
        let before = self.days.entry(date).or_default();
        for of in &before.all {
            // A key that nobody counts any more says so, for its lines are still there.
            found.entry(of.who).or_default();
        }
        before.counted = counted;
        for (who, totals) in found {
            // One that is new has no line, whatever it says.
            let is_new = before.all.binary_search_by_key(&who, |of| of.who).is_err();
            let of = before.of(who);
            if is_new || *of != totals {
                *of = totals;
                self.unwritten.insert((date, who));
            }
        }
    }

    /// Lets go of memory that reading took.
    pub fn trim(&mut self) {
        self.days.values_mut().for_each(|day| day.all.shrink_to_fit());
    }

    /// All of a day.
    pub fn day(&self, date: Date) -> Totals {
        let mut sum = Totals::default();
        self.days.get(&date).into_iter().flat_map(|day| &day.all).for_each(|of| sum.add(&of.totals));
        sum
    }

    fn range(&self, start: Option<Date>, end: Option<Date>) -> impl Iterator<Item = (&Date, &Day)> {
        let (from, to) = (start.unwrap_or(Date::MIN), end.unwrap_or(Date::MAX));
        // The other way round there is nothing, and a range of it would panic.
        (from <= to).then(|| self.days.range(from..=to)).into_iter().flatten()
    }

    /// Days of which `usage.jsonl` lacks something.
    pub fn unwritten_days(&self) -> BTreeSet<Date> {
        self.unwritten.iter().map(|(date, _)| *date).collect()
    }

    fn line(&self, date: Date, who: Who, totals: Totals, seq: u64) -> UsageLine<'_> {
        let Totals { cost, tokens_in, tokens_out, dispatches } = totals;
        let (user_id, model) = (self.known(who.user).into(), self.known(who.model).into());
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

    /// The lines that `usage.jsonl` lacks. Those that are written are told to [`Ledger::written`].
    pub fn lines(&self) -> impl Iterator<Item = UsageLine<'_>> {
        self.unwritten.iter().map(|(date, who)| {
            let day = self.days.get(date);
            let (totals, seq) = day.map(|day| (day.totals(*who), day.counted)).unwrap_or_default();
            self.line(*date, *who, totals, seq)
        })
    }

    /// Of [`Ledger::lines`] the first so many are written.
    pub fn written(&mut self, lines: usize) {
        for _ in 0..lines {
            self.unwritten.pop_first();
        }
    }

    /// The days, in order.
    pub fn dates(&self) -> Vec<Date> {
        self.days.keys().copied().collect()
    }

    /// Lines that say all of a day.
    pub fn lines_of(&self, date: Date) -> impl Iterator<Item = UsageLine<'_>> {
        let day = self.days.get(&date);
        day.into_iter().flat_map(move |day| {
            let all = day.all.iter().filter(|of| of.totals != Totals::default());
            all.map(move |of| self.line(date, of.who, of.totals, day.counted))
        })
    }

    /// Keys that there is something of.
    pub fn keys(&self) -> usize {
        self.days.values().map(|day| day.all.len()).sum()
    }

    /// What a user spent from one day to another.
    pub fn spent(&self, user: &str, start: Date, end: Date) -> Dollars {
        let Some(user) = self.by_name.get(user) else { return Dollars::ZERO };
        let days = self.range(Some(start), Some(end));
        days.flat_map(|(_, day)| day.those(Some(*user))).map(|of| of.totals.cost).sum()
    }

    /// Who spent something on or after this day.
    pub fn users_since(&self, start: Date) -> BTreeSet<&str> {
        let all = self.range(Some(start), None).flat_map(|(_, day)| &day.all);
        all.filter(|of| of.totals.dispatches > 0).map(|of| self.known(of.who.user)).collect()
    }

    pub fn report(&self, asked: &UsageQuery) -> Report {
        let wanted = asked.user_id.as_deref().map(|user| self.by_name.get(user).copied());
        // Nobody has heard of this user.
        let Some(wanted) = wanted.map_or(Some(None), |user| user.map(Some)) else { return Report::default() };
        let days = self.range(asked.start, asked.end).map(|(date, day)| (*date, day.those(wanted)));
        match asked.group_by {
            GroupBy::Day => by_periods(days, |date| date),
            GroupBy::Week => by_periods(days, monday),
            GroupBy::Month => by_periods(days, Date::first_of_month),
            GroupBy::Model => self.by_names(days, |who| who.model, |name| (Some(name), None)),
            GroupBy::User => self.by_names(days, |who| who.user, |name| (None, Some(name))),
        }
    }

    fn by_names<'a>(
        &self,
        days: impl Iterator<Item = (Date, &'a [Of])>,
        of_whom: impl Fn(Who) -> Name,
        named: impl Fn(String) -> (Option<String>, Option<String>),
    ) -> Report {
        let mut total = Totals::default();
        // By number: a name has one, and there are not many.
        let mut groups: Vec<Option<(Date, Totals)>> = vec![None; self.names.len()];
        for (date, all) in days {
            for of in all.iter().filter(|of| of.totals.dispatches > 0) {
                // Days come in their order: the first of a group is its first.
                let group = &mut groups[of_whom(of.who) as usize];
                group.get_or_insert_with(|| (date, Totals::default())).1.add(&of.totals);
            }
        }
        let found = self.names.iter().zip(groups).filter_map(|(name, group)| Some((name, group?)));
        let mut entries: Vec<Entry> = found
            .map(|(name, (date, totals))| {
                total.add(&totals);
                let (model, user_id) = named(name.clone());
                Entry { date, model, user_id, totals }
            })
            .collect();
        entries.sort_by(|a, b| (&a.model, &a.user_id).cmp(&(&b.model, &b.user_id)));
        Report { total, entries }
    }
}

/// Days come in their order, and so do the periods that they are in.
fn by_periods<'a>(days: impl Iterator<Item = (Date, &'a [Of])>, begins: impl Fn(Date) -> Date) -> Report {
    let mut report = Report::default();
    for (date, all) in days {
        let mut of_day = Totals::default();
        all.iter().for_each(|of| of_day.add(&of.totals));
        if of_day.dispatches == 0 {
            continue;
        }
        report.total.add(&of_day);
        let period = begins(date);
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

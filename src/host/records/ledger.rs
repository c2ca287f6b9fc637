//! What was spent, by day, user and model: pure. A line of `usage.jsonl` says it of one key; the last line of a key wins.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::civil::{Date, Weekday};
use serde::{Deserialize, Serialize};

use super::money::Dollars;

/// A user or a model; names are many times the same.
type Name = u32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    date: Date,
    user: Name,
    model: Name,
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
pub struct UsageLine {
    pub version: u32,
    pub date: Date,
    pub user_id: String,
    pub model: String,
    #[serde(flatten)]
    pub totals: Totals,
    /// How many interactions of the day were counted when this was written, whosever they are.
    pub seq: u64,
}

impl UsageLine {
    pub const VERSION: u32 = 1;
}

/// By what a report is grouped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum GroupBy {
    #[default]
    Day,
    /// From Monday on
    Week,
    Month,
    Model,
    User,
}

impl GroupBy {
    pub const WORDS: [&str; 5] = ["day", "week", "month", "model", "user"];
}

impl std::str::FromStr for GroupBy {
    type Err = &'static str;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "day" => Ok(Self::Day),
            "week" => Ok(Self::Week),
            "month" => Ok(Self::Month),
            "model" => Ok(Self::Model),
            "user" => Ok(Self::User),
            _ => Err("must be day, week, month, model or user"),
        }
    }
}

/// What a report is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asked {
    pub user_id: Option<String>,
    /// The first day and the last, both in it.
    pub start: Option<Date>,
    pub end: Option<Date>,
    pub group_by: GroupBy,
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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    pub total: Totals,
    pub entries: Vec<Entry>,
}

/// All that is known to have been spent.
#[derive(Debug, Default)]
pub struct Ledger {
    names: Vec<String>,
    by_name: HashMap<String, Name>,
    totals: BTreeMap<Key, Totals>,
    /// Interactions counted, by day.
    counted: BTreeMap<Date, u64>,
    /// What no line of `usage.jsonl` says yet.
    unwritten: BTreeSet<Key>,
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

    fn key(&mut self, date: Date, user: &str, model: &str) -> Key {
        Key { date, user: self.name(user), model: self.name(model) }
    }

    fn known(&self, name: Name) -> &str {
        &self.names[name as usize]
    }

    /// A dispatch has ended.
    pub fn count(&mut self, date: Date, user: &str, model: &str, one: &Totals) {
        let key = self.key(date, user, model);
        self.totals.entry(key).or_default().add(one);
        *self.counted.entry(date).or_default() += one.dispatches;
        self.unwritten.insert(key);
    }

    /// What a line of `usage.jsonl` says; lines come in their order.
    pub fn settle(&mut self, line: &UsageLine) {
        let key = self.key(line.date, &line.user_id, &line.model);
        self.totals.insert(key, line.totals);
        let counted = self.counted.entry(line.date).or_default();
        *counted = line.seq.max(*counted);
        self.unwritten.remove(&key);
    }

    /// A day is what its interactions say, whatever was known of it before.
    pub fn recount<'a>(&mut self, date: Date, all: impl Iterator<Item = (&'a str, &'a str, Totals)>) {
        let mut found: BTreeMap<Key, Totals> = BTreeMap::new();
        let mut counted = 0;
        for (user, model, one) in all {
            let key = self.key(date, user, model);
            found.entry(key).or_default().add(&one);
            counted += one.dispatches;
        }
        for key in self.of_day(date) {
            // A key that nobody counts any more says so, for its lines are still there.
            found.entry(key).or_default();
        }
        self.counted.insert(date, counted);
        for (key, totals) in found {
            if self.totals.insert(key, totals) != Some(totals) {
                self.unwritten.insert(key);
            }
        }
    }

    /// All of a day.
    pub fn day(&self, date: Date) -> Totals {
        let mut sum = Totals::default();
        self.range(Some(date), Some(date)).for_each(|(_, totals)| sum.add(totals));
        sum
    }

    fn of_day(&self, date: Date) -> Vec<Key> {
        self.range(Some(date), Some(date)).map(|(key, _)| *key).collect()
    }

    fn range(&self, start: Option<Date>, end: Option<Date>) -> impl Iterator<Item = (&Key, &Totals)> {
        let from = Key { date: start.unwrap_or(Date::MIN), user: 0, model: 0 };
        let to = Key { date: end.unwrap_or(Date::MAX), user: Name::MAX, model: Name::MAX };
        // The other way round there is nothing, and a range of it would panic.
        (from <= to).then(|| self.totals.range(from..=to)).into_iter().flatten()
    }

    /// Days of which `usage.jsonl` lacks something.
    pub fn unwritten_days(&self) -> BTreeSet<Date> {
        self.unwritten.iter().map(|key| key.date).collect()
    }

    /// The lines that `usage.jsonl` lacks. One that is written is told to [`Ledger::settle`].
    pub fn lines(&self) -> Vec<UsageLine> {
        let line = |key: &Key| UsageLine {
            version: UsageLine::VERSION,
            date: key.date,
            user_id: self.known(key.user).to_owned(),
            model: self.known(key.model).to_owned(),
            totals: self.totals.get(key).copied().unwrap_or_default(),
            seq: self.counted.get(&key.date).copied().unwrap_or_default(),
        };
        self.unwritten.iter().map(line).collect()
    }

    /// What a user spent from one day to another.
    pub fn spent(&self, user: &str, start: Date, end: Date) -> Dollars {
        let Some(user) = self.by_name.get(user) else { return Dollars::ZERO };
        let of_user = self.range(Some(start), Some(end)).filter(|(key, _)| key.user == *user);
        of_user.map(|(_, totals)| totals.cost).sum()
    }

    /// Who spent something on or after this day.
    pub fn users_since(&self, start: Date) -> BTreeSet<&str> {
        let users = self.range(Some(start), None).filter(|(_, totals)| totals.dispatches > 0);
        users.map(|(key, _)| self.known(key.user)).collect()
    }

    pub fn report(&self, asked: &Asked) -> Report {
        let wanted = match &asked.user_id {
            Some(user) => match self.by_name.get(user) {
                Some(name) => Some(*name),
                None => return Report::default(),
            },
            None => None,
        };
        let mut total = Totals::default();
        let mut groups: BTreeMap<(Date, Name), (Date, Totals)> = BTreeMap::new();
        for (key, totals) in self.range(asked.start, asked.end) {
            if totals.dispatches == 0 || wanted.is_some_and(|user| user != key.user) {
                continue;
            }
            total.add(totals);
            let group = match asked.group_by {
                GroupBy::Day => (key.date, 0),
                GroupBy::Week => (monday(key.date), 0),
                GroupBy::Month => (key.date.first_of_month(), 0),
                GroupBy::Model => (Date::MIN, key.model),
                GroupBy::User => (Date::MIN, key.user),
            };
            // Days come in their order: the first of a group is its first.
            groups.entry(group).or_insert_with(|| (key.date, Totals::default())).1.add(totals);
        }
        let entries = groups.into_iter().map(|((date, name), (first, totals))| match asked.group_by {
            GroupBy::Model => {
                Entry { date: first, model: Some(self.known(name).to_owned()), user_id: None, totals }
            }
            GroupBy::User => {
                Entry { date: first, model: None, user_id: Some(self.known(name).to_owned()), totals }
            }
            _ => Entry { date, model: None, user_id: None, totals },
        });
        let mut entries: Vec<Entry> = entries.collect();
        entries.sort_by(|a, b| (&a.model, &a.user_id, a.date).cmp(&(&b.model, &b.user_id, b.date)));
        Report { total, entries }
    }
}

fn monday(date: Date) -> Date {
    let back = date.weekday().since(Weekday::Monday);
    date.checked_sub(jiff::Span::new().days(back)).unwrap_or(date)
}

#[cfg(test)]
mod tests;

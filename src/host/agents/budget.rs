//! What users may spend: set aside before a dispatch starts, counted when it has ended.
//!
//! Invariant: what is looked at and what is changed of a user's spending is one step, whoever else asks at the time.

use std::sync::{Arc, PoisonError};

use jiff::Timestamp;
use jiff::civil::Date;
use serde_json::{Value, json};

use super::kernel::Kernel;
use super::owner_config::Settings;
use crate::clock::rfc3339_ms;
use crate::host::records::entry::Interaction;
use crate::host::records::limits::{Period, Spent, is_warning, may_start};
use crate::host::records::money::Dollars;
use crate::http::problem::{Code, Problem};

/// So many users are named where a limit is armed.
const MOST_NAMED: usize = 5;

/// What is set aside for a dispatch, until this is dropped.
pub struct Reservation {
    kernel: Arc<Kernel>,
    user: String,
    amount: Dollars,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reserved = self.kernel.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(all) = reserved.get_mut(&self.user) {
            *all = all.saturating_sub(self.amount);
            if *all == Dollars::ZERO {
                reserved.remove(&self.user);
            }
        }
    }
}

/// A user's limit is near.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    pub period: Period,
    pub limit: Dollars,
    pub spent: Dollars,
}

impl Warning {
    pub fn shown(&self) -> Value {
        json!({ "period": self.period.word(), "limit": self.limit, "spent": self.spent })
    }
}

/// Why nothing can be set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reached {
    pub period: Period,
    pub limit: Dollars,
    pub spent: Spent,
    pub resets_at: Timestamp,
}

impl Reached {
    /// What runs or waits may cost less than is set aside for it: then there may be room.
    pub fn may_pass(&self) -> bool {
        self.spent.in_period(self.period) < self.limit
    }

    pub fn problem(&self, now: Timestamp) -> Problem {
        let seconds = self.resets_at.as_second().saturating_sub(now.as_second()).max(0);
        Problem::new(Code::CostLimitReached, self.period.reached())
            .retry_after(u64::try_from(seconds).unwrap_or_default() + 1)
            .with("period", self.period.word().into())
            .with("limit", json!(self.limit))
            .with("spent", json!(self.spent.in_period(self.period)))
            .with("reserved", json!(self.spent.reserved))
            .with("resetsAt", rfc3339_ms(self.resets_at).into())
    }
}

impl Kernel {
    /// What a user has spent in the periods of this time, and what is set aside.
    ///
    /// # Errors
    /// While the records are read.
    pub fn spent(&self, user: &str, settings: &Settings, now: Timestamp) -> Result<Spent, Problem> {
        let reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let reserved = reserved.get(user).copied().unwrap_or_default();
        self.spent_beside(user, settings, now, reserved)
    }

    fn spent_beside(
        &self,
        user: &str,
        settings: &Settings,
        now: Timestamp,
        reserved: Dollars,
    ) -> Result<Spent, Problem> {
        let book = self.book()?;
        let today = settings.calendar.day(now);
        let since = |period| first_day(period, today);
        Ok(Spent {
            today: book.spent(user, since(Period::Daily), today),
            this_month: book.spent(user, since(Period::Monthly), today),
            reserved,
        })
    }

    /// Sets aside what one more dispatch of this user's may cost; nothing for a model that is free of charge.
    ///
    /// # Errors
    /// While the records are read; inside, the limit that is reached.
    pub fn reserve(
        self: &Arc<Self>,
        user: &str,
        settings: &Settings,
        is_free: bool,
    ) -> Result<Result<Reservation, Reached>, Problem> {
        self.reserve_at(Timestamp::now(), user, settings, is_free)
    }

    fn reserve_at(
        self: &Arc<Self>,
        now: Timestamp,
        user: &str,
        settings: &Settings,
        is_free: bool,
    ) -> Result<Result<Reservation, Reached>, Problem> {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let aside = reserved.get(user).copied().unwrap_or_default();
        let spent = self.spent_beside(user, settings, now, aside)?;
        let amount = if is_free { Dollars::ZERO } else { settings.limits.reservation };
        if !is_free && let Err(period) = may_start(settings.limits, &spent) {
            let resets_at = match period {
                Period::Daily => settings.calendar.next_day(now),
                Period::Monthly => settings.calendar.next_month(now),
            };
            return Ok(Err(Reached { period, limit: settings.limits.of(period), spent, resets_at }));
        }
        if amount > Dollars::ZERO {
            *reserved.entry(user.to_owned()).or_default() += amount;
        }
        Ok(Ok(Reservation { kernel: Arc::clone(self), user: user.to_owned(), amount }))
    }

    /// Sets the same aside for one that was accepted before, whatever is spent by now.
    pub fn reserve_again(self: &Arc<Self>, user: &str, settings: &Settings, is_free: bool) -> Reservation {
        let amount = if is_free { Dollars::ZERO } else { settings.limits.reservation };
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if amount > Dollars::ZERO {
            *reserved.entry(user.to_owned()).or_default() += amount;
        }
        Reservation { kernel: Arc::clone(self), user: user.to_owned(), amount }
    }

    /// A dispatch has ended: it is recorded and counts. The limits that it brought its user near to; `None` where its record
    /// found no room, so that it counts in this process alone.
    pub fn record(&self, one: &Interaction) -> Option<Vec<Warning>> {
        let settings = self.settings();
        let _alone = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(book) = self.book() else {
            tracing::error!(id = one.id, "a dispatch ended before the records were read");
            return None;
        };
        let user = &one.sender_id;
        let before = self.spent_beside(user, &settings, one.timestamp, Dollars::ZERO).unwrap_or_default();
        let recorded = book.record(settings.calendar.day(one.timestamp), one);
        if let Err(error) = recorded {
            tracing::warn!(id = one.id, %error, "an interaction had no room");
        }
        let now = self.spent_beside(user, &settings, one.timestamp, Dollars::ZERO).unwrap_or_default();
        let near = |period: &Period| {
            let limit = settings.limits.of(*period);
            is_warning(limit, before.in_period(*period), now.in_period(*period))
        };
        let warnings = Period::ALL.into_iter().filter(near).map(|period| Warning {
            period,
            limit: settings.limits.of(period),
            spent: now.in_period(period),
        });
        let warnings = warnings.inspect(|warning| self.warn(user, warning)).collect();
        recorded.is_ok().then_some(warnings)
    }

    fn warn(&self, user: &str, warning: &Warning) {
        let Warning { period, limit, spent } = warning;
        let word = period.word();
        tracing::warn!(user, %limit, %spent, "four fifths of the {word} cost limit are spent");
        self.note(&format!("{user} has spent {spent} of the {word} cost limit of {limit}"));
    }

    /// Of a limit that is armed: what its period has already.
    pub(super) fn already(&self, settings: &Settings, period: Period) -> String {
        let Ok(book) = self.book() else {
            return "what was spent in its period already counts".to_owned();
        };
        let today = settings.calendar.day(Timestamp::now());
        let since = first_day(period, today);
        let spent = |user: String| (book.spent(&user, since, today), user);
        let mut spent: Vec<(Dollars, String)> = book.users_since(since).into_iter().map(spent).collect();
        spent.sort_by(|a, b| b.cmp(a));
        let named: Vec<String> =
            spent.iter().take(MOST_NAMED).map(|(dollars, user)| format!("{dollars} by {user}")).collect();
        match (named.is_empty(), spent.len().saturating_sub(MOST_NAMED)) {
            (true, _) => "nothing is spent in its period yet".to_owned(),
            (false, 0) => format!("what was spent in its period already counts: {}", named.join(", ")),
            (false, more) => {
                let named = named.join(", ");
                format!("what was spent in its period already counts: {named}, and by {more} more")
            }
        }
    }
}

/// The first day of a period that this day is in.
fn first_day(period: Period, today: Date) -> Date {
    match period {
        Period::Daily => today,
        Period::Monthly => today.first_of_month(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::records::entry::Status;
    use crate::host::system::layout::Layout;

    fn spent(kernel: &Kernel, at: &str, cents: u64) {
        let one = Interaction {
            version: Interaction::VERSION,
            id: at.to_owned(),
            timestamp: at.parse().unwrap(),
            sender_id: "ada".to_owned(),
            conversation_id: "c".to_owned(),
            model: "m".to_owned(),
            agent_name: "a".to_owned(),
            tokens_in: 0,
            tokens_out: 0,
            cost: Dollars::from_nanos(cents * 10_000_000),
            duration_ms: 0,
            tools: Vec::new(),
            status: Status::Success,
            error: None,
            batch: false,
            batch_id: None,
        };
        kernel.record(&one).unwrap();
    }

    /// Whether one more may start at a time; else when the limit begins anew.
    fn asked(kernel: &Arc<Kernel>, at: &str) -> Result<(), String> {
        let settings = kernel.settings();
        match kernel.reserve_at(at.parse().unwrap(), "ada", &settings, false).unwrap() {
            Ok(_) => Ok(()),
            Err(reached) => Err(format!("{} {}", reached.period.word(), rfc3339_ms(reached.resets_at))),
        }
    }

    #[test]
    fn limits_begin_anew_with_the_days_and_months_of_the_owners_clock() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        std::fs::create_dir_all(layout.settings().parent().unwrap()).unwrap();
        let limits = r#"{"costLimits": {"daily": 1, "monthly": 5, "timeZone": "America/Santiago"}}"#;
        std::fs::write(layout.settings(), limits).unwrap();
        let kernel = Arc::new(Kernel::new(&layout).unwrap());
        assert!(kernel.open());
        // At home it is the 5th of September, 23:30; the clock goes from midnight to one, so that the next day has 23 hours.
        spent(&kernel, "2026-09-06T03:30:00.000Z", 100);
        let midnight = "daily 2026-09-06T04:00:00.000Z".to_owned();
        assert_eq!(asked(&kernel, "2026-09-06T03:59:59.999Z"), Err(midnight));
        assert_eq!(asked(&kernel, "2026-09-06T04:00:00.000Z"), Ok(()));
        // The day ends at 03:00 by then.
        spent(&kernel, "2026-09-07T02:59:59.000Z", 100);
        assert_eq!(
            asked(&kernel, "2026-09-07T02:59:59.999Z"),
            Err("daily 2026-09-07T03:00:00.000Z".to_owned())
        );
        assert_eq!(asked(&kernel, "2026-09-07T03:00:00.000Z"), Ok(()));
        // The month, which lasts longer, is what is told; its end is the owner's, too.
        spent(&kernel, "2026-10-01T02:30:00.000Z", 300);
        let end = "monthly 2026-10-01T03:00:00.000Z".to_owned();
        assert_eq!(asked(&kernel, "2026-10-01T02:59:59.999Z"), Err(end));
        assert_eq!(asked(&kernel, "2026-10-01T03:00:00.000Z"), Ok(()));
        kernel.close();
    }
}

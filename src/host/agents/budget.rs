//! Per-user budgets: reserves an amount before a dispatch starts and records the cost when it ends.
//!
//! Invariant: a user's budget is checked and updated atomically, even under concurrent requests.

use std::sync::{Arc, PoisonError};

use jiff::Timestamp;
use jiff::civil::Date;
use serde_json::{Value, json};

use super::kernel::Kernel;
use super::owner_config::OwnerSettings;
use crate::records::entry::Interaction;
use crate::records::limits::{Period, Spending, check_limits, crosses_warning_threshold};
use crate::records::money::Dollars;
use svc_base::clock::rfc3339_ms;
use svc_http::problem::{Code, Problem};

/// `Retry-After` when only reservations block a dispatch: they're released as in-flight dispatches end.
const RESERVED_RETRY_SECONDS: u64 = 10;
/// Maximum number of users listed in the changed-limit message.
const MAX_LISTED_USERS: usize = 5;

/// An amount reserved for a dispatch, released on drop.
pub struct Reservation {
    kernel: Arc<Kernel>,
    user: String,
    amount: Dollars,
}

impl Reservation {
    pub fn amount(&self) -> Dollars {
        self.amount
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reserved = self.kernel.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(total) = reserved.get_mut(&self.user) {
            *total = total.saturating_sub(self.amount);
            if *total == Dollars::ZERO {
                reserved.remove(&self.user);
            }
        }
    }
}

/// A warning that a user is close to a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitWarning {
    pub period: Period,
    pub limit: Dollars,
    pub spent: Dollars,
}

impl LimitWarning {
    pub fn to_json(&self) -> Value {
        json!({ "period": self.period.as_str(), "limit": self.limit, "spent": self.spent })
    }
}

/// The limit that blocked a reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitReached {
    pub period: Period,
    pub limit: Dollars,
    pub spent: Spending,
    pub resets_at: Timestamp,
}

impl LimitReached {
    /// Whether a retry may succeed within the period: in-flight dispatches may cost less than reserved.
    pub fn can_retry_in_period(&self) -> bool {
        self.spent.in_period(self.period) < self.limit
    }

    pub fn problem(&self, now: Timestamp) -> Problem {
        let until_reset = self.resets_at.as_second().saturating_sub(now.as_second());
        let until_reset = u64::try_from(until_reset).unwrap_or_default() + 1;
        let can_retry = self.can_retry_in_period();
        Problem::new(Code::CostLimitReached, self.period.reached_message())
            .retry_after(if can_retry { until_reset.min(RESERVED_RETRY_SECONDS) } else { until_reset })
            .with("period", self.period.as_str().into())
            .with("limit", json!(self.limit))
            .with("spent", json!(self.spent.in_period(self.period)))
            .with("reserved", json!(self.spent.reserved))
            .with("resetsAt", rfc3339_ms(self.resets_at).into())
    }
}

impl Kernel {
    /// A user's spending in the current periods, and the reserved amount.
    ///
    /// # Errors
    /// The records are still being read.
    pub fn spent(&self, user: &str, settings: &OwnerSettings, now: Timestamp) -> Result<Spending, Problem> {
        let reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let reserved = reserved.get(user).copied().unwrap_or_default();
        self.spent_with_reserved(user, settings, now, reserved)
    }

    fn spent_with_reserved(
        &self,
        user: &str,
        settings: &OwnerSettings,
        now: Timestamp,
        reserved: Dollars,
    ) -> Result<Spending, Problem> {
        let store = self.usage_store()?;
        let today = settings.calendar.day(now);
        let since = |period| first_day(period, today);
        Ok(Spending {
            today: store.spent(user, since(Period::Daily), today),
            this_month: store.spent(user, since(Period::Monthly), today),
            reserved,
        })
    }

    /// Reserves the configured amount for another dispatch by this user. Applies to models without a price as well,
    /// since a different model may end up running.
    ///
    /// # Errors
    /// The records are still being read. The inner error is the limit reached.
    pub fn reserve(
        self: &Arc<Self>,
        user: &str,
        settings: &OwnerSettings,
    ) -> Result<Result<Reservation, LimitReached>, Problem> {
        self.reserve_at(Timestamp::now(), user, settings)
    }

    fn reserve_at(
        self: &Arc<Self>,
        now: Timestamp,
        user: &str,
        settings: &OwnerSettings,
    ) -> Result<Result<Reservation, LimitReached>, Problem> {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let already_reserved = reserved.get(user).copied().unwrap_or_default();
        let spent = self.spent_with_reserved(user, settings, now, already_reserved)?;
        let amount = settings.limits.reservation;
        if let Err(period) = check_limits(settings.limits, &spent) {
            let resets_at = match period {
                Period::Daily => settings.calendar.start_of_next_day(now),
                Period::Monthly => settings.calendar.start_of_next_month(now),
            };
            return Ok(Err(LimitReached {
                period,
                limit: settings.limits.for_period(period),
                spent,
                resets_at,
            }));
        }
        if amount > Dollars::ZERO {
            *reserved.entry(user.to_owned()).or_default() += amount;
        }
        Ok(Ok(Reservation { kernel: Arc::clone(self), user: user.to_owned(), amount }))
    }

    /// Reserves the configured amount for a dispatch accepted before a restart, ignoring the limits.
    pub fn restore_reservation(self: &Arc<Self>, user: &str, settings: &OwnerSettings) -> Reservation {
        let amount = settings.limits.reservation;
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if amount > Dollars::ZERO {
            *reserved.entry(user.to_owned()).or_default() += amount;
        }
        Reservation { kernel: Arc::clone(self), user: user.to_owned(), amount }
    }

    /// Records an ended dispatch, then logs and returns a warning for each limit whose warning threshold it crossed.
    ///
    /// Returns `None` if the dispatch wasn't recorded: either the records haven't been read yet, or its record was
    /// dropped (in which case its cost only counts within this process).
    pub fn record(&self, interaction: &Interaction) -> Option<Vec<LimitWarning>> {
        let settings = self.settings();
        let _guard = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(store) = self.usage_store() else {
            tracing::error!(id = interaction.id, "dispatch ended before the records were read");
            return None;
        };
        let user = &interaction.sender_id;
        let spent = || {
            self.spent_with_reserved(user, &settings, interaction.timestamp, Dollars::ZERO)
                .unwrap_or_default()
        };
        let before = spent();
        let recorded = store.record(settings.calendar.day(interaction.timestamp), interaction);
        if let Err(error) = recorded {
            tracing::warn!(id = interaction.id, %error, "interaction record dropped");
        }
        let after = spent();
        let crosses_threshold = |period: &Period| {
            let limit = settings.limits.for_period(*period);
            crosses_warning_threshold(limit, before.in_period(*period), after.in_period(*period))
        };
        let warnings = Period::ALL.into_iter().filter(crosses_threshold).map(|period| LimitWarning {
            period,
            limit: settings.limits.for_period(period),
            spent: after.in_period(period),
        });
        let warnings = warnings.inspect(|warning| self.warn(user, warning)).collect();
        recorded.is_ok().then_some(warnings)
    }

    fn warn(&self, user: &str, warning: &LimitWarning) {
        let LimitWarning { period, limit, spent } = warning;
        let period = period.as_str();
        tracing::warn!(user, %limit, %spent, "at least 80% of the {period} cost limit has been spent");
        self.note(&format!("{user} has spent {spent} of the {period} cost limit of {limit}"));
    }

    /// Describes spending that already counts toward a changed limit.
    pub(super) fn describe_spending(&self, settings: &OwnerSettings, period: Period) -> String {
        let Ok(store) = self.usage_store() else {
            return "spending so far in the current period counts toward it".to_owned();
        };
        let today = settings.calendar.day(Timestamp::now());
        let since = first_day(period, today);
        let spent = |user: String| (store.spent(&user, since, today), user);
        let mut spent: Vec<(Dollars, String)> = store.users_since(since).into_iter().map(spent).collect();
        spent.sort_by(|a, b| b.cmp(a));
        let listed: Vec<String> = spent
            .iter()
            .take(MAX_LISTED_USERS)
            .map(|(dollars, user)| format!("{dollars} by {user}"))
            .collect();
        match (listed.is_empty(), spent.len().saturating_sub(MAX_LISTED_USERS)) {
            (true, _) => "nothing has been spent in the current period".to_owned(),
            (false, 0) => format!("spent so far in the current period: {}", listed.join(", ")),
            (false, unlisted) => {
                let (listed, users) = (listed.join(", "), if unlisted == 1 { "user" } else { "users" });
                format!("spent so far in the current period: {listed}, and more by {unlisted} other {users}")
            }
        }
    }
}

/// First day of the period containing `today`.
fn first_day(period: Period, today: Date) -> Date {
    match period {
        Period::Daily => today,
        Period::Monthly => today.first_of_month(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::entry::ResultStatus;
    use crate::system::layout::Layout;

    fn record_cost(kernel: &Kernel, at: &str, cents: u64) {
        let interaction = Interaction {
            version: Interaction::FORMAT_VERSION,
            id: at.to_owned(),
            timestamp: at.parse().unwrap(),
            accepted_at: None,
            started_at: None,
            sender_id: "ada".to_owned(),
            conversation_id: "c".to_owned(),
            model: "m".to_owned(),
            agent_name: "a".to_owned(),
            tokens_in: 0,
            tokens_out: 0,
            cost: Dollars::from_nanos(cents * 10_000_000),
            cost_estimated: false,
            duration_ms: 0,
            tools: Vec::new(),
            status: ResultStatus::Success,
            error: None,
            batch: false,
            batch_id: None,
            batch_size: None,
            fingerprint: None,
        };
        kernel.record(&interaction).unwrap();
    }

    /// Tries to reserve at the given time. The error is the period whose limit was reached, and when that limit resets.
    fn try_reserve(kernel: &Arc<Kernel>, at: &str) -> Result<(), String> {
        let settings = kernel.settings();
        match kernel.reserve_at(at.parse().unwrap(), "ada", &settings).unwrap() {
            Ok(_) => Ok(()),
            Err(reached) => Err(format!("{} {}", reached.period.as_str(), rfc3339_ms(reached.resets_at))),
        }
    }

    #[test]
    fn retry_after_is_short_if_only_reservations_block() {
        let now: Timestamp = "2026-09-06T03:00:00.000Z".parse().unwrap();
        let retry_after = |today: u64, resets_at: &str| {
            let (limit, today) = (Dollars::from_nanos(100), Dollars::from_nanos(today));
            let spent = Spending { today, this_month: today, reserved: limit };
            let reached =
                LimitReached { period: Period::Daily, limit, spent, resets_at: resets_at.parse().unwrap() };
            reached.problem(now).retry_after_seconds
        };
        assert_eq!(retry_after(100, "2026-09-06T04:00:00.000Z"), Some(3601));
        assert_eq!(retry_after(99, "2026-09-06T04:00:00.000Z"), Some(RESERVED_RETRY_SECONDS));
        assert_eq!(retry_after(99, "2026-09-06T03:00:00.000Z"), Some(1));
    }

    #[test]
    fn limits_reset_in_the_owners_time_zone() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        std::fs::create_dir_all(layout.settings().parent().unwrap()).unwrap();
        let limits = r#"{"costLimits": {"daily": 1, "monthly": 5, "timeZone": "America/Santiago"}}"#;
        std::fs::write(layout.settings(), limits).unwrap();
        let kernel = Arc::new(Kernel::new(&layout).unwrap());
        assert!(kernel.open_usage_store());
        // Local time is 23:30 on September 5. The clock jumps from midnight to 1:00, so the next day is 23 hours long.
        record_cost(&kernel, "2026-09-06T03:30:00.000Z", 100);
        let midnight = "daily 2026-09-06T04:00:00.000Z".to_owned();
        assert_eq!(try_reserve(&kernel, "2026-09-06T03:59:59.999Z"), Err(midnight));
        assert_eq!(try_reserve(&kernel, "2026-09-06T04:00:00.000Z"), Ok(()));
        // After the clock change, the day ends at 03:00 UTC.
        record_cost(&kernel, "2026-09-07T02:59:59.000Z", 100);
        assert_eq!(
            try_reserve(&kernel, "2026-09-07T02:59:59.999Z"),
            Err("daily 2026-09-07T03:00:00.000Z".to_owned())
        );
        assert_eq!(try_reserve(&kernel, "2026-09-07T03:00:00.000Z"), Ok(()));
        // Both limits are reached; the monthly one is reported. Months end in the owner's time zone, too.
        record_cost(&kernel, "2026-10-01T02:30:00.000Z", 300);
        let end = "monthly 2026-10-01T03:00:00.000Z".to_owned();
        assert_eq!(try_reserve(&kernel, "2026-10-01T02:59:59.999Z"), Err(end));
        assert_eq!(try_reserve(&kernel, "2026-10-01T03:00:00.000Z"), Ok(()));
        kernel.close();
    }
}

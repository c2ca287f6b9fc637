//! Cost limits: whether a dispatch may start, and when somebody is to be warned. Pure.
//!
//! A dispatch starts while what its user has spent, and what is set aside for that user's running dispatches, is less than
//! the limit; then something is set aside for it, too. So a limit is passed by one dispatch's reservation at most, and by what
//! dispatches cost beyond theirs.

use serde::Serialize;

use super::money::Dollars;

/// `costLimits` of `config.json`; 0 is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub daily: Dollars,
    pub monthly: Dollars,
    /// What is set aside for a dispatch while it runs.
    pub reservation: Dollars,
}

impl Limits {
    /// A dispatch of a coding agent seldom costs more.
    pub const DEFAULT_RESERVATION: Dollars = Dollars::from_nanos(500_000_000);

    pub fn of(self, period: Period) -> Dollars {
        match period {
            Period::Daily => self.daily,
            Period::Monthly => self.monthly,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { daily: Dollars::ZERO, monthly: Dollars::ZERO, reservation: Self::DEFAULT_RESERVATION }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Period {
    Daily,
    Monthly,
}

impl Period {
    pub const ALL: [Self; 2] = [Self::Daily, Self::Monthly];

    pub fn word(self) -> &'static str {
        match self {
            Self::Daily => "daily",
            Self::Monthly => "monthly",
        }
    }

    /// The specification's words.
    pub fn reached(self) -> &'static str {
        match self {
            Self::Daily => "Daily cost limit reached.",
            Self::Monthly => "Monthly cost limit reached.",
        }
    }
}

/// What one user has spent in the periods of now, and what is set aside for the dispatches that run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    pub today: Dollars,
    pub this_month: Dollars,
    pub reserved: Dollars,
}

impl Spent {
    pub fn in_period(&self, period: Period) -> Dollars {
        match period {
            Period::Daily => self.today,
            Period::Monthly => self.this_month,
        }
    }
}

/// Whether one more dispatch may start.
///
/// # Errors
/// The period whose limit is reached; of both, the month, which lasts longer.
pub fn may_start(limits: Limits, spent: &Spent) -> Result<(), Period> {
    let is_reached = |period: &Period| {
        let limit = limits.of(*period);
        limit > Dollars::ZERO && spent.in_period(*period) + spent.reserved >= limit
    };
    match Period::ALL.into_iter().rev().find(is_reached) {
        Some(period) => Err(period),
        None => Ok(()),
    }
}

/// Whether spending has come to four fifths of a limit: from less before to that or more now.
pub fn is_warning(limit: Dollars, before: Dollars, now: Dollars) -> bool {
    let line = limit.scaled(4, 5);
    limit > Dollars::ZERO && before < line && now >= line
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dollars(cents: u64) -> Dollars {
        Dollars::from_nanos(cents * 10_000_000)
    }

    fn limits(daily: u64, monthly: u64) -> Limits {
        Limits { daily: dollars(daily), monthly: dollars(monthly), reservation: dollars(50) }
    }

    #[test]
    fn nothing_is_a_limit_where_it_is_zero() {
        let spent = Spent { today: dollars(1 << 40), this_month: dollars(1 << 40), reserved: dollars(1) };
        assert_eq!(may_start(limits(0, 0), &spent), Ok(()));
        assert_eq!(may_start(limits(1, 0), &spent), Err(Period::Daily));
        assert_eq!(may_start(limits(0, 1), &spent), Err(Period::Monthly));
        assert_eq!(may_start(limits(1, 1), &spent), Err(Period::Monthly));
    }

    #[test]
    fn what_is_set_aside_counts() {
        let spent = |today, reserved| Spent {
            today: dollars(today),
            reserved: dollars(reserved),
            ..Spent::default()
        };
        assert_eq!(may_start(limits(500, 0), &spent(449, 50)), Ok(()));
        assert_eq!(may_start(limits(500, 0), &spent(450, 50)), Err(Period::Daily));
    }

    #[test]
    fn a_warning_comes_once() {
        let limit = dollars(1000);
        assert!(is_warning(limit, dollars(799), dollars(800)));
        assert!(is_warning(limit, dollars(0), dollars(2000)));
        assert!(!is_warning(limit, dollars(800), dollars(900)));
        assert!(!is_warning(limit, dollars(1), dollars(799)));
        assert!(!is_warning(Dollars::ZERO, dollars(1), dollars(799)));
    }

    proptest! {
        /// Whatever starts and ends in whatever order: dispatches that cost no more than was set aside pass the limit by less
        /// than one reservation.
        #[test]
        fn a_limit_is_passed_by_a_reservation_at_most(costs in prop::collection::vec((0_u64..=50, any::<bool>()), 0..200)) {
            let limits = limits(500, 0);
            let mut spent = Spent::default();
            let mut running: Vec<Dollars> = Vec::new();
            for (cost, ends) in costs {
                if may_start(limits, &spent).is_ok() {
                    running.push(dollars(cost));
                    spent.reserved += limits.reservation;
                }
                if ends && let Some(cost) = running.pop() {
                    spent.today += cost;
                    spent.reserved = spent.reserved.saturating_sub(limits.reservation);
                }
            }
            let all = spent.today + running.iter().copied().sum();
            prop_assert!(all < limits.daily + limits.reservation, "{:?}", all);
        }
    }
}

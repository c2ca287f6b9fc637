//! Cost limits: decides whether a dispatch may start and when to warn. Performs no I/O.
//!
//! A dispatch may start while the user's spending plus reservations is below the limit, and then gets a reservation of
//! its own. This bounds the overshoot to one reservation, plus any amounts by which dispatches exceed theirs.

use serde::{Deserialize, Serialize};

use super::money::Dollars;

/// `costLimits` from `config.json`; 0 means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub daily: Dollars,
    pub monthly: Dollars,
    /// Amount reserved for each dispatch before it starts.
    pub reservation: Dollars,
}

impl Limits {
    /// $0.50. Few dispatches to coding agents cost more.
    pub const DEFAULT_RESERVATION: Dollars = Dollars::from_nanos(500_000_000);

    pub fn for_period(self, period: Period) -> Dollars {
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Period {
    Daily,
    Monthly,
}

impl Period {
    pub const ALL: [Self; 2] = [Self::Daily, Self::Monthly];

    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns the message required by the specification.
    pub fn reached_message(self) -> &'static str {
        match self {
            Self::Daily => "Daily cost limit reached.",
            Self::Monthly => "Monthly cost limit reached.",
        }
    }
}

/// A user's spending in the current periods, and the amount reserved for queued and running dispatches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spending {
    pub today: Dollars,
    pub this_month: Dollars,
    pub reserved: Dollars,
}

impl Spending {
    pub fn in_period(&self, period: Period) -> Dollars {
        match period {
            Period::Daily => self.today,
            Period::Monthly => self.this_month,
        }
    }
}

/// Checks whether another dispatch may start.
///
/// # Errors
/// The period whose limit has been reached. If both have, [`Period::Monthly`], which ends later.
pub fn check_limits(limits: Limits, spent: &Spending) -> Result<(), Period> {
    let is_reached = |period: &Period| {
        let limit = limits.for_period(*period);
        limit > Dollars::ZERO && spent.in_period(*period) + spent.reserved >= limit
    };
    match Period::ALL.into_iter().rev().find(is_reached) {
        Some(period) => Err(period),
        None => Ok(()),
    }
}

/// Returns whether spending reached 80% of a limit between `before` and `after`.
pub fn crosses_warning_threshold(limit: Dollars, before: Dollars, after: Dollars) -> bool {
    let threshold = limit.scaled(4, 5);
    limit > Dollars::ZERO && before < threshold && after >= threshold
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
    fn zero_means_no_limit() {
        let spent = Spending { today: dollars(1 << 40), this_month: dollars(1 << 40), reserved: dollars(1) };
        assert_eq!(check_limits(limits(0, 0), &spent), Ok(()));
        assert_eq!(check_limits(limits(1, 0), &spent), Err(Period::Daily));
        assert_eq!(check_limits(limits(0, 1), &spent), Err(Period::Monthly));
        assert_eq!(check_limits(limits(1, 1), &spent), Err(Period::Monthly));
    }

    #[test]
    fn reservations_count_toward_the_limit() {
        let spent = |today, reserved| Spending {
            today: dollars(today),
            reserved: dollars(reserved),
            ..Spending::default()
        };
        assert_eq!(check_limits(limits(500, 0), &spent(449, 50)), Ok(()));
        assert_eq!(check_limits(limits(500, 0), &spent(450, 50)), Err(Period::Daily));
    }

    #[test]
    fn warning_is_issued_once() {
        let limit = dollars(1000);
        assert!(crosses_warning_threshold(limit, dollars(799), dollars(800)));
        assert!(crosses_warning_threshold(limit, dollars(0), dollars(2000)));
        assert!(!crosses_warning_threshold(limit, dollars(800), dollars(900)));
        assert!(!crosses_warning_threshold(limit, dollars(1), dollars(799)));
        assert!(!crosses_warning_threshold(Dollars::ZERO, dollars(1), dollars(799)));
    }

    proptest! {
        /// However starts and ends are interleaved, dispatches within their reservation exceed the limit by less than
        /// one reservation.
        #[test]
        fn limit_is_exceeded_by_one_reservation_at_most(costs in prop::collection::vec((0_u64..=50, any::<bool>()), 0..200)) {
            let limits = limits(500, 0);
            let mut spent = Spending::default();
            let mut running: Vec<Dollars> = Vec::new();
            for (cost, should_end) in costs {
                if check_limits(limits, &spent).is_ok() {
                    running.push(dollars(cost));
                    spent.reserved += limits.reservation;
                }
                if should_end && let Some(cost) = running.pop() {
                    spent.today += cost;
                    spent.reserved = spent.reserved.saturating_sub(limits.reservation);
                }
            }
            let total = spent.today + running.iter().copied().sum();
            prop_assert!(total < limits.daily + limits.reservation, "{:?}", total);
        }
    }
}

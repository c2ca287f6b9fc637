//! Dollar amounts in billionths, so that sums are exact regardless of order.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

const NANOS_PER_DOLLAR: f64 = 1e9;
/// Fits in 64 bits as billionths; real costs are far lower.
const MAX_DOLLARS: f64 = 1e9;

/// A non-negative amount, serialized as a number of dollars.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dollars(u64);

/// Error for an invalid amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a number of dollars from 0 to 1000000000")]
pub struct InvalidAmount;

impl Dollars {
    pub const ZERO: Self = Self(0);

    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// Converts from dollars, rounding to the nearest billionth.
    ///
    /// # Errors
    /// [`InvalidAmount`] if `dollars` is negative, not finite, or above the maximum.
    pub fn from_f64(dollars: f64) -> Result<Self, InvalidAmount> {
        if !(0.0..=MAX_DOLLARS).contains(&dollars) {
            return Err(InvalidAmount);
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the range is checked above"
        )]
        Ok(Self((dollars * NANOS_PER_DOLLAR).round() as u64))
    }

    /// Returns the amount in dollars, exact to 15 digits.
    pub fn as_f64(self) -> f64 {
        self.0 as f64 / NANOS_PER_DOLLAR
    }

    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Returns `self` × `numerator` / `denominator`, rounded to the nearest billionth.
    pub fn scaled(self, numerator: u64, denominator: u64) -> Self {
        let product = u128::from(self.0) * u128::from(numerator) + u128::from(denominator / 2);
        Self(u64::try_from(product / u128::from(denominator)).unwrap_or(u64::MAX))
    }
}

impl Add for Dollars {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Dollars {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Dollars {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Dollars {
    /// Formats the amount as `$12.30`, with more digits if necessary.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, nanos) = (self.0 / 1_000_000_000, self.0 % 1_000_000_000);
        let digits = format!("{nanos:09}");
        let digits = digits.trim_end_matches('0');
        write!(f, "${whole}.{digits:0<2}")
    }
}

impl fmt::Debug for Dollars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Dollars {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(1_000_000_000) {
            return out.serialize_u64(self.0 / 1_000_000_000);
        }
        out.serialize_f64(self.as_f64())
    }
}

impl<'de> Deserialize<'de> for Dollars {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        Self::from_f64(f64::deserialize(input)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn display_shows_at_least_cents() {
        for (nanos, expected) in
            [(0, "$0.00"), (12_300_000_000, "$12.30"), (1_234, "$0.000001234"), (500_000_000, "$0.50")]
        {
            assert_eq!(Dollars::from_nanos(nanos).to_string(), expected);
        }
    }

    #[test]
    fn invalid_amounts_are_rejected() {
        for invalid in [-0.01, f64::NAN, f64::INFINITY, 1e10] {
            assert_eq!(Dollars::from_f64(invalid), Err(InvalidAmount), "{invalid}");
        }
        for text in ["-1", "\"1\"", "null", "1e300"] {
            assert!(serde_json::from_str::<Dollars>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn scaled_rounds_to_nearest_and_saturates() {
        // 1,234 tokens at $3 per million.
        assert_eq!(
            Dollars::from_nanos(3_000_000_000).scaled(1234, 1_000_000),
            Dollars::from_nanos(3_702_000)
        );
        assert_eq!(Dollars::from_nanos(5).scaled(1, 2), Dollars::from_nanos(3));
        assert_eq!(Dollars::from_nanos(4).scaled(1, 3), Dollars::from_nanos(1));
        assert_eq!(Dollars::from_nanos(u64::MAX).scaled(u64::MAX, 1), Dollars::from_nanos(u64::MAX));
    }

    proptest! {
        #[test]
        fn amounts_round_trip_through_json(nanos in 0_u64..1_000_000_000_000_000) {
            let amount = Dollars::from_nanos(nanos);
            let text = serde_json::to_string(&amount).unwrap();
            prop_assert_eq!(serde_json::from_str::<Dollars>(&text).unwrap(), amount, "{}", text);
        }
    }
}

//! Wire format for timestamps: RFC 3339, UTC, millisecond precision.

use jiff::{Timestamp, Unit};

/// Formats a time as `2026-11-21T00:36:34.123Z`.
pub fn rfc3339_ms(at: Timestamp) -> String {
    format!("{at:.3}")
}

/// Returns the current time, truncated to milliseconds so it equals its stored form.
pub fn now_ms() -> Timestamp {
    let now = Timestamp::now();
    now.round(jiff::TimestampRound::new().smallest(Unit::Millisecond).mode(jiff::RoundMode::Trunc))
        .unwrap_or(now)
}

/// serde adapter for a [`Timestamp`] field in the wire format.
pub mod wire {
    use jiff::Timestamp;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(at: &Timestamp, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(&super::rfc3339_ms(*at))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Timestamp, D::Error> {
        Timestamp::deserialize(input)
    }
}

/// serde adapter for an optional [`Timestamp`] field in the wire format.
pub mod wire_option {
    use jiff::Timestamp;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(at: &Option<Timestamp>, out: S) -> Result<S::Ok, S::Error> {
        match at {
            Some(at) => out.serialize_str(&super::rfc3339_ms(*at)),
            None => out.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Timestamp>, D::Error> {
        Option::<Timestamp>::deserialize(input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc3339_ms_has_exactly_three_decimals() {
        let at: Timestamp = "2026-01-02T03:04:05.6789Z".parse().unwrap();
        assert_eq!(rfc3339_ms(at), "2026-01-02T03:04:05.678Z");
        let whole: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        assert_eq!(rfc3339_ms(whole), "2026-01-02T03:04:05.000Z");
    }
}

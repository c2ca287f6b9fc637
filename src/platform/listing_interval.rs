//! The interval between two listings of all of the provider's servers.

use std::time::Duration;

/// Returns the minimum interval between two listings of all servers. Calls for further pages use at most a quarter of
/// the provider's rate limit, so that operations do not wait for them.
pub fn listing_interval(servers: u64) -> Duration {
    const SERVERS_PER_CALL: u64 = 50;
    const SECONDS_PER_CALL: u64 = 4;
    let further_calls = servers.saturating_sub(1) / SERVERS_PER_CALL;
    Duration::from_secs(further_calls * SECONDS_PER_CALL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_interval_leaves_most_of_rate_limit_to_operations() {
        for (servers, seconds) in [(0, 0), (1, 0), (50, 0), (51, 4), (500, 36), (5000, 396)] {
            assert_eq!(listing_interval(servers), Duration::from_secs(seconds), "{servers}");
        }
    }
}

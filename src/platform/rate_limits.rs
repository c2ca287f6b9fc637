//! Limits, for the control API, how often each client address may have bearer tokens verified, and how many requests
//! each operator and each host may send.
//!
//! A token that this process has accepted recently does not count against its address, so that an attacker in the same
//! network cannot exhaust an operator's or a host's limit. The token is still verified on every request.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::operators::Operator;
use crate::tokens;
use crate::vars;
use svc_base::config::Env;
use svc_http::address_limit::client_network;
use svc_http::networks::Networks;
use svc_http::problem::{Code, Problem};
use svc_http::rate_limit::RateLimit;
use svc_machine::id::MachineId;

const HOST_BURST_SECONDS: u32 = 20;
/// Minimum average interval between a host's requests for credentials. Each costs calls to STS, and a host needs new
/// credentials only a few times an hour.
const CREDENTIALS_INTERVAL: Duration = Duration::from_secs(10);
const CREDENTIALS_BURST: u32 = 20;
const BURST_SECONDS: u32 = 10;
/// Minimum average interval between reported rejections of host tokens: short enough to keep the alarm raised, and long
/// enough to limit the log's volume.
const REJECTION_REPORT_INTERVAL: Duration = Duration::from_secs(5);
const REJECTION_REPORT_BURST: u32 = 20;
const ACCEPTED_TOKEN_TTL: Duration = Duration::from_secs(600);
/// Maximum number of remembered tokens. If all of them are recent, they are forgotten, and each counts against the
/// limit once more.
const MAX_ACCEPTED_TOKENS: usize = 32_768;

/// Settings for [`ApiRateLimits`].
#[derive(Debug, Clone)]
pub struct RateLimitConfig {
    /// Requests per operator per second; 0 means no limit.
    pub operator_rate: u32,
    /// Requests per host per second; 0 means no limit, including for credentials.
    pub host_rate: u32,
    /// Tokens to verify per client address per second, except recently accepted ones; 0 means no limit.
    pub unverified_token_rate: u32,
    /// Proxies in front of the API. They are exempt from the per-address limit, because many clients share their
    /// addresses.
    pub trusted_proxies: Networks,
}

impl RateLimitConfig {
    /// Reads `PLATFORM_OPERATOR_REQUESTS_PER_SECOND`, `PLATFORM_HOST_REQUESTS_PER_SECOND`,
    /// `PLATFORM_ADDRESS_CHECKS_PER_SECOND` and `PLATFORM_TRUSTED_PROXIES`.
    pub fn read(env: &mut Env) -> Self {
        Self {
            operator_rate: env.or_default(&vars::PLATFORM_OPERATOR_REQUESTS_PER_SECOND),
            host_rate: env.or_default(&vars::PLATFORM_HOST_REQUESTS_PER_SECOND),
            unverified_token_rate: env.or_default(&vars::PLATFORM_ADDRESS_CHECKS_PER_SECOND),
            trusted_proxies: env.optional(&vars::PLATFORM_TRUSTED_PROXIES).unwrap_or_default(),
        }
    }
}

/// One process's rate limits.
pub struct ApiRateLimits {
    operators: RateLimit<String>,
    hosts: RateLimit<MachineId>,
    credentials: RateLimit<MachineId>,
    addresses: RateLimit<IpAddr>,
    rejection_reports: RateLimit<()>,
    trusted_proxies: Networks,
    /// The hashes of accepted tokens, and when each stops counting as recent.
    accepted: Mutex<HashMap<Vec<u8>, Instant>>,
}

impl ApiRateLimits {
    pub fn new(config: &RateLimitConfig) -> Self {
        let credentials = match config.host_rate {
            0 => RateLimit::unlimited(),
            _ => RateLimit::every(CREDENTIALS_INTERVAL, CREDENTIALS_BURST),
        };
        Self {
            hosts: RateLimit::new(config.host_rate, HOST_BURST_SECONDS),
            credentials,
            operators: RateLimit::new(config.operator_rate, BURST_SECONDS),
            addresses: RateLimit::new(config.unverified_token_rate, BURST_SECONDS),
            rejection_reports: RateLimit::every(REJECTION_REPORT_INTERVAL, REJECTION_REPORT_BURST),
            trusted_proxies: config.trusted_proxies.clone(),
            accepted: Mutex::default(),
        }
    }

    /// Counts a token verification against the limit for `client`, the address of the connected peer. Unknown
    /// addresses, trusted proxies and recently accepted tokens are exempt.
    ///
    /// # Errors
    /// `rate_limited` if the limit is exceeded.
    pub fn admit_unverified_token(&self, client: Option<IpAddr>, token: &str) -> Result<(), Problem> {
        let Some(address) = client.filter(|address| !self.trusted_proxies.contains(*address)) else {
            return Ok(());
        };
        let hash = tokens::hash(token);
        if self.lock_accepted().get(&hash).is_some_and(|until| *until > Instant::now()) {
            return Ok(());
        }
        self.addresses.check(&client_network(address)).map_err(|wait| {
            rate_limited("This address is sending too many tokens that were not accepted recently.", wait)
        })
    }

    /// Remembers a token that was found valid.
    pub fn record_accepted(&self, token: &str) {
        let mut accepted = self.lock_accepted();
        let now = Instant::now();
        if accepted.len() >= MAX_ACCEPTED_TOKENS {
            accepted.retain(|_, until| *until > now);
            if accepted.len() >= MAX_ACCEPTED_TOKENS {
                accepted.clear();
            }
        }
        accepted.insert(tokens::hash(token), now + ACCEPTED_TOKEN_TTL);
    }

    /// Forgets a token that was found invalid, for example because it has been revoked.
    pub fn forget_accepted(&self, token: &str) {
        self.lock_accepted().remove(&tokens::hash(token));
    }

    /// Counts a request from a verified operator.
    ///
    /// # Errors
    /// `rate_limited` if the limit is exceeded.
    pub fn admit_operator(&self, operator: &Operator) -> Result<(), Problem> {
        let actor = operator.actor();
        self.operators
            .check(&actor.to_string())
            .map_err(|wait| rate_limited(&format!("Operator {actor} is sending too many requests."), wait))
    }

    /// Counts a request from a verified host.
    ///
    /// # Errors
    /// `rate_limited` if the limit is exceeded.
    pub fn admit_host(&self, machine: MachineId) -> Result<(), Problem> {
        self.hosts
            .check(&machine)
            .map_err(|wait| rate_limited("This host is sending too many requests.", wait))
    }

    /// Counts a host's request for object store credentials.
    ///
    /// # Errors
    /// `rate_limited` if the limit is exceeded.
    pub fn admit_credentials(&self, machine: MachineId) -> Result<(), Problem> {
        let cause = "This host is requesting credentials too often.";
        self.credentials.check(&machine).map_err(|wait| rate_limited(cause, wait))
    }

    /// Counts a report of a rejected host token, and returns whether it may be sent.
    pub fn admit_rejection_report(&self) -> bool {
        self.rejection_reports.check(&()).is_ok()
    }

    fn lock_accepted(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Instant>> {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn rate_limited(cause: &str, wait: Duration) -> Problem {
    let detail = format!("{cause} Retry after the time in Retry-After.");
    Problem::new(Code::RateLimited, detail).retry_after(wait.as_secs() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)));

    fn limits(trusted_proxies: &str) -> ApiRateLimits {
        let trusted_proxies = trusted_proxies.parse().unwrap();
        ApiRateLimits::new(&RateLimitConfig {
            operator_rate: 1,
            host_rate: 1,
            unverified_token_rate: 1,
            trusted_proxies,
        })
    }

    /// Exhausts `CLIENT`'s limit with guesses.
    fn exhaust_address_limit(limits: &ApiRateLimits) {
        let refused = (0..20)
            .filter(|number| limits.admit_unverified_token(CLIENT, &format!("guess {number}")).is_err());
        assert!(refused.count() >= 9);
    }

    #[test]
    fn guesses_do_not_limit_accepted_token() {
        let limits = limits("10.0.0.0/8");
        limits.admit_unverified_token(CLIENT, "accepted").unwrap();
        limits.record_accepted("accepted");
        exhaust_address_limit(&limits);
        limits.admit_unverified_token(CLIENT, "accepted").unwrap();
        assert!(limits.admit_unverified_token(CLIENT, "other").is_err());
    }

    #[test]
    fn rejected_token_counts_against_address_limit() {
        let limits = limits("10.0.0.0/8");
        limits.record_accepted("revoked");
        exhaust_address_limit(&limits);
        limits.admit_unverified_token(CLIENT, "revoked").unwrap();
        limits.forget_accepted("revoked");
        assert!(limits.admit_unverified_token(CLIENT, "revoked").is_err());
    }

    #[test]
    fn credentials_limit_does_not_affect_other_requests() {
        let limits = limits("10.0.0.0/8");
        let (machine, other) = (MachineId::new(), MachineId::new());
        for _ in 0..CREDENTIALS_BURST {
            limits.admit_credentials(machine).unwrap();
        }
        let refused = limits.admit_credentials(machine).unwrap_err();
        assert_eq!(refused.code, Code::RateLimited);
        limits.admit_credentials(other).unwrap();
        limits.admit_host(machine).unwrap();
    }

    #[test]
    fn trusted_proxy_has_no_per_address_limit() {
        let limits = limits("192.0.2.0/24");
        for number in 0..100 {
            limits.admit_unverified_token(CLIENT, &format!("guess {number}")).unwrap();
        }
    }

    #[test]
    fn number_of_accepted_tokens_is_bounded() {
        let limits = limits("10.0.0.0/8");
        for number in 0..2 * MAX_ACCEPTED_TOKENS {
            limits.record_accepted(&number.to_string());
        }
        assert!(limits.lock_accepted().len() <= MAX_ACCEPTED_TOKENS);
    }
}

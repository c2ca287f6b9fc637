//! Lifetimes of the tokens that the platform signs for browsers, and of sign-out records.

use std::time::Duration;

use svc_http::proof::LEEWAY_SECONDS;

/// Lifetime of a session and its cookie.
pub(crate) const SESSION_SECONDS: u64 = 12 * 3600;

/// Lifetime of an app token.
pub(crate) const APP_TOKEN_SECONDS: i64 = 3600;

/// Age after which no router accepts an app token: its lifetime, plus the leeway for clock skew.
pub(crate) const MAX_APP_TOKEN_LIFETIME: Duration =
    Duration::from_secs((APP_TOKEN_SECONDS + LEEWAY_SECONDS) as u64);

/// Maximum lifetime of app tokens and session cookies, which are signed with the same key.
pub const MAX_SIGNED_LIFETIME: Duration = Duration::from_secs(SESSION_SECONDS);
const _: () = assert!(APP_TOKEN_SECONDS as u64 <= SESSION_SECONDS, "an app token must not outlive its key");

/// How long a sign-out is stored: longer than any app token that it revokes would be accepted.
pub const SIGN_OUT_TTL: Duration = MAX_APP_TOKEN_LIFETIME.saturating_mul(2);

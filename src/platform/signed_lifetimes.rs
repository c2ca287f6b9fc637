//! Lifetimes of what the platform signs for browsers, and of the records of a sign-out.

use std::time::Duration;

use svc_http::proof::LEEWAY_SECONDS;

/// Lifetime of a session and its cookie.
pub const SESSION_SECONDS: u64 = 12 * 3600;

/// Lifetime of an app token.
pub const APP_TOKEN_SECONDS: i64 = 3600;

/// Time until no router accepts an app token, with the leeway between clocks.
pub const MAX_APP_TOKEN_LIFETIME: Duration = Duration::from_secs((APP_TOKEN_SECONDS + LEEWAY_SECONDS) as u64);

/// Maximum lifetime of an app token or a session cookie, which the same key signs.
pub const MAX_SIGNED_LIFETIME: Duration = Duration::from_secs(SESSION_SECONDS);

/// How long a sign-out is stored: longer than any token that it ends.
pub const SIGN_OUT_TTL: Duration = MAX_APP_TOKEN_LIFETIME.saturating_mul(2);

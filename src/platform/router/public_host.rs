//! The two public hosts, and the differences between them.

use svc_http::proof::Route;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PublicHost {
    /// `APP_HOST`, which serves the shell and the gateway.
    App,
    /// `CODE_HOST`, which serves code-server through the gateway.
    Code,
}

impl PublicHost {
    /// Returns the value stored in `sessions.host`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::App => "app",
            Self::Code => "code",
        }
    }

    pub fn parse_stored(text: &str) -> Option<Self> {
        [Self::App, Self::Code].into_iter().find(|host| host.as_str() == text)
    }

    pub fn session_cookie_name(self) -> &'static str {
        match self {
            Self::App => "svc_session",
            Self::Code => "svc_code_session",
        }
    }

    pub fn route(self) -> Route {
        match self {
            Self::App => Route::Shell,
            Self::Code => Route::Code,
        }
    }
}

//! The two public names, and what differs between them.

use crate::http::proof::Route;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Door {
    /// `APP_HOST`: shell and gateway.
    App,
    /// `CODE_HOST`: code-server through the gateway.
    Code,
}

impl Door {
    /// As stored in `sessions.host`.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::App => "app",
            Self::Code => "code",
        }
    }

    pub(super) fn from_stored(text: &str) -> Option<Self> {
        [Self::App, Self::Code].into_iter().find(|door| door.as_str() == text)
    }

    pub(super) fn session_cookie(self) -> &'static str {
        match self {
            Self::App => "svc_session",
            Self::Code => "svc_code_session",
        }
    }

    pub(super) fn route(self) -> Route {
        match self {
            Self::App => Route::Shell,
            Self::Code => Route::Code,
        }
    }
}

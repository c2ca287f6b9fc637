//! The router's settings.

use std::time::Duration;

use url::Url;

use crate::public_host::PublicHost;
use svc_http::jwt::TrustedIssuer;
use svc_http::networks::Networks;

#[derive(Debug, Clone)]
pub struct RouterConfig {
    pub app_host: HostAndPort,
    pub code_host: HostAndPort,
    /// The scheme that browsers use; `None` means the listener's. If it is set, a proxy is in front of the router.
    pub public_scheme: Option<&'static str>,
    pub idp: TrustedIssuer,
    pub sign_in: Url,
    /// Redirect target for users without a running machine; only for legacy deployments.
    pub legacy_fallback: Option<Url>,
    pub poll_interval: Duration,
    /// Maximum age of the routes that are served while the database is unreachable.
    pub max_staleness: Duration,
    /// Maximum number of requests that a process forwards per user per second; 0 means no limit.
    pub user_rate: u32,
    /// Maximum number of uncached credentials that are verified per second for each client address (IPv4) or network
    /// (IPv6); 0 means no limit.
    pub check_rate: u32,
    /// Load balancers in front of the router. They are exempt from the per-address limits, because all clients behind a
    /// load balancer share its address.
    pub trusted_proxies: Networks,
}

impl RouterConfig {
    /// Returns the public host of a request with this authority and scheme.
    pub fn find_host(&self, authority: &str, scheme: &str) -> Option<PublicHost> {
        if self.app_host.matches(authority, scheme) {
            Some(PublicHost::App)
        } else {
            self.code_host.matches(authority, scheme).then_some(PublicHost::Code)
        }
    }

    pub fn address(&self, host: PublicHost) -> &HostAndPort {
        match host {
            PublicHost::App => &self.app_host,
            PublicHost::Code => &self.code_host,
        }
    }
}

/// A host name, with a port only if requests must match it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostAndPort {
    name: String,
    port: Option<u16>,
}

impl HostAndPort {
    /// Returns the host name without the port, in lower case.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the port that requests must use; `None` if every port matches.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// Whether a request's authority names this host. Browsers omit the scheme's default port.
    fn matches(&self, authority: &str, scheme: &str) -> bool {
        let (name, port) = split_port(authority);
        let port = port.unwrap_or(if scheme == "https" { 443 } else { 80 });
        name.eq_ignore_ascii_case(&self.name) && self.port.is_none_or(|own| port == own)
    }

    /// Returns the authority for a URL to this host, for a client whose own request had the authority `requested`.
    pub fn authority(&self, requested: &str) -> String {
        match self.port.or_else(|| split_port(requested).1) {
            Some(port) => format!("{}:{port}", self.name),
            None => self.name.clone(),
        }
    }
}

fn split_port(authority: &str) -> (&str, Option<u16>) {
    match authority.rsplit_once(':') {
        Some((name, port)) => match port.parse() {
            Ok(port) => (name, Some(port)),
            Err(_) => (authority, None),
        },
        None => (authority, None),
    }
}

impl std::str::FromStr for HostAndPort {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, port) = split_port(text);
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        if name.is_empty() || !name.chars().all(is_allowed) {
            return Err("must be a host name, optionally followed by the :port that requests must use");
        }
        Ok(Self { name: name.to_ascii_lowercase(), port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(app_host: &str, code_host: &str) -> RouterConfig {
        let url = |text: &str| Url::parse(text).unwrap();
        RouterConfig {
            app_host: app_host.parse().unwrap(),
            code_host: code_host.parse().unwrap(),
            public_scheme: None,
            idp: TrustedIssuer {
                issuer: "https://idp.example/".to_owned(),
                audiences: Vec::new(),
                jwks_url: url("https://idp.example/.well-known/jwks.json"),
            },
            sign_in: url("https://idp.example/sign-in"),
            legacy_fallback: None,
            poll_interval: Duration::from_millis(500),
            max_staleness: Duration::from_secs(1800),
            user_rate: 0,
            check_rate: 0,
            trusted_proxies: Networks::default(),
        }
    }

    #[test]
    fn find_host_ignores_case_and_unconfigured_port() {
        let config = config("App.example", "code.example:8443");
        let find_host = |authority: &str| config.find_host(authority, "https");
        assert_eq!(find_host("app.EXAMPLE"), Some(PublicHost::App));
        assert_eq!(find_host("app.example:9"), Some(PublicHost::App));
        assert_eq!(find_host("code.example:8443"), Some(PublicHost::Code));
        for other in ["code.example", "app.example.evil", "xapp.example", "", ":1", "app.example@code"] {
            assert_eq!(find_host(other), None, "{other}");
        }
        assert_eq!(config.app_host.authority("code.example:8443"), "app.example:8443");
        assert_eq!(config.app_host.authority("code.example"), "app.example");
    }

    #[test]
    fn find_host_matches_omitted_default_port() {
        let config = config("app.example:443", "code.example:80");
        for (authority, scheme, expected) in [
            ("app.example", "https", Some(PublicHost::App)),
            ("app.example:443", "https", Some(PublicHost::App)),
            ("app.example", "http", None),
            ("app.example:80", "https", None),
            ("code.example", "http", Some(PublicHost::Code)),
            ("code.example", "https", None),
        ] {
            assert_eq!(config.find_host(authority, scheme), expected, "{scheme}://{authority}");
        }
    }
}

//! The router's settings. The invariant: a value that got here is usable as it is.

use std::time::Duration;

use url::Url;

use crate::config::Env;
use crate::http::jwt::Trust;
use crate::http::networks::Networks;
use crate::http::tls::ChainCheck;

use super::door::Door;

/// A change of a machine must be obeyed within a second.
const SLOWEST_POLL_MS: u64 = 500;
/// Safe for as long, because a machine answers only by the key that it registered.
const MAX_STALE_SECONDS: u64 = 1800;
/// A quarter of what one core forwards.
const USER_REQUESTS_PER_SECOND: u32 = 5000;
/// A browser needs one a minute, so that thousands can share an address.
const ADDRESS_CHECKS_PER_SECOND: u32 = 100;

#[derive(Debug, Clone)]
pub struct RouterConfig {
    pub app_host: PublicHost,
    pub code_host: PublicHost,
    /// The scheme that browsers use, where it is not the listener's own.
    pub public_scheme: Option<&'static str>,
    pub idp: Trust,
    pub sign_in: Url,
    /// Where requests go that have no running machine; for old deployments only.
    pub legacy_fallback: Option<Url>,
    pub chain_check: ChainCheck,
    pub poll: Duration,
    /// How long routes are served while the database is unreachable.
    pub max_staleness: Duration,
    /// Of each user, each second; 0 for no limit.
    pub user_rate: u32,
    /// Credentials that this process has not verified before, of each address, each second; 0 for no limit.
    pub check_rate: u32,
    /// Load balancers in front of the router: their connections are not limited by address.
    pub trusted_proxies: Networks,
}

impl RouterConfig {
    /// Reads `APP_HOST`, `CODE_HOST`, `ROUTER_*`, `IDP_*`, `LEGACY_FALLBACK_URL`, `CUSTOMER_VPS_TLS_VERIFY` and
    /// `PLATFORM_ROUTES_POLL_MS`; `None` after a mistake was recorded.
    pub fn read(env: &mut Env) -> Option<Self> {
        let app_host: Option<PublicHost> = env.required("APP_HOST");
        let code_host: Option<PublicHost> = env.required("CODE_HOST");
        if app_host.is_some() && app_host == code_host {
            env.mistake("CODE_HOST", "must be another host than APP_HOST");
        }
        let public_scheme = match env.text("ROUTER_PUBLIC_SCHEME").as_deref() {
            None => None,
            Some("https") => Some("https"),
            Some("http") => Some("http"),
            Some(_) => {
                env.mistake("ROUTER_PUBLIC_SCHEME", "must be https or http");
                None
            }
        };
        let issuer: Option<String> = env.required("IDP_ISSUER");
        let audiences = audiences(env);
        let jwks_url = jwks_url(env, issuer.as_deref());
        let sign_in = web_url(env, "IDP_SIGN_IN_URL");
        if sign_in.is_none() && !env.is_set("IDP_SIGN_IN_URL") {
            env.mistake("IDP_SIGN_IN_URL", "is required and not set");
        }
        let legacy_fallback = web_url(env, "LEGACY_FALLBACK_URL");
        let chain = env.flag("CUSTOMER_VPS_TLS_VERIFY", crate::config::Flag::Off);
        let poll = env.or("PLATFORM_ROUTES_POLL_MS", SLOWEST_POLL_MS).clamp(10, SLOWEST_POLL_MS);
        let max_stale = env.or("ROUTER_MAX_STALE_SECONDS", MAX_STALE_SECONDS).max(1);
        let user_rate = env.or("ROUTER_USER_REQUESTS_PER_SECOND", USER_REQUESTS_PER_SECOND);
        let check_rate = env.or("ROUTER_ADDRESS_CHECKS_PER_SECOND", ADDRESS_CHECKS_PER_SECOND);
        let trusted_proxies = env.or("ROUTER_TRUSTED_PROXIES", Networks::default());
        Some(Self {
            app_host: app_host?,
            code_host: code_host?,
            public_scheme,
            idp: Trust { issuer: issuer?, audiences: audiences?, jwks_url: jwks_url? },
            sign_in: sign_in?,
            legacy_fallback,
            chain_check: if chain.is_on() { ChainCheck::PinAndChain } else { ChainCheck::PinOnly },
            poll: Duration::from_millis(poll),
            max_staleness: Duration::from_secs(max_stale),
            user_rate,
            check_rate,
            trusted_proxies,
        })
    }

    /// Which of the two public names a request was sent to.
    pub(super) fn door(&self, authority: &str) -> Option<Door> {
        if self.app_host.is(authority) {
            Some(Door::App)
        } else {
            self.code_host.is(authority).then_some(Door::Code)
        }
    }

    pub(super) fn host(&self, door: Door) -> &PublicHost {
        match door {
            Door::App => &self.app_host,
            Door::Code => &self.code_host,
        }
    }
}

fn audiences(env: &mut Env) -> Option<Vec<String>> {
    let text: String = env.required("IDP_AUDIENCE")?;
    let all: Vec<String> =
        text.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
    if all.is_empty() {
        env.mistake("IDP_AUDIENCE", "must name at least one audience; several are separated by commas");
    }
    Some(all)
}

fn jwks_url(env: &mut Env, issuer: Option<&str>) -> Option<Url> {
    if env.is_set("IDP_JWKS_URL") {
        return web_url(env, "IDP_JWKS_URL");
    }
    let issuer = issuer?;
    let Ok(url) = Url::parse(&format!("{}/.well-known/jwks.json", issuer.trim_end_matches('/'))) else {
        env.mistake("IDP_JWKS_URL", "is required, because IDP_ISSUER is not a URL");
        return None;
    };
    Some(url)
}

fn web_url(env: &mut Env, name: &str) -> Option<Url> {
    let url: Url = env.optional(name)?;
    if !matches!(url.scheme(), "http" | "https") {
        env.mistake(name, "must be an http or https URL");
        return None;
    }
    Some(url)
}

/// A public host name; with a port only where it is not the scheme's own and must be compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicHost {
    name: String,
    port: Option<u16>,
}

impl PublicHost {
    fn is(&self, authority: &str) -> bool {
        let (name, port) = split(authority);
        name.eq_ignore_ascii_case(&self.name) && self.port.is_none_or(|own| port == Some(own))
    }

    /// The authority of a URL to this host, for a client that reached us at `here`.
    pub(super) fn authority(&self, here: &str) -> String {
        match self.port.or_else(|| split(here).1) {
            Some(port) => format!("{}:{port}", self.name),
            None => self.name.clone(),
        }
    }
}

fn split(authority: &str) -> (&str, Option<u16>) {
    match authority.rsplit_once(':') {
        Some((name, port)) => match port.parse() {
            Ok(port) => (name, Some(port)),
            Err(_) => (authority, None),
        },
        None => (authority, None),
    }
}

impl std::str::FromStr for PublicHost {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, port) = split(text);
        let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        if name.is_empty() || !name.chars().all(fits) {
            return Err("must be a host name, with :port only where it must be compared");
        }
        Ok(Self { name: name.to_ascii_lowercase(), port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<RouterConfig, Vec<String>> {
        let mut all = vec![
            ("APP_HOST", "App.example"),
            ("CODE_HOST", "code.example"),
            ("IDP_ISSUER", "https://idp.example/"),
            ("IDP_AUDIENCE", "https://app.example, https://code.example"),
            ("IDP_SIGN_IN_URL", "https://idp.example/sign-in"),
        ];
        for pair in pairs {
            all.retain(|(name, _)| name != &pair.0);
            all.push(*pair);
        }
        let mut env = Env::from_pairs(all.into_iter().filter(|(_, value)| !value.is_empty()));
        let config = RouterConfig::read(&mut env);
        env.finish(config).map_err(|error| error.mistakes)
    }

    #[test]
    fn hosts_are_compared_without_case_and_port_unless_the_port_is_theirs() {
        let config = read(&[("CODE_HOST", "code.example:8443")]).unwrap();
        assert_eq!(config.door("app.EXAMPLE"), Some(Door::App));
        assert_eq!(config.door("app.example:9"), Some(Door::App));
        assert_eq!(config.door("code.example:8443"), Some(Door::Code));
        for other in ["code.example", "app.example.evil", "xapp.example", "", ":1", "app.example@code"] {
            assert_eq!(config.door(other), None, "{other}");
        }
        assert_eq!(config.app_host.authority("code.example:8443"), "app.example:8443");
        assert_eq!(config.app_host.authority("code.example"), "app.example");
        assert_eq!(config.idp.jwks_url.as_str(), "https://idp.example/.well-known/jwks.json");
        assert_eq!(config.idp.audiences.len(), 2);
    }

    #[test]
    fn every_mistake_is_named() {
        let mistakes = read(&[
            ("APP_HOST", "https://app"),
            ("CODE_HOST", ""),
            ("IDP_AUDIENCE", " , "),
            ("IDP_SIGN_IN_URL", "ftp://x"),
            ("ROUTER_PUBLIC_SCHEME", "gopher"),
        ]);
        assert_eq!(mistakes.unwrap_err().len(), 5);
        let same = read(&[("CODE_HOST", "app.example")]).unwrap_err();
        assert!(same[0].starts_with("CODE_HOST"), "{same:?}");
    }
}

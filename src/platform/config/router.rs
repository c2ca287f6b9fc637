//! Reads the router's settings. Invariant: every value is validated.

use std::time::Duration;

use url::Url;

use crate::vars;
use svc_base::config::Env;
use svc_http::jwt::TrustedIssuer;
use svc_router::config::{HostAndPort, RouterConfig};

/// Maximum interval at which routes are refreshed: a change to a machine must take effect within one second.
const MAX_POLL_INTERVAL_MS: u64 = 500;

/// Reads `APP_HOST`, `CODE_HOST`, `IDP_*`, `LEGACY_FALLBACK_URL`, `PLATFORM_ROUTES_POLL_MS`, and `ROUTER_*` except
/// the listener settings. Records errors in `env` and returns `None` if a required value is missing or invalid.
pub fn read(env: &mut Env) -> Option<RouterConfig> {
    let app_host: Option<HostAndPort> = env.required(&vars::APP_HOST);
    let code_host: Option<HostAndPort> = env.required(&vars::CODE_HOST);
    match (&app_host, &code_host) {
        (Some(app), Some(code)) if app == code => {
            env.add_error(&vars::CODE_HOST, "must differ from APP_HOST");
        }
        // Requests to the code host would be served as requests to the app host, which is matched first.
        (Some(app), Some(code)) if app.name() == code.name() && app.port().is_none() => {
            let reason =
                "has the same name as APP_HOST, which matches every port: add a port to APP_HOST, too";
            env.add_error(&vars::CODE_HOST, reason);
        }
        _ => {}
    }
    let public_scheme = match env.text(&vars::ROUTER_PUBLIC_SCHEME).as_deref() {
        None => None,
        Some("https") => Some("https"),
        Some("http") => Some("http"),
        Some(_) => {
            env.add_error(&vars::ROUTER_PUBLIC_SCHEME, "must be https or http");
            None
        }
    };
    let issuer: Option<String> = env.required(&vars::IDP_ISSUER);
    let audiences = read_audiences(env);
    let jwks_url = read_jwks_url(env, issuer.as_deref());
    env.require(&vars::IDP_SIGN_IN_URL);
    let sign_in = env.web_url(&vars::IDP_SIGN_IN_URL);
    let legacy_fallback = env.web_url(&vars::LEGACY_FALLBACK_URL);
    let poll_interval_ms =
        env.or_default::<u64>(&vars::PLATFORM_ROUTES_POLL_MS).clamp(10, MAX_POLL_INTERVAL_MS);
    let max_staleness_seconds = env.or_default::<u64>(&vars::ROUTER_MAX_STALE_SECONDS).max(1);
    let user_rate = env.or_default(&vars::ROUTER_USER_REQUESTS_PER_SECOND);
    let check_rate = env.or_default(&vars::ROUTER_ADDRESS_CHECKS_PER_SECOND);
    let trusted_proxies = env.optional(&vars::ROUTER_TRUSTED_PROXIES).unwrap_or_default();
    Some(RouterConfig {
        app_host: app_host?,
        code_host: code_host?,
        public_scheme,
        idp: TrustedIssuer { issuer: issuer?, audiences: audiences?, jwks_url: jwks_url? },
        sign_in: sign_in?,
        legacy_fallback,
        poll_interval: Duration::from_millis(poll_interval_ms),
        max_staleness: Duration::from_secs(max_staleness_seconds),
        user_rate,
        check_rate,
        trusted_proxies,
    })
}

fn read_audiences(env: &mut Env) -> Option<Vec<String>> {
    let text: String = env.required(&vars::IDP_AUDIENCE)?;
    let audiences: Vec<String> =
        text.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
    if audiences.is_empty() {
        env.add_error(&vars::IDP_AUDIENCE, "must name at least one audience; separate several with commas");
    }
    Some(audiences)
}

fn read_jwks_url(env: &mut Env, issuer: Option<&str>) -> Option<Url> {
    if env.is_set(&vars::IDP_JWKS_URL) {
        return env.web_url(&vars::IDP_JWKS_URL);
    }
    let derived_url = TrustedIssuer::default_jwks_url(issuer?);
    if derived_url.is_none() {
        env.add_error(&vars::IDP_JWKS_URL, "is required, because IDP_ISSUER is not an http or https URL");
    }
    derived_url
}

#[cfg(test)]
mod tests {
    use svc_router::public_host::PublicHost;

    use super::*;

    fn read_pairs(pairs: &[(&str, &str)]) -> Result<RouterConfig, Vec<String>> {
        let mut settings = vec![
            ("APP_HOST", "App.example"),
            ("CODE_HOST", "code.example"),
            ("IDP_ISSUER", "https://idp.example/"),
            ("IDP_AUDIENCE", "https://app.example, https://code.example"),
            ("IDP_SIGN_IN_URL", "https://idp.example/sign-in"),
        ];
        for pair in pairs {
            settings.retain(|(name, _)| name != &pair.0);
            settings.push(*pair);
        }
        let mut env = Env::from_pairs(settings.into_iter().filter(|(_, value)| !value.is_empty()));
        let config = super::read(&mut env);
        env.finish(config).map_err(|error| error.errors)
    }

    #[test]
    fn read_derives_jwks_url_and_splits_audiences() {
        let config = read_pairs(&[]).unwrap();
        assert_eq!(config.idp.jwks_url.as_str(), "https://idp.example/.well-known/jwks.json");
        assert_eq!(config.idp.audiences.len(), 2);
    }

    #[test]
    fn read_requires_jwks_url_if_issuer_is_not_web_url() {
        for issuer in ["idp.example", "idp.example:8443", "urn:idp"] {
            let errors = read_pairs(&[("IDP_ISSUER", issuer)]).unwrap_err();
            assert_eq!(
                errors,
                ["IDP_JWKS_URL: is required, because IDP_ISSUER is not an http or https URL"],
                "{issuer}"
            );
            read_pairs(&[("IDP_ISSUER", issuer), ("IDP_JWKS_URL", "https://idp.example/keys")]).unwrap();
        }
    }

    #[test]
    fn read_reports_every_error() {
        let errors = read_pairs(&[
            ("APP_HOST", "https://app"),
            ("CODE_HOST", ""),
            ("IDP_AUDIENCE", " , "),
            ("IDP_SIGN_IN_URL", "ftp://x"),
            ("ROUTER_PUBLIC_SCHEME", "gopher"),
        ]);
        assert_eq!(errors.unwrap_err().len(), 5);
    }

    #[test]
    fn read_rejects_code_host_that_app_host_matches() {
        for code_host in ["app.example", "app.example:8443"] {
            let errors = read_pairs(&[("CODE_HOST", code_host)]).unwrap_err();
            assert!(errors[0].starts_with("CODE_HOST"), "{errors:?}");
        }
        let ports = [("APP_HOST", "app.example:8443"), ("CODE_HOST", "app.example:9443")];
        let config = read_pairs(&ports).unwrap();
        assert_eq!(config.find_host("app.example:9443", "https"), Some(PublicHost::Code));
    }
}

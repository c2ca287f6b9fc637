//! Checks that the identity provider's keys, which every sign-in needs, can be fetched.

use serde::Deserialize;

use crate::config::PlatformConfig;
use svc_base::diagnosis::Findings;
use svc_base::error_chain::format_chain;
use svc_base::quantity::pluralize;
use svc_http::client::{self, Timeouts};

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<Key>,
}

#[derive(Deserialize)]
struct Key {
    kid: Option<String>,
}

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("identity-provider");
    let url = config.routing.idp.jwks_url.clone();
    let next = "check IDP_JWKS_URL (by default <IDP_ISSUER>/.well-known/jwks.json); without the identity provider's keys, \
                users cannot sign in";
    match fetch_key_set(url.clone()).await {
        Ok(set) if set.keys.iter().any(|key| key.kid.is_some()) => {
            let keys = pluralize(set.keys.len() as u64, "key");
            findings.ok(format!("{} has {keys}", url.host_str().unwrap_or_default()))
        }
        Ok(_) => findings.problem(format!("{url} has no key with an id"), next),
        Err(reason) => {
            findings.problem(format!("cannot fetch the keys of the identity provider: {reason}"), next)
        }
    }
}

async fn fetch_key_set(url: url::Url) -> Result<KeySet, String> {
    let client = client::build(Timeouts::CALL).map_err(|error| format!("{error:#}"))?;
    let response = client.get(url).send().await.map_err(|error| format_chain(&error.without_url()))?;
    if !response.status().is_success() {
        return Err(format!("the identity provider responded with {}", response.status()));
    }
    response.json().await.map_err(|error| format_chain(&error.without_url()))
}

//! Checks that the cloud provider accepts the token and offers the default server type and the configured locations.

use crate::config::PlatformConfig;
use svc_base::diagnosis::Findings;
use svc_base::error_chain::format_chain;
use svc_base::quantity::pluralize;
use svc_http::client::{self, Timeouts};
use svc_provider::Provider;
use svc_provider::hetzner::Hetzner;

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("provider");
    let next = "check PROVIDER_API_TOKEN, PROVIDER_API_URL and the provider's status page";
    let client = match client::build(Timeouts::CALL) {
        Ok(client) => client,
        Err(error) => return findings.problem(format!("{error:#}"), "check SSL_CERT_FILE"),
    };
    let provider = match Hetzner::new(client, config.provider.api_url.clone(), &config.provider.token) {
        Ok(provider) => provider,
        Err(error) => return findings.problem(error.to_string(), next),
    };
    let server_type = &config.provisioning.server_type;
    match provider.get_server_type(server_type).await {
        Ok(Some(_)) => {}
        Ok(None) => {
            let what = format!("the provider does not offer the server type {server_type}");
            return findings.problem(what, "set PROVIDER_SERVER_TYPE to a type that the provider offers");
        }
        Err(error) => return findings.problem(format_chain(&error), next),
    }
    let provisioning = &config.provisioning;
    for location in std::iter::once(&provisioning.location).chain(&provisioning.fallback_locations) {
        match provider.has_location(location).await {
            Ok(true) => {}
            Ok(false) => {
                let next =
                    "set PROVIDER_LOCATION and PROVIDER_FALLBACK_LOCATIONS to locations of this provider";
                return findings.problem(format!("the provider has no location {location}"), next);
            }
            Err(error) => return findings.problem(format_chain(&error), next),
        }
    }
    match provider.list_by_label("svc-installation").await {
        Ok(servers) => {
            let servers = pluralize(servers.len() as u64, "svc server");
            findings.ok(format!("the provider responds, offers {server_type}, and has {servers}"))
        }
        Err(error) => findings.problem(format_chain(&error), next),
    }
}

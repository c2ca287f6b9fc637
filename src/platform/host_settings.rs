//! Settings that new hosts receive in their user-data, and settings for their certificates.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD as B64, URL_SAFE_NO_PAD};
use secrecy::ExposeSecret;
use url::Url;

use crate::vars;
use svc_base::config::Env;
use svc_base::variable::Variable;
use svc_http::networks::Networks;
use svc_machine::id::MachineId;
use svc_machine::name::ImageVersion;
use svc_router::host_domain::HostDomain;
use svc_store::bundle::TrustedKeys;
use svc_store::key::BUNDLE_FILE;
use svc_wire::heartbeat::{AcmeSettings, CertificateSettings, ExternalAccount};

/// Maximum number of egress networks. They are part of user-data, whose size is limited.
pub const MAX_EGRESS_NETWORKS: usize = 32;

/// Settings for new hosts.
pub struct HostSettings {
    pub public_url: Url,
    pub internal_url: Url,
    pub bundle_url: BundleUrl,
    pub https_port: u16,
    /// The parent domain of host names.
    pub domain: Option<HostDomain>,
    /// The authority from which hosts request certificates.
    pub acme: Option<AcmeSettings>,
    /// The `IDP_*` variables, passed to hosts unchanged.
    pub idp: Vec<(&'static str, String)>,
    /// The endpoint at which hosts reach the object store, if it differs from the platform's.
    pub store_endpoint: Option<Url>,
    /// The keys with which hosts verify bundle manifests: raw Ed25519 keys in base64, separated by commas.
    pub bundle_public_keys: Option<String>,
    /// The sequence number of the bundle key set.
    pub bundle_keys_sequence: u32,
    /// Networks from which the platform connects to hosts. If empty, hosts accept connections to :443 from any address.
    pub egress: Networks,
    /// The container image of the hosts' database, if it is not the default.
    pub postgres_image: Option<String>,
}

/// Where hosts download their bundle.
pub enum BundleUrl {
    /// `SVC_HOST_BUNDLE_URL`, the same URL for every version.
    Exact(Url),
    /// The base URL, to which `/system-bundles/VERSION/` and the file name are appended.
    Base(Url),
}

impl BundleUrl {
    pub fn for_version(&self, version: &ImageVersion) -> String {
        match self {
            Self::Exact(url) => url.to_string(),
            Self::Base(base) => {
                format!("{}/system-bundles/{version}/{BUNDLE_FILE}", base.as_str().trim_end_matches('/'))
            }
        }
    }
}

impl HostSettings {
    /// Reads the settings. Records errors in `env`; returns `None` if a required URL is missing or invalid.
    pub fn read(env: &mut Env) -> Option<Self> {
        env.require(&vars::PLATFORM_PUBLIC_URL);
        let public = env.web_url(&vars::PLATFORM_PUBLIC_URL);
        let internal = env.web_url(&vars::PLATFORM_INTERNAL_URL).or_else(|| public.clone());
        let exact = env.web_url(&vars::SVC_HOST_BUNDLE_URL);
        let base = env.web_url(&vars::SVC_HOST_BUNDLE_BASE_URL).or(public.clone());
        let https_port = env.or_default(&vars::CUSTOMER_VPS_HTTPS_PORT);
        let domain = env.optional(&vars::HOST_DOMAIN);
        let acme = read_acme_settings(env);
        let idp = [&vars::IDP_ISSUER, &vars::IDP_AUDIENCE, &vars::IDP_JWKS_URL];
        let idp =
            idp.into_iter().filter_map(|variable| Some((variable.name, read_line(env, variable)?))).collect();
        let bundle_url = exact.map(BundleUrl::Exact).or_else(|| base.map(BundleUrl::Base));
        let store_endpoint = env.web_url(&vars::HOST_OBJECT_STORE_ENDPOINT);
        let bundle_public_keys = read_bundle_public_keys(env);
        let bundle_keys_sequence = env.or_default(&vars::BUNDLE_KEYS_SEQUENCE);
        if bundle_keys_sequence > 0 && !env.is_set(&vars::BUNDLE_PUBLIC_KEYS) {
            env.add_error(&vars::BUNDLE_KEYS_SEQUENCE, "requires BUNDLE_PUBLIC_KEYS, which is not set");
        }
        let egress = read_egress(env);
        let postgres_image = read_postgres_image(env);
        Some(Self {
            public_url: public?,
            internal_url: internal?,
            bundle_url: bundle_url?,
            https_port,
            domain,
            acme,
            idp,
            store_endpoint,
            bundle_public_keys,
            bundle_keys_sequence,
            egress,
            postgres_image,
        })
    }
}

impl HostSettings {
    /// Returns whether a URL has the origin of the platform's public or internal URL.
    pub fn is_platform_url(&self, url: &str) -> bool {
        let url = Url::parse(url).map(|url| url.origin());
        url.is_ok_and(|origin| {
            [&self.public_url, &self.internal_url].iter().any(|platform_url| platform_url.origin() == origin)
        })
    }

    /// Returns the settings for a machine's certificate.
    pub fn certificate_settings(&self, machine: MachineId) -> CertificateSettings {
        let host_name = self.domain.as_ref().map(|domain| domain.host_name(machine));
        CertificateSettings { acme: self.acme.clone().filter(|_| host_name.is_some()), host_name }
    }

    /// Returns [`HostSettings::bundle_public_keys`], parsed for verification; no keys if it is not set.
    pub fn trusted_keys(&self) -> TrustedKeys {
        self.bundle_public_keys.as_deref().and_then(|keys| keys.parse().ok()).unwrap_or_default()
    }
}

/// Reads text that fits on one line of an env file.
fn read_line(env: &mut Env, variable: &Variable) -> Option<String> {
    let text = env.text(variable)?;
    if text.chars().any(char::is_control) {
        env.add_error(variable, "must be one line of text: hosts read it from an env file");
        return None;
    }
    Some(text)
}

/// Reads the settings for the authority that issues host certificates. Without an authority, setting any `ACME_*`
/// variable that depends on it is an error.
fn read_acme_settings(env: &mut Env) -> Option<AcmeSettings> {
    let url = env.web_url(&vars::ACME_DIRECTORY_URL);
    if url.as_ref().is_some_and(|url| url.scheme() != "https") {
        env.add_error(&vars::ACME_DIRECTORY_URL, "must be an https URL");
    }
    if env.is_set(&vars::ACME_DIRECTORY_URL) && !env.is_set(&vars::HOST_DOMAIN) {
        env.add_error(&vars::ACME_DIRECTORY_URL, "requires HOST_DOMAIN, which is not set");
    }
    for variable in [&vars::ACME_CONTACT, &vars::ACME_EAB_KEY_ID, &vars::ACME_EAB_HMAC_KEY] {
        if env.is_set(variable) && !env.is_set(&vars::ACME_DIRECTORY_URL) {
            env.add_error(variable, "requires ACME_DIRECTORY_URL, which is not set");
        }
    }
    let contact = read_line(env, &vars::ACME_CONTACT);
    let address = contact.as_deref().map(|text| text.trim_start_matches("mailto:"));
    if address.is_some_and(|address| !is_email_address(address)) {
        env.add_error(&vars::ACME_CONTACT, "must be one e-mail address");
    }
    let contact = address.map(|address| format!("mailto:{address}"));
    let external = match (read_line(env, &vars::ACME_EAB_KEY_ID), env.secret(&vars::ACME_EAB_HMAC_KEY)) {
        (Some(key_id), Some(hmac_key)) => Some(ExternalAccount { key_id, hmac_key }),
        (None, None) => None,
        _ => {
            env.add_error(&vars::ACME_EAB_KEY_ID, "must be set together with ACME_EAB_HMAC_KEY");
            None
        }
    };
    if let Some(external) = &external {
        let key = external.hmac_key.expose_secret().trim_end_matches('=');
        if !URL_SAFE_NO_PAD.decode(key).is_ok_and(|key| !key.is_empty()) {
            env.add_error(&vars::ACME_EAB_HMAC_KEY, "must be base64url, as the authority issued it");
        }
    }
    Some(AcmeSettings { directory_url: url?.to_string(), contact, external_account: external })
}

/// Returns whether the text is one e-mail address that a `mailto:` URL can contain: no list, and no header fields after
/// a `?`.
fn is_email_address(text: &str) -> bool {
    let Some((local, domain)) = text.split_once('@') else { return false };
    !local.is_empty() && domain.contains('.') && !domain.contains('@') && !text.contains([' ', ',', '?'])
}

/// Reads raw Ed25519 keys in base64, separated by commas.
fn read_bundle_public_keys(env: &mut Env) -> Option<String> {
    let text = env.text(&vars::BUNDLE_PUBLIC_KEYS)?;
    let keys: Vec<&str> = text.split(',').map(str::trim).collect();
    if keys.iter().all(|key| B64.decode(key).is_ok_and(|raw| raw.len() == 32)) {
        return Some(keys.join(","));
    }
    env.add_error(&vars::BUNDLE_PUBLIC_KEYS, "must be base64 of 32 bytes; separate several keys with commas");
    None
}

/// Reads the networks from which the platform connects to hosts. Each invalid entry is a separate error. A value
/// without entries is rejected, because hosts would then admit every address.
fn read_egress(env: &mut Env) -> Networks {
    let Some(text) = env.text(&vars::PLATFORM_EGRESS_CIDRS) else { return Networks::default() };
    let entries: Vec<&str> = text.split(',').map(str::trim).filter(|entry| !entry.is_empty()).collect();
    if entries.is_empty() || entries.len() > MAX_EGRESS_NETWORKS {
        let reason =
            format!("must list 1 to {MAX_EGRESS_NETWORKS} networks; unset it to admit every address");
        env.add_error(&vars::PLATFORM_EGRESS_CIDRS, reason);
        return Networks::default();
    }
    let parsed: Vec<Result<Networks, _>> = entries.iter().map(|entry| entry.parse()).collect();
    let networks: Networks = parsed
        .into_iter()
        .filter_map(|network| {
            network.map_err(|error| env.add_error(&vars::PLATFORM_EGRESS_CIDRS, error)).ok()
        })
        .collect();
    for network in networks.unroutable() {
        let reason = format!(
            "{network} cannot be a source of connections to hosts: list the platform's outgoing addresses"
        );
        env.add_error(&vars::PLATFORM_EGRESS_CIDRS, reason);
    }
    networks
}

/// Reads the name of the database image. Only safe characters are accepted, because the name becomes part of a unit and
/// of a command line on the host.
fn read_postgres_image(env: &mut Env) -> Option<String> {
    let image = env.text(&vars::SVC_POSTGRES_IMAGE)?;
    if image.chars().all(|c| c.is_ascii_alphanumeric() || "./:@_-".contains(c)) && !image.starts_with('-') {
        return Some(image);
    }
    env.add_error(&vars::SVC_POSTGRES_IMAGE, "must be the name of a container image");
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_egress(list: &str) -> Result<Networks, String> {
        let mut env = Env::from_pairs([(vars::PLATFORM_EGRESS_CIDRS.name, list)]);
        let networks = read_egress(&mut env);
        env.finish(Some(networks)).map_err(|error| error.to_string())
    }

    fn read_acme(pairs: &[(&str, &str)]) -> Result<Option<AcmeSettings>, Vec<String>> {
        let mut env = Env::from_pairs(pairs.iter().copied());
        let settings = read_acme_settings(&mut env);
        env.finish(Some(settings)).map_err(|error| error.errors)
    }

    #[test]
    fn acme_settings_report_each_error_without_values() {
        let good = [
            ("HOST_DOMAIN", "hosts.example.com"),
            ("ACME_DIRECTORY_URL", "https://ca.example/dir"),
            ("ACME_CONTACT", "ops@example.com"),
            ("ACME_EAB_KEY_ID", "kid-1"),
            ("ACME_EAB_HMAC_KEY", "bWFj"),
        ];
        let settings = read_acme(&good).unwrap().unwrap();
        assert_eq!(settings.contact.as_deref(), Some("mailto:ops@example.com"));
        assert!(read_acme(&[]).unwrap().is_none());
        for (changed, error) in [
            (("ACME_DIRECTORY_URL", "http://ca.example/dir"), "must be an https URL"),
            (("ACME_CONTACT", "ops"), "must be one e-mail address"),
            (("ACME_CONTACT", "a@example.com,b@example.com"), "must be one e-mail address"),
            (("ACME_CONTACT", "mailto:@example.com"), "must be one e-mail address"),
            (("ACME_CONTACT", "a@b@c.example"), "must be one e-mail address"),
            (("ACME_EAB_HMAC_KEY", "s3cret!"), "must be base64url"),
        ] {
            let pairs: Vec<_> =
                good.iter().map(|pair| if pair.0 == changed.0 { changed } else { *pair }).collect();
            let errors = read_acme(&pairs).unwrap_err().join("; ");
            assert!(errors.contains(error) && !errors.contains("s3cret"), "{changed:?}: {errors}");
        }
        for (missing, error) in [
            ("HOST_DOMAIN", "ACME_DIRECTORY_URL: requires HOST_DOMAIN"),
            ("ACME_DIRECTORY_URL", "ACME_CONTACT: requires ACME_DIRECTORY_URL"),
            ("ACME_EAB_HMAC_KEY", "must be set together with"),
        ] {
            let pairs: Vec<_> = good.iter().filter(|pair| pair.0 != missing).copied().collect();
            let errors = read_acme(&pairs).unwrap_err().join("; ");
            assert!(errors.contains(error), "{missing}: {errors}");
        }
    }

    #[test]
    fn egress_reports_every_error() {
        assert!(!parse_egress("203.0.113.0/24, 2001:db8::/32").unwrap().is_empty());
        let error = parse_egress("gateway,10.0.0.5/8,0.0.0.0/0,::/0,203.0.113.7").unwrap_err();
        for list in ["127.0.0.1", "203.0.113.7,::1", "127.0.0.0/8", "0.0.0.0", "ff02::1"] {
            assert!(
                parse_egress(list).unwrap_err().contains("cannot be a source of connections to hosts"),
                "{list}"
            );
        }
        for part in ["\"gateway\"", "10.0.0.0/8", "0.0.0.0/0 contains every", "::/0 contains every"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let many = vec!["203.0.113.7"; MAX_EGRESS_NETWORKS + 1].join(",");
        for list in [",", " , ", many.as_str()] {
            assert!(parse_egress(list).unwrap_err().contains("1 to 32 networks"), "{list}");
        }
    }
}

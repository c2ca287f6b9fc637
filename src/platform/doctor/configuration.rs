//! Checks the platform's settings on this machine: the settings file, the enabled features, and the certificates.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::config::{PlatformConfig, TlsFiles};
use crate::vars;
use svc_base::accounts::Accounts;
use svc_base::config;
use svc_base::diagnosis::{Finding, Findings};
use svc_http::tls::Identity;

/// The user that the package's unit runs as.
const SERVICE_USER: &str = "svc-platform";
const EXPIRY_WARNING_PERIOD: SignedDuration = SignedDuration::from_hours(14 * 24);

/// Checks the settings file's permissions, and the names of the settings in it.
pub fn check_env_file(file: Option<&Path>) -> Vec<Finding> {
    let findings = Findings::new("env-file");
    let Some(file) = file else { return Vec::new() };
    let path = file.display();
    let meta = match std::fs::metadata(file) {
        Ok(meta) => meta,
        Err(error) => {
            let next = format!(
                "run `install -o root -g {SERVICE_USER} -m 0640 /etc/svc/platform.env.example {path}`, and fill in the file; or \
                 run this command as root"
            );
            return findings.problem(format!("{path}: {error}"), next).into_list();
        }
    };
    let mode = meta.permissions().mode() & 0o7777;
    let next = format!("run `chown root:{SERVICE_USER} {path}; chmod 0640 {path}`");
    let findings = if mode & 0o027 == 0 {
        findings
    } else {
        let what = format!("{path} has mode {mode:04o}, but contains all of the platform's secrets");
        findings.problem(what, next.clone())
    };
    // A machine without this user does not run the package's unit.
    let findings = match Accounts::load(Path::new("/")).credentials(SERVICE_USER) {
        Some(user) if !user.can_read(&meta) => findings.problem(
            format!("the user {SERVICE_USER} cannot read {path}: the service will not start (exit 78)"),
            next,
        ),
        _ => findings,
    };
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let settings = config::parse_env_file(&text).unwrap_or_default();
    let findings =
        settings.iter().filter(|(name, _)| !is_setting(name)).fold(findings, |findings, (name, _)| {
            findings.warning(
                format!("{path} sets {name}, which is not a platform setting and has no effect"),
                "correct its name; docs/reference/configuration.md lists all settings",
            )
        });
    findings.or_ok(format!("{path} has mode {mode:04o}")).into_list()
}

/// Returns whether the platform or one of its libraries reads this variable.
fn is_setting(name: &str) -> bool {
    const LIBRARY_PREFIXES: [&str; 5] = ["AWS_", "RUST_", "TOKIO_", "LC_", "MALLOC_"];
    const SYSTEM_NAMES: [&str; 5] = ["HOME", "LANG", "PATH", "TMPDIR", "TZ"];
    let sections =
        [svc_base::vars::SECTIONS, svc_http::vars::SECTIONS, svc_store::vars::SECTIONS, vars::SECTIONS];
    let mut declared = sections.into_iter().flatten().flat_map(|section| section.variables);
    declared.any(|variable| variable.name == name)
        || LIBRARY_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || SYSTEM_NAMES.contains(&name)
        || name.to_ascii_lowercase().ends_with("_proxy")
}

pub fn check_settings(config: &PlatformConfig) -> Findings {
    let mut findings = Findings::new("configuration");
    if !config.provisioning.enabled.is_on() {
        findings = findings.warning(
            "CUSTOMER_VPS_ENABLED is not true: provisioning is disabled",
            "set CUSTOMER_VPS_ENABLED=true to provision machines",
        );
    }
    if !config.provisioning.billing_enforcement.is_on() {
        findings = findings.warning(
            "BILLING_ENFORCEMENT is off: slots are provisioned without a subscription",
            "unset BILLING_ENFORCEMENT, except in tests",
        );
    }
    let is_exposed_without_tls =
        |listen: &crate::config::ListenerConfig| listen.tls.is_none() && !listen.address.ip().is_loopback();
    if is_exposed_without_tls(&config.api) {
        findings = findings.warning(
            format!(
                "the API listens on {} without TLS: the secret is sent in clear text",
                config.api.address
            ),
            "set PLATFORM_TLS_CERT_FILE and PLATFORM_TLS_KEY_FILE, or listen on loopback behind a proxy with TLS",
        );
    }
    if is_exposed_without_tls(&config.router) {
        findings = findings.warning(
            format!("the router listens on {} without TLS", config.router.address),
            "set ROUTER_TLS_CERT_FILE and ROUTER_TLS_KEY_FILE, or listen on loopback behind a proxy with TLS",
        );
    }
    if config.hosts.acme.is_some() && config.router.tls.is_none() {
        findings = findings.warning(
            "ACME_DIRECTORY_URL is set, but the router does not terminate TLS, so it cannot pass ACME validations through to \
             machines",
            "set ROUTER_TLS_CERT_FILE and ROUTER_TLS_KEY_FILE, or create an A record for each machine: see \
             docs/operating/certificates.md",
        );
    }
    if let Some(reason) = config.shared_site_warning() {
        findings = findings.warning(
            reason,
            "set HOST_DOMAIN to a name below another registrable domain, such as hosts.example.net, unless the shared \
             labels are a public suffix such as co.uk: see docs/operating/certificates.md",
        );
    }
    if let Some(reason) = config.host_port_warning() {
        findings = findings.warning(reason, "unset CUSTOMER_VPS_HTTPS_PORT");
    }
    let admitted = if config.hosts.egress.is_empty() {
        "every address, because PLATFORM_EGRESS_CIDRS is not set".to_owned()
    } else {
        format!("only PLATFORM_EGRESS_CIDRS ({})", config.hosts.egress)
    };
    let version = &config.provisioning.image_version;
    findings.or_ok(format!(
        "the configuration is complete; new machines get {version}, and accept connections to port 443 from {admitted}"
    ))
}

pub fn check_certificates(config: &PlatformConfig) -> Findings {
    let mut findings = Findings::new("tls");
    for (name, listen) in [("PLATFORM", &config.api), ("ROUTER", &config.router)] {
        if let Some(files) = &listen.tls {
            findings = check_certificate(findings, name, files);
        }
    }
    if findings.is_empty() { findings.skipped("no listener has a certificate") } else { findings }
}

fn check_certificate(findings: Findings, name: &str, files: &TlsFiles) -> Findings {
    let next = format!("check {name}_TLS_CERT_FILE and {name}_TLS_KEY_FILE, then restart svc-platform");
    let server_config = Identity::read(&files.cert, &files.key)
        .map_err(anyhow::Error::from)
        .and_then(|identity| identity.server_config());
    if let Err(error) = server_config {
        return findings.problem(format!("{}: {error:#}", files.cert.display()), next);
    }
    let Some(expires_at) = read_expiry(&files.cert) else {
        return findings.problem(format!("{} is not a certificate", files.cert.display()), next);
    };
    let remaining = expires_at.duration_since(Timestamp::now());
    let text = format!("{} expires at {:.0}", files.cert.display(), expires_at);
    if remaining.is_negative() {
        findings.problem(text, "renew the certificate, then restart svc-platform")
    } else if remaining < EXPIRY_WARNING_PERIOD {
        findings.warning(text, "renew the certificate, then restart svc-platform")
    } else {
        findings.ok(text)
    }
}

fn read_expiry(path: &Path) -> Option<Timestamp> {
    let certificate = CertificateDer::pem_file_iter(path).ok()?.next()?.ok()?;
    let (_, parsed) = x509_parser::parse_x509_certificate(&certificate).ok()?;
    Timestamp::from_second(parsed.validity().not_after.timestamp()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_setting_rejects_misspelled_names() {
        for name in
            ["CUSTOMER_VPS_TLS_VERIFY", "OBJECT_STORE_URL", "AWS_REGION", "RUST_LOG", "https_proxy", "TZ"]
        {
            assert!(is_setting(name), "{name}");
        }
        for name in ["CUSTOMER_VPS_TLS_VERFY", "PROVIDER_API_TOKN", "S3_BUCKETS"] {
            assert!(!is_setting(name), "{name}");
        }
    }
}

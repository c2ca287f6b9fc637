//! Reads the settings for verifying hosts' TLS certificates.

use std::collections::HashSet;
use std::time::Duration;

use crate::vars;
use svc_base::config::Env;
use svc_http::tls::ChainVerifier;
use svc_http::vars::SSL_CERT_FILE;
use svc_machine::id::MachineId;
use svc_router::host_domain::HostDomain;
use svc_router::host_trust::{ChainPolicy, HostTrust};

/// Maximum number of machines in `CUSTOMER_VPS_TLS_VERIFY_EXCEPT`.
const MAX_EXEMPT_MACHINES: usize = 1000;

/// Reads `CUSTOMER_VPS_TLS_VERIFY*`. Records errors in `env` and returns `None` if there are any.
pub fn read(env: &mut Env, domain: Option<HostDomain>) -> Option<HostTrust> {
    let is_on = env.flag(&vars::CUSTOMER_VPS_TLS_VERIFY).is_on();
    let grace = Duration::from_secs(env.or_default(&vars::CUSTOMER_VPS_TLS_VERIFY_GRACE_SECONDS));
    let exempt = read_exempt_machines(env);
    // `domain` is also `None` if `HOST_DOMAIN` is invalid, but then that error has already been reported.
    if is_on && !env.is_set(&vars::HOST_DOMAIN) {
        let reason = "requires HOST_DOMAIN: the certificate is verified against the host's name";
        env.add_error(&vars::CUSTOMER_VPS_TLS_VERIFY, reason);
    }
    let exempt = exempt?;
    if !is_on {
        return Some(HostTrust { domain, chain: None });
    }
    domain.as_ref()?;
    match ChainVerifier::new(env.path(&SSL_CERT_FILE)) {
        Ok(verifier) => Some(HostTrust { domain, chain: Some(ChainPolicy::new(verifier, grace, exempt)) }),
        Err(error) => {
            env.add_error(&vars::CUSTOMER_VPS_TLS_VERIFY, format!("{error:#}"));
            None
        }
    }
}

fn read_exempt_machines(env: &mut Env) -> Option<HashSet<MachineId>> {
    let variable = &vars::CUSTOMER_VPS_TLS_VERIFY_EXCEPT;
    let text = env.text(variable).unwrap_or_default();
    let ids = text.split(',').map(str::trim).filter(|id| !id.is_empty());
    match ids.map(str::parse).collect::<Result<HashSet<MachineId>, _>>() {
        Ok(ids) if ids.len() <= MAX_EXEMPT_MACHINES => Some(ids),
        Ok(_) => {
            env.add_error(variable, format!("must list at most {MAX_EXEMPT_MACHINES} machines"));
            None
        }
        Err(_) => {
            env.add_error(variable, "must list machine ids, separated by commas");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_pairs(pairs: &[(&str, &str)]) -> Result<HostTrust, Vec<String>> {
        svc_http::tls::install_provider();
        let mut env = Env::from_pairs(pairs.iter().copied());
        let domain = env.optional(&vars::HOST_DOMAIN);
        let trust = super::read(&mut env, domain);
        env.finish(trust).map_err(|error| error.errors)
    }

    #[test]
    fn read_rejects_verification_without_domain() {
        let errors = read_pairs(&[("CUSTOMER_VPS_TLS_VERIFY", "true")]).unwrap_err();
        assert!(errors[0].starts_with("CUSTOMER_VPS_TLS_VERIFY: requires HOST_DOMAIN"), "{errors:?}");
    }

    #[test]
    fn read_rejects_invalid_exempt_machine_ids() {
        let errors = read_pairs(&[("CUSTOMER_VPS_TLS_VERIFY_EXCEPT", "ada")]).unwrap_err();
        assert!(errors[0].contains("machine ids"), "{errors:?}");
    }

    #[test]
    fn read_reports_every_error() {
        let pairs = [("CUSTOMER_VPS_TLS_VERIFY", "true"), ("CUSTOMER_VPS_TLS_VERIFY_EXCEPT", "ada")];
        let errors = read_pairs(&pairs).unwrap_err();
        assert_eq!(errors.len(), 2, "{errors:?}");
    }

    #[test]
    fn read_applies_every_setting() {
        let exempt = MachineId::new();
        let trust = read_pairs(&[
            ("CUSTOMER_VPS_TLS_VERIFY", "true"),
            ("HOST_DOMAIN", "hosts.example.com"),
            ("CUSTOMER_VPS_TLS_VERIFY_GRACE_SECONDS", "600"),
            ("CUSTOMER_VPS_TLS_VERIFY_EXCEPT", &format!("{exempt}, ")),
        ])
        .unwrap();
        let policy = trust.chain.unwrap();
        assert_eq!(policy.grace(), Duration::from_secs(600));
        assert!(policy.is_exempt(exempt) && !policy.is_exempt(MachineId::new()));
        let off = read_pairs(&[("HOST_DOMAIN", "hosts.example.com")]).unwrap();
        assert!(off.domain.is_some() && off.chain.is_none());
    }
}

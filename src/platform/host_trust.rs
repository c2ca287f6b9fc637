//! How the router and the control plane verify a host's TLS certificate: they always check the pinned key and, with
//! `CUSTOMER_VPS_TLS_VERIFY`, also the chain and host name.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use jiff::Timestamp;
use rustls::ClientConfig;
use rustls::pki_types::{ServerName, UnixTime};

use super::host_domain::HostDomain;
use crate::vars;
use svc_base::config::Env;
use svc_http::tls::{ChainCheck, ChainVerifier, SpkiPin, pinned_client_config};
use svc_http::vars::SSL_CERT_FILE;
use svc_machine::id::MachineId;

/// Maximum number of machines in `CUSTOMER_VPS_TLS_VERIFY_EXCEPT`.
const MAX_EXEMPT_MACHINES: usize = 1000;

/// Settings for host verification.
#[derive(Debug, Clone)]
pub struct HostTrust {
    /// The parent domain of host names. Without it, hosts are addressed by IP address.
    pub domain: Option<HostDomain>,
    /// `None` if only the pin is checked.
    pub chain: Option<ChainPolicy>,
}

/// When a host's certificate must chain to a trusted root.
#[derive(Debug, Clone)]
pub struct ChainPolicy {
    verifier: ChainVerifier,
    /// Time after registration during which the pin suffices: a new machine can request its certificate only once it is
    /// reachable.
    grace: Duration,
    /// Machines whose chain is never checked (`CUSTOMER_VPS_TLS_VERIFY_EXCEPT`).
    exempt: HashSet<MachineId>,
}

impl ChainPolicy {
    pub fn is_exempt(&self, machine: MachineId) -> bool {
        self.exempt.contains(&machine)
    }

    pub fn grace(&self) -> Duration {
        self.grace
    }
}

impl HostTrust {
    /// Verifies hosts only by their pinned keys; hosts have no names.
    pub fn pin_only() -> Self {
        Self { domain: None, chain: None }
    }

    /// Reads `CUSTOMER_VPS_TLS_VERIFY*`. Records errors in `env` and returns `None` if there are any.
    pub fn read(env: &mut Env, domain: Option<HostDomain>) -> Option<Self> {
        let is_on = env.flag(&vars::CUSTOMER_VPS_TLS_VERIFY).is_on();
        let grace = Duration::from_secs(env.or_default(&vars::CUSTOMER_VPS_TLS_VERIFY_GRACE_SECONDS));
        let exempt = parse_exempt_machines(env);
        // `domain` is also `None` if `HOST_DOMAIN` is invalid, but then that error has already been reported.
        if is_on && !env.is_set(&vars::HOST_DOMAIN) {
            let why = "requires HOST_DOMAIN: the certificate is verified against the host's name";
            env.add_error(&vars::CUSTOMER_VPS_TLS_VERIFY, why);
        }
        let exempt = exempt?;
        if !is_on {
            return Some(Self { domain, chain: None });
        }
        domain.as_ref()?;
        match ChainVerifier::new(env.path(&SSL_CERT_FILE)) {
            Ok(verifier) => Some(Self { domain, chain: Some(ChainPolicy { verifier, grace, exempt }) }),
            Err(error) => {
                env.add_error(&vars::CUSTOMER_VPS_TLS_VERIFY, format!("{error:#}"));
                None
            }
        }
    }

    /// Returns the server name to send and verify: the host name or, without `HOST_DOMAIN`, the address.
    pub fn server_name(&self, machine: MachineId, ip: Ipv4Addr) -> ServerName<'static> {
        let name = self.domain.as_ref().map(|domain| domain.host_name(machine));
        name.and_then(|name| ServerName::try_from(name).ok())
            .unwrap_or_else(|| ServerName::from(std::net::IpAddr::from(ip)))
    }

    /// Returns the Unix time in seconds from which this machine's chain is required; `None` if it is never required.
    /// For a machine without a registration time, the grace period starts in 1970, so the chain is required.
    pub fn chain_required_from(&self, machine: MachineId, registered_at: Option<Timestamp>) -> Option<u64> {
        let policy = self.chain.as_ref().filter(|policy| !policy.is_exempt(machine))?;
        let registered = registered_at.map_or(0, Timestamp::as_second);
        Some(u64::try_from(registered).unwrap_or(0).saturating_add(policy.grace.as_secs()))
    }

    /// Builds the client configuration for connections to a machine with this pin.
    ///
    /// # Errors
    /// If the crypto provider supports none of the required TLS versions.
    pub fn client_config(
        &self,
        pin: SpkiPin,
        chain_required_from: Option<u64>,
    ) -> anyhow::Result<ClientConfig> {
        let check = match (&self.chain, chain_required_from) {
            (Some(policy), Some(from)) => ChainCheck::PinAndChain {
                verifier: policy.verifier.clone(),
                from: UnixTime::since_unix_epoch(Duration::from_secs(from)),
            },
            _ => ChainCheck::PinOnly,
        };
        pinned_client_config(pin, check)
    }
}

fn parse_exempt_machines(env: &mut Env) -> Option<HashSet<MachineId>> {
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

    fn read(pairs: &[(&str, &str)]) -> Result<HostTrust, Vec<String>> {
        svc_http::tls::install_provider();
        let mut env = Env::from_pairs(pairs.iter().copied());
        let domain = env.optional(&vars::HOST_DOMAIN);
        let trust = HostTrust::read(&mut env, domain);
        env.finish(trust).map_err(|error| error.errors)
    }

    #[test]
    fn read_rejects_verification_without_domain() {
        let errors = read(&[("CUSTOMER_VPS_TLS_VERIFY", "true")]).unwrap_err();
        assert!(errors[0].starts_with("CUSTOMER_VPS_TLS_VERIFY: requires HOST_DOMAIN"), "{errors:?}");
    }

    #[test]
    fn read_rejects_invalid_exempt_machine_ids() {
        let errors = read(&[("CUSTOMER_VPS_TLS_VERIFY_EXCEPT", "ada")]).unwrap_err();
        assert!(errors[0].contains("machine ids"), "{errors:?}");
    }

    #[test]
    fn read_reports_every_error() {
        let pairs = [("CUSTOMER_VPS_TLS_VERIFY", "true"), ("CUSTOMER_VPS_TLS_VERIFY_EXCEPT", "ada")];
        let errors = read(&pairs).unwrap_err();
        assert_eq!(errors.len(), 2, "{errors:?}");
    }

    #[test]
    fn chain_is_required_after_grace_unless_exempt() {
        let (machine, exempt) = (MachineId::new(), MachineId::new());
        let trust = read(&[
            ("CUSTOMER_VPS_TLS_VERIFY", "true"),
            ("HOST_DOMAIN", "hosts.example.com"),
            ("CUSTOMER_VPS_TLS_VERIFY_GRACE_SECONDS", "600"),
            ("CUSTOMER_VPS_TLS_VERIFY_EXCEPT", &format!("{exempt}, ")),
        ])
        .unwrap();
        let registered = Timestamp::from_second(1000).unwrap();
        assert_eq!(trust.chain_required_from(machine, Some(registered)), Some(1600));
        assert_eq!(trust.chain_required_from(machine, None), Some(600));
        assert_eq!(trust.chain_required_from(exempt, Some(registered)), None);
        let off = read(&[("HOST_DOMAIN", "hosts.example.com")]).unwrap();
        assert_eq!(off.chain_required_from(machine, Some(registered)), None);
        let name = trust.server_name(machine, Ipv4Addr::LOCALHOST);
        assert_eq!(name.to_str(), format!("{machine}.hosts.example.com"));
        assert_eq!(HostTrust::pin_only().server_name(machine, Ipv4Addr::LOCALHOST).to_str(), "127.0.0.1");
    }
}

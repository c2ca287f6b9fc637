//! Determines how the router and the control plane verify a host's TLS certificate. They always check the pinned key
//! and, with `CUSTOMER_VPS_TLS_VERIFY`, also the chain and the host name.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use jiff::Timestamp;
use rustls::ClientConfig;
use rustls::pki_types::{ServerName, UnixTime};

use crate::host_domain::HostDomain;
use svc_http::tls::{ChainCheck, ChainVerifier, SpkiPin, pinned_client_config};
use svc_machine::id::MachineId;

/// Settings for host verification.
#[derive(Debug, Clone)]
pub struct HostTrust {
    /// The parent domain of host names. Without it, hosts are addressed by IP address.
    pub domain: Option<HostDomain>,
    /// `None` if only the pin is checked.
    pub chain: Option<ChainPolicy>,
}

/// The policy that determines when a host's certificate must chain to a trusted root.
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
    pub fn new(verifier: ChainVerifier, grace: Duration, exempt: HashSet<MachineId>) -> Self {
        Self { verifier, grace, exempt }
    }

    pub fn is_exempt(&self, machine: MachineId) -> bool {
        self.exempt.contains(&machine)
    }

    pub fn grace(&self) -> Duration {
        self.grace
    }
}

impl HostTrust {
    /// Returns settings with which hosts have no names and are verified only by their pinned keys.
    pub fn pin_only() -> Self {
        Self { domain: None, chain: None }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_is_required_after_grace_unless_exempt() {
        svc_http::tls::install_provider();
        let (machine, exempt) = (MachineId::new(), MachineId::new());
        let verifier = ChainVerifier::new(None).unwrap();
        let chain = ChainPolicy::new(verifier, Duration::from_secs(600), HashSet::from([exempt]));
        let domain: HostDomain = "hosts.example.com".parse().unwrap();
        let trust = HostTrust { domain: Some(domain), chain: Some(chain) };
        let registered = Timestamp::from_second(1000).unwrap();
        assert_eq!(trust.chain_required_from(machine, Some(registered)), Some(1600));
        assert_eq!(trust.chain_required_from(machine, None), Some(600));
        assert_eq!(trust.chain_required_from(exempt, Some(registered)), None);
        let name = trust.server_name(machine, Ipv4Addr::LOCALHOST);
        assert_eq!(name.to_str(), format!("{machine}.hosts.example.com"));
        let pin_only = HostTrust::pin_only();
        assert_eq!(pin_only.chain_required_from(machine, Some(registered)), None);
        assert_eq!(pin_only.server_name(machine, Ipv4Addr::LOCALHOST).to_str(), "127.0.0.1");
    }
}

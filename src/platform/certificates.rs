//! Reports which machines have a trusted certificate: each host verifies its own certificate against its trusted roots.
//! Operators need this report before they enable `CUSTOMER_VPS_TLS_VERIFY` and while it is enabled.
//!
//! This module performs no I/O: its input is the fleet's rows.

use super::db::fleet::{FleetRow, ReportedCertificate};
use svc_machine::name::Handle;
use svc_router::host_trust::HostTrust;
use svc_wire::fleet::Certificates;
use svc_wire::text::WireString;

/// A certificate counts as expiring this long before it expires, unless it is short-lived.
const EXPIRING_WITHIN_SECONDS: f64 = 14.0 * 86_400.0;
/// A short-lived certificate counts as expiring when less than this fraction of its lifetime remains: half of the
/// fraction at which renewal is due.
const EXPIRING_FRACTION: f64 = 1.0 / 6.0;
/// Maximum number of handles in each list; the counts include all machines.
const MAX_HANDLES: usize = 20;

/// The state of a machine's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateState {
    Trusted,
    /// Trusted, but about to expire: its renewal is long overdue.
    Expiring,
    /// The machine has no unexpired certificate for its name that chains to the host's trusted roots.
    Missing,
}

impl CertificateState {
    /// Classifies a certificate for clients that connect by `name`, or by address if it is `None`.
    pub fn classify(certificate: Option<&ReportedCertificate>, name: Option<&str>) -> Self {
        let matches_name =
            |reported: &ReportedCertificate| name.is_none() || reported.host_name.as_deref() == name;
        match certificate {
            // After a change to the domain, the name changes immediately, but the certificate changes only later.
            Some(reported) if reported.is_trusted && reported.expires_in > 0.0 && matches_name(reported) => {
                let threshold = EXPIRING_WITHIN_SECONDS.min(reported.lifetime * EXPIRING_FRACTION);
                if reported.expires_in < threshold { Self::Expiring } else { Self::Trusted }
            }
            _ => Self::Missing,
        }
    }
}

fn certificate_state(row: &FleetRow, trust: &HostTrust) -> CertificateState {
    let name = trust.domain.as_ref().map(|domain| domain.host_name(row.machine));
    CertificateState::classify(row.certificate.as_ref(), name.as_deref())
}

/// Returns whether the machine should have a certificate: a booting machine has none yet, and a machine that has failed
/// or is off may be unable to renew its certificate.
fn is_expected(row: &FleetRow) -> bool {
    !matches!(row.status.as_str(), "provisioning" | "recovering" | "failed") && row.powered_off_age.is_none()
}

/// Attention reason for a machine that is unreachable because it has no trusted certificate.
pub const CERTIFICATE_MISSING: &str = "certificate_missing";

/// Returns the reason a machine's certificate needs an operator's attention, if any.
pub fn attention_reason(row: &FleetRow, trust: &HostTrust) -> Option<&'static str> {
    if !is_expected(row) {
        return None;
    }
    match certificate_state(row, trust) {
        CertificateState::Trusted => None,
        CertificateState::Expiring => Some("certificate_expiring"),
        CertificateState::Missing => {
            let policy = trust.chain.as_ref().filter(|policy| !policy.is_exempt(row.machine))?;
            let is_unreachable = row.registered_age.is_some_and(|age| age > policy.grace().as_secs_f64());
            Some(if is_unreachable { CERTIFICATE_MISSING } else { "certificate_pending" })
        }
    }
}

/// Builds `certificates` for `GET /vps/fleet`; `None` without `HOST_DOMAIN`.
pub fn summarize(rows: &[FleetRow], trust: &HostTrust) -> Option<Certificates> {
    trust.domain.as_ref()?;
    let in_state = |state: CertificateState| {
        rows.iter().filter(move |row| is_expected(row) && certificate_state(row, trust) == state)
    };
    let handles = |state: CertificateState| -> Vec<WireString<Handle>> {
        in_state(state).take(MAX_HANDLES).map(|row| WireString::from_stored(&row.handle)).collect()
    };
    let count = |state: CertificateState| in_state(state).count() as u64;
    let is_exempt =
        |row: &&FleetRow| trust.chain.as_ref().is_some_and(|policy| policy.is_exempt(row.machine));
    Some(Certificates {
        is_required: trust.chain.is_some(),
        trusted: count(CertificateState::Trusted),
        expiring: count(CertificateState::Expiring),
        expiring_handles: handles(CertificateState::Expiring),
        missing: count(CertificateState::Missing),
        missing_handles: handles(CertificateState::Missing),
        exempt: in_state(CertificateState::Missing).filter(is_exempt).count() as u64,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fleet::tests::healthy_row;
    use svc_router::host_domain::HostDomain;

    const DAY: f64 = 86_400.0;

    fn state(is_trusted: bool, expires_in_days: f64, lifetime_days: f64) -> CertificateState {
        let (expires_in, lifetime) = (expires_in_days * DAY, lifetime_days * DAY);
        let host_name = Some("a.example.com".to_owned());
        let reported = ReportedCertificate { host_name, is_trusted, expires_in, lifetime };
        CertificateState::classify(Some(&reported), Some("a.example.com"))
    }

    #[test]
    fn certificate_for_another_name_counts_as_missing() {
        let host_name = Some("a.example.com".to_owned());
        let reported =
            ReportedCertificate { host_name, is_trusted: true, expires_in: 60.0 * DAY, lifetime: 90.0 * DAY };
        let state = |name| CertificateState::classify(Some(&reported), name);
        assert_eq!(state(Some("a.example.com")), CertificateState::Trusted);
        assert_eq!(state(Some("a.example.org")), CertificateState::Missing);
        assert_eq!(state(None), CertificateState::Trusted);
    }

    #[test]
    fn certificate_is_expiring_in_14_days_or_sixth_of_lifetime() {
        assert_eq!(state(true, 14.1, 90.0), CertificateState::Trusted);
        assert_eq!(state(true, 13.9, 90.0), CertificateState::Expiring);
        assert_eq!(state(true, 1.1, 6.0), CertificateState::Trusted, "renewal is due two days before expiry");
        assert_eq!(state(true, 0.9, 6.0), CertificateState::Expiring);
        assert_eq!(state(true, -0.1, 90.0), CertificateState::Missing);
        assert_eq!(state(false, 60.0, 90.0), CertificateState::Missing);
        assert_eq!(CertificateState::classify(None, None), CertificateState::Missing);
    }

    #[test]
    fn summary_counts_booted_machines_by_certificate() {
        let domain: HostDomain = "hosts.example.com".parse().unwrap();
        let machine = healthy_row().machine;
        let name = domain.host_name(machine);
        let reported = |expires_in: f64| {
            let host_name = Some(name.clone());
            Some(ReportedCertificate { host_name, is_trusted: true, expires_in, lifetime: 90.0 * DAY })
        };
        let row = |handle: &str, certificate| FleetRow {
            machine,
            handle: handle.to_owned(),
            certificate,
            ..healthy_row()
        };
        let booting = FleetRow { status: "provisioning".to_owned(), ..row("eve", None) };
        let off = FleetRow { powered_off_age: Some(60.0), ..row("fay", None) };
        let rows =
            [row("ada", reported(60.0 * DAY)), row("bob", reported(DAY)), row("cy", None), booting, off];
        assert!(summarize(&rows, &HostTrust::pin_only()).is_none());
        let trust = HostTrust { domain: Some(domain), chain: None };
        let expected = json!({
            "isRequired": false, "trusted": 1, "expiring": 1, "expiringHandles": ["bob"],
            "missing": 1, "missingHandles": ["cy"], "exempt": 0,
        });
        assert_eq!(json!(summarize(&rows, &trust).unwrap()), expected);
        assert_eq!(attention_reason(&rows[1], &trust), Some("certificate_expiring"));
        assert_eq!(attention_reason(&rows[2], &trust), None, "no client verifies the chain");
    }
}

//! Machine certificates: one-line views for the fleet and for a machine, and doctor findings.

use super::Color;
use super::table::Cell;
use svc_base::diagnosis::Findings;
use svc_base::quantity::pluralize;
use svc_machine::name::Handle;
use svc_wire::fleet::Certificates;
use svc_wire::host::HostCertificate;
use svc_wire::text::WireString;

fn join_handles(handles: &[WireString<Handle>], count: u64) -> String {
    let ellipsis = if count > handles.len() as u64 { ", …" } else { "" };
    let handles: Vec<_> = handles.iter().map(WireString::as_str).collect();
    format!("{}{ellipsis}", handles.join(", "))
}

/// Formats the fleet's certificates as `3 trusted, 1 missing (ada); required`.
pub fn fleet_cell(certificates: Option<&Certificates>) -> Cell {
    let Some(certificates) = certificates else { return "".into() };
    let mut parts = vec![format!("{} trusted", certificates.trusted)];
    if certificates.expiring > 0 {
        parts.push(format!(
            "{} expiring ({})",
            certificates.expiring,
            join_handles(&certificates.expiring_handles, certificates.expiring)
        ));
    }
    if certificates.missing > 0 {
        parts.push(format!(
            "{} missing ({})",
            certificates.missing,
            join_handles(&certificates.missing_handles, certificates.missing)
        ));
    }
    let required = if certificates.is_required { "; required" } else { "; not required" };
    let is_bad =
        certificates.expiring > 0 || (certificates.is_required && certificates.missing > certificates.exempt);
    Cell::colored(is_bad.then_some(Color::Bad), parts.join(", ") + required)
}

/// Adds a finding for machines without a trusted certificate, unless all of them are exempt. Non-exempt ones are
/// unreachable once `CUSTOMER_VPS_TLS_VERIFY` is set.
pub fn findings(certificates: Option<&Certificates>, findings: Findings) -> Findings {
    let Some(certificates) = certificates.filter(|certificates| certificates.missing > certificates.exempt)
    else {
        return findings;
    };
    let who = format!(
        "{} ({})",
        pluralize(certificates.missing, "machine"),
        join_handles(&certificates.missing_handles, certificates.missing)
    );
    let verb = if certificates.missing == 1 { "has" } else { "have" };
    if certificates.is_required {
        findings.warning(
            format!("CUSTOMER_VPS_TLS_VERIFY is on, but {who} {verb} no trusted certificate"),
            "run `svcctl status HANDLE` to see why; add a machine to CUSTOMER_VPS_TLS_VERIFY_EXCEPT to keep it \
             reachable",
        )
    } else {
        findings.warning(
            format!("{who} {verb} no trusted certificate: do not set CUSTOMER_VPS_TLS_VERIFY yet"),
            "run `svcctl status HANDLE` to see why; a machine needs a release that requests certificates",
        )
    }
}

/// Formats a machine's certificate as `acme, trusted, until 2026-12-01T00:00:00.000Z`.
pub fn machine_cell(certificate: &HostCertificate) -> Cell {
    let trust = if certificate.is_trusted { "trusted" } else { "not trusted" };
    let line = format!("{}, {trust}, until {}", certificate.source, certificate.expires_at);
    match &certificate.error {
        Some(error) => Cell::colored(Some(Color::Bad), format!("{line}; last attempt: {error}")),
        None if certificate.source.as_str() == "self_signed" && certificate.next_attempt_at.is_none() => {
            format!(
                "{line}; neither a certificate authority (ACME_DIRECTORY_URL) nor a certificate file \
                 (GATEWAY_TLS_CERT_FILE) is configured"
            )
            .into()
        }
        None => line.into(),
    }
}

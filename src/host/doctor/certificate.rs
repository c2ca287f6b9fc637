//! Checks the name, trust and expiry of the gateway certificate.

use jiff::{SignedDuration, Timestamp};

use crate::system::certificate;
use crate::system::layout::Layout;
use svc_base::diagnosis::Findings;
use svc_wire::host::{CertificateSource, HostCertificate};

/// Certificates should be renewed before their remaining lifetime drops below this.
const MIN_REMAINING_LIFETIME: SignedDuration = SignedDuration::from_hours(14 * 24);
/// Short-lived certificates must have at least `1 / MIN_REMAINING_DIVISOR` of their lifetime left.
const MIN_REMAINING_DIVISOR: i32 = 6;

pub fn check(layout: &Layout) -> Findings {
    let findings = Findings::new("certificate");
    let settings = certificate::read_settings(layout);
    let Some(certificate) = certificate::read(layout) else {
        return findings.skipped("the gateway has not reported its certificate");
    };
    let next = "run `journalctl -u svc-gateway -n 50`; docs/operating/certificates.md lists the requirements";
    let retry = certificate.next_attempt_at.as_ref();
    let retry = retry.map(|at| format!("; next attempt at {at}")).unwrap_or_default();
    let (findings, has_failed) = match &certificate.error {
        Some(error) => (findings.warning(format!("{error}{retry}"), next), true),
        None => (findings, false),
    };
    let Some(name) = settings.host_name else {
        let source = if certificate.source.is(CertificateSource::SelfSigned) {
            "self-signed".to_owned()
        } else {
            format!("source {}, valid until {}", certificate.source, certificate.expires_at)
        };
        return findings.ok(format!("{source}: the platform has no domain for machines (HOST_DOMAIN)"));
    };
    if certificate.source.is(CertificateSource::SelfSigned) && settings.acme.is_none() && !has_failed {
        let what = format!(
            "the certificate is self-signed: neither a certificate authority nor a certificate file is configured for \
             {name}"
        );
        return findings
            .warning(what, "set ACME_DIRECTORY_URL on the platform, or GATEWAY_TLS_CERT_FILE here");
    }
    // Check expiry before trust, since an expired certificate is also untrusted.
    let lifetime = remaining_and_total_lifetime(&certificate);
    if lifetime.is_some_and(|(remaining, _)| remaining <= SignedDuration::ZERO) {
        let what = format!("the certificate for {name} expired at {}{retry}", certificate.expires_at);
        return findings.problem(what, next);
    }
    let findings = if certificate.is_trusted {
        findings
    } else {
        let what = format!(
            "the certificate for {name} is not trusted by this machine's root certificates (source {})",
            certificate.source
        );
        findings.warning(what, next)
    };
    match lifetime {
        Some((remaining, total)) if remaining < MIN_REMAINING_LIFETIME.min(total / MIN_REMAINING_DIVISOR) => {
            findings.problem(
                format!("the certificate for {name} expires at {}{retry}", certificate.expires_at),
                next,
            )
        }
        _ if !certificate.is_trusted => findings,
        _ => findings
            .ok(format!("{name}, source {}, valid until {}", certificate.source, certificate.expires_at)),
    }
}

fn remaining_and_total_lifetime(certificate: &HostCertificate) -> Option<(SignedDuration, SignedDuration)> {
    let (issued, expires): (Timestamp, Timestamp) =
        (certificate.issued_at.parse().ok()?, certificate.expires_at.parse().ok()?);
    Some((expires.duration_since(Timestamp::now()), expires.duration_since(issued)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn findings_text(settings: &serde_json::Value, change: impl FnOnce(&mut HostCertificate)) -> String {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let settings = serde_json::from_value(settings.clone()).unwrap();
        certificate::write_settings(&layout, &settings).unwrap();
        let day = SignedDuration::from_hours(24);
        let mut certificate = HostCertificate {
            host_name: settings.host_name.clone(),
            source: CertificateSource::Acme.into(),
            issued_at: (Timestamp::now() - 77 * day).into(),
            expires_at: (Timestamp::now() + 20 * day).into(),
            is_trusted: true,
            error: None,
            next_attempt_at: None,
        };
        change(&mut certificate);
        certificate::write(&layout, &certificate).unwrap();
        json!(check(&layout).into_list()).to_string()
    }

    #[test]
    fn check_distinguishes_certificate_states() {
        let with_acme =
            json!({"hostName": "a.hosts.example", "acme": {"directoryUrl": "https://ca.example/dir"}});
        let good = findings_text(&with_acme, |_| ());
        assert!(good.contains("source acme, valid until"), "{good}");
        assert!(findings_text(&json!({}), |_| ()).contains("HOST_DOMAIN"));
        let error = findings_text(&with_acme, |certificate| {
            certificate.error = Some("the authority refused".to_owned());
        });
        assert!(error.contains("the authority refused"), "{error}");
        assert!(
            findings_text(&with_acme, |certificate| certificate.is_trusted = false)
                .contains("is not trusted")
        );
        let soon = Timestamp::now() + SignedDuration::from_hours(24 * 13);
        let expiring = findings_text(&with_acme, |certificate| certificate.expires_at = soon.into());
        assert!(expiring.contains("expires at"), "{expiring}");
        let both = findings_text(&with_acme, |certificate| {
            (certificate.expires_at, certificate.is_trusted) = (soon.into(), false);
        });
        assert!(both.contains("expires at") && both.contains("is not trusted"), "{both}");
        let expired = findings_text(&with_acme, |certificate| {
            certificate.expires_at = (Timestamp::now() - SignedDuration::from_mins(1)).into();
            certificate.is_trusted = false;
        });
        assert!(expired.contains("expired at") && expired.contains("\"problem\""), "{expired}");
        let without_name = findings_text(&json!({}), |certificate| {
            certificate.source = CertificateSource::File.into();
            certificate.error = Some("GATEWAY_TLS_CERT_FILE: cannot be read".to_owned());
        });
        assert!(without_name.contains("cannot be read"), "{without_name}");
        assert!(
            without_name.contains("source file") && !without_name.contains("self-signed"),
            "{without_name}"
        );
        let without_authority = json!({"hostName": "a.hosts.example"});
        let self_signed = findings_text(&without_authority, |certificate| {
            certificate.source = CertificateSource::SelfSigned.into();
            certificate.is_trusted = false;
        });
        assert!(self_signed.contains("GATEWAY_TLS_CERT_FILE"), "{self_signed}");
    }
}

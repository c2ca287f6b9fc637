//! The parent domain of machine host names: `<machine-id>.<domain>`.

use std::str::FromStr;

use svc_machine::id::MachineId;

/// Maximum length of a DNS name, minus a machine id and its dot.
const MAX_CHARS: usize = 253 - 36 - 1;
const MAX_LABEL_CHARS: usize = 63;

/// `HOST_DOMAIN`, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostDomain(String);

impl HostDomain {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns a machine's host name. A UUID is a valid DNS label.
    pub fn host_name(&self, machine: MachineId) -> String {
        format!("{machine}.{}", self.0)
    }

    /// Returns the machine with this host name, which must be in lower case.
    pub fn parse_machine(&self, name: &str) -> Option<MachineId> {
        name.strip_suffix(&self.0)?.strip_suffix('.')?.parse().ok()
    }

    /// Returns the domain's last two labels if `host` ends with the same two. Browsers then usually treat both as the
    /// same site.
    pub fn shared_site(&self, host: &str) -> Option<&str> {
        let own = last_two_labels(&self.0)?;
        last_two_labels(host).is_some_and(|other| other.eq_ignore_ascii_case(own)).then_some(own)
    }
}

fn last_two_labels(name: &str) -> Option<&str> {
    let name = name.strip_suffix('.').unwrap_or(name);
    let last = name.rfind('.')?;
    Some(name[..last].rfind('.').map_or(name, |dot| &name[dot + 1..]))
}

impl FromStr for HostDomain {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_label = |label: &str| {
            (1..=MAX_LABEL_CHARS).contains(&label.len())
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        let labels: Vec<&str> = text.split('.').collect();
        let is_address = labels.last().is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()));
        if text.len() > MAX_CHARS || labels.len() < 2 || is_address || !labels.into_iter().all(is_label) {
            return Err(
                "must be a domain such as hosts.example.net, of at most 216 characters, without a scheme, port, `*.` \
                 or trailing dot",
            );
        }
        Ok(Self(text.to_ascii_lowercase()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_machine_reverses_host_name() {
        let domain: HostDomain = "Hosts.Example.com".parse().unwrap();
        let machine = MachineId::new();
        let name = domain.host_name(machine);
        assert_eq!(name, format!("{machine}.hosts.example.com"));
        assert_eq!(domain.parse_machine(&name), Some(machine));
        for other in [
            "hosts.example.com".to_owned(),
            format!("x{name}"),
            format!("{machine}hosts.example.com"),
            format!("a.{name}"),
            format!("{machine}.example.com"),
            format!("{}.hosts.example.com", machine.0.simple()),
        ] {
            assert_eq!(domain.parse_machine(&other), None, "{other}");
        }
    }

    #[test]
    fn shared_site_compares_last_two_labels() {
        for (domain, host, site) in [
            ("hosts.example.com", "app.example.com", Some("example.com")),
            ("hosts.example.com", "EXAMPLE.com.", Some("example.com")),
            ("example.com", "a.b.example.com", Some("example.com")),
            ("hosts.example.net", "app.example.com", None),
            ("hosts.example.com", "app.notexample.com", None),
            ("hosts.example.com", "com", None),
            ("hosts.example.com", "localhost", None),
            ("hosts.example.com", "192.0.2.10", None),
        ] {
            let parsed: HostDomain = domain.parse().unwrap();
            assert_eq!(parsed.shared_site(host), site, "{domain} {host}");
        }
    }

    #[test]
    fn parse_rejects_invalid_domains() {
        let long = format!("{}.example", ["a"; 110].join("."));
        for invalid in [
            "",
            "example",
            ".example.com",
            "example.com.",
            "*.example.com",
            "https://example.com",
            "example.com:443",
            "exa mple.com",
            "-a.example.com",
            "a-.example.com",
            "203.0.113.7",
            "b\u{fc}cher.example",
            &format!("{}.example", "a".repeat(64)),
            &long,
        ] {
            assert!(invalid.parse::<HostDomain>().is_err(), "{invalid}");
        }
        let longest = format!("{}.{}", vec!["a".repeat(62); 3].join("."), "b".repeat(27));
        assert_eq!(longest.len(), MAX_CHARS);
        let name = longest.parse::<HostDomain>().unwrap().host_name(MachineId::new());
        assert_eq!(name.len(), 253);
        assert!(rustls::pki_types::ServerName::try_from(name).is_ok());
    }
}

//! Keeps the gateway's certificate current, from either the operator's file or the ACME CA.
//!
//! Invariant: after startup, the presented certificate is only ever replaced by a usable chain, and a trusted one only
//! by another trusted one. A failed request leaves it unchanged.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use jiff::{SignedDuration, Timestamp};
use svc_wire::heartbeat::{AcmeSettings, CertificateSettings};
use tokio_util::sync::CancellationToken;

use super::acme::CertificateIssuance;
use super::schedule;
use svc_base::error_chain::format_chain;
use svc_base::fsx;
use svc_base::metrics::{CERTIFICATE_EXPIRY, CERTIFICATE_TRUSTED};
use svc_base::untrusted_text;
use svc_host::system::certificate;
use svc_host::system::layout::Layout;
use svc_host::system::registration;
use svc_http::certificate::{CertificateResolver, Chain, ChainError, MAX_CHAIN_BYTES};
use svc_http::tls::{ChainVerifier, Identity, SpkiPin};
use svc_http::vars::SSL_CERT_FILE;
use svc_machine::id::MachineId;
use svc_wire::host::{CertificateSource, HostCertificate};

/// Interval for checking the settings, the operator's file and the schedule.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Interval for re-verifying the presented chain: it may expire, or the machine's clock may be corrected.
const VERIFY_INTERVAL: Duration = Duration::from_secs(60);

/// Configuration for a [`CertificateManager`].
pub struct CertificateManagerConfig {
    pub layout: Layout,
    /// `None` on a development machine, which never requests certificates.
    pub machine: Option<MachineId>,
    /// `GATEWAY_TLS_CERT_FILE`.
    pub file: Option<PathBuf>,
    /// `ACME_RETRY_SECONDS`.
    pub initial_backoff: Duration,
}

pub struct CertificateManager {
    config: CertificateManagerConfig,
    identity: Identity,
    pin: SpkiPin,
    resolver: Arc<CertificateResolver>,
    verifier: ChainVerifier,
    presented: PresentedChain,
    /// The last input checked: contents of the operator's file (`None` if unreadable) and host name.
    checked_file: Option<(Option<Vec<u8>>, Option<String>)>,
    requests: RequestSchedule,
    error: Option<String>,
    last_verification: Option<Verification>,
    /// An issued chain that hasn't been persisted yet.
    unstored_chain: Option<String>,
}

/// Result of verifying the presented chain against this machine's roots.
struct Verification {
    verified_at: Instant,
    name: Option<String>,
    is_trusted: bool,
}

struct PresentedChain {
    source: CertificateSource,
    chain: Chain,
    /// ACME directory URL of the issuing CA, if known.
    directory_url: Option<String>,
}

/// Prefix of the stored chain's first line, which records the ACME directory. PEM parsers ignore text outside
/// certificates (RFC 7468).
const DIRECTORY_PREFIX: &str = "Directory: ";

const NOT_TRUSTED: &str = "is not trusted by this machine's roots, but the presented certificate is";

/// Request schedule under the current settings.
struct RequestSchedule {
    /// The settings as JSON; a change resets the backoff.
    settings: Option<String>,
    delays: backon::ExponentialBackoff,
    /// Earliest time for the next request. Set by each attempt and each settings change; restored after a restart.
    retry_at: Option<Timestamp>,
}

impl CertificateManager {
    /// Creates a manager that presents the stored chain if it's usable, or the self-signed certificate otherwise.
    ///
    /// # Errors
    /// If the self-signed certificate or the trusted roots cannot be read.
    pub fn new(config: CertificateManagerConfig, identity: Identity) -> anyhow::Result<Self> {
        let resolver = CertificateResolver::new(&identity)?;
        let self_signed = Chain::from_pem(identity.cert_pem.as_bytes())
            .context("cannot parse the self-signed certificate")?;
        let pin = identity.pin()?;
        let requests = RequestSchedule {
            settings: None,
            delays: schedule::retry_delays(config.initial_backoff),
            retry_at: None,
        };
        let mut manager = Self {
            pin,
            resolver,
            verifier: ChainVerifier::new(SSL_CERT_FILE.env_value().map(PathBuf::from))?,
            presented: PresentedChain {
                source: CertificateSource::SelfSigned,
                chain: self_signed,
                directory_url: None,
            },
            checked_file: None,
            requests,
            error: None,
            last_verification: None,
            unstored_chain: None,
            identity,
            config,
        };
        let settings = certificate::read_settings(&manager.config.layout);
        manager.load_stored_chain(&settings);
        manager.restore_schedule(&settings);
        Ok(manager)
    }

    pub fn resolver(&self) -> &Arc<CertificateResolver> {
        &self.resolver
    }

    /// Keeps the certificate current until `stop` is cancelled.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.check() => {}
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
            }
        }
    }

    async fn check(&mut self) {
        let settings = certificate::read_settings(&self.config.layout);
        if let Some(file) = self.config.file.clone() {
            self.check_file(&file, &settings);
        } else if let Some((name, acme)) = settings.host_name.clone().zip(settings.acme.clone()) {
            let json = settings_json(&settings);
            if self.requests.settings.as_ref() != Some(&json) {
                self.requests.settings = Some(json);
                self.requests.reset(self.config.initial_backoff);
                let machine = self.config.machine.unwrap_or_default().0;
                self.requests.retry_at = Some(schedule::first_request_time(Timestamp::now(), machine));
            }
            self.store_chain();
            self.request_if_due(&settings, &name, &acme).await;
        } else {
            self.error = None;
        }
        self.publish_status(&settings);
    }

    /// Presents the chain stored before a restart, even if it has expired or isn't valid yet.
    fn load_stored_chain(&mut self, settings: &CertificateSettings) {
        let Ok(Some(pem)) = fsx::read_if_exists(&self.config.layout.tls_chain()) else { return };
        let usable = Chain::from_pem(&pem).and_then(|chain| {
            let checked = match settings.host_name.as_deref() {
                Some(name) => chain.check(self.pin, name, Timestamp::now()),
                None => chain.check_key(self.pin),
            };
            match checked {
                Ok(()) | Err(ChainError::Expired(_) | ChainError::NotYetValid(_)) => Ok(chain),
                Err(error) => Err(error),
            }
        });
        match usable {
            Ok(chain) => {
                self.present(CertificateSource::Acme, chain);
                let first_line = pem.split(|byte| *byte == b'\n').next().unwrap_or_default();
                let directory_url =
                    std::str::from_utf8(first_line).ok().and_then(|line| line.strip_prefix(DIRECTORY_PREFIX));
                self.presented.directory_url = directory_url.map(str::to_owned);
            }
            Err(error) => tracing::warn!("the stored certificate chain {error}; ignoring it"),
        }
    }

    /// Restores the next request time and the last request's error, unless the settings have changed since. CAs
    /// rate-limit failed and abandoned orders, so a restart must not shorten the current delay. Later delays start over
    /// from the initial backoff.
    fn restore_schedule(&mut self, settings: &CertificateSettings) {
        let layout = &self.config.layout;
        let modified = |path: PathBuf| std::fs::metadata(path).and_then(|meta| meta.modified()).ok();
        let are_settings_newer = modified(layout.certificate_settings()) > modified(layout.certificate());
        let Some(last) = certificate::read(layout) else { return };
        if are_settings_newer || last.host_name != settings.host_name {
            return;
        }
        // Any other error is about the operator's file, which is rechecked right away if it's still configured.
        let is_request_pending = self.config.file.is_none() && last.next_attempt_at.is_some();
        self.error = last.error.filter(|_| is_request_pending);
        let retry_at: Option<Timestamp> = last.next_attempt_at.and_then(|time| time.parse().ok());
        self.requests.retry_at =
            retry_at.filter(|time| time.duration_since(Timestamp::now()) <= schedule::MAX_RETRY_DELAY);
        self.requests.settings = Some(settings_json(settings));
    }

    fn present(&mut self, source: CertificateSource, chain: Chain) {
        self.resolver.present(chain.clone());
        self.presented = PresentedChain { source, chain, directory_url: None };
        self.last_verification = None;
    }

    fn check_file(&mut self, file: &Path, settings: &CertificateSettings) {
        let content = read_limited(file);
        let input = (content.as_ref().ok().cloned(), settings.host_name.clone());
        if self.checked_file.as_ref() == Some(&input) {
            return;
        }
        self.checked_file = Some(input);
        let mut is_temporary = false;
        let loaded = content.and_then(|pem| {
            let chain = Chain::from_pem(&pem).map_err(|error| error.to_string())?;
            // Without a host name, clients don't check the name.
            let name = settings.host_name.as_deref();
            let checked = match name {
                Some(name) => chain.check(self.pin, name, Timestamp::now()),
                None => chain.check_key(self.pin),
            };
            is_temporary = matches!(checked, Err(ChainError::NotYetValid(_) | ChainError::Expired(_)));
            checked.map_err(|error| error.to_string())?;
            if name.is_some_and(|name| self.would_lose_trust(&chain, name)) {
                is_temporary = true;
                return Err(NOT_TRUSTED.to_owned());
            }
            Ok(chain)
        });
        if is_temporary {
            // Recheck the file next time: the chain may become valid as time passes or the clock is corrected, and the
            // presented certificate may expire.
            self.checked_file = None;
        }
        match loaded {
            Ok(chain) => {
                tracing::info!(file = %file.display(), until = %chain.not_after(), "certificate loaded from file");
                self.present(CertificateSource::File, chain);
                self.error = None;
            }
            Err(reason) => {
                let error = format!("GATEWAY_TLS_CERT_FILE: {} {reason}", file.display());
                if self.error.as_ref() != Some(&error) {
                    tracing::error!("{error}; still presenting the previous certificate");
                }
                self.error = Some(error);
            }
        }
    }

    /// Whether the presented chain is trusted but `chain` isn't, e.g. due to a wrong ACME directory or missing
    /// intermediates. This machine's clock may be behind, so a chain that isn't valid yet is verified as of its
    /// `notBefore`.
    fn would_lose_trust(&self, chain: &Chain, name: &str) -> bool {
        let now = Timestamp::now();
        let is_trusted = |chain: &Chain, at| chain.verify(&self.verifier, name, at).is_ok();
        is_trusted(&self.presented.chain, now) && !is_trusted(chain, now.max(chain.not_before()))
    }

    async fn request_if_due(&mut self, settings: &CertificateSettings, name: &str, acme: &AcmeSettings) {
        if self.next_attempt(name, acme).is_some_and(|due| Timestamp::now() < due) {
            return;
        }
        // The router only passes validations through to registered machines.
        let Some(machine) = self.config.machine else { return };
        if registration::read_accepted(&self.config.layout, machine).is_none() {
            return;
        }
        // Record the attempt first, so that a gateway killed mid-request doesn't place another order on restart.
        let delay = self.requests.next_delay();
        self.requests.schedule_retry(delay);
        self.publish_status(settings);
        match self.request(name, acme).await {
            Ok((chain, pem)) => {
                tracing::info!(name, until = %chain.not_after(), "certificate issued");
                self.present(CertificateSource::Acme, chain);
                self.presented.directory_url = Some(acme.directory_url.clone());
                self.requests.reset(self.config.initial_backoff);
                // Delay the next order even if the new certificate is already due for renewal.
                let delay = self.requests.next_delay();
                self.requests.schedule_retry(delay);
                self.error = None;
                self.unstored_chain = Some(format!("{DIRECTORY_PREFIX}{}\n{pem}", acme.directory_url));
                self.store_chain();
            }
            Err(error) => {
                let retry_at = self.requests.schedule_retry(delay);
                let reason = untrusted_text::truncate_printable(&error_chain(&error));
                tracing::warn!(name, error = reason, next = %retry_at, "certificate request failed; still presenting the previous certificate");
                self.error = Some(reason);
            }
        }
    }

    /// Persists an issued chain, which is already presented. Otherwise, the gateway would request a new one after a
    /// restart.
    fn store_chain(&mut self) {
        let Some(text) = &self.unstored_chain else { return };
        match fsx::write_atomic(&self.config.layout.tls_chain(), text.as_bytes(), 0o600) {
            Ok(()) => self.unstored_chain = None,
            Err(error) => {
                let error = format!("the issued certificate cannot be stored: {}", format_chain(&error));
                if self.error.as_ref() != Some(&error) {
                    tracing::error!("{error}; presenting it until the next restart");
                }
                self.error = Some(error);
                return;
            }
        }
        self.error = None;
    }

    /// When to request the next certificate; `None` means now.
    fn next_attempt(&self, name: &str, acme: &AcmeSettings) -> Option<Timestamp> {
        let PresentedChain { source, chain, directory_url } = &self.presented;
        // Checking as of `not_before` covers only the key and the name: an expired chain is renewed like any other.
        let matches_settings = *source == CertificateSource::Acme
            && directory_url.as_ref().is_none_or(|url| *url == acme.directory_url)
            && chain.check(self.pin, name, chain.not_before()).is_ok();
        let machine = self.config.machine.unwrap_or_default().0;
        let renewal =
            matches_settings.then(|| schedule::renewal_time(chain.not_before(), chain.not_after(), machine));
        // Ignore a retry time after `latest`: the clock was ahead when it was computed.
        let latest = Timestamp::now() + schedule::MAX_RETRY_DELAY;
        renewal.max(self.requests.retry_at.filter(|retry_at| *retry_at <= latest))
    }

    /// Requests a certificate, returning the checked chain and its PEM.
    async fn request(&self, name: &str, settings: &AcmeSettings) -> anyhow::Result<(Chain, String)> {
        let layout = &self.config.layout;
        let key_pem = &self.identity.key_pem;
        let pem =
            CertificateIssuance { layout, settings, name, key_pem, resolver: &self.resolver }.issue().await?;
        let chain = Chain::from_pem(pem.as_bytes());
        let chain = chain.and_then(|chain| match chain.check(self.pin, name, Timestamp::now()) {
            // A new chain that isn't valid yet means that this machine's clock is behind.
            Ok(()) | Err(ChainError::NotYetValid(_)) => Ok(chain),
            Err(error) => Err(error),
        });
        let chain = chain.map_err(|error| anyhow::anyhow!("the issued certificate {error}"))?;
        anyhow::ensure!(!self.would_lose_trust(&chain, name), "the issued certificate {NOT_TRUSTED}");
        Ok((chain, pem))
    }

    /// Updates the metrics and the recorded certificate status.
    fn publish_status(&mut self, settings: &CertificateSettings) {
        let name = settings.host_name.as_deref();
        let is_trusted = match &self.last_verification {
            Some(last) if last.verified_at.elapsed() < VERIFY_INTERVAL && last.name.as_deref() == name => {
                last.is_trusted
            }
            _ => {
                let now = Timestamp::now();
                let verified = name.map(|name| self.presented.chain.verify(&self.verifier, name, now));
                let is_trusted = matches!(verified, Some(Ok(())));
                let (verified_at, name) = (Instant::now(), name.map(str::to_owned));
                self.last_verification = Some(Verification { verified_at, name, is_trusted });
                is_trusted
            }
        };
        let chain = &self.presented.chain;
        CERTIFICATE_EXPIRY.set([], chain.not_after().as_second() as f64);
        CERTIFICATE_TRUSTED.set([], f64::from(u8::from(is_trusted)));
        let request_settings = name.zip(settings.acme.as_ref()).filter(|_| self.config.file.is_none());
        let current = HostCertificate {
            host_name: settings.host_name.clone(),
            source: self.presented.source.into(),
            issued_at: chain.not_before().into(),
            expires_at: chain.not_after().into(),
            is_trusted,
            error: self.error.clone(),
            next_attempt_at: request_settings
                .and_then(|(name, acme)| self.next_attempt(name, acme))
                .map(Into::into),
        };
        if let Err(error) = certificate::write(&self.config.layout, &current) {
            tracing::warn!(error = %format_chain(&error), "cannot record certificate status");
        }
    }
}

impl RequestSchedule {
    fn reset(&mut self, initial_backoff: Duration) {
        self.delays = schedule::retry_delays(initial_backoff);
        self.retry_at = None;
    }

    fn next_delay(&mut self) -> SignedDuration {
        let delay = self.delays.next().and_then(|delay| SignedDuration::try_from(delay).ok());
        delay.unwrap_or(schedule::MAX_RETRY_DELAY)
    }

    fn schedule_retry(&mut self, delay: SignedDuration) -> Timestamp {
        let retry_at = Timestamp::now() + delay;
        self.retry_at = Some(retry_at);
        retry_at
    }
}

fn settings_json(settings: &CertificateSettings) -> String {
    serde_json::to_string(settings).expect("settings can be serialized")
}

fn error_chain(error: &anyhow::Error) -> String {
    format_chain(AsRef::<dyn std::error::Error>::as_ref(error))
}

/// Reads up to [`MAX_CHAIN_BYTES`] + 1 bytes of the operator's file. On failure, returns the reason.
fn read_limited(file: &Path) -> Result<Vec<u8>, String> {
    use std::io::Read;
    let mut content = Vec::new();
    let opened = std::fs::File::open(file).map_err(|error| format!("cannot be opened: {error}"))?;
    let read = opened.take(MAX_CHAIN_BYTES as u64 + 1).read_to_end(&mut content);
    read.map_err(|error| format!("cannot be read: {error}"))?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn create_identity() -> Identity {
        svc_http::tls::install_provider();
        svc_http::tls::generate_self_signed(&["svc-host".to_owned()]).unwrap()
    }

    fn create_manager(layout: &Layout, identity: Identity) -> CertificateManager {
        let config = CertificateManagerConfig {
            layout: layout.clone(),
            machine: None,
            file: None,
            initial_backoff: CHECK_INTERVAL,
        };
        CertificateManager::new(config, identity).unwrap()
    }

    #[test]
    fn new_ignores_stored_chain_for_different_key() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let source_after_start = |stored_pem: &str, identity: Identity| {
            fsx::write_atomic(&layout.tls_chain(), stored_pem.as_bytes(), 0o600).unwrap();
            create_manager(&layout, identity).presented.source
        };
        let other_pem = create_identity().cert_pem;
        assert!(source_after_start(&other_pem, create_identity()) == CertificateSource::SelfSigned);
        let identity = create_identity();
        let own_pem = identity.cert_pem.clone();
        assert!(source_after_start(&own_pem, identity) == CertificateSource::Acme);
    }

    #[test]
    fn new_restores_error_only_for_pending_request() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let now = Timestamp::now();
        let error_after_start = |next_attempt_at: Option<Timestamp>| {
            let recorded = HostCertificate {
                host_name: None,
                source: CertificateSource::SelfSigned.into(),
                issued_at: now.into(),
                expires_at: now.into(),
                is_trusted: false,
                error: Some("failed".to_owned()),
                next_attempt_at: next_attempt_at.map(Into::into),
            };
            certificate::write(&layout, &recorded).unwrap();
            create_manager(&layout, create_identity()).error
        };
        assert_eq!(error_after_start(Some(now)).as_deref(), Some("failed"));
        assert_eq!(error_after_start(None), None);
    }
}

//! The machine's TLS key and self-signed certificate, created once. The platform pins the key at registration.
//! CA-issued chains use the same key: see [`manager`].
//!
//! The key is written before the certificate, and the pair is only used once both exist. A crash between the two writes
//! leaves an unused key behind, which the next start replaces.

mod acme;
mod manager;
mod schedule;

pub use self::manager::{CertificateManager, CertificateManagerConfig};

use anyhow::{Context, anyhow};

use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::fsx;
use svc_host::system::certificate;
use svc_host::system::layout::Layout;
use svc_http::certificate::create_signing_request;
use svc_http::tls::{self, Identity};

/// Loads the machine's TLS key and certificate, creating them if missing.
///
/// # Errors
/// If the files cannot be read or written.
pub fn load_or_create(layout: &Layout) -> anyhow::Result<Identity> {
    if layout.tls_cert().exists() {
        return Identity::read(&layout.tls_cert(), &layout.tls_key())
            .with_context(|| format!("cannot read {} and its key", layout.tls_cert().display()));
    }
    let identity = tls::generate_self_signed(&["svc-host".to_owned()])?;
    fsx::write_atomic(&layout.tls_key(), identity.key_pem.as_bytes(), 0o600)?;
    fsx::write_atomic(&layout.tls_cert(), identity.cert_pem.as_bytes(), 0o600)?;
    Ok(identity)
}

/// Prints a CSR for the machine's name, signed with its TLS key.
///
/// # Errors
/// [`Exit::Config`] if the machine has no name yet; [`Exit::Unavailable`] if its key cannot be read, e.g. because the
/// gateway hasn't created it yet; [`Exit::Internal`] if the CSR cannot be created.
pub fn print_csr(layout: &Layout) -> Result<(), Failure> {
    let Some(name) = certificate::read_settings(layout).host_name else {
        let error = anyhow!("this machine has no name: set HOST_DOMAIN on the platform");
        return Err(Failure::new(Exit::Config, error));
    };
    let path = layout.tls_key();
    let key = std::fs::read_to_string(&path);
    let key = key.with_context(|| format!("cannot read {}", path.display())).or_exit(Exit::Unavailable)?;
    print!("{}", create_signing_request(&name, &key).or_exit(Exit::Internal)?.pem);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn load_or_create_creates_private_key_once() {
        tls::install_provider();
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let first = load_or_create(&layout).unwrap().pin().unwrap();
        assert_eq!(load_or_create(&layout).unwrap().pin().unwrap(), first);
        let mode = std::fs::metadata(layout.tls_key()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn load_or_create_replaces_key_without_certificate() {
        tls::install_provider();
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        fsx::write_atomic(&layout.tls_key(), b"half", 0o600).unwrap();
        let identity = load_or_create(&layout).unwrap();
        identity.server_config().unwrap();
    }
}

//! The machine's TLS key and self-signed certificate, made once; the platform pins its key at registration.
//!
//! The key is written before the certificate, and the pair counts only when the certificate is there: a kill between
//! the two leaves nothing that was ever shown to anybody.

use anyhow::Context;

use crate::fsx;
use crate::host::system::layout::Layout;
use crate::http::tls::{self, Identity};

/// Reads the machine's certificate, or makes it.
///
/// # Errors
/// When the files cannot be read or written.
pub fn open(layout: &Layout) -> anyhow::Result<Identity> {
    if layout.tls_cert().exists() {
        return Identity::read(&layout.tls_cert(), &layout.tls_key())
            .with_context(|| format!("read {} and its key", layout.tls_cert().display()));
    }
    let made = tls::self_signed(&["svc-host".to_owned()])?;
    fsx::write_atomic(&layout.tls_key(), made.key_pem.as_bytes(), 0o600)?;
    fsx::write_atomic(&layout.tls_cert(), made.cert_pem.as_bytes(), 0o600)?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_key_is_made_once_and_private() {
        tls::install_provider();
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let first = open(&layout).unwrap().pin().unwrap();
        assert_eq!(open(&layout).unwrap().pin().unwrap(), first);
        let mode = std::fs::metadata(layout.tls_key()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_key_without_its_certificate_is_replaced() {
        tls::install_provider();
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        fsx::write_atomic(&layout.tls_key(), b"half", 0o600).unwrap();
        let made = open(&layout).unwrap();
        made.server_config().unwrap();
    }
}

//! Platform-delivered certificate settings and the gateway's certificate, in files shared by the gateway, the sync
//! agent and the doctor.

use crate::system::config;
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::fsx::{self, FileError};
use svc_wire::heartbeat::CertificateSettings;
use svc_wire::host::HostCertificate;

/// Reads the settings last delivered by the platform, falling back to the host name from user-data.
pub fn read_settings(layout: &Layout) -> CertificateSettings {
    let delivered = fsx::read_if_exists(&layout.certificate_settings()).ok().flatten();
    let delivered = delivered.and_then(|text| serde_json::from_slice(&text).ok());
    let initial = || {
        let host_name = config::services_env(layout).text(&vars::SVC_HOST_NAME);
        CertificateSettings { host_name, acme: None }
    };
    delivered.unwrap_or_else(initial)
}

/// Writes delivered settings. They contain a secret if the ACME account has an external account binding.
pub fn write_settings(layout: &Layout, settings: &CertificateSettings) -> Result<(), FileError> {
    write_if_changed(&layout.certificate_settings(), settings, 0o600)
}

/// Reads the gateway's certificate. Returns `None` before the gateway's first start or if the file is unreadable.
pub fn read(layout: &Layout) -> Option<HostCertificate> {
    let text = fsx::read_if_exists(&layout.certificate()).ok().flatten()?;
    serde_json::from_slice(&text).ok()
}

pub fn write(layout: &Layout, certificate: &HostCertificate) -> Result<(), FileError> {
    write_if_changed(&layout.certificate(), certificate, 0o644)
}

fn write_if_changed(
    path: &std::path::Path,
    content: &impl serde::Serialize,
    mode: u32,
) -> Result<(), FileError> {
    let text = serde_json::to_vec(content).expect("plain fields serialize to JSON");
    if fsx::read_if_exists(path)?.as_ref() == Some(&text) {
        return Ok(());
    }
    fsx::write_atomic(path, &text, mode)
}

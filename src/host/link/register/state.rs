//! `var/lib/svc/register.json`: the registration request as first sent, and its outcome.
//!
//! The platform accepts a single body per machine, but accepts it repeatedly, so we persist the body before the first
//! call.

use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::fsx::{self, FileError};
use svc_http::tls::SpkiPin;
use svc_machine::id::MachineId;
use svc_wire::registration::Registration;

fn eq_ignoring_boot_time(a: &Registration, b: &Registration) -> bool {
    let without_time = |registration: &Registration| Registration { boot_ms: None, ..registration.clone() };
    without_time(a) == without_time(b)
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegistrationState {
    version: u32,
    machine_id: MachineId,
    /// Exact text of the request.
    sent: String,
    registered_at: Option<String>,
}

impl RegistrationState {
    /// Reads the state file. Returns `None` if it's missing, malformed, or of a different version; registration then
    /// creates a new request.
    ///
    /// # Errors
    /// If the file exists but can't be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.registration())?;
        let parsed = text.and_then(|text| serde_json::from_slice(&text).ok());
        Ok(parsed.filter(|state: &Self| state.version == 1))
    }

    /// Reuses the earlier request if it matches `body` apart from the boot time; otherwise creates and persists a new
    /// one.
    pub fn reuse_or_create(
        layout: &Layout,
        earlier: Option<Self>,
        body: &Registration,
    ) -> Result<Self, FileError> {
        if let Some(earlier) = earlier
            && earlier.body().is_some_and(|sent| eq_ignoring_boot_time(&sent, body))
        {
            return Ok(earlier);
        }
        let sent = serde_json::to_string(body).expect("plain fields serialize to JSON");
        let state = Self { version: 1, machine_id: body.machine_id, sent, registered_at: None };
        state.write(layout)?;
        Ok(state)
    }

    pub fn mark_registered(&mut self, layout: &Layout) -> Result<(), FileError> {
        self.registered_at = Some(clock::rfc3339_ms(clock::now_ms()));
        self.write(layout)
    }

    pub fn request_text(&self) -> &str {
        &self.sent
    }

    pub fn is_registered(&self, machine: MachineId) -> bool {
        self.registered_at.is_some() && self.machine_id == machine
    }

    pub fn has_pin(&self, pin: SpkiPin) -> bool {
        self.body().is_some_and(|body| body.tls_spki_sha256 == pin.to_string())
    }

    fn body(&self) -> Option<Registration> {
        serde_json::from_str(&self.sent).ok()
    }

    fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.registration(), &text, 0o600)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuse_or_create_ignores_boot_time() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let body = Registration {
            machine_id: MachineId::new(),
            image_version: "1".parse().unwrap(),
            bundle_sha256: "00".repeat(32),
            tls_spki_sha256: "11".repeat(32),
            boot_ms: Some(7),
            restored_files: None,
        };
        let first = RegistrationState::reuse_or_create(&layout, None, &body).unwrap();
        let later = Registration { boot_ms: Some(9), ..body.clone() };
        let again =
            RegistrationState::reuse_or_create(&layout, RegistrationState::read(&layout).unwrap(), &later)
                .unwrap();
        assert_eq!(again.request_text(), first.request_text());
        let with_new_key = Registration { tls_spki_sha256: "22".repeat(32), ..body };
        let new = RegistrationState::reuse_or_create(&layout, Some(again), &with_new_key).unwrap();
        assert_ne!(new.request_text(), first.request_text());
    }
}

//! `var/lib/svc/register.json`: the body as it was first sent, and whether it was accepted.
//!
//! The platform takes a token once, and answers the identical body again. So the body is on disk before the first call.

use serde::{Deserialize, Serialize};

use crate::clock;
use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;
use crate::http::tls::SpkiPin;
use crate::machine::id::MachineId;
use crate::machine::name::ImageVersion;

/// The request of `POST /vps/register` (contract, part 3).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Body {
    pub machine_id: MachineId,
    pub image_version: ImageVersion,
    pub bundle_sha256: String,
    pub tls_spki_sha256: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_ms: Option<u64>,
}

impl Body {
    /// Whether it says the same of the machine; the time of the boot does not count.
    fn says_the_same(&self, other: &Self) -> bool {
        Self { boot_ms: None, ..self.clone() } == Self { boot_ms: None, ..other.clone() }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ledger {
    version: u32,
    machine_id: MachineId,
    /// The exact text of the request.
    sent: String,
    registered_at: Option<String>,
}

impl Ledger {
    /// What cannot be read was never whole, so it was never sent.
    ///
    /// # Errors
    /// When the file is there and the disk does not give it.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_there(&layout.registration())?;
        let read = text.and_then(|text| serde_json::from_slice(&text).ok());
        Ok(read.filter(|ledger: &Self| ledger.version == 1))
    }

    /// The earlier text, if it says the same of this machine; else a new one, written down before it is sent.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn keep_or_begin(layout: &Layout, earlier: Option<Self>, body: &Body) -> Result<Self, FileError> {
        if let Some(earlier) = earlier
            && earlier.body().is_some_and(|sent| sent.says_the_same(body))
        {
            return Ok(earlier);
        }
        let sent = serde_json::to_string(body).expect("a body of plain fields is JSON");
        let ledger = Self { version: 1, machine_id: body.machine_id, sent, registered_at: None };
        ledger.write(layout)?;
        Ok(ledger)
    }

    /// # Errors
    /// [`FileError`].
    pub fn done(&mut self, layout: &Layout) -> Result<(), FileError> {
        self.registered_at = Some(clock::rfc3339_ms(clock::now_ms()));
        self.write(layout)
    }

    pub fn sent(&self) -> &str {
        &self.sent
    }

    pub fn is_done_for(&self, machine: MachineId) -> bool {
        self.registered_at.is_some() && self.machine_id == machine
    }

    pub fn names(&self, pin: SpkiPin) -> bool {
        self.body().is_some_and(|body| body.tls_spki_sha256 == pin.to_string())
    }

    fn body(&self) -> Option<Body> {
        serde_json::from_str(&self.sent).ok()
    }

    fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("a ledger of plain fields is JSON");
        fsx::write_atomic(&layout.registration(), &text, 0o600)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_stays_the_same_until_the_machine_changes() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let body = Body {
            machine_id: MachineId::new(),
            image_version: "1".parse().unwrap(),
            bundle_sha256: "00".repeat(32),
            tls_spki_sha256: "11".repeat(32),
            boot_ms: Some(7),
        };
        let first = Ledger::keep_or_begin(&layout, None, &body).unwrap();
        let later = Body { boot_ms: Some(9), ..body.clone() };
        let again = Ledger::keep_or_begin(&layout, Ledger::read(&layout).unwrap(), &later).unwrap();
        assert_eq!(again.sent(), first.sent());
        let moved = Body { tls_spki_sha256: "22".repeat(32), ..body };
        let new = Ledger::keep_or_begin(&layout, Some(again), &moved).unwrap();
        assert_ne!(new.sent(), first.sent());
    }
}

//! Text view of a slot's file backups.

use secrecy::ExposeSecret;

use super::View;
use super::table;
use crate::args::SlotTarget;
use svc_wire::files::FilesAccess;

/// Shows the location and the password of the slot's repository, in clear text.
pub fn access(view: &View, slot: &SlotTarget, access: &FilesAccess) -> String {
    let pairs = [
        ("slot", slot.to_string().into()),
        ("repository", access.repository.clone().into()),
        ("password", access.key.key.expose_secret().to_owned().into()),
    ];
    table::render_pairs(view, &pairs)
}

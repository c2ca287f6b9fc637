//! What runs in a simulated server: nothing, or the processes of a host.

use super::book::Record;

/// Chosen once for a simulator.
pub(super) enum Guests {
    /// Servers are lines in the books.
    None,
}

impl Guests {
    /// Gives the new server its disk and user-data.
    pub(super) fn install(&self, _record: &Record) {}

    /// Starts the machine; returns at once, as power does.
    pub(super) fn boot(&self, _name: &str) {}

    /// Cuts the power: every process dies at once.
    pub(super) async fn cut(&self, _name: &str) {}

    /// The power button: `false` where the machine did not obey.
    pub(super) async fn shut_down(&self, _name: &str) -> bool {
        true
    }
}

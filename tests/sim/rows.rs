//! Acknowledged rows: the disks and snapshots that contain them, and the rows whose loss an operator accepted.
//!
//! The rule: an acknowledged row remains on a server of its slot or in a snapshot, unless an operator accepted its
//! loss or the provider lost the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Clone, Default)]
pub struct Rows(Arc<Mutex<RowsState>>);

#[derive(Debug, Default)]
struct RowsState {
    last: u32,
    /// By the slot's prefix.
    slots: BTreeMap<String, SlotRows>,
    /// By machine; a machine without an entry has never loaded its disk.
    disks: BTreeMap<String, Disk>,
}

#[derive(Debug, Default)]
struct SlotRows {
    acknowledged: BTreeSet<u32>,
    in_snapshots: BTreeSet<u32>,
    given_up: BTreeSet<u32>,
    /// Number of open requests that accept a loss.
    accepting: u32,
}

#[derive(Debug)]
struct Disk {
    prefix: String,
    rows: BTreeSet<u32>,
}

impl Rows {
    fn state(&self) -> MutexGuard<'_, RowsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a new machine's disk, with the rows of its snapshot.
    pub fn load(&self, machine: &str, prefix: &str, rows: BTreeSet<u32>) {
        self.state().disks.insert(machine.to_owned(), Disk { prefix: prefix.to_owned(), rows });
    }

    /// `None` if no data was restored to the disk.
    pub fn rows_on_disk(&self, machine: &str) -> Option<BTreeSet<u32>> {
        self.state().disks.get(machine).map(|disk| disk.rows.clone())
    }

    /// Writes one more row and returns its number.
    pub fn write(&self, machine: &str) -> Option<u32> {
        let mut state = self.state();
        state.last += 1;
        let row = state.last;
        let disk = state.disks.get_mut(machine)?;
        disk.rows.insert(row);
        let prefix = disk.prefix.clone();
        let slot = state.slots.entry(prefix).or_default();
        slot.acknowledged.insert(row);
        if slot.accepting > 0 {
            slot.given_up.insert(row);
        }
        Some(row)
    }

    /// Removes a row whose write was not acknowledged.
    pub fn remove_unacknowledged(&self, row: u32) {
        for slot in self.state().slots.values_mut() {
            slot.acknowledged.remove(&row);
        }
    }

    pub fn record_snapshot(&self, prefix: &str, rows: BTreeSet<u32>) {
        self.state().slots.entry(prefix.to_owned()).or_default().in_snapshots.extend(rows);
    }

    /// Records that the provider lost the disk.
    pub fn record_lost_disk(&self, machine: &str) {
        let mut state = self.state();
        let Some(disk) = state.disks.remove(machine) else { return };
        state.slots.entry(disk.prefix).or_default().given_up.extend(disk.rows);
    }

    /// Records that an operator accepts the loss of the slot's unsaved rows, until the end of the request.
    pub fn accept_loss(&self, prefix: String) -> LossAcceptance {
        let accepting = LossAcceptance { rows: self.clone(), prefix };
        accepting.count(1);
        accepting
    }

    pub fn acknowledged_count(&self) -> usize {
        self.state().slots.values().map(|slot| slot.acknowledged.len()).sum()
    }

    /// Acknowledged rows that are not stored anywhere, given that these machines have servers.
    pub fn missing_rows(&self, live: &[String]) -> BTreeSet<u32> {
        let state = self.state();
        let on_servers: BTreeSet<u32> = live
            .iter()
            .filter_map(|machine| state.disks.get(machine))
            .flat_map(|disk| &disk.rows)
            .copied()
            .collect();
        let held = |slot: &SlotRows, row: &u32| {
            slot.in_snapshots.contains(row) || slot.given_up.contains(row) || on_servers.contains(row)
        };
        let missing = |slot: &SlotRows| -> Vec<u32> {
            slot.acknowledged.iter().filter(|row| !held(slot, row)).copied().collect()
        };
        state.slots.values().flat_map(missing).collect()
    }
}

/// An open request that accepts a loss. It may take effect at any moment until its end.
#[derive(Debug)]
pub struct LossAcceptance {
    rows: Rows,
    prefix: String,
}

impl LossAcceptance {
    fn count(&self, by: i8) {
        let mut state = self.rows.state();
        let slot = state.slots.entry(self.prefix.clone()).or_default();
        slot.given_up.extend(slot.acknowledged.clone());
        slot.accepting = slot.accepting.saturating_add_signed(i32::from(by));
    }
}

impl Drop for LossAcceptance {
    fn drop(&mut self) {
        self.count(-1);
    }
}

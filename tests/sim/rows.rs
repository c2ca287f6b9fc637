//! Tracks acknowledged rows: which disks and snapshots contain them, and which of them an operator has agreed to lose.
//!
//! An acknowledged row must remain on a server in its slot or in a snapshot, unless an operator has agreed to lose it
//! or the provider has lost the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Clone, Default)]
pub struct Rows(Arc<Mutex<RowsState>>);

#[derive(Debug, Default)]
struct RowsState {
    last_row: u32,
    /// By slot prefix.
    slots: BTreeMap<String, SlotRows>,
    /// By machine. A machine without an entry has restored no data yet, or the provider lost its disk.
    disks: BTreeMap<String, Disk>,
}

#[derive(Debug, Default)]
struct SlotRows {
    acknowledged: BTreeSet<u32>,
    in_snapshots: BTreeSet<u32>,
    /// Rows that may be lost: an operator accepted their loss, or the provider lost their disk.
    expendable: BTreeSet<u32>,
    /// Number of open requests that accept a loss.
    open_acceptances: u32,
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
    pub fn add_disk(&self, machine: &str, prefix: &str, rows: BTreeSet<u32>) {
        self.state().disks.insert(machine.to_owned(), Disk { prefix: prefix.to_owned(), rows });
    }

    /// Returns the rows on a machine's disk; `None` if no data has been restored to it, or the provider lost it.
    pub fn rows_on_disk(&self, machine: &str) -> Option<BTreeSet<u32>> {
        self.state().disks.get(machine).map(|disk| disk.rows.clone())
    }

    /// Writes a new row and returns its number; `None` if the machine has no disk with restored data.
    pub fn write(&self, machine: &str) -> Option<u32> {
        let mut state = self.state();
        state.last_row += 1;
        let row = state.last_row;
        let disk = state.disks.get_mut(machine)?;
        disk.rows.insert(row);
        let prefix = disk.prefix.clone();
        let slot = state.slots.entry(prefix).or_default();
        slot.acknowledged.insert(row);
        if slot.open_acceptances > 0 {
            slot.expendable.insert(row);
        }
        Some(row)
    }

    /// Stops tracking a row whose write was not acknowledged: the row may be lost.
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
        state.slots.entry(disk.prefix).or_default().expendable.extend(disk.rows);
    }

    /// Records that an operator accepts the loss of the slot's acknowledged rows, until the returned acceptance is
    /// dropped at the end of the request.
    pub fn accept_loss(&self, prefix: String) -> LossAcceptance {
        let acceptance = LossAcceptance { rows: self.clone(), prefix };
        acceptance.adjust_count(1);
        acceptance
    }

    pub fn acknowledged_count(&self) -> usize {
        self.state().slots.values().map(|slot| slot.acknowledged.len()).sum()
    }

    /// Returns the acknowledged rows that are neither stored anywhere nor expendable, given that the machines in `live`
    /// have servers.
    pub fn missing_rows(&self, live: &[String]) -> BTreeSet<u32> {
        let state = self.state();
        let on_servers: BTreeSet<u32> = live
            .iter()
            .filter_map(|machine| state.disks.get(machine))
            .flat_map(|disk| &disk.rows)
            .copied()
            .collect();
        let is_accounted_for = |slot: &SlotRows, row: &u32| {
            slot.in_snapshots.contains(row) || slot.expendable.contains(row) || on_servers.contains(row)
        };
        let missing = |slot: &SlotRows| -> Vec<u32> {
            slot.acknowledged.iter().filter(|row| !is_accounted_for(slot, row)).copied().collect()
        };
        state.slots.values().flat_map(missing).collect()
    }
}

/// An open request that accepts a loss. It may take effect at any moment until it ends.
#[derive(Debug)]
pub struct LossAcceptance {
    rows: Rows,
    prefix: String,
}

impl LossAcceptance {
    /// Changes the number of open acceptances, and marks all acknowledged rows as expendable.
    fn adjust_count(&self, change: i8) {
        let mut state = self.rows.state();
        let slot = state.slots.entry(self.prefix.clone()).or_default();
        slot.expendable.extend(slot.acknowledged.clone());
        slot.open_acceptances = slot.open_acceptances.saturating_add_signed(i32::from(change));
    }
}

impl Drop for LossAcceptance {
    fn drop(&mut self) {
        self.adjust_count(-1);
    }
}

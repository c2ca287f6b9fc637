//! Finds the newest copy of a slot's data: the latest snapshot of the database, and the owner's files as last reported.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;

use super::files::find_reported_problem;
use crate::db::machine_row::MachineRow;
use crate::db::{self, DbError};
use crate::operations::leased::LeasedOperation;
use svc_base::clock::rfc3339_ms;
use svc_base::error_chain::format_chain;
use svc_store::key::SlotPrefix;
use svc_store::pointer_io;

/// Timeout for reading the pointer.
const POINTER_TIMEOUT: Duration = Duration::from_secs(10);

/// The newest copy of the slot's data. `Display` completes the phrase "the newest copy is …".
pub struct NewestCopy {
    pub snapshot: NewestSnapshot,
    /// `None` if the host has reported no file backup.
    files: Option<ReportedFiles>,
}

/// The newest copy of the slot's database.
pub enum NewestSnapshot {
    Taken(Timestamp),
    /// The slot has no snapshot: nothing has been saved since this time, when the machine registered.
    Nothing(Option<Timestamp>),
    /// The pointer cannot be read, and no reported backup time is available. The time is when the machine registered.
    Unknown(Option<Timestamp>),
}

/// The state of the file backup in the machine's last heartbeat.
#[derive(Clone)]
struct ReportedFiles {
    saved_until: Option<Timestamp>,
    /// The reason to expect that not everything written before `saved_until` can be restored.
    problem: Option<String>,
    registered_at: Option<Timestamp>,
}

impl NewestCopy {
    /// Returns this copy with the database's snapshot replaced by one that was taken at `taken_at`.
    pub fn with_snapshot(&self, taken_at: Timestamp) -> Self {
        Self { snapshot: NewestSnapshot::Taken(taken_at), files: self.files.clone() }
    }

    /// Returns the time up to which both the database and the files are saved. A part that is not known to be saved
    /// counts from the machine's registration.
    pub fn saved_until(&self) -> Option<Timestamp> {
        let files = self.files.as_ref().and_then(ReportedFiles::restorable_until);
        [self.snapshot.saved_until(), files].into_iter().flatten().min()
    }
}

impl fmt::Display for NewestCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.snapshot)?;
        let Some(files) = &self.files else { return Ok(()) };
        write!(f, "{files}")?;
        let (NewestSnapshot::Taken(taken_at), None, Some(saved_until)) =
            (&self.snapshot, &files.problem, files.saved_until)
        else {
            return Ok(());
        };
        let minutes = saved_until.duration_since(*taken_at).as_mins();
        match minutes {
            1.. => write!(f, ", which is {minutes} min later"),
            ..=-1 => write!(f, ", which is {} min earlier", -minutes),
            0 => Ok(()),
        }
    }
}

impl NewestSnapshot {
    fn saved_until(&self) -> Option<Timestamp> {
        match self {
            Self::Taken(at) => Some(*at),
            Self::Nothing(registered_at) | Self::Unknown(registered_at) => *registered_at,
        }
    }
}

impl fmt::Display for NewestSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken(at) => write!(f, "the snapshot taken at {}", rfc3339_ms(*at)),
            Self::Nothing(Some(at)) => {
                write!(f, "none: there is no snapshot, and the machine registered at {}", rfc3339_ms(*at))
            }
            Self::Nothing(None) => f.write_str("none: there is no snapshot"),
            Self::Unknown(_) => f.write_str("unknown, because the snapshot pointer cannot be read"),
        }
    }
}

impl ReportedFiles {
    fn from_machine(machine: &MachineRow) -> Option<Self> {
        let problem = find_reported_problem(&machine.attention).map(str::to_owned);
        if machine.files.is_none() && problem.is_none() {
            return None;
        }
        let saved_until = machine.files.as_ref().and_then(|files| files["savedUntil"].as_str()?.parse().ok());
        Some(Self { saved_until, problem, registered_at: machine.registered_at })
    }

    fn restorable_until(&self) -> Option<Timestamp> {
        self.saved_until.filter(|_| self.problem.is_none()).or(self.registered_at)
    }
}

impl fmt::Display for ReportedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.problem, self.saved_until) {
            (Some(problem), _) => write!(f, "; the owner's files may not be completely saved ({problem})"),
            (None, Some(at)) => {
                write!(f, "; according to the host, the owner's files are saved as of {}", rfc3339_ms(at))
            }
            (None, None) => f.write_str("; according to the host, the owner's files are not saved"),
        }
    }
}

/// Finds the newest copy of a slot's data. The pointer names the database's snapshot; if the pointer is unreadable, the
/// newest backup time reported by the slot's hosts is used instead. The state of the files comes from the machine's
/// last heartbeat.
pub async fn find_newest_copy(leased: &LeasedOperation<'_>, machine: &MachineRow) -> NewestCopy {
    let files = ReportedFiles::from_machine(machine);
    NewestCopy { snapshot: find_newest_snapshot(leased, machine).await, files }
}

async fn find_newest_snapshot(leased: &LeasedOperation<'_>, machine: &MachineRow) -> NewestSnapshot {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let (bucket, key) = (&leased.platform.bucket, slot.pointer());
    match bucket.run_with_timeout(&key, POINTER_TIMEOUT, pointer_io::read(bucket, &slot)).await {
        Ok(pointer) => {
            let newest = pointer.and_then(|pointer| pointer.value.snapshot).map(|snapshot| snapshot.taken_at);
            newest.map_or(NewestSnapshot::Nothing(machine.registered_at), NewestSnapshot::Taken)
        }
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %format_chain(&error), "cannot read the snapshot pointer");
            let newest = find_newest_reported(leased, machine).await.unwrap_or_default();
            newest.map_or(NewestSnapshot::Unknown(machine.registered_at), NewestSnapshot::Taken)
        }
    }
}

async fn find_newest_reported(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
) -> Result<Option<Timestamp>, DbError> {
    let session = leased.platform.db.session().await?;
    db::machines::load_newest_backup_time(&session, &machine.user, &machine.slot).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timestamp(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn copy_with(files: Option<(Option<i64>, Option<&str>)>) -> NewestCopy {
        let files = files.map(|(saved_until, problem)| ReportedFiles {
            saved_until: saved_until.map(timestamp),
            problem: problem.map(str::to_owned),
            registered_at: Some(timestamp(1)),
        });
        NewestCopy { snapshot: NewestSnapshot::Taken(timestamp(100)), files }
    }

    #[test]
    fn newest_copy_is_as_old_as_its_older_part() {
        for (files, saved_until, text) in [
            (None, 100, "the snapshot taken at 1970-01-01T00:01:40.000Z"),
            (Some((Some(101), None)), 100, "files are saved as of 1970-01-01T00:01:41"),
            (Some((Some(99), None)), 99, "files are saved as of 1970-01-01T00:01:39"),
            (Some((None, None)), 1, "files are not saved"),
            (Some((Some(101), Some("a pack is damaged"))), 1, "completely saved (a pack is damaged)"),
        ] {
            let copy = copy_with(files);
            assert_eq!(copy.saved_until(), Some(timestamp(saved_until)), "{copy}");
            assert!(copy.to_string().contains(text), "{copy}");
        }
    }
}

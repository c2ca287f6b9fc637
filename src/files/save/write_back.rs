//! Writes dirty pages to disk before a file is read. A write through a memory map updates the file's timestamps only if
//! the page is clean, so further writes to a dirty page would go unnoticed. The timestamps must therefore be read
//! before the write-back, and must still match after the file has been read.

use std::fs::File;
use std::io;
use std::time::{Duration, SystemTime};

use super::entry_stat::{TIME_GRANULARITY, stat_open, to_timestamp};

/// By default, the kernel writes dirty pages back within 35 s (`vm.dirty_expire_centisecs` and
/// `vm.dirty_writeback_centisecs`). The rest is margin.
const MAX_WRITE_BACK_TIME: Duration = Duration::from_secs(120);
/// After this many files, sync the whole file system: flushing the disk for each of many new files would take longer
/// than reading them.
const MAX_INDIVIDUAL_FLUSHES: u32 = 64;

/// Write-back progress during a save.
#[derive(Debug, Default)]
pub(super) struct WriteBack {
    /// Number of files flushed individually since the last full write-back.
    individual_flushes: u32,
    /// Every file last changed before this time has been written back.
    flushed_before: Option<SystemTime>,
}

impl WriteBack {
    /// Writes back the file's dirty pages.
    ///
    /// # Errors
    /// If the write-back fails.
    pub(super) fn clean(&mut self, file: &File) -> io::Result<()> {
        let changed_at = SystemTime::from(to_timestamp(stat_open(file)?.stx_ctime));
        if self.is_clean(changed_at, SystemTime::now()) {
            return Ok(());
        }
        if self.individual_flushes < MAX_INDIVIDUAL_FLUSHES {
            self.individual_flushes += 1;
            return Ok(rustix::fs::fdatasync(file)?);
        }
        let began = SystemTime::now();
        nix::unistd::syncfs(file)?;
        *self = Self { individual_flushes: 0, flushed_before: began.checked_sub(TIME_GRANULARITY) };
        Ok(())
    }

    /// Whether a file last changed at this time has no dirty pages.
    fn is_clean(&self, changed_at: SystemTime, now: SystemTime) -> bool {
        let is_old = now.duration_since(changed_at).is_ok_and(|age| age >= MAX_WRITE_BACK_TIME);
        is_old || self.flushed_before.is_some_and(|time| changed_at < time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_new_files_are_written_back_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut write_back = WriteBack::default();
        for number in 0..MAX_INDIVIDUAL_FLUSHES {
            let file = File::create(dir.path().join(number.to_string())).unwrap();
            write_back.clean(&file).unwrap();
        }
        assert!(write_back.flushed_before.is_none());
        std::thread::sleep(TIME_GRANULARITY * 2);
        let file = File::create(dir.path().join("next")).unwrap();
        std::thread::sleep(TIME_GRANULARITY * 2);
        write_back.clean(&file).unwrap();
        let flushed_before = write_back.flushed_before.unwrap();
        let second = Duration::from_secs(1);
        let now = flushed_before + second;
        assert!(
            write_back.is_clean(flushed_before - second, now) && !write_back.is_clean(flushed_before, now)
        );
        assert!(write_back.is_clean(flushed_before, flushed_before + MAX_WRITE_BACK_TIME));
        assert!(
            !write_back.is_clean(now + second, now),
            "a file whose change time is in the future may be dirty"
        );
        let count = |write_back: &mut WriteBack| {
            write_back.clean(&file).unwrap();
            write_back.individual_flushes
        };
        assert_eq!(count(&mut write_back), 0, "the file was written back with all others");
    }
}

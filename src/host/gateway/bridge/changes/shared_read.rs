//! Lets many streams share one read of the outbox: when something changes, all idle streams of the same apps need the
//! same events, which are read from the database once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OnceCell;

use super::read::ChangeEvent;
use crate::database::DatabaseError;

/// The events to read: those after `position`, when the newest settled transaction was `newest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRange {
    pub position: i64,
    pub newest: i64,
}

/// The result of one read.
#[derive(Debug)]
pub struct ChangeBatch {
    /// Oldest first.
    pub events: Vec<ChangeEvent>,
    /// Whether there may be further events up to the range's `newest`.
    pub has_more: bool,
    /// The feed's floor: events up to this position may have been deleted.
    pub floor: i64,
}

/// A read that is running or has completed. After a failure, the next caller reads again.
type ReadCell = Arc<OnceCell<Arc<ChangeBatch>>>;

/// The latest read for each list of schemas. It is kept until a schema in the list no longer has a stream.
///
/// A stream that is far behind reads different ranges than the idle streams with the same list. Their reads then
/// replace one another, which takes additional queries but no additional memory. Lists in different orders share no
/// reads.
#[derive(Debug, Default)]
pub struct SharedReads {
    latest: Mutex<HashMap<Vec<String>, (ReadRange, ReadCell)>>,
}

impl SharedReads {
    /// Returns the result of a read of this range that another stream has completed or is performing; otherwise
    /// performs `read`.
    ///
    /// # Errors
    /// Those of `read`.
    pub async fn get_or_read(
        &self,
        schemas: &[String],
        range: ReadRange,
        read: impl Future<Output = Result<ChangeBatch, DatabaseError>>,
    ) -> Result<Arc<ChangeBatch>, DatabaseError> {
        let cell = self.find_or_add(schemas, range);
        cell.get_or_try_init(async || read.await.map(Arc::new)).await.cloned()
    }

    fn find_or_add(&self, schemas: &[String], range: ReadRange) -> ReadCell {
        let mut latest = self.latest();
        if let Some((latest_range, cell)) = latest.get(schemas)
            && *latest_range == range
        {
            return cell.clone();
        }
        let cell = ReadCell::default();
        latest.insert(schemas.to_vec(), (range, cell.clone()));
        cell
    }

    /// Drops the reads of all lists that include a schema for which `is_followed` returns false.
    pub fn retain(&self, is_followed: impl Fn(&String) -> bool) {
        self.latest().retain(|schemas, _| schemas.iter().all(&is_followed));
    }

    fn latest(&self) -> MutexGuard<'_, HashMap<Vec<String>, (ReadRange, ReadCell)>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;

    use super::*;

    const RANGE: ReadRange = ReadRange { position: 4, newest: 7 };

    fn batch() -> ChangeBatch {
        let events = vec![ChangeEvent { position: 7, json: "{}".to_owned() }];
        ChangeBatch { events, has_more: false, floor: 0 }
    }

    #[tokio::test]
    async fn concurrent_reads_of_one_range_share_one_query() {
        let (shared, schemas, reads) = (SharedReads::default(), ["app_a".to_owned()], AtomicUsize::new(0));
        let read = async || {
            reads.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
            Ok(batch())
        };
        let batches = join_all((0..100).map(|_| shared.get_or_read(&schemas, RANGE, read()))).await;
        assert!(batches.into_iter().all(|batch| batch.unwrap().events[0].position == 7));
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        // A later stream at the same position also needs no query, but every other range and list of schemas does.
        shared.get_or_read(&schemas, RANGE, read()).await.unwrap();
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        shared.get_or_read(&schemas, ReadRange { newest: 8, ..RANGE }, read()).await.unwrap();
        shared.get_or_read(&["app_b".to_owned()], RANGE, read()).await.unwrap();
        assert_eq!((reads.load(Ordering::Relaxed), shared.latest().len()), (3, 2));
        shared.retain(|schema| schema == "app_b");
        assert_eq!(shared.latest().len(), 1);
    }

    #[tokio::test]
    async fn failed_or_abandoned_read_is_repeated() {
        let (shared, schemas) = (SharedReads::default(), ["app_a".to_owned()]);
        let failed = shared.get_or_read(&schemas, RANGE, async { Err(DatabaseError::Timeout) }).await;
        assert!(matches!(failed, Err(DatabaseError::Timeout)));
        let abandoned = shared.get_or_read(&schemas, RANGE, std::future::pending());
        assert!(futures_util::poll!(Box::pin(abandoned)).is_pending());
        let batch = shared.get_or_read(&schemas, RANGE, async { Ok(batch()) }).await;
        assert_eq!(batch.unwrap().events.len(), 1);
    }
}

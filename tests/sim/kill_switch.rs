//! Kills a simulated platform process as kill -9 would: all its tasks stop immediately.

use std::sync::{Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

use super::plan::Moment;

/// The kill switch of a process; when armed, it kills the process at the n-th call of a kind.
#[derive(Debug, Default)]
pub struct KillSwitch {
    dead: CancellationToken,
    armed: Mutex<Option<(Moment, u8)>>,
}

impl KillSwitch {
    pub fn kill(&self) {
        self.dead.cancel();
    }

    pub fn arm(&self, moment: Moment, nth: u8) {
        *self.armed.lock().unwrap_or_else(PoisonError::into_inner) = Some((moment, nth));
    }

    pub fn disarm(&self) {
        *self.armed.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub fn is_dead(&self) -> bool {
        self.dead.is_cancelled()
    }

    /// The token for components that stop when a token is cancelled.
    pub fn token(&self) -> CancellationToken {
        self.dead.clone()
    }

    /// Runs work of the process. Returns `None` if the process is killed before the work ends.
    pub async fn run_while_alive<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.dead.cancelled() => None,
            result = work => Some(result),
        }
    }

    /// A point at which the process may be killed; if it is, the call never returns.
    pub async fn reach(&self, moment: Moment) {
        {
            let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *armed {
                Some((at, 0)) if *at == moment => {
                    *armed = None;
                    self.dead.cancel();
                }
                Some((at, remaining)) if *at == moment => *remaining -= 1,
                _ => {}
            }
        }
        if self.is_dead() {
            std::future::pending::<()>().await;
        }
    }
}

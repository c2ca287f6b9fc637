//! Kills a simulated platform process as kill -9 would: all its tasks stop immediately.

use std::sync::{Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

use super::plan::KillPoint;

/// A process's kill switch. When armed, it lets `calls_to_skip` calls of one kind pass, and kills the process at the
/// next one.
#[derive(Debug, Default)]
pub struct KillSwitch {
    dead: CancellationToken,
    armed: Mutex<Option<(KillPoint, u8)>>,
}

impl KillSwitch {
    pub fn kill(&self) {
        self.dead.cancel();
    }

    pub fn arm(&self, kill_point: KillPoint, calls_to_skip: u8) {
        *self.armed.lock().unwrap_or_else(PoisonError::into_inner) = Some((kill_point, calls_to_skip));
    }

    pub fn disarm(&self) {
        *self.armed.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub fn is_dead(&self) -> bool {
        self.dead.is_cancelled()
    }

    /// Returns the token for components that stop when a token is cancelled.
    pub fn token(&self) -> CancellationToken {
        self.dead.clone()
    }

    /// Runs the process's work. Returns `None` if the process is killed before the work ends.
    pub async fn run_while_alive<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.dead.cancelled() => None,
            result = work => Some(result),
        }
    }

    /// Marks a point at which the process may be killed. If the process is dead, the call never returns.
    pub async fn reach(&self, kill_point: KillPoint) {
        {
            let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *armed {
                Some((armed_point, 0)) if *armed_point == kill_point => {
                    *armed = None;
                    self.dead.cancel();
                }
                Some((armed_point, remaining)) if *armed_point == kill_point => *remaining -= 1,
                _ => {}
            }
        }
        if self.is_dead() {
            std::future::pending::<()>().await;
        }
    }
}

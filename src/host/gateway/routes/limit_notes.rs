//! Notes in `activity.log` that a cost limit has refused a dispatch, at most once a minute for each user.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::agents::kernel::Kernel;
use svc_http::problem::{Code, Problem};

const INTERVAL: Duration = Duration::from_secs(60);
/// Users whose last note is remembered.
const MAX_USERS: usize = 1000;

static LAST_NOTES: Mutex<BTreeMap<String, Instant>> = Mutex::new(BTreeMap::new());

pub fn record(kernel: &Kernel, user: &str, problem: &Problem) {
    if problem.code != Code::CostLimitReached {
        return;
    }
    let mut last_notes = LAST_NOTES.lock().unwrap_or_else(PoisonError::into_inner);
    if is_due(&mut last_notes, user, Instant::now()) {
        kernel.note(&format!("a dispatch of {user} was refused: {}", problem.detail));
    }
}

fn is_due(last_notes: &mut BTreeMap<String, Instant>, user: &str, now: Instant) -> bool {
    last_notes.retain(|_, at| now.duration_since(*at) < INTERVAL);
    if last_notes.contains_key(user) || last_notes.len() >= MAX_USERS {
        return false;
    }
    last_notes.insert(user.to_owned(), now);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_is_noted_once_a_minute() {
        let mut last_notes = BTreeMap::new();
        let start = Instant::now();
        let mut is_due =
            |user: &str, seconds| is_due(&mut last_notes, user, start + Duration::from_secs(seconds));
        assert!(is_due("ada", 0) && !is_due("ada", 59) && is_due("bob", 59));
        assert!(is_due("ada", 60) && !is_due("bob", 60));
        for user in 0..MAX_USERS - 2 {
            assert!(is_due(&user.to_string(), 61));
        }
        assert!(!is_due("one too many", 61) && is_due("one too many", 121));
    }
}

//! Scripted provider faults and the provider's call log.

use serde::{Deserialize, Serialize};

/// A fault injected into a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "kind")]
pub enum Fault {
    /// The call is rejected with this status and code. With `reset_in_seconds`, the headers report an exhausted
    /// rate limit.
    Status {
        status: u16,
        code: String,
        #[serde(default)]
        reset_in_seconds: Option<u64>,
    },
    /// The call is executed, then the connection is cut without a response.
    LostReplyAfterCommit,
    /// The connection is cut before the call is executed.
    LostRequest,
    /// The call is executed, and its response is delayed.
    SlowReply { ms: u64 },
    /// The call is accepted, but its action ends in an error and has no effect.
    ActionError,
    /// The call is neither executed nor answered: the caller times out.
    Timeout,
}

/// A fault for matching calls. `method: None` matches all methods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultRule {
    #[serde(default)]
    pub method: Option<String>,
    #[serde(default)]
    pub path_contains: String,
    /// Number of matching calls to skip first.
    #[serde(default)]
    pub skip: u32,
    pub times: u32,
    pub fault: Fault,
}

impl FaultRule {
    /// Returns a rule for the next call with this method whose path contains `path_contains`.
    pub fn once(method: &str, path_contains: &str, fault: Fault) -> Self {
        Self::times(1, method, path_contains, fault)
    }

    pub fn times(times: u32, method: &str, path_contains: &str, fault: Fault) -> Self {
        Self {
            method: Some(method.to_owned()),
            path_contains: path_contains.to_owned(),
            skip: 0,
            times,
            fault,
        }
    }
}

/// A call and its response; `status` is `None` if the connection was cut or abandoned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CallRecord {
    pub method: String,
    /// Includes the query.
    pub path: String,
    pub status: Option<u16>,
    /// The caller's `x-request-id`.
    pub request_id: Option<String>,
}

#[derive(Default)]
pub(super) struct FaultScript {
    rules: Vec<FaultRule>,
    calls: Vec<CallRecord>,
}

impl FaultScript {
    pub(super) fn add(&mut self, rule: FaultRule) {
        self.rules.push(rule);
    }

    pub(super) fn clear(&mut self) {
        self.rules.clear();
    }

    /// Returns the rules with remaining faults.
    pub(super) fn pending(&self) -> Vec<FaultRule> {
        self.rules.clone()
    }

    pub(super) fn set_request_id(&mut self, call_index: usize, request_id: &str) {
        if let Some(call) = self.calls.get_mut(call_index) {
            call.request_id = Some(request_id.to_owned());
        }
    }

    /// Logs the call, and returns its index.
    pub(super) fn record_call(&mut self, method: &str, path: &str) -> usize {
        let (method, path) = (method.to_owned(), path.to_owned());
        self.calls.push(CallRecord { method, path, status: None, request_id: None });
        self.calls.len() - 1
    }

    /// Returns the fault for a call, if any. Counts the call for each matching rule, up to the one that applies.
    pub(super) fn take_fault(&mut self, method: &str, path: &str) -> Option<Fault> {
        let fault = self.rules.iter_mut().find_map(|rule| {
            let matches = rule.method.as_deref().is_none_or(|expected| expected == method)
                && path.contains(&rule.path_contains);
            if !matches {
                return None;
            }
            if rule.skip > 0 {
                rule.skip -= 1;
                return None;
            }
            rule.times = rule.times.saturating_sub(1);
            Some(rule.fault.clone())
        });
        self.rules.retain(|rule| rule.times > 0);
        fault
    }

    pub(super) fn set_status(&mut self, call_index: usize, status: u16) {
        if let Some(call) = self.calls.get_mut(call_index) {
            call.status = Some(status);
        }
    }

    pub(super) fn calls(&self) -> &[CallRecord] {
        &self.calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_skips_then_applies_then_expires() {
        let mut script = FaultScript::default();
        script.add(FaultRule { skip: 1, ..FaultRule::once("POST", "/servers", Fault::LostRequest) });
        assert_eq!(script.take_fault("GET", "/v1/servers"), None);
        assert_eq!(script.take_fault("POST", "/v1/servers"), None);
        assert_eq!(script.take_fault("POST", "/v1/servers"), Some(Fault::LostRequest));
        assert_eq!(script.take_fault("POST", "/v1/servers"), None);
        assert!(script.pending().is_empty());
    }
}

//! Configuration of the keys that hosts trust.
//!
//! `bundle publish` checks the sequence number of the release's key set before uploading anything. A published manifest
//! can only be replaced by one valid for longer, so a mistake couldn't be undone.

use super::PublishError;
use crate::vars;
use svc_base::config::{ConfigError, Env};
use svc_store::bundle::{KeySet, TrustedKeys, max_sequence_after};

#[derive(Debug, Default)]
pub struct HostKeys {
    /// `BUNDLE_PUBLIC_KEYS`, if set.
    pub keys: Option<TrustedKeys>,
    /// `BUNDLE_KEYS_SEQUENCE`, or 0 if unset.
    pub sequence: u32,
}

impl HostKeys {
    #[cfg(test)]
    pub fn with_keys(keys: &str) -> Self {
        Self { keys: Some(keys.parse().unwrap()), sequence: 0 }
    }

    /// # Errors
    /// If a variable is invalid.
    pub fn from_process() -> Result<Self, ConfigError> {
        Self::from_env(Env::from_process())
    }

    fn from_env(mut env: Env) -> Result<Self, ConfigError> {
        let keys = env.optional(&vars::BUNDLE_PUBLIC_KEYS);
        let sequence = env.or_default(&vars::BUNDLE_KEYS_SEQUENCE);
        env.finish(Some(Self { keys, sequence }))
    }

    /// Checks that hosts would accept the key set's sequence number.
    ///
    /// # Errors
    /// [`PublishError::SequenceTooHigh`] if it's too high.
    pub fn check_sequence(&self, set: Option<&KeySet>) -> Result<(), PublishError> {
        let (base, max) = (self.sequence, max_sequence_after(self.sequence));
        match set.map(|set| set.sequence).filter(|found| *found > max) {
            Some(found) => Err(PublishError::SequenceTooHigh { found, base, max }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use kit::bundle::SigningKey;

    use super::*;

    #[test]
    fn check_sequence_rejects_sequence_above_maximum() {
        let set = |sequence: u32| {
            let key =
                SigningKey::from_pem(include_bytes!("../../../tests/kit/src/bundle/ed25519-test-only.txt"))
                    .unwrap();
            Some(KeySet { sequence, keys: key.public_key_base64().parse().unwrap() })
        };
        for (sequence, base, is_accepted) in
            [(3, 2, true), (1002, 2, true), (1003, 2, false), (5000, 2, false)]
        {
            let host_keys = HostKeys { sequence: base, ..HostKeys::default() };
            let checked = host_keys.check_sequence(set(sequence).as_ref());
            assert_eq!(checked.is_ok(), is_accepted, "{sequence} after {base}");
        }
        let host_keys = HostKeys { sequence: 2, ..HostKeys::default() };
        let error = host_keys.check_sequence(set(5000).as_ref()).unwrap_err().to_string();
        assert!(error.contains("5000") && error.contains("1002 at most"), "{error}");
        HostKeys::default().check_sequence(None).unwrap();
    }

    #[test]
    fn from_env_rejects_invalid_variables() {
        let from = |name, value| HostKeys::from_env(Env::from_pairs([(name, value)]));
        assert_eq!(from("BUNDLE_KEYS_SEQUENCE", "7").unwrap().sequence, 7);
        for (name, value) in [("BUNDLE_KEYS_SEQUENCE", "one"), ("BUNDLE_PUBLIC_KEYS", "AAAA")] {
            let error = from(name, value).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}

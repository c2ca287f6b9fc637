//! Checks, before a release is published, that hosts accept the sequence of its keys. Afterwards, its manifest can be
//! replaced only with one that is valid for longer.

use super::PublishError;
use crate::vars;
use svc_base::config::Env;
use svc_store::bundle::{KeySet, max_sequence_after};

/// Returns `BUNDLE_KEYS_SEQUENCE`, the sequence of the keys that hosts trust; 0 if it is not set or invalid.
pub fn configured_sequence() -> u32 {
    Env::from_process().or_default(&vars::BUNDLE_KEYS_SEQUENCE)
}

/// Checks that hosts at the sequence `base` would not reject the key set because its sequence is too high.
///
/// # Errors
/// [`PublishError::SequenceTooHigh`] if they would.
pub fn check(set: Option<&KeySet>, base: u32) -> Result<(), PublishError> {
    let max = max_sequence_after(base);
    match set.map(|set| set.sequence).filter(|found| *found > max) {
        Some(found) => Err(PublishError::SequenceTooHigh { found, base, max }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use kit::bundle::SigningKey;

    use super::*;

    #[test]
    fn check_rejects_sequence_that_is_too_high() {
        let set = |sequence: u32| {
            let key =
                SigningKey::from_pem(include_bytes!("../../../tests/kit/src/bundle/ed25519-test-only.txt"))
                    .unwrap();
            Some(KeySet { sequence, keys: key.public_key_base64().parse().unwrap() })
        };
        for (sequence, base, is_accepted) in
            [(3, 2, true), (1002, 2, true), (1003, 2, false), (5000, 2, false)]
        {
            let checked = check(set(sequence).as_ref(), base);
            assert_eq!(checked.is_ok(), is_accepted, "{sequence} after {base}");
        }
        let refused = check(set(5000).as_ref(), 2).unwrap_err().to_string();
        assert!(refused.contains("5000") && refused.contains("1002 at most"), "{refused}");
        check(None, 0).unwrap();
    }
}

//! Reads `PLATFORM_KEY` and, while two keys are active, `PLATFORM_KEY_PREVIOUS`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as B64;
use secrecy::{ExposeSecret, SecretSlice, SecretString};

use crate::platform_key::PlatformKeys;
use crate::vars;
use svc_base::config::Env;
use svc_base::variable::Variable;

/// Reads both keys. Records errors in `env` and returns `None` if there are any.
pub fn read(env: &mut Env) -> Option<PlatformKeys> {
    let (variable, previous_variable) = (&vars::PLATFORM_KEY, &vars::PLATFORM_KEY_PREVIOUS);
    let current = env.required_secret(variable).and_then(|text| parse_key(env, variable, &text));
    let previous = match env.secret(previous_variable) {
        Some(text) => Some(parse_key(env, previous_variable, &text)?),
        None => None,
    };
    let current = current?;
    if previous.as_ref().is_some_and(|previous| previous.expose_secret() == current.expose_secret()) {
        env.add_error(
            previous_variable,
            "must differ from PLATFORM_KEY; unset it unless a key is being replaced",
        );
        return None;
    }
    Some(PlatformKeys { current, previous })
}

fn parse_key(env: &mut Env, variable: &Variable, text: &SecretString) -> Option<SecretSlice<u8>> {
    let text = text.expose_secret();
    let bytes = hex::decode(text).ok().filter(|bytes| bytes.len() == 32).or_else(|| B64.decode(text).ok());
    match bytes {
        Some(bytes) if bytes.len() == 32 => Some(bytes.into()),
        _ => {
            env.add_error(variable, "must be 32 bytes, in hexadecimal or base64");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the errors reported for these two settings.
    fn errors(current: &'static str, previous: &'static str) -> Vec<String> {
        let mut env = Env::from_pairs([("PLATFORM_KEY", current), ("PLATFORM_KEY_PREVIOUS", previous)]);
        let keys = read(&mut env);
        env.finish(keys.map(drop)).err().map(|error| error.errors).unwrap_or_default()
    }

    #[test]
    fn read_rejects_invalid_or_equal_keys_without_quoting_them() {
        let zeros = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
        // The same 32 bytes in hexadecimal.
        let same = errors(zeros, "0000000000000000000000000000000000000000000000000000000000000000");
        assert_eq!(same.len(), 1, "{same:?}");
        assert!(same[0].starts_with("PLATFORM_KEY_PREVIOUS: must differ"), "{same:?}");
        assert!(!same[0].contains("0000"), "{same:?}");
        assert!(errors(zeros, "AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=").is_empty());
        let both = errors("hunter2", "hunter2-too");
        assert!(both.len() == 2 && !both.concat().contains("hunter2"), "{both:?}");
    }
}

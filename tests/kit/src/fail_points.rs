//! Recognizes an executable with fail points: the dev build has them, a release must not.

/// A part of a message of the `fail` library.
const MESSAGE: &[u8] = b"unable to configure failpoint";

/// Returns whether this executable was built with fail points.
pub fn are_in(executable: &[u8]) -> bool {
    executable.windows(MESSAGE.len()).any(|window| window == MESSAGE)
}

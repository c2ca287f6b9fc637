//! Detects whether an executable was built with fail points. Development builds have them; releases must not.

/// Part of an error message in the `fail` crate.
const MESSAGE: &[u8] = b"unable to configure failpoint";

/// Returns whether the executable with this content was built with fail points.
pub fn has_fail_points(executable: &[u8]) -> bool {
    executable.windows(MESSAGE.len()).any(|window| window == MESSAGE)
}

//! System randomness.

use ring::rand::{SecureRandom, SystemRandom};

use crate::error::FilesError;

/// Fills a buffer with random bytes.
///
/// # Errors
/// [`FilesError::NoRandomness`] if the system's random number generator fails.
pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<(), FilesError> {
    SystemRandom::new().fill(bytes).map_err(|_| FilesError::NoRandomness)
}

//! The means by which the launchers of a job authenticate each other.

use accelerator_collective::launcher::{Security, Token};

use crate::error::{Error, Result};
use crate::supervisor::store::{given_security, given_token};
pub(crate) use crate::variables::liveness;

/// The token of the job: that of `ACCEL_TOKEN_FILE`; `None` where `ACCEL_INSECURE=1` waives it.
///
/// # Errors
/// When there is neither, or the file cannot be read.
pub(crate) fn token() -> Result<Option<Token>> {
    if let Some(given) = given_token()? {
        return Ok(Some(given.token));
    }
    match given_security()? {
        Security::Waived => Ok(None),
        Security::Required => Err(Error::usage(
            "several hosts know one another by a token: write the same random one (`openssl rand -hex 32`) into a file on \
             each, readable by you alone, and name it in ACCEL_TOKEN_FILE; on a network that you trust, ACCEL_INSECURE=1 \
             does without",
        )),
    }
}

//! By what the launchers of a job know one another.

use std::time::Duration;

use accelerator_collective::rendezvous::{Security, Token};
use accelerator_env::{DEFAULT_LIVENESS, LIVENESS_TIMEOUT};

use crate::error::{Error, Result};
use crate::supervisor::store::{given_security, given_token};
use crate::variables;

/// The token of the job: that of `ACCEL_TOKEN_FILE`; `None` where `ACCEL_INSECURE=1` waives it.
///
/// # Errors
/// When there is neither, or the file cannot be read.
pub(crate) fn token() -> Result<Option<Token>> {
    if let Some(token) = given_token()? {
        return Ok(Some(token));
    }
    match given_security()? {
        Security::Waived => Ok(None),
        Security::Required => Err(Error::usage(
            "several hosts know one another by a token: write the same 16 bytes or more into a file on each, readable by \
             you alone, and name it in ACCEL_TOKEN_FILE; on a network that you trust, ACCEL_INSECURE=1 does without",
        )),
    }
}

/// For how long a host may be silent before it is lost: `ACCEL_LIVENESS_TIMEOUT`, or 5 s.
pub(crate) fn liveness() -> Duration {
    let given = variables::given(LIVENESS_TIMEOUT.name);
    let given = given.and_then(|text| accelerator_env::seconds(&text.to_string_lossy()));
    given.unwrap_or(DEFAULT_LIVENESS)
}

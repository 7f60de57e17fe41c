//! By what the launchers of a job know one another.

use std::time::Duration;

use accelerator_collective::rendezvous::{Security, Token};
use accelerator_env::{LIVENESS_TIMEOUT, TOKEN_FILE};

use crate::error::{Error, Result, chain};
use crate::variables;

/// Silence of a host for which it is lost, where nothing else is asked for: that of ranks.
const DEFAULT_LIVENESS: Duration = Duration::from_secs(5);

/// The token of the job: that of `ACCEL_TOKEN_FILE`; `None` where `ACCEL_INSECURE=1` waives it.
///
/// # Errors
/// When there is neither, or the file cannot be read.
pub(crate) fn token() -> Result<Option<Token>> {
    if let Some(path) = variables::given(TOKEN_FILE.name) {
        let token = Token::from_file(path).map_err(|error| Error::usage(chain(&error)))?;
        return Ok(Some(token));
    }
    match Security::from_env().map_err(|error| Error::usage(chain(&error)))? {
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

//! The outcome of a command.

use std::error::Error;
use std::path::Path;

use serde::Serialize;

/// A measurement, or the reason why there is none.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Outcome<T> {
    /// The measurement.
    Measured(T),
    /// The device does not support it.
    Skipped {
        /// The reason.
        skipped: String,
    },
}

impl<T> Outcome<T> {
    /// Returns the measurement, if there is one.
    pub(crate) fn measured(&self) -> Option<&T> {
        match self {
            Self::Measured(value) => Some(value),
            Self::Skipped { .. } => None,
        }
    }
}

/// Turns the error that the device does not support something into an outcome; passes on all other errors.
pub(crate) fn skip_unsupported<T>(
    found: Result<T, Box<dyn Error>>,
) -> Result<Outcome<T>, Box<dyn Error>> {
    match found {
        Ok(value) => Ok(Outcome::Measured(value)),
        Err(error) => match error.downcast::<Unsupported>() {
            Ok(unsupported) => Ok(Outcome::Skipped {
                skipped: unsupported.0,
            }),
            Err(error) => Err(error),
        },
    }
}

/// The error that the device does not support a precision.
#[derive(Debug)]
pub(crate) struct Unsupported(pub(crate) String);

impl std::fmt::Display for Unsupported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Unsupported {}

/// Prints the JSON object of a command, and writes it to `out` if given.
pub(crate) fn tell(out: Option<&Path>, value: &impl Serialize) -> Result<(), Box<dyn Error>> {
    let text = serde_json::to_string(value)?;
    println!("{text}");
    if let Some(path) = out {
        std::fs::write(path, text + "\n")?;
    }
    Ok(())
}

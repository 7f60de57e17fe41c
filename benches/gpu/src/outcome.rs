//! What a command found.

use std::error::Error;
use std::path::Path;

use serde::Serialize;

/// Figures, or why there are none.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Outcome<T> {
    /// It was measured.
    Measured(T),
    /// The device cannot do it.
    Skipped {
        /// Why.
        skipped: String,
    },
}

impl<T> Outcome<T> {
    /// What was measured, if it was.
    pub(crate) fn measured(&self) -> Option<&T> {
        match self {
            Self::Measured(value) => Some(value),
            Self::Skipped { .. } => None,
        }
    }
}

/// Takes a refusal of the device for an outcome: only what fails in another way is an error.
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

/// The device does not compute in what was asked for.
#[derive(Debug)]
pub(crate) struct Unsupported(pub(crate) String);

impl std::fmt::Display for Unsupported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Unsupported {}

/// Prints a command's JSON object, and writes it to the file where one is given.
pub(crate) fn tell(out: Option<&Path>, value: &impl Serialize) -> Result<(), Box<dyn Error>> {
    let text = serde_json::to_string(value)?;
    println!("{text}");
    if let Some(path) = out {
        std::fs::write(path, text + "\n")?;
    }
    Ok(())
}

//! What the environment may say besides where this process stands.

use accelerator_collective::Launch;

use crate::device::DeviceKind;
use crate::error::{Error, Result};

/// Names the device, as [`AcceleratorBuilder::device`](super::AcceleratorBuilder::device) does.
const DEVICE: &str = "ACCEL_DEVICE";

/// Moves the fixtures of this project's own tests.
const FIXTURES: &str = "ACCEL_FIXTURES";

/// The device of the program and of the environment, which must not contradict each other.
pub(super) fn device(asked: Option<DeviceKind>) -> Result<DeviceKind> {
    let named = match std::env::var(DEVICE) {
        Ok(name) => Some(
            name.parse::<DeviceKind>()
                .map_err(|error| Error::config(format!("{DEVICE}: {error}")))?,
        ),
        Err(std::env::VarError::NotPresent) => None,
        Err(error) => return Err(Error::config(format!("{DEVICE}: {error}"))),
    };
    match (asked, named) {
        (Some(asked), Some(named)) if asked != named => Err(Error::config(format!(
            "the program asks for device `{asked}`, and {DEVICE} for `{named}`; unset the \
             variable, or leave the choice to it"
        ))),
        (asked, named) => Ok(asked.or(named).unwrap_or_else(DeviceKind::preferred)),
    }
}

/// Refuses a variable with this project's prefix that nothing reads: it is misspelt.
pub(super) fn check() -> Result<()> {
    let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    check_names(names)
}

fn check_names(names: impl Iterator<Item = String>) -> Result<()> {
    let known = || Launch::VARIABLES.into_iter().chain([DEVICE, FIXTURES]);
    let mut ours = names.filter(|name| name.starts_with("ACCEL_"));
    match ours.find(|name| !known().any(|known| known == name)) {
        None => Ok(()),
        Some(name) => Err(Error::config(format!(
            "the environment variable {name} is not known; expected one of {}: correct it, or \
             unset it",
            known()
                .filter(|known| *known != FIXTURES)
                .collect::<Vec<_>>()
                .join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_refused_and_others_are_not() {
        let check = |names: &[&str]| check_names(names.iter().map(|name| (*name).to_owned()));
        check(&["PATH", "ACCEL_PORT", "ACCEL_DEVICE", "ACCELERATE_USE_CPU"]).unwrap();
        let error = check(&["PATH", "ACCEL_TRASNPORT"]).unwrap_err();
        assert!(error.is_config());
        let text = error.to_string();
        assert!(
            text.contains("ACCEL_TRASNPORT") && text.contains("ACCEL_TRANSPORT"),
            "{text}"
        );
    }
}

//! What the environment may say besides where this process stands.

use core::fmt::Display;
use core::num::NonZeroUsize;
use core::str::FromStr;
use std::path::{Path, PathBuf};

use accelerator_collective::{Launch, variable};

use crate::device::{DeviceKind, Oversubscription};
use crate::error::{Error, Result};
use crate::gradient::{Compression, GradientReduction, Overlap};
use crate::precision::Precision;
use crate::timeline::Schedule;

/// Names the device, as [`AcceleratorBuilder::device`](super::AcceleratorBuilder::device) does.
const DEVICE: &str = "ACCEL_DEVICE";

/// Names the compression, as
/// [`AcceleratorBuilder::with_compression`](super::AcceleratorBuilder::with_compression) does.
const COMPRESSION: &str = "ACCEL_COMPRESSION";

/// Says how gradients of a GPU get to other ranks, as
/// [`AcceleratorBuilder::with_reduction`](super::AcceleratorBuilder::with_reduction) does.
const REDUCTION: &str = "ACCEL_REDUCTION";

/// Says whether communication overlaps, as
/// [`AcceleratorBuilder::with_overlap`](super::AcceleratorBuilder::with_overlap) does.
const OVERLAP: &str = "ACCEL_OVERLAP";

/// Says whether ranks may share GPUs, as
/// [`AcceleratorBuilder::with_oversubscription`](super::AcceleratorBuilder::with_oversubscription) does.
const OVERSUBSCRIBE_GPUS: &str = "ACCEL_OVERSUBSCRIBE_GPUS";

/// Names the file of the trace, as
/// [`AcceleratorBuilder::with_trace`](super::AcceleratorBuilder::with_trace) does.
const TRACE: &str = "ACCEL_TRACE";

/// Says which steps the trace keeps, as
/// [`AcceleratorBuilder::with_trace_schedule`](super::AcceleratorBuilder::with_trace_schedule) does.
const TRACE_SCHEDULE: &str = "ACCEL_TRACE_SCHEDULE";

/// Names the precision, as [`AcceleratorBuilder::precision`](super::AcceleratorBuilder::precision) does.
const PRECISION: &str = "ACCEL_PRECISION";

/// Says how many micro-steps make a step, as
/// [`AcceleratorBuilder::accumulation_steps`](super::AcceleratorBuilder::accumulation_steps) does.
const ACCUMULATION_STEPS: &str = "ACCEL_ACCUMULATION_STEPS";

/// Moves the fixtures of this project's own tests.
const FIXTURES: &str = "ACCEL_FIXTURES";

/// The device of the program and of the environment, which must not contradict each other.
pub(super) fn device(asked: Option<DeviceKind>) -> Result<DeviceKind> {
    Ok(agreed("device", asked, DEVICE)?.unwrap_or_else(DeviceKind::preferred))
}

/// The compression of the program and of the environment, in the same way.
pub(super) fn compression(asked: Option<Compression>) -> Result<Compression> {
    Ok(agreed("compression", asked, COMPRESSION)?.unwrap_or_default())
}

/// The reduction of the program and of the environment, in the same way.
pub(super) fn reduction(asked: Option<GradientReduction>) -> Result<GradientReduction> {
    Ok(agreed("reduction", asked, REDUCTION)?.unwrap_or_default())
}

/// The file of the trace, in the same way.
pub(super) fn trace(asked: Option<&Path>) -> Result<Option<PathBuf>> {
    match (asked, variable(TRACE).map(PathBuf::from)) {
        (Some(asked), Some(named)) if asked != named => Err(Error::config(format!(
            "the program asks for a trace in `{}`, and {TRACE} for one in `{}`; unset the variable, \
             or leave the choice to it",
            asked.display(),
            named.display()
        ))),
        (asked, named) => Ok(asked.map(Path::to_owned).or(named)),
    }
}

/// Which steps the trace keeps, in the same way.
pub(super) fn trace_schedule(asked: Option<Schedule>) -> Result<Option<Schedule>> {
    agreed("the schedule", asked, TRACE_SCHEDULE)
}

/// The overlap of the program and of the environment, in the same way.
pub(super) fn overlap(asked: Option<Overlap>) -> Result<Overlap> {
    Ok(agreed("overlap", asked, OVERLAP)?.unwrap_or_default())
}

/// Whether ranks may share GPUs, in the same way.
pub(super) fn oversubscription(asked: Option<Oversubscription>) -> Result<Oversubscription> {
    let agreed = agreed("oversubscription", asked.map(Switch), OVERSUBSCRIBE_GPUS)?;
    Ok(agreed.map_or_else(Oversubscription::default, |switch| switch.0))
}

/// The precision of the program and of the environment, in the same way.
pub(super) fn precision(asked: Option<Precision>) -> Result<Precision> {
    Ok(agreed("precision", asked, PRECISION)?.unwrap_or_default())
}

/// The number of accumulation steps of the program and of the environment, in the same way.
pub(super) fn accumulation_steps(asked: Option<NonZeroUsize>) -> Result<NonZeroUsize> {
    let asked = asked.map(Count);
    let agreed = agreed(
        "a number of accumulation steps of",
        asked,
        ACCUMULATION_STEPS,
    )?;
    Ok(agreed.map_or(NonZeroUsize::MIN, |count| count.0))
}

/// A number of at least 1, whose errors say so.
#[derive(PartialEq)]
struct Count(NonZeroUsize);

impl Display for Count {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse()
            .map(Self)
            .map_err(|_| format!("expected a number of at least 1, found `{text}`"))
    }
}

/// The setting as the variable has it: `1` or `0`, or the words for them.
#[derive(PartialEq)]
struct Switch(Oversubscription);

impl Display for Switch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self.0 {
            Oversubscription::Allow => "1",
            Oversubscription::Refuse => "0",
        })
    }
}

impl FromStr for Switch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim().to_ascii_lowercase().as_str() {
            "1" | "true" => Ok(Self(Oversubscription::Allow)),
            "" | "0" | "false" => Ok(Self(Oversubscription::Refuse)),
            _ => Err(format!("expected 1 or 0, found `{text}`")),
        }
    }
}

/// What the program or the variable says about `what`.
fn agreed<T>(what: &str, asked: Option<T>, name: &str) -> Result<Option<T>>
where
    T: Display + FromStr<Err: Display> + PartialEq,
{
    // A value that is not Unicode is none of the valid ones; the lossy text shows it.
    let parsed = variable(name).map(|value| value.to_string_lossy().parse::<T>());
    let named = parsed
        .transpose()
        .map_err(|error| Error::config(format!("{name}: {error}")))?;
    match (asked, named) {
        (Some(asked), Some(named)) if asked != named => Err(Error::config(format!(
            "the program asks for {what} `{asked}`, and {name} for `{named}`; unset the \
             variable, or leave the choice to it"
        ))),
        (asked, named) => Ok(asked.or(named)),
    }
}

/// Refuses a variable with this project's prefix that nothing reads: it is misspelt, unless the launcher
/// has set it, which is newer then.
pub(super) fn check() -> Result<()> {
    let set = std::env::vars_os().filter(|(_, value)| !value.is_empty());
    let names = set.map(|(name, _)| name.to_string_lossy().into_owned());
    let launcher = variable(Launch::SET_BY_LAUNCHER).unwrap_or_default();
    check_names(names, &launcher.to_string_lossy())
}

fn check_names(names: impl Iterator<Item = String>, set_by_launcher: &str) -> Result<()> {
    let known = || {
        Launch::VARIABLES.into_iter().chain([
            ACCUMULATION_STEPS,
            COMPRESSION,
            DEVICE,
            FIXTURES,
            OVERLAP,
            OVERSUBSCRIBE_GPUS,
            PRECISION,
            REDUCTION,
            TRACE,
            TRACE_SCHEDULE,
        ])
    };
    let mut ours = names.filter(|name| name.starts_with("ACCEL_"));
    let is_known = |name: &str| {
        known()
            .chain(set_by_launcher.split(','))
            .any(|known| known == name)
    };
    match ours.find(|name| !is_known(name)) {
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
    fn a_switch_is_read_as_the_launcher_reads_it() {
        use Oversubscription::{Allow, Refuse};
        for (text, setting) in [
            ("1", Allow),
            (" True", Allow),
            ("0", Refuse),
            ("false", Refuse),
        ] {
            let switch: Switch = text.parse().unwrap();
            assert_eq!(switch.0, setting, "{text}");
        }
        for setting in [Allow, Refuse] {
            let switch: Switch = Switch(setting).to_string().parse().unwrap();
            assert_eq!(switch.0, setting);
        }
        let error = "2".parse::<Switch>().err().unwrap();
        assert!(error.contains("1 or 0") && error.contains('2'), "{error}");
    }

    #[test]
    fn a_misspelt_variable_is_refused_and_others_are_not() {
        let check = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned());
            check_names(names, "ACCEL_JOB,ACCEL_FUTURE")
        };
        check(&["PATH", "ACCEL_PORT", "ACCEL_DEVICE", "ACCELERATE_USE_CPU"]).unwrap();
        // The launcher is newer, and says that the variable is its own.
        check(&["ACCEL_JOB", "ACCEL_FUTURE"]).unwrap();
        let error = check(&["PATH", "ACCEL_TRASNPORT"]).unwrap_err();
        assert!(error.is_config());
        let text = error.to_string();
        assert!(
            text.contains("ACCEL_TRASNPORT") && text.contains("ACCEL_TRANSPORT"),
            "{text}"
        );
    }
}

//! Settings from environment variables, which must not contradict those of the program.

use core::fmt::Display;
use core::num::NonZeroUsize;
use core::str::FromStr;
use std::path::{Path, PathBuf};

use accelerator_host::{
    self as env, ACCUMULATION_STEPS, OVERSUBSCRIBE_GPUS, SET_BY_LAUNCHER, Variable, variable,
};

use crate::core::device::Oversubscription;
use crate::core::error::{Error, Result};

/// Returns the path of a file or folder that the program or a variable sets, by the rule of [`agreed`]. `what` names it in
/// the error.
pub(super) fn path(what: &str, asked: Option<&Path>, of: Variable) -> Result<Option<PathBuf>> {
    match (asked, variable(of.name).map(PathBuf::from)) {
        (Some(asked), Some(named)) if asked != named => Err(Error::config(format!(
            "the program sets {what} to `{}`, but {} sets it to `{}`; unset the variable, or do not set it in the program",
            asked.display(),
            of.name,
            named.display()
        ))),
        (asked, named) => Ok(asked.map(Path::to_owned).or(named)),
    }
}

pub(super) fn oversubscription(asked: Option<Oversubscription>) -> Result<Oversubscription> {
    let agreed = agreed(
        "oversubscription",
        asked.map(BoolVariable),
        OVERSUBSCRIBE_GPUS,
    )?;
    Ok(agreed.map_or_else(Oversubscription::default, |switch| switch.0))
}

/// Returns `true` unless `ACCEL_LOCAL_POOL` is off.
#[cfg(feature = "flex")]
pub(super) fn local_pool() -> Result<bool> {
    let Some(value) = variable(env::LOCAL_POOL.name) else {
        return Ok(true);
    };
    let value = value.to_string_lossy();
    env::switch(&value).ok_or_else(|| {
        let name = env::LOCAL_POOL.name;
        Error::config(format!("{name}: expected 1 or 0, found `{value}`"))
    })
}

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
struct BoolVariable(Oversubscription);

impl Display for BoolVariable {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self.0 {
            Oversubscription::Allow => "1",
            Oversubscription::Refuse => "0",
        })
    }
}

impl FromStr for BoolVariable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match env::switch(text) {
            Some(true) => Ok(Self(Oversubscription::Allow)),
            Some(false) => Ok(Self(Oversubscription::Refuse)),
            None => Err(format!("expected 1 or 0, found `{text}`")),
        }
    }
}

/// Returns the value of `what` that the program or the variable sets; they must not contradict each other.
pub(super) fn agreed<T>(what: &str, asked: Option<T>, by: Variable) -> Result<Option<T>>
where
    T: Display + FromStr<Err: Display> + PartialEq,
{
    let name = by.name;
    // A value that is not Unicode is none of the valid ones; the lossy text shows it.
    let parsed = variable(name).map(|value| value.to_string_lossy().parse::<T>());
    let named = parsed
        .transpose()
        .map_err(|error| Error::config(format!("{name}: {error}")))?;
    match (asked, named) {
        (Some(asked), Some(named)) if asked != named => Err(Error::config(format!(
            "the program asks for {what} `{asked}`, and {name} for `{named}`; {}, or do not set it in the program",
            match is_set_by_launcher(name) {
                true => "the variable comes from an option of `accel-launch`: remove the option",
                false => "unset the variable",
            }
        ))),
        (asked, named) => Ok(asked.or(named)),
    }
}

fn is_set_by_launcher(name: &str) -> bool {
    lists(&set_by_launcher(), name)
}

/// Returns `true` if the name is among these, which commas separate.
fn lists(names: &str, name: &str) -> bool {
    names.split(',').any(|listed| listed == name)
}

/// The names of the variables that the launcher has set.
fn set_by_launcher() -> String {
    let names = variable(SET_BY_LAUNCHER.name).unwrap_or_default();
    names.to_string_lossy().into_owned()
}

/// Refuses a variable with this project's prefix that nothing reads: it is misspelt, unless the launcher
/// has set it, which is newer then.
pub(super) fn check() -> Result<()> {
    let set = std::env::vars_os().filter(|(_, value)| !value.is_empty());
    let names = set.map(|(name, _)| name.to_string_lossy().into_owned());
    check_names(names, &set_by_launcher())
}

fn check_names(names: impl Iterator<Item = String>, set_by_launcher: &str) -> Result<()> {
    let mut ours = names.filter(|name| name.starts_with(env::PREFIX));
    let is_known = |name: &str| env::find(name).is_some() || lists(set_by_launcher, name);
    match ours.find(|name| !is_known(name)) {
        None => Ok(()),
        Some(name) => Err(Error::config(env::unknown(&name))),
    }
}

#[cfg(test)]
mod tests {
    use accelerator_host::{COMPRESSION, DEVICE, OVERLAP, PRECISION, REDUCTION, TRACE_SCHEDULE};

    use super::*;
    use crate::core::device::BackendKind;
    use crate::precision::Precision;
    use crate::reduce::{Compression, GradientReduction, Overlap};
    use crate::timeline::ProfilerSchedule;

    #[test]
    fn a_switch_is_read_as_the_launcher_reads_it() {
        use Oversubscription::{Allow, Refuse};
        for (text, setting) in [
            ("1", Allow),
            (" True", Allow),
            ("0", Refuse),
            ("false", Refuse),
        ] {
            let switch: BoolVariable = text.parse().unwrap();
            assert_eq!(switch.0, setting, "{text}");
        }
        for setting in [Allow, Refuse] {
            let switch: BoolVariable = BoolVariable(setting).to_string().parse().unwrap();
            assert_eq!(switch.0, setting);
        }
        let error = "2".parse::<BoolVariable>().err().unwrap();
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

    #[test]
    fn the_words_of_variables_are_those_of_the_settings() {
        fn check<T: Display + FromStr<Err: Display>>(variable: Variable) {
            for word in variable.words() {
                match word.parse::<T>() {
                    Ok(setting) => assert_eq!(setting.to_string(), *word),
                    Err(error) => panic!("{}={word}: {error}", variable.name),
                }
            }
            // The error lists all settings that there are.
            let error = "no such setting".parse::<T>().err().unwrap().to_string();
            let expected = error.split_once("expected ").unwrap().1;
            let count = expected.replace(" or ", ", ").split(", ").count();
            assert_eq!(variable.words().len(), count, "{}: {error}", variable.name);
        }
        check::<BackendKind>(DEVICE);
        check::<Compression>(COMPRESSION);
        check::<GradientReduction>(REDUCTION);
        check::<Overlap>(OVERLAP);
        check::<Precision>(PRECISION);
    }

    #[test]
    fn a_schedule_of_traces_is_what_the_table_accepts() {
        for text in [
            "active=3",
            "active=3, wait=1,warm_up=1,repeat=2,skip_first=10",
            "3",
            "wait=3",
            "active=0",
            "active=1,active=1",
            "active=1,sleep=1",
        ] {
            let is_accepted = TRACE_SCHEDULE.accepts(text.as_ref());
            assert_eq!(
                text.parse::<ProfilerSchedule>().is_ok(),
                is_accepted,
                "{text}"
            );
        }
    }
}

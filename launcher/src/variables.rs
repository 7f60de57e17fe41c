//! Checks the environment variables of this project before anything starts, and selects those that ranks inherit.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use accelerator_fault::FaultPlan;
use accelerator_host::{
    DEFAULT_LIVENESS, FAULTS, JOB, LAUNCH_COMMAND, LAUNCH_ID, LIVENESS_TIMEOUT, Reader,
    SET_BY_LAUNCHER, TOKEN_FILE, Variable, find, variable,
};

use crate::error::{Error, Result};
use crate::text::shell_word;

/// The scope of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// This very environment.
    Everything,
    /// The variables that ranks inherit from it when they are launched.
    Inherited,
}

/// An error of the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VariableError {
    pub(crate) name: String,
    /// The problem, and its remedy.
    pub(crate) text: String,
}

/// The variables of this project that are set, in alphabetical order; misspelt ones too. One that is
/// empty is not set, and one of a newer launcher means nothing here.
pub(crate) fn set() -> Vec<(String, OsString)> {
    let newer: Vec<String> = of_outer_launcher().collect();
    let all = std::env::vars_os().filter(|(_, value)| !value.is_empty());
    let all = all.map(|(name, value)| (name.to_string_lossy().into_owned(), value));
    let mut ours: Vec<_> = all
        .filter(|(name, _)| is_ours(name) && !newer.contains(name))
        .collect();
    ours.sort();
    ours
}

/// The value of a variable, unless it belongs to the job of another launcher in
/// which this one runs.
pub(crate) fn given(name: &str) -> Option<OsString> {
    variable(name).filter(|_| !of_outer_launcher().any(|outer| outer == name))
}

/// Returns the time for which a rank or a host may be silent before it is lost: `ACCEL_LIVENESS_TIMEOUT`, or 5 s.
pub(crate) fn liveness() -> Duration {
    let given = given(LIVENESS_TIMEOUT.name);
    let given = given.and_then(|text| accelerator_host::seconds(&text.to_string_lossy()));
    given.unwrap_or(DEFAULT_LIVENESS)
}

/// The variables that a launcher has set in which this one runs, and that are not for this one's job: those of that
/// job, and those that this one does not know.
pub(crate) fn of_outer_launcher() -> impl Iterator<Item = String> {
    let listed = variable(SET_BY_LAUNCHER.name).unwrap_or_default();
    let listed = listed.to_string_lossy().into_owned();
    let names = listed.split(',').map(|name| name.trim().to_owned());
    let names: Vec<String> = names.collect();
    let is_theirs =
        |name: &String| is_ours(name) && (find(name).is_none() || OF_A_JOB.contains(&&**name));
    names.into_iter().filter(is_theirs)
}

/// The variables that a launcher sets anew for each job.
const OF_A_JOB: [&str; 4] = [
    JOB.name,
    LAUNCH_COMMAND.name,
    LAUNCH_ID.name,
    TOKEN_FILE.name,
];

/// The variables that cargo sets for a program it runs, and that mislead another cargo or
/// program when the launcher itself was started by `cargo run`.
pub(crate) fn of_cargo() -> impl Iterator<Item = OsString> {
    const EXACT: [&str; 6] = [
        "CARGO_BIN_NAME",
        "CARGO_CRATE_NAME",
        "CARGO_MANIFEST_DIR",
        "CARGO_MANIFEST_PATH",
        "CARGO_PRIMARY_PACKAGE",
        "OUT_DIR",
    ];
    std::env::vars_os().map(|(name, _)| name).filter(|name| {
        let name = name.to_string_lossy();
        EXACT.contains(&&*name)
            || name.starts_with("CARGO_PKG_")
            || name.starts_with("CARGO_BIN_EXE_")
    })
}

/// Checks if a variable of this name belongs to this project.
pub(crate) fn is_ours(name: &str) -> bool {
    name.starts_with(accelerator_host::PREFIX)
}

/// Returns the errors of these variables: names that nothing reads, and values that are refused.
pub(crate) fn errors(set: &[(String, OsString)], scope: Scope) -> Vec<VariableError> {
    let error = |(name, value): &(String, OsString)| {
        let text = match find(name) {
            None => accelerator_host::unknown(name),
            Some(known) if scope == Scope::Inherited && known.reader == Reader::SetByLauncher => {
                return None;
            }
            Some(known) if accepts(known, value) => return None,
            Some(known) => known.invalid(&value.to_string_lossy()),
        };
        let name = name.clone();
        Some(VariableError { name, text })
    };
    set.iter().filter_map(error).collect()
}

/// Checks if a variable may have this value.
fn accepts(known: &Variable, value: &OsStr) -> bool {
    let is_plan = || {
        value
            .to_str()
            .is_some_and(|value| value.parse::<FaultPlan>().is_ok())
    };
    known.accepts(value) && (known.name != FAULTS.name || is_plan())
}

/// Refuses an environment that ranks would refuse, before they are started.
///
/// # Errors
/// One that names every variable that is wrong; its exit code is 2.
pub(crate) fn check() -> Result<()> {
    let errors = errors(&set(), Scope::Inherited);
    if errors.is_empty() {
        return Ok(());
    }
    let texts: Vec<_> = errors.into_iter().map(|error| error.text).collect();
    Err(Error::usage(texts.join("\nerror: ")))
}

/// Returns the prefix of a command with which a shell runs it with the variables that ranks of this launcher inherit:
/// `ACCEL_TRANSPORT=tcp `, with a blank at the end, or nothing. A file of a process, in which a host that was reached
/// over SSH has its token, is left out.
pub(crate) fn assignments(set: &[(String, OsString)]) -> String {
    let inherited = set
        .iter()
        .filter(|(name, _)| find(name).is_none_or(|known| known.reader != Reader::SetByLauncher))
        .filter(|(_, value)| !value.as_encoded_bytes().starts_with(b"/proc/"));
    inherited
        .map(|(name, value)| format!("{name}={} ", shell_word(value)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &str, value: &str) -> Vec<(String, OsString)> {
        vec![(name.to_owned(), value.into())]
    }

    #[test]
    fn the_variable_of_faults_is_that_of_the_crate_that_injects_them() {
        assert_eq!(FAULTS.name, accelerator_fault::VARIABLE);
        assert_eq!(accelerator_host::RESTART.name, accelerator_fault::RESTART);
    }

    #[test]
    fn wrong_values_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let lost = format!("{folder}/none/x.json");
        for (name, value) in [
            ("ACCEL_OVERLAP", "yes"),
            ("ACCEL_COMPRESSION", "fp16"),
            ("ACCEL_ACCUMULATION_STEPS", "0"),
            ("ACCEL_DEVICE", "tpu"),
            ("ACCEL_PRECISION", "fp8"),
            ("ACCEL_TRACE", folder),
            ("ACCEL_TRACE", &lost),
            ("ACCEL_TRACE_SCHEDULE", "3"),
            ("ACCEL_TRACE_SCHEDULE", "wait=3"),
            ("ACCEL_TRACE_SCHEDULE", "active=0"),
            ("ACCEL_TRACE_SCHEDULE", "active=1,active=1"),
            ("ACCEL_TRACE_SCHEDULE", "active=1,sleep=1"),
            ("ACCEL_TRANSPORT", "mpi"),
            ("ACCEL_LIVENESS_TIMEOUT", "0"),
            ("ACCEL_LIVENESS_TIMEOUT", "0.001"),
            ("ACCEL_LIVENESS_TIMEOUT", "5s"),
            ("ACCEL_INSECURE", "maybe"),
            ("ACCEL_OVERSUBSCRIBE_GPUS", "2"),
            ("ACCEL_FAULTS", "banana"),
            ("ACCEL_TOKEN_FILE", &lost),
        ] {
            let found = errors(&one(name, value), Scope::Inherited);
            assert_eq!(found.len(), 1, "{name}={value}");
            assert!(
                found[0]
                    .text
                    .contains(&find(name).unwrap().grammar.to_string())
            );
            assert!(found[0].text.contains(value), "{}", found[0].text);
        }
        let trace = format!("{folder}/x.json");
        for (name, value) in [
            ("ACCEL_TRACE", "x.json"),
            ("ACCEL_TRACE_SCHEDULE", "active=3"),
            (
                "ACCEL_TRACE_SCHEDULE",
                "active=3, wait=1,warm_up=1,repeat=2,skip_first=10",
            ),
            ("ACCEL_TRACE", &trace),
            ("ACCEL_LIVENESS_TIMEOUT", " 1.5"),
            ("ACCEL_PRECISION", "fp16"),
            ("ACCEL_INSECURE", "True"),
            ("ACCEL_OVERSUBSCRIBE_GPUS", "1"),
        ] {
            assert_eq!(errors(&one(name, value), Scope::Everything), [], "{name}");
        }
    }

    #[test]
    fn misspelt_names_are_refused() {
        let found = errors(&one("ACCEL_RESTRAT", "1"), Scope::Inherited);
        let nearest = "ACCEL_RESTRAT is not known; did you mean ACCEL_RESTART?";
        assert!(found[0].text.contains(nearest), "{found:?}");
        let found = errors(&one("ACCEL_FOO", "1"), Scope::Inherited);
        assert!(found[0].text.contains("ACCEL_RESTART,"));
        assert!(!found[0].text.contains("ACCEL_FIXTURES"));
    }

    #[test]
    fn variables_set_by_the_launcher_are_checked_by_env_only() {
        let set = one("ACCEL_PORT", "0");
        assert_eq!(errors(&set, Scope::Inherited), []);
        assert_eq!(errors(&set, Scope::Everything).len(), 1);
        assert_eq!(assignments(&set), "");
        let set = one("ACCEL_TRACE", "a trace");
        assert_eq!(assignments(&set), "ACCEL_TRACE='a trace' ");
        assert_eq!(assignments(&one("ACCEL_TOKEN_FILE", "/proc/7/fd/5")), "");
    }
}

//! The environment variables of this project: what each may say, and who reads it.
//!
//! The launcher cannot ask the library that trains, which brings its tensors along. A test keeps this
//! table equal to what the library reads.

use core::num::NonZeroUsize;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Duration;

use accelerator_collective::{Launch, TransportKind, variable};
use accelerator_fault::FaultPlan;

use crate::error::{Error, Result};
use crate::text::shell_line;

/// One variable.
#[derive(Debug)]
pub(crate) struct Variable {
    /// Its name.
    pub(crate) name: &'static str,
    /// What it may say.
    pub(crate) expected: &'static str,
    /// What holds where it is not set.
    pub(crate) default: &'static str,
    /// Who reads it.
    pub(crate) reader: Reader,
    accepts: fn(&OsStr) -> bool,
}

/// Who reads a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// The ranks.
    Ranks,
    /// The ranks, and the launcher too.
    Both,
    /// The ranks, which the launcher gives a value of its own.
    Placed,
    /// This project's own tests.
    Tests,
}

impl Reader {
    /// In words.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Ranks => "ranks",
            Self::Both => "launcher and ranks",
            Self::Placed => "ranks, set by the launcher",
            Self::Tests => "tests",
        }
    }
}

/// What a check is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// This very environment.
    Everything,
    /// What ranks inherit from it when they are launched.
    Inherited,
}

/// An error of the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VariableError {
    /// The variable.
    pub(crate) name: String,
    /// What is wrong with it, and what to do.
    pub(crate) text: String,
}

/// All of them, in alphabetical order.
pub(crate) const VARIABLES: [Variable; 21] = [
    Variable {
        name: "ACCEL_ACCUMULATION_STEPS",
        expected: "a number of at least 1",
        default: "1",
        reader: Reader::Ranks,
        accepts: |value| {
            let number = value.to_str().map(str::parse::<NonZeroUsize>);
            matches!(number, Some(Ok(_)))
        },
    },
    Variable {
        name: "ACCEL_COMPRESSION",
        expected: "none, f16 or bf16",
        default: "none",
        reader: Reader::Ranks,
        accepts: |value| ["none", "f16", "bf16"].iter().any(|name| value == *name),
    },
    Variable {
        name: "ACCEL_DEVICE",
        expected: "cuda, wgpu, flex or ndarray",
        default: "the fastest that the program is built with",
        reader: Reader::Ranks,
        accepts: |value| DEVICES.iter().any(|name| value == *name),
    },
    Variable {
        name: "ACCEL_FAULTS",
        expected: "a plan of faults, for programs that are built with them",
        default: "none",
        reader: Reader::Ranks,
        accepts: |value| {
            let plan = value.to_str().map(str::parse::<FaultPlan>);
            matches!(plan, Some(Ok(_)))
        },
    },
    Variable {
        name: "ACCEL_FIXTURES",
        expected: "a folder",
        default: "the fixtures of this project",
        reader: Reader::Tests,
        accepts: |_| true,
    },
    Variable {
        name: "ACCEL_INSECURE",
        expected: "1 or 0",
        default: "0",
        reader: Reader::Both,
        accepts: is_switch,
    },
    Variable {
        name: "ACCEL_JOB",
        expected: "a name",
        default: "a new one for every launch",
        reader: Reader::Both,
        accepts: |_| true,
    },
    Variable {
        name: "ACCEL_LIVENESS_TIMEOUT",
        expected: "seconds from 0.1, such as 5 or 1.5",
        default: "that of the transport",
        reader: Reader::Ranks,
        accepts: |value| {
            let seconds = value.to_str().and_then(|value| value.trim().parse().ok());
            let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            timeout.is_some_and(|timeout| timeout >= Duration::from_millis(100))
        },
    },
    Variable {
        name: "ACCEL_MAX_RESTARTS",
        expected: "a whole number from 0 on",
        default: "--max-restarts",
        reader: Reader::Placed,
        accepts: is_number,
    },
    Variable {
        name: "ACCEL_OVERLAP",
        expected: "auto, on or off",
        default: "auto",
        reader: Reader::Ranks,
        accepts: |value| ["auto", "on", "off"].iter().any(|name| value == *name),
    },
    Variable {
        name: "ACCEL_OVERSUBSCRIBE_GPUS",
        expected: "1 or 0",
        default: "0",
        reader: Reader::Both,
        accepts: is_switch,
    },
    Variable {
        name: "ACCEL_PORT",
        expected: "a port from 1 to 65535",
        default: "--master-port",
        reader: Reader::Placed,
        accepts: |value| {
            let port = value.to_str().map(|value| value.trim().parse::<u16>());
            matches!(port, Some(Ok(1..)))
        },
    },
    Variable {
        name: "ACCEL_PRECISION",
        expected: "no, f16 or bf16",
        default: "no",
        reader: Reader::Ranks,
        accepts: |value| ["no", "f16", "bf16"].iter().any(|name| value == *name),
    },
    Variable {
        name: "ACCEL_REDUCTION",
        expected: "auto, nccl or staged",
        default: "auto: NCCL where every rank has a CUDA device of its own",
        reader: Reader::Ranks,
        accepts: |value| ["auto", "nccl", "staged"].iter().any(|name| value == *name),
    },
    Variable {
        name: "ACCEL_RESTART",
        expected: "a whole number from 0 on",
        default: "0",
        reader: Reader::Placed,
        accepts: is_number,
    },
    Variable {
        name: Launch::SET_BY_LAUNCHER,
        expected: "names of variables, with commas between them",
        default: "none",
        reader: Reader::Placed,
        accepts: |_| true,
    },
    Variable {
        name: "ACCEL_STORE",
        expected: "launcher or rank0",
        default: "rank0",
        reader: Reader::Placed,
        accepts: |value| value == "launcher" || value == "rank0",
    },
    Variable {
        name: "ACCEL_TOKEN_FILE",
        expected: "the path of the file that holds the job token",
        default: "none",
        reader: Reader::Both,
        accepts: |value| Path::new(value).exists() && !Path::new(value).is_dir(),
    },
    Variable {
        name: "ACCEL_TRACE",
        expected: "the path of a file in a folder that exists",
        default: "none",
        reader: Reader::Ranks,
        accepts: |value| can_be_file(Path::new(value)),
    },
    Variable {
        name: "ACCEL_TRACE_SCHEDULE",
        expected: "active=N with wait=N, warm_up=N, repeat=N and skip_first=N where wanted, with commas",
        default: "none: one trace of everything",
        reader: Reader::Ranks,
        accepts: |value| value.to_str().is_some_and(is_schedule),
    },
    Variable {
        name: "ACCEL_TRANSPORT",
        expected: "auto, hierarchical, shm, tcp or threads",
        default: "auto",
        reader: Reader::Ranks,
        accepts: |value| {
            let kind = value.to_str().map(str::parse::<TransportKind>);
            matches!(kind, Some(Ok(_)))
        },
    },
];

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

/// What the environment says by the variable of this name, but for what belongs to the job of another launcher in
/// which this one runs.
pub(crate) fn given(name: &str) -> Option<OsString> {
    variable(name).filter(|_| !of_outer_launcher().any(|outer| outer == name))
}

/// The variables that a launcher has set in which this one runs, and that are not for this one's job: those of that
/// job, and those that this one does not know.
pub(crate) fn of_outer_launcher() -> impl Iterator<Item = String> {
    let listed = variable(Launch::SET_BY_LAUNCHER).unwrap_or_default();
    let listed = listed.to_string_lossy().into_owned();
    let names = listed.split(',').map(|name| name.trim().to_owned());
    let names: Vec<String> = names.collect();
    let is_theirs =
        |name: &String| is_ours(name) && (find(name).is_none() || OF_A_JOB.contains(&&**name));
    names.into_iter().filter(is_theirs)
}

/// What a launcher makes anew for each job.
const OF_A_JOB: [&str; 2] = ["ACCEL_JOB", "ACCEL_TOKEN_FILE"];

/// Whether a variable of this name belongs to this project.
pub(crate) fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// What is wrong with these variables: names that nothing reads, and values that are refused.
pub(crate) fn errors(set: &[(String, OsString)], scope: Scope) -> Vec<VariableError> {
    let error = |(name, value): &(String, OsString)| {
        let text = match find(name) {
            None => format!(
                "the environment variable {name} is not known; expected one of {}: correct it, or \
                 unset it",
                names().join(", ")
            ),
            Some(known) if scope == Scope::Inherited && known.reader == Reader::Placed => {
                return None;
            }
            Some(known) if (known.accepts)(value) => return None,
            Some(known) => format!(
                "{name} is {:?}; expected {}: correct it, or unset it",
                value.to_string_lossy(),
                known.expected
            ),
        };
        let name = name.clone();
        Some(VariableError { name, text })
    };
    set.iter().filter_map(error).collect()
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

/// What has to stand before a command, so that a shell runs it with the variables that ranks of this
/// launcher inherit: `ACCEL_TRANSPORT=tcp `, with a blank at the end, or nothing.
pub(crate) fn assignments(set: &[(String, OsString)]) -> String {
    let inherited = set
        .iter()
        .filter(|(name, _)| find(name).is_none_or(|known| known.reader != Reader::Placed));
    inherited
        .map(|(name, value)| format!("{name}={} ", shell_line(std::slice::from_ref(value))))
        .collect()
}

/// The variable of this name.
pub(crate) fn find(name: &str) -> Option<&'static Variable> {
    VARIABLES.iter().find(|variable| variable.name == name)
}

/// The names, less that of the tests.
fn names() -> Vec<&'static str> {
    let ours = VARIABLES
        .iter()
        .filter(|variable| variable.reader != Reader::Tests);
    ours.map(|variable| variable.name).collect()
}

/// Whether it is `1` or `0`, or a word for one of them.
fn is_switch(value: &OsStr) -> bool {
    let value = value.to_string_lossy().trim().to_ascii_lowercase();
    ["", "0", "1", "false", "true"].contains(&value.as_str())
}

fn is_number(value: &OsStr) -> bool {
    let number = value.to_str().map(|value| value.trim().parse::<usize>());
    matches!(number, Some(Ok(_)))
}

/// Whether it is a schedule of traces.
fn is_schedule(text: &str) -> bool {
    const NAMES: [&str; 5] = ["active", "repeat", "skip_first", "wait", "warm_up"];
    let mut named: Vec<(&str, u64)> = Vec::new();
    for part in text.split(',') {
        let Some((name, number)) = part.split_once('=') else {
            return false;
        };
        let (name, number) = (name.trim(), number.trim().parse());
        match number {
            Ok(number) if NAMES.contains(&name) && !named.iter().any(|x| x.0 == name) => {
                named.push((name, number));
            }
            _ => return false,
        }
    }
    named
        .iter()
        .any(|(name, number)| *name == "active" && *number > 0)
}

fn can_be_file(path: &Path) -> bool {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    folder.is_dir() && !path.is_dir()
}

const PREFIX: &str = "ACCEL_";

const DEVICES: [&str; 4] = ["cuda", "wgpu", "flex", "ndarray"];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn one(name: &str, value: &str) -> Vec<(String, OsString)> {
        vec![(name.to_owned(), value.into())]
    }

    /// A source file of the library that trains.
    fn library(path: &str) -> String {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../accelerator/src");
        std::fs::read_to_string(sources.join(path)).unwrap()
    }

    /// Every `=> "name",` of a source file.
    fn arms(text: &str) -> BTreeSet<&str> {
        let arms = text.lines().filter_map(|line| line.split_once("=> \""));
        arms.filter_map(|(_, rest)| rest.strip_suffix("\","))
            .collect()
    }

    #[test]
    fn the_names_are_those_that_the_library_reads() {
        let text = library("accelerator/environment.rs");
        let constants = text.lines().filter_map(|line| {
            let (_, rest) = line.strip_prefix("const ")?.split_once(": &str = \"")?;
            rest.strip_suffix("\";")
        });
        let read: BTreeSet<&str> = constants.chain(Launch::VARIABLES).collect();
        let known: BTreeSet<&str> = VARIABLES.iter().map(|variable| variable.name).collect();
        assert_eq!(known, read);
        assert!(VARIABLES.is_sorted_by_key(|variable| variable.name));
    }

    #[test]
    fn the_values_are_those_that_the_library_takes() {
        for (name, path) in [
            ("ACCEL_DEVICE", "device.rs"),
            ("ACCEL_COMPRESSION", "gradient/compression.rs"),
            ("ACCEL_OVERLAP", "gradient/overlap/setting.rs"),
            ("ACCEL_PRECISION", "precision/mod.rs"),
            ("ACCEL_REDUCTION", "gradient/road/mod.rs"),
        ] {
            let text = library(path);
            let variable = find(name).unwrap();
            let words = variable.expected.split([',', ' ']);
            let expected = words.filter(|word| !word.is_empty() && *word != "or");
            assert_eq!(arms(&text), expected.clone().collect(), "{name}");
            for value in expected {
                assert!((variable.accepts)(value.as_ref()), "{name}={value}");
            }
        }
    }

    #[test]
    fn what_ranks_refuse_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let lost = format!("{folder}/none/x.json");
        for (name, value) in [
            ("ACCEL_OVERLAP", "yes"),
            ("ACCEL_COMPRESSION", "fp16"),
            ("ACCEL_ACCUMULATION_STEPS", "0"),
            ("ACCEL_DEVICE", "tpu"),
            ("ACCEL_PRECISION", "fp16"),
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
            assert!(found[0].text.contains(find(name).unwrap().expected));
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
            ("ACCEL_INSECURE", "True"),
            ("ACCEL_OVERSUBSCRIBE_GPUS", "1"),
        ] {
            assert_eq!(errors(&one(name, value), Scope::Everything), [], "{name}");
        }
    }

    #[test]
    fn misspelt_names_are_refused() {
        let found = errors(&one("ACCEL_RESTRAT", "1"), Scope::Inherited);
        assert!(found[0].text.contains("ACCEL_RESTRAT is not known"));
        assert!(found[0].text.contains("ACCEL_RESTART,"));
        assert!(!found[0].text.contains("ACCEL_FIXTURES"));
    }

    #[test]
    fn what_the_launcher_sets_is_checked_for_env_alone() {
        let set = one("ACCEL_PORT", "0");
        assert_eq!(errors(&set, Scope::Inherited), []);
        assert_eq!(errors(&set, Scope::Everything).len(), 1);
        assert_eq!(assignments(&set), "");
        let set = one("ACCEL_TRACE", "a trace");
        assert_eq!(assignments(&set), "ACCEL_TRACE='a trace' ");
    }
}

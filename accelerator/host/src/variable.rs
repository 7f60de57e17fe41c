//! An environment variable, and the values that it may have.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// An environment variable.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Variable {
    /// The name of the variable.
    pub name: &'static str,
    /// The meaning of the variable, in a few words.
    pub meaning: &'static str,
    /// The values that it may have.
    pub grammar: Grammar,
    /// The default if the variable is not set.
    pub default: &'static str,
    /// The method that sets the same in code, or nothing.
    pub code: &'static str,
    /// The programs that read the variable.
    pub reader: Reader,
}

impl Variable {
    /// Checks if the variable may have this value. A precision may also have PyTorch's name, `fp16`.
    pub fn accepts(&self, value: &OsStr) -> bool {
        let is_other_name = self.name == "ACCEL_PRECISION" && value == "fp16";
        self.grammar.accepts(value) || is_other_name
    }

    /// The words that it may be, where it is one of several.
    pub fn words(&self) -> &'static [&'static str] {
        match self.grammar {
            Grammar::OneOf(words) => words,
            _ => &[],
        }
    }

    /// The message for a value that is not accepted.
    pub fn invalid(&self, value: &str) -> String {
        let Self { name, grammar, .. } = self;
        format!("{name} is {value:?}; expected {grammar}: correct it, or unset it")
    }
}

/// The programs that read a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The ranks.
    Ranks,
    /// The ranks and the launcher.
    LauncherAndRanks,
    /// The ranks; the launcher sets it for them.
    SetByLauncher,
    /// This project's own tests.
    Tests,
}

impl fmt::Display for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ranks => "ranks",
            Self::LauncherAndRanks => "launcher and ranks",
            Self::SetByLauncher => "ranks, set by the launcher",
            Self::Tests => "tests",
        })
    }
}

/// The values that a variable may have; its text completes "expected …".
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Grammar {
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// `1`, `0`, `true` or `false`.
    Switch,
    /// A whole number from 0 on.
    Number,
    /// A whole number from 1 on.
    Count,
    /// A port that is not 0.
    Port,
    /// A time in seconds, no shorter than [`SHORTEST_LIVENESS`].
    Seconds,
    /// The path of a file that exists.
    ExistingFile,
    /// The path of a file in a folder that exists.
    NewFile,
    /// The steps that a trace records: `active=3,wait=1,…`.
    TraceSchedule,
    /// Any text, which this describes; the reader of the variable checks it.
    Text(&'static str),
}

impl Grammar {
    /// Checks if `value` is one of these values.
    pub fn accepts(&self, value: &OsStr) -> bool {
        let text = value.to_str();
        match self {
            Self::OneOf(words) => words.iter().any(|word| value == *word),
            Self::Switch => text.and_then(switch).is_some(),
            Self::Number => text.and_then(number).is_some(),
            Self::Count => text
                .and_then(|text| text.parse().ok())
                .is_some_and(|count: usize| count > 0),
            Self::Port => text.and_then(port).is_some(),
            Self::Seconds => text.and_then(seconds).is_some(),
            Self::ExistingFile => Path::new(value).exists() && !Path::new(value).is_dir(),
            Self::NewFile => can_be_file(Path::new(value)),
            Self::TraceSchedule => text.is_some_and(is_trace_schedule),
            Self::Text(_) => true,
        }
    }
}

impl fmt::Display for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneOf(words) => {
                return match words.split_last() {
                    Some((last, [])) => f.write_str(last),
                    Some((last, others)) => write!(f, "{} or {last}", others.join(", ")),
                    None => f.write_str("nothing"),
                };
            }
            Self::Switch => "1 or 0",
            Self::Number => "a whole number from 0 on",
            Self::Count => "a number of at least 1",
            Self::Port => "a port from 1 to 65535",
            Self::Seconds => "seconds from 0.1, such as 5 or 1.5",
            Self::ExistingFile => "the path of a file that exists",
            Self::NewFile => "the path of a file in a folder that exists",
            Self::TraceSchedule => {
                "active=N with wait=N, warm_up=N, repeat=N and skip_first=N where wanted, with commas"
            }
            Self::Text(expected) => expected,
        })
    }
}

/// The shortest liveness timeout: a busy system may delay a process for less although nothing is wrong.
pub const SHORTEST_LIVENESS: Duration = Duration::from_millis(100);

/// The liveness timeout where `ACCEL_LIVENESS_TIMEOUT` is not set.
pub const DEFAULT_LIVENESS: Duration = Duration::from_secs(5);

/// Reads a variable that is on or off; an empty one is off.
pub fn switch(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" => Some(true),
        "" | "0" | "false" => Some(false),
        _ => None,
    }
}

/// Reads a whole number from 0 on.
pub fn number(text: &str) -> Option<usize> {
    text.trim().parse().ok()
}

/// Reads a port that is not 0.
pub fn port(text: &str) -> Option<u16> {
    text.trim().parse().ok().filter(|port| *port != 0)
}

/// Reads a time in seconds, no shorter than [`SHORTEST_LIVENESS`].
pub fn seconds(text: &str) -> Option<Duration> {
    let seconds = Duration::try_from_secs_f64(text.trim().parse().ok()?).ok()?;
    (seconds >= SHORTEST_LIVENESS).then_some(seconds)
}

fn can_be_file(path: &Path) -> bool {
    crate::fs::folder_of(path).is_dir() && !path.is_dir()
}

fn is_trace_schedule(text: &str) -> bool {
    const NAMES: [&str; 5] = ["active", "repeat", "skip_first", "wait", "warm_up"];
    let mut named: Vec<(&str, u64)> = Vec::new();
    for part in text.split(',') {
        let Some((name, number)) = part.split_once('=') else {
            return false;
        };
        let (name, number) = (name.trim(), number.trim().parse());
        match number {
            Ok(number) if NAMES.contains(&name) && !named.iter().any(|known| known.0 == name) => {
                named.push((name, number));
            }
            _ => return false,
        }
    }
    let mut named = named.iter();
    named.any(|(name, number)| *name == "active" && *number > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_accepted_or_refused() {
        let folder = std::env::temp_dir();
        let folder = folder.to_str().unwrap();
        let missing = format!("{folder}/no-such-folder/x.json");
        let new = format!("{folder}/no-such-file.json");
        for (grammar, accepted, refused) in [
            (
                Grammar::OneOf(&["auto", "on"]),
                &["auto", "on"][..],
                &["yes", "AUTO", ""][..],
            ),
            (
                Grammar::Switch,
                &["1", "True", " 0", "false"],
                &["2", "maybe"],
            ),
            (Grammar::Number, &["0", " 3"], &["-1", "x", ""]),
            (Grammar::Count, &["1", "7"], &["0", "x"]),
            (Grammar::Port, &["1", "65535"], &["0", "65536"]),
            (
                Grammar::Seconds,
                &["0.1", " 1.5"],
                &["0", "0.001", "5s", "-1", "nan"],
            ),
            (Grammar::ExistingFile, &["Cargo.toml"], &[&missing, folder]),
            (Grammar::NewFile, &["x.json", &new], &[&missing, folder]),
            (
                Grammar::TraceSchedule,
                &[
                    "active=3",
                    "active=3, wait=1,warm_up=1,repeat=2,skip_first=10",
                ],
                &[
                    "3",
                    "wait=3",
                    "active=0",
                    "active=1,active=1",
                    "active=1,sleep=1",
                ],
            ),
        ] {
            for value in accepted {
                assert!(grammar.accepts(value.as_ref()), "{grammar:?} {value:?}");
            }
            for value in refused {
                assert!(!grammar.accepts(value.as_ref()), "{grammar:?} {value:?}");
            }
        }
    }

    #[test]
    fn values_are_read_as_they_are_accepted() {
        assert_eq!(
            [switch("True"), switch(""), switch("2")],
            [Some(true), Some(false), None]
        );
        assert_eq!([number(" 3"), number("x")], [Some(3), None]);
        assert_eq!([port("29500"), port("0")], [Some(29_500), None]);
        assert_eq!(
            [seconds("1.5"), seconds("0.01")],
            [Some(Duration::from_millis(1500)), None]
        );
        assert_eq!(seconds("0.1"), Some(SHORTEST_LIVENESS));
        assert_eq!(
            seconds(crate::LIVENESS_TIMEOUT.default),
            Some(DEFAULT_LIVENESS)
        );
    }
}

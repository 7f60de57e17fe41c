//! The `ACCEL_` environment variables, and utilities that know nothing of training, which the crates of this project
//! share.
//!
//! Internal to Accelerate for Rust: no promise of stability.
//!
//! One table has the name, grammar, default, reader and meaning of each variable; the library, the launcher and the
//! documentation ([`markdown`]) use it. A new variable is one entry of `table.rs`. The crate also has the exit code
//! that programs and launcher share, and the signal state that a process inherits with its variables.
//!
//! The utilities are allocator settings ([`allocator`]), the structure of errors ([`error`]), the common part of
//! command-line programs ([`cli`]), memory backed by files ([`file_memory`]), atomic file replacement ([`fs`]), file
//! locks ([`lock`]), information about the machine ([`machine`]), programs that run within limits ([`process`]), locks
//! without poisoning ([`sync`]), and text for terminals, shells and tables ([`text`]).
//!
//! ```
//! use accelerator_host::{OVERLAP, VARIABLES, find};
//!
//! assert!(OVERLAP.accepts("on".as_ref()));
//! assert_eq!(
//!     OVERLAP.invalid("yes"),
//!     "ACCEL_OVERLAP is \"yes\"; expected auto, on or off: correct it, or unset it"
//! );
//! assert_eq!(find("ACCEL_OVERLAP"), Some(&OVERLAP));
//! assert!(VARIABLES.iter().all(|variable| variable.name.starts_with("ACCEL_")));
//! ```

#[cfg(unix)]
pub use signals::{heed_children, prepare_child, reset_signals};
pub use table::*;
pub use variable::{
    DEFAULT_LIVENESS, Grammar, Reader, SHORTEST_LIVENESS, Variable, number, port, seconds, switch,
};

pub mod allocator;
pub mod cli;
pub mod error;
pub mod file_memory;
pub mod fs;
pub mod lock;
pub mod machine;
pub mod process;
pub mod sync;
pub mod text;

#[cfg(unix)]
mod signals;
mod table;
mod variable;

use std::ffi::OsString;
use std::fmt::Write;

/// The prefix of all variables of this project.
pub const PREFIX: &str = "ACCEL_";

/// The exit code of a program that was preempted: its ranks have saved and ended together, and continue when they
/// are started again. It is `EX_TEMPFAIL` of `sysexits.h`.
pub const PREEMPTED_EXIT_CODE: u8 = 75;

/// The value of [`ON_LOSS`] in the places that the launcher gives to the survivors of a lost rank.
pub const SURVIVOR: &str = "survivor";

/// The value of [`ON_LOSS`] in place of a place, for ranks that do not continue after all.
pub const NO_SURVIVOR: &str = "end";

/// The variable, with its value, that makes Python write output at once instead of in blocks. Ranks and trials get it
/// if it is not set: the launcher and the search read their output through pipes while they run.
pub const PYTHON_UNBUFFERED: (&str, &str) = ("PYTHONUNBUFFERED", "1");

/// The value of an environment variable. An empty one counts as not set, as in `NAME= program`.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The variable of this name.
pub fn find(name: &str) -> Option<&'static Variable> {
    VARIABLES.iter().find(|variable| variable.name == name)
}

/// The message for a variable with [`PREFIX`] that is not in the table: most likely it is misspelt.
pub fn unknown(name: &str) -> String {
    let known = VARIABLES
        .iter()
        .filter(|variable| variable.reader != Reader::Tests);
    let known: Vec<_> = known.map(|variable| variable.name).collect();
    let rests = known.iter().map(|known| known.trim_start_matches(PREFIX));
    match text::nearest(name.trim_start_matches(PREFIX), rests) {
        Some(near) => format!(
            "the environment variable {name} is not known; did you mean {PREFIX}{near}? Correct it, or unset it"
        ),
        None => format!(
            "the environment variable {name} is not known; expected one of {}: correct it, or unset it",
            known.join(", ")
        ),
    }
}

/// The table as Markdown, which is `docs/environment.md`.
pub fn markdown() -> String {
    let mut text = String::from(
        "# Environment variables\n\n\
         `accel-launch env` shows their values and refuses wrong ones; a variable with the prefix `ACCEL_` that is not \
         in this table is an error.\nAn empty variable counts as not set. Conflicting values in code and \
         environment are an error; for timeouts, code wins.\n\n\
         | variable | meaning | values | default | in code | read by |\n|---|---|---|---|---|---|\n",
    );
    let shown = VARIABLES
        .iter()
        .filter(|variable| variable.reader != Reader::Tests);
    for variable in shown {
        let Variable {
            name,
            meaning,
            grammar,
            default,
            code,
            reader,
        } = variable;
        let code = if code.is_empty() {
            String::new()
        } else {
            format!("`{code}`")
        };
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "| `{name}` | {meaning} | {grammar} | {default} | {code} | {reader} |"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_its_names_have_the_prefix() {
        assert!(VARIABLES.is_sorted_by_key(|variable| variable.name));
        assert!(
            VARIABLES
                .iter()
                .all(|variable| variable.name.starts_with(PREFIX))
        );
    }

    #[test]
    fn the_documentation_is_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/environment.md");
        let found = std::fs::read_to_string(path).unwrap_or_default();
        let expected = markdown();
        assert!(
            found == expected,
            "replace docs/environment.md by:\n{expected}"
        );
    }

    #[test]
    fn test_variables_are_not_suggested() {
        assert!(!unknown("ACCEL_FOO").contains("ACCEL_FIXTURES"));
        assert!(unknown("ACCEL_FOO").contains("ACCEL_RESTART,"));
    }

    #[test]
    fn a_misspelt_variable_names_the_nearest() {
        for (name, meant) in [
            ("ACCEL_RESTRAT", "ACCEL_RESTART"),
            ("ACCEL_MIXED_PRECISION", "ACCEL_PRECISION"),
            (
                "ACCEL_GRADIENT_ACCUMULATION_STEPS",
                "ACCEL_ACCUMULATION_STEPS",
            ),
        ] {
            let text = unknown(name);
            let expected = format!("{name} is not known; did you mean {meant}?");
            assert!(text.contains(&expected), "{text}");
        }
        assert!(unknown("ACCEL_FOO").contains("ACCEL_FOO is not known; expected one of"));
    }
}

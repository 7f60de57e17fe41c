use std::ffi::OsStr;
use std::fmt;

use crate::grammar::Grammar;

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
    /// Checks if the variable may have this value.
    pub fn accepts(&self, value: &OsStr) -> bool {
        self.grammar.accepts(value)
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

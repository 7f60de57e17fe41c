//! The reader of a launch's variables, with errors that name them, and the settings that were read.

use std::fmt;

use accelerator_host as env;

use crate::{
    error::{Error, Result},
    rendezvous::is_on,
};

/// The variables of a launch. One that is empty counts as not set.
#[derive(Clone, Copy)]
pub(super) struct LaunchReader<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl LaunchReader<'_> {
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    pub(super) fn is_set(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<usize>> {
        self.read(name, env::Grammar::Number, env::number)
    }

    pub(super) fn port(&self, name: &str) -> Result<Option<u16>> {
        self.read(name, env::Grammar::Port, env::port)
    }

    pub(super) fn switch(&self, name: &str) -> Result<bool> {
        self.text(name)
            .map_or(Ok(false), |value| is_on(name, &value))
    }

    /// Returns a number that must be set if these `others` are.
    pub(super) fn required(&self, name: &str, others: &[&str]) -> Result<usize> {
        self.number(name)?.ok_or_else(|| {
            Error::topology(format!("{name} is not set, unlike {}", self.shown(others)))
        })
    }

    /// Returns the variables among these that are set, for messages: `A=1, B=2`.
    pub(super) fn shown(&self, names: &[&str]) -> String {
        let set = names.iter();
        let set = set.filter_map(|name| Some(format!("{name}={}", self.text(name)?)));
        set.collect::<Vec<_>>().join(", ")
    }

    pub(super) fn read<T>(
        &self,
        name: &str,
        grammar: env::Grammar,
        read: fn(&str) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.text(name) else {
            return Ok(None);
        };
        match read(&value) {
            Some(value) => Ok(Some(value)),
            None => Err(Error::topology(format!(
                "{name} is {value:?}; expected {grammar}"
            ))),
        }
    }
}

/// A setting of a launch, with its name, its value and its origin.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Setting {
    /// The name, such as `world size`.
    pub name: &'static str,
    /// The value as text.
    pub value: String,
    /// The origin of the value.
    pub origin: Origin,
}

/// The origin of a setting.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Origin {
    /// Nothing set it, so it is the default.
    Default,
    /// It follows from other settings.
    Derived,
    /// The environment variable of this name.
    Variable(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Derived => f.write_str("derived"),
            Self::Variable(name) => f.write_str(name),
        }
    }
}

/// A launcher, or an engine, whose variables are set.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct LaunchSource {
    /// Its name, such as `Open MPI`.
    pub launcher: &'static str,
    /// A variable that shows it.
    pub variable: &'static str,
}

impl fmt::Display for LaunchSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.launcher, self.variable)
    }
}

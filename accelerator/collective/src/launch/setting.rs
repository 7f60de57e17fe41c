//! The settings of a launch, and their origins.

use std::fmt;

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
    /// Nobody said anything: the default.
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

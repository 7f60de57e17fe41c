//! What a launch was told, and by whom.

use std::fmt;

/// One setting of a launch: what it is called, what it is, and who said so.
///
/// ```
/// use accelerator_collective::{Launch, Origin};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let launch = Launch::from_vars(|name| (name == "ACCEL_RESTART").then(|| "2".to_owned()))?;
/// let restart = launch.settings().iter().find(|setting| setting.name == "restart").unwrap();
/// assert_eq!((&*restart.value, restart.origin), ("2", Origin::Variable("ACCEL_RESTART")));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Setting {
    /// The name, such as `world size`.
    pub name: &'static str,
    /// The value as text.
    pub value: String,
    /// Where the value came from.
    pub origin: Origin,
}

/// Where a setting came from.
///
/// ```
/// use accelerator_collective::{Launch, Origin};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let launch = Launch::from_vars(|name| (name == "ACCEL_RESTART").then(|| "2".to_owned()))?;
/// // What somebody has said, and what is so by default or follows from the rest.
/// let (said, known): (Vec<_>, Vec<_>) = launch
///     .settings()
///     .iter()
///     .map(|setting| setting.origin)
///     .partition(|origin| !matches!(origin, Origin::Default | Origin::Derived));
/// assert_eq!(said, [Origin::Variable("ACCEL_RESTART")]);
/// assert!(known.len() > 3);
/// # Ok(())
/// # }
/// ```
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
///
/// ```
/// use accelerator_collective::Launch;
///
/// // A job of Slurm's with one task, outside of a step.
/// let launch = Launch::from_vars(|name| (name == "SLURM_JOB_ID").then(|| "7".to_owned()))?;
/// assert_eq!(launch.source(), None);
/// let noticed = launch.noticed()[0];
/// assert_eq!((noticed.launcher, noticed.variable), ("Slurm", "SLURM_JOB_ID"));
/// assert_eq!(noticed.to_string(), "Slurm (SLURM_JOB_ID)");
/// # Ok::<(), accelerator_collective::Error>(())
/// ```
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

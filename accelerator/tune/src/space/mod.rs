//! Search spaces as in Ray Tune, from which configurations are drawn.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::value::IntoValue;

pub(crate) use domain::{Domain, Random, Scale, multiples};
pub(crate) use draw::{Draw, Keys, Place};

mod domain;
mod draw;
mod file;
mod point;
#[cfg(test)]
mod tests;

/// A table of parameters. A file has the same names as the functions of this crate:
///
/// ```
/// use accelerator_tune::{Space, choice, loguniform, randint, sample_from, uniform};
///
/// let space = Space::new([
///     ("lr", loguniform(1e-4, 1e-1)),
///     ("optimizer", choice([
///         Space::new([("name", "sgd".into()), ("momentum", uniform(0.1, 0.9))]).into(),
///         Space::new([("name", "adam".into())]).into(),
///     ])),
///     ("layers", randint(1, 5)),
///     ("width", sample_from(|config| Ok((64 / config.parse::<u64>("layers")?).into()))),
/// ]);
/// let of_file: Space = serde_json::from_str(r#"{
///     "lr": {"loguniform": [1e-4, 1e-1]},
///     "optimizer": {"choice": [{"name": "sgd", "momentum": {"uniform": [0.1, 0.9]}}, {"name": "adam"}]},
///     "layers": {"randint": [1, 5]},
///     "width": {"sample_from": {"of": "optimizer/name", "cases": {"sgd": 64, "adam": {"randint": [8, 16]}}}}
/// }"#)?;
/// # Ok::<(), serde_json::Error>(())
/// ```
///
/// What is drawn for a parameter follows from the seed, the number of the trial and the parameter's path. So another
/// parameter beside it changes nothing, and it is the same on every machine.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "Value")]
pub struct Space(BTreeMap<String, Parameter>);

impl Space {
    /// Creates a space of these parameters.
    pub fn new<K: Into<String>>(parameters: impl IntoIterator<Item = (K, Parameter)>) -> Self {
        let named = parameters
            .into_iter()
            .map(|(name, parameter)| (name.into(), parameter));
        Self(named.collect())
    }

    /// A list of parameters, for a place where a value is one.
    pub fn list(parameters: impl IntoIterator<Item = Parameter>) -> Parameter {
        Parameter(Node::List(parameters.into_iter().collect()))
    }

    /// The paths of what is drawn, by path. Constants are not among them.
    pub(crate) fn parameters(&self) -> Vec<String> {
        let mut paths = Vec::new();
        for (name, parameter) in &self.0 {
            parameter.0.add_drawn(name, &mut paths);
        }
        paths.sort();
        paths.dedup();
        paths
    }

    pub(crate) fn table(&self) -> &BTreeMap<String, Parameter> {
        &self.0
    }
}

/// A parameter of a [`Space`]: a constant, what a value is drawn from, a table, or a list.
#[derive(Clone, Debug)]
pub struct Parameter(pub(crate) Node);

#[derive(Clone, Debug)]
pub(crate) enum Node {
    Constant(Value),
    Domain(Domain),
    Choice(Vec<Parameter>),
    Grid(Vec<Parameter>),
    Table(BTreeMap<String, Parameter>),
    List(Vec<Parameter>),
    SampleFrom(SampleFrom),
    Cases(Cases),
}

/// A closure that sees what was drawn.
#[derive(Clone)]
pub(crate) struct SampleFrom {
    sample: Arc<SampleFn>,
    /// The value that a point sets for the parameter.
    point: Option<Value>,
}

type SampleFn = dyn Fn(&Config) -> Result<Parameter> + Send + Sync;

impl fmt::Debug for SampleFrom {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("closure")
    }
}

/// A parameter that depends on the value of another.
#[derive(Clone, Debug)]
pub(crate) struct Cases {
    pub(crate) of: String,
    pub(crate) cases: BTreeMap<String, Parameter>,
    pub(crate) otherwise: Option<Box<Parameter>>,
}

impl Node {
    fn add_drawn(&self, path: &str, paths: &mut Vec<String>) {
        match self {
            Self::Constant(_) => {}
            Self::Domain(_) | Self::SampleFrom(_) | Self::Cases(_) => paths.push(path.to_owned()),
            Self::Choice(options) | Self::Grid(options) => {
                let are_nested = options
                    .iter()
                    .any(|option| matches!(option.0, Self::Table(_) | Self::List(_)));
                if !are_nested {
                    paths.push(path.to_owned());
                }
                for option in options {
                    match &option.0 {
                        table @ Self::Table(_) => {
                            // Which of them was chosen shows in its constants, too.
                            for (path, part) in table.parts(path) {
                                match part {
                                    Self::Constant(_) => paths.push(path),
                                    part => part.add_drawn(&path, paths),
                                }
                            }
                        }
                        other => other.add_drawn(path, paths),
                    }
                }
            }
            Self::Table(_) | Self::List(_) => {
                for (path, part) in self.parts(path) {
                    part.add_drawn(&path, paths);
                }
            }
        }
    }

    /// Returns what is in a table or a list, with its path.
    fn parts(&self, path: &str) -> Vec<(String, &Self)> {
        match self {
            Self::Table(table) => {
                let parts = table.iter();
                let parts = parts.map(|(name, part)| (format!("{path}/{name}"), &part.0));
                parts.collect()
            }
            Self::List(list) => {
                let parts = list.iter().enumerate();
                let parts = parts.map(|(index, part)| (format!("{path}/{index}"), &part.0));
                parts.collect()
            }
            _ => Vec::new(),
        }
    }
}

impl Cases {
    fn all(&self) -> impl Iterator<Item = &Parameter> {
        self.cases.values().chain(self.otherwise.as_deref())
    }
}

impl<T: IntoValue> From<T> for Parameter {
    fn from(value: T) -> Self {
        Self(Node::Constant(value.into_value()))
    }
}

impl From<Space> for Parameter {
    fn from(space: Space) -> Self {
        Self(Node::Table(space.0))
    }
}

/// Any number from `low` to below `high`.
#[must_use]
pub fn uniform(low: f64, high: f64) -> Parameter {
    Parameter(Node::Domain(Domain::Float(Scale::Linear, low, high, None)))
}

/// A multiple of `q` from `low` to `high`, of which each is one: a number of [`uniform`], rounded.
#[must_use]
pub fn quniform(low: f64, high: f64, q: f64) -> Parameter {
    Parameter(Node::Domain(Domain::Float(
        Scale::Linear,
        low,
        high,
        Some(q),
    )))
}

/// Any number from `low` to below `high`, whose logarithm is uniform.
#[must_use]
pub fn loguniform(low: f64, high: f64) -> Parameter {
    Parameter(Node::Domain(Domain::Float(Scale::Log, low, high, None)))
}

/// A number of [`loguniform`], rounded to a multiple of `q`.
#[must_use]
pub fn qloguniform(low: f64, high: f64, q: f64) -> Parameter {
    Parameter(Node::Domain(Domain::Float(Scale::Log, low, high, Some(q))))
}

/// An integer from `low` to below `high`.
#[must_use]
pub fn randint(low: i64, high: i64) -> Parameter {
    Parameter(Node::Domain(Domain::Int(Scale::Linear, low, high, None)))
}

/// A multiple of `q` from `low` to `high`, both included.
#[must_use]
pub fn qrandint(low: i64, high: i64, q: i64) -> Parameter {
    Parameter(Node::Domain(Domain::Int(Scale::Linear, low, high, Some(q))))
}

/// An integer from `low` to below `high`, whose logarithm is uniform.
#[must_use]
pub fn lograndint(low: i64, high: i64) -> Parameter {
    Parameter(Node::Domain(Domain::Int(Scale::Log, low, high, None)))
}

/// An integer of [`lograndint`], rounded to a multiple of `q` from `low` to `high`.
#[must_use]
pub fn qlograndint(low: i64, high: i64, q: i64) -> Parameter {
    Parameter(Node::Domain(Domain::Int(Scale::Log, low, high, Some(q))))
}

/// A number of the normal distribution with that mean and standard deviation.
#[must_use]
pub fn randn(mean: f64, sd: f64) -> Parameter {
    Parameter(Node::Domain(Domain::Normal(mean, sd, None)))
}

/// A number of [`randn`], rounded to a multiple of `q`.
#[must_use]
pub fn qrandn(mean: f64, sd: f64, q: f64) -> Parameter {
    Parameter(Node::Domain(Domain::Normal(mean, sd, Some(q))))
}

/// Draws one of the options, each as likely as the others. The contents of an option are drawn if it is chosen.
#[must_use]
pub fn choice(options: impl IntoIterator<Item = Parameter>) -> Parameter {
    Parameter(Node::Choice(options.into_iter().collect()))
}

/// Tries each of the options: a trial for each combination with other grids.
#[must_use]
pub fn grid_search(options: impl IntoIterator<Item = Parameter>) -> Parameter {
    Parameter(Node::Grid(options.into_iter().collect()))
}

/// A value that a closure computes from the parameters that are drawn already, or what it is drawn from. The closure is
/// called again if it fails for want of a parameter that comes later.
#[must_use]
pub fn sample_from(
    sample: impl Fn(&Config) -> Result<Parameter> + Send + Sync + 'static,
) -> Parameter {
    Parameter(Node::SampleFrom(SampleFrom {
        sample: Arc::new(sample),
        point: None,
    }))
}

impl TryFrom<Value> for Space {
    type Error = Error;

    fn try_from(value: Value) -> Result<Self> {
        match file::parse("", value)? {
            Parameter(Node::Table(table)) => Ok(Self(table)),
            _ => Err(Error::misuse("the search space is no table of parameters")),
        }
    }
}

impl Serialize for Space {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        file::value(self.clone().into()).serialize(serializer)
    }
}

//! The configuration of a trial.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::value;

/// The configuration of a trial: a tree of JSON values, whose leaves have paths such as `optimizer/lr`.
///
/// ```
/// use accelerator_tune::Config;
///
/// let config: Config = serde_json::from_str(r#"{"optimizer": {"lr": 0.01}, "layers": 3}"#)?;
/// assert_eq!(config.parse::<f64>("optimizer/lr")?, 0.01);
/// assert_eq!(config.parse_or("momentum", 0.9)?, 0.9);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Config(Map<String, Value>);

impl Config {
    /// Parses the value at a path. If the type has a float, the words of a [`Number`](crate::Number) are floats there.
    ///
    /// # Errors
    /// [`Error::is_misuse`] where there is none, or it is of another type.
    pub fn parse<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let Some(value) = self.value(path) else {
            let known: Vec<_> = self.leaves().into_iter().map(|(path, _)| path).collect();
            return Err(Error::misuse(format!(
                "the configuration has no `{path}`; it has {}",
                match known.is_empty() {
                    true => "nothing".to_owned(),
                    false => known.join(", "),
                }
            )));
        };
        value::parse(value).map_err(|error| {
            Error::misuse(format!("`{path}` of the configuration is {value}: {error}"))
                .with_source(error)
        })
    }

    /// The value at a path, as a type, or `default` where there is none.
    ///
    /// # Errors
    /// [`Error::is_misuse`] where it is of another type.
    pub fn parse_or<T: DeserializeOwned>(&self, path: &str, default: T) -> Result<T> {
        match self.value(path) {
            Some(_) => self.parse(path),
            None => Ok(default),
        }
    }

    /// The whole configuration as a type.
    ///
    /// # Errors
    /// [`Error::is_misuse`] where it does not have the type's fields.
    pub fn parse_all<T: DeserializeOwned>(&self) -> Result<T> {
        let value = Value::Object(self.0.clone());
        value::parse(&value).map_err(|error| {
            Error::misuse(format!("the configuration: {error}")).with_source(error)
        })
    }

    /// The value at a path.
    #[must_use]
    pub fn value(&self, path: &str) -> Option<&Value> {
        let (name, below) = split(path);
        self.0.get(name)?.pointer(&below)
    }

    /// Sets the value at a path, whose tables and lists are there.
    pub(crate) fn set(&mut self, path: &str, value: Value) {
        let (name, below) = split(path);
        let top = self.0.get_mut(name);
        if let Some(place) = top.and_then(|top| top.pointer_mut(&below)) {
            *place = value;
        }
    }

    /// Every value that is no table or list, with its path, by path.
    pub(crate) fn leaves(&self) -> Vec<(String, &Value)> {
        let below = |(name, value): (&String, _)| leaves_below(name.clone(), value);
        self.0.iter().flat_map(below).collect()
    }

    pub(crate) fn as_map(&self) -> &Map<String, Value> {
        &self.0
    }
}

impl From<Map<String, Value>> for Config {
    fn from(map: Map<String, Value>) -> Self {
        Self(map)
    }
}

/// Writes the configuration as JSON.
impl fmt::Display for Config {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = serde_json::to_string(&self.0).map_err(|_| fmt::Error)?;
        formatter.write_str(&text)
    }
}

/// Splits a path into a name at the top, and the JSON pointer to what is below.
fn split(path: &str) -> (&str, String) {
    match path.split_once('/') {
        None => (path, String::new()),
        Some((name, below)) => (name, format!("/{}", below.replace('~', "~0"))),
    }
}

/// Returns the leaves of the value at a path.
pub(crate) fn leaves_below(path: String, value: &Value) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    add_leaves(path, value, &mut found);
    found
}

fn add_leaves<'a>(path: String, value: &'a Value, found: &mut Vec<(String, &'a Value)>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (name, value) in map {
                add_leaves(format!("{path}/{name}"), value, found);
            }
        }
        Value::Array(values) if !values.is_empty() => {
            for (index, value) in values.iter().enumerate() {
                add_leaves(format!("{path}/{index}"), value, found);
            }
        }
        _ => found.push((path, value)),
    }
}

/// The number of a trial in its search, from 0.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
#[serde(transparent)]
pub struct TrialId(u32);

impl TrialId {
    pub(crate) const fn new(number: u32) -> Self {
        Self(number)
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for TrialId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:05}", self.0)
    }
}

//! Points of a space: some values of a configuration, to which the search draws the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::draw::case;
use super::{Node, Parameter, SampleFrom, Space, file};
use crate::config::Config;
use crate::fields;

impl Space {
    /// Returns the part of the space that has the values of a point. All other parameters are drawn as before, and
    /// grids have the options that fit.
    pub(crate) fn at_point(&self, point: &Config) -> Result<Self, Misfit> {
        table(self.table(), "", point.as_map()).map(Self)
    }
}

impl Parameter {
    /// Returns the parameter restricted to a value of a point.
    pub(super) fn at_point(&self, path: &str, value: &Value) -> Result<Self, Misfit> {
        fixed(&self.0, path, value).map(Self)
    }
}

/// The reason why a point is not in a space.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Misfit {
    /// There is no such parameter.
    Unknown {
        path: String,
        known: BTreeSet<String>,
    },
    /// The parameter never has this value.
    Value {
        path: String,
        found: Value,
        expected: Vec<String>,
    },
}

impl Misfit {
    fn value(path: &str, found: &Value, expected: String) -> Self {
        Self::Value {
            path: path.to_owned(),
            found: found.clone(),
            expected: vec![expected],
        }
    }

    /// Combines what two options expect of one value; returns `None` if the misfits are about different values.
    fn either(self, other: Self) -> Option<Self> {
        match (self, other) {
            (
                Self::Unknown { path, mut known },
                Self::Unknown {
                    path: of,
                    known: more,
                },
            ) if path == of => {
                known.extend(more);
                Some(Self::Unknown { path, known })
            }
            (
                Self::Value {
                    path,
                    found,
                    mut expected,
                },
                Self::Value {
                    path: of,
                    expected: more,
                    ..
                },
            ) if path == of => {
                for more in more {
                    if !expected.contains(&more) {
                        expected.push(more);
                    }
                }
                Some(Self::Value {
                    path,
                    found,
                    expected,
                })
            }
            _ => None,
        }
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { path, known } => {
                let instead = fields::instead(path, known.iter().map(String::as_str));
                write!(formatter, "`{path}` is no parameter{instead}")
            }
            Self::Value {
                path,
                found,
                expected,
            } => {
                let expected = expected.join(" or ");
                write!(
                    formatter,
                    "`{path}` is {found}, where {expected} is expected"
                )
            }
        }
    }
}

fn fixed(node: &Node, path: &str, value: &Value) -> Result<Node, Misfit> {
    let misfit = |expected: String| Misfit::value(path, value, expected);
    match (node, value) {
        (Node::Constant(Value::Object(own)), Value::Object(named)) => {
            let own = own.iter();
            let own = own.map(|(name, value)| (name.clone(), value.clone().into()));
            table(&own.collect(), path, named).map(Node::Table)
        }
        (Node::Constant(own), _) => match is_same(own, value) {
            true => Ok(node.clone()),
            false => Err(misfit(own.to_string())),
        },
        (Node::Domain(domain), _) => match domain.accept(value) {
            Some(value) => Ok(Node::Constant(value)),
            None => Err(misfit(domain.to_string())),
        },
        (Node::Choice(options), _) => fitting(options, path, value).map(Node::Choice),
        (Node::Grid(options), _) => fitting(options, path, value).map(Node::Grid),
        (Node::Table(own), Value::Object(named)) => table(own, path, named).map(Node::Table),
        (Node::List(own), Value::Array(values)) if own.len() == values.len() => {
            let own = own.iter().zip(values).enumerate();
            let own = own.map(|(index, (parameter, value))| {
                parameter.at_point(&format!("{path}/{index}"), value)
            });
            own.collect::<Result<_, _>>().map(Node::List)
        }
        (Node::Table(_) | Node::List(_), _) => {
            Err(misfit(file::value(Parameter(node.clone())).to_string()))
        }
        (Node::SampleFrom(sample), _) => Ok(Node::SampleFrom(SampleFrom {
            point: Some(value.clone()),
            ..sample.clone()
        })),
        (Node::Cases(cases), _) => {
            let cases = cases.clone();
            Ok(Node::SampleFrom(SampleFrom {
                sample: Arc::new(move |config| case(&cases, config)),
                point: Some(value.clone()),
            }))
        }
    }
}

fn table(
    own: &BTreeMap<String, Parameter>,
    path: &str,
    named: &Map<String, Value>,
) -> Result<BTreeMap<String, Parameter>, Misfit> {
    if let Some(name) = named.keys().find(|name| !own.contains_key(*name)) {
        return Err(Misfit::Unknown {
            path: file::below(path, name),
            known: own.keys().map(|name| file::below(path, name)).collect(),
        });
    }
    let parameters = own.iter().map(|(name, parameter)| {
        let parameter = match named.get(name) {
            Some(value) => parameter.at_point(&file::below(path, name), value)?,
            None => parameter.clone(),
        };
        Ok((name.clone(), parameter))
    });
    parameters.collect()
}

/// Returns the options that a value fits: the one that it equals, or each that contains it as a part.
fn fitting(options: &[Parameter], path: &str, value: &Value) -> Result<Vec<Parameter>, Misfit> {
    let mut fitting = Vec::new();
    let mut misfits = Vec::new();
    for option in options {
        match option.at_point(path, value) {
            Ok(option) if constant(&option.0).is_some_and(|own| is_same(&own, value)) => {
                return Ok(vec![option]);
            }
            Ok(option) => fitting.push(option),
            Err(misfit) => misfits.push(misfit),
        }
    }
    if !fitting.is_empty() {
        return Ok(fitting);
    }
    let either = |all: Option<Misfit>, misfit: Misfit| match all {
        None => Some(Some(misfit)),
        Some(all) => all.either(misfit).map(Some),
    };
    Err(match misfits.into_iter().try_fold(None, either) {
        Some(Some(misfit)) => misfit,
        _ => Misfit::Value {
            path: path.to_owned(),
            found: value.clone(),
            expected: options
                .iter()
                .map(|option| file::value(option.clone()).to_string())
                .collect(),
        },
    })
}

/// Returns the value of a node in which nothing is drawn.
fn constant(node: &Node) -> Option<Value> {
    match node {
        Node::Constant(value) => Some(value.clone()),
        Node::Choice(options) | Node::Grid(options) => match options.as_slice() {
            [option] => constant(&option.0),
            _ => None,
        },
        Node::Table(table) => {
            let entries = table.iter();
            let entries =
                entries.map(|(name, parameter)| Some((name.clone(), constant(&parameter.0)?)));
            entries.collect::<Option<_>>().map(Value::Object)
        }
        Node::List(parameters) => {
            let values = parameters.iter().map(|parameter| constant(&parameter.0));
            values.collect::<Option<_>>().map(Value::Array)
        }
        Node::Domain(_) | Node::SampleFrom(_) | Node::Cases(_) => None,
    }
}

/// Returns true if two values are equal; an integer may be written as a float.
fn is_same(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) if left.is_f64() != right.is_f64() => {
            left.as_f64() == right.as_f64()
        }
        (Value::Array(left), Value::Array(right)) => {
            let mut pairs = left.iter().zip(right);
            left.len() == right.len() && pairs.all(|(left, right)| is_same(left, right))
        }
        (Value::Object(left), Value::Object(right)) => {
            let has_same =
                |(name, value)| right.get(name).is_some_and(|right| is_same(value, right));
            left.len() == right.len() && left.iter().all(has_same)
        }
        _ => left == right,
    }
}

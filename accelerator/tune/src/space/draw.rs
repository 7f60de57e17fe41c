//! Draws configurations.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::domain::Random;
use super::{Cases, Node, Parameter, SampleFrom, Space};
use crate::config::{Config, leaves_below};
use crate::error::{Error, Result};
use crate::fields;

/// The origins of the parts of a draw.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw<'a> {
    pub(crate) seed: u64,
    pub(crate) number: u64,
    /// The option of each grid, in the order of their paths.
    pub(crate) grid: &'a [(String, usize)],
}

impl Space {
    /// Every grid's path and number of options, by path.
    pub(crate) fn grids(&self) -> Vec<(String, usize)> {
        let mut grids = Vec::new();
        for (name, parameter) in self.table() {
            add_grids(&parameter.0, name, &mut grids);
        }
        grids.sort();
        grids
    }

    /// Fails where something cannot be drawn; the message has its path.
    pub(crate) fn check(&self) -> Result<()> {
        let keys = self.keys();
        let mut parameters = self.table().iter();
        parameters.try_for_each(|(name, parameter)| {
            check_name(name)?;
            check(&parameter.0, name, &keys)
        })
    }

    pub(crate) fn draw(&self, draw: Draw<'_>) -> Result<Config> {
        let mut later = Vec::new();
        let mut map = Map::new();
        for (name, parameter) in self.table() {
            let value = drawn(&parameter.0, name, draw, &mut later)?;
            map.insert(name.clone(), value);
        }
        let mut config = Config::from(map);
        for pass in 1.. {
            if later.is_empty() {
                break;
            }
            let mut failed = None;
            let mut again = Vec::new();
            for (path, node) in std::mem::take(&mut later) {
                match resolved(&node, &config) {
                    Ok(mut parameter) => {
                        if let Node::SampleFrom(SampleFrom {
                            point: Some(value), ..
                        }) = &node
                        {
                            let fixed = parameter.at_point(&path, value);
                            parameter =
                                fixed.map_err(|misfit| Error::misuse(misfit.to_string()))?;
                        }
                        let mut nested = Vec::new();
                        let value = drawn(&parameter.0, &path, draw, &mut nested)?;
                        again.extend(nested);
                        config.set(&path, value);
                    }
                    Err(error) => {
                        failed = Some(error);
                        again.push((path, node));
                    }
                }
            }
            if let (Some(error), true) = (failed, pass == PASSES) {
                let paths: Vec<_> = again.iter().map(|(path, _)| format!("`{path}`")).collect();
                return Err(Error::misuse(format!(
                    "{} cannot be drawn: {error}; what it depends on is not there, or depends on it",
                    paths.join(", ")
                )));
            }
            later = again;
        }
        Ok(config)
    }
}

/// The number of times that parameters that depend on others are tried: Ray's number.
const PASSES: usize = 20;

fn drawn(
    node: &Node,
    path: &str,
    draw: Draw<'_>,
    later: &mut Vec<(String, Node)>,
) -> Result<Value> {
    let random = || {
        let number = draw.number.to_le_bytes();
        Random::of(draw.seed, &[&number, path.as_bytes()])
    };
    Ok(match node {
        Node::Constant(value) => value.clone(),
        Node::Domain(domain) => {
            domain.check().map_err(|error| at(path, &error))?;
            domain.sample(&mut random())
        }
        Node::Choice(options) => {
            if options.is_empty() {
                return Err(at(path, &"`choice` has no options"));
            }
            let option = &options[random().index(options.len())];
            drawn(&option.0, path, draw, later)?
        }
        Node::Grid(options) => {
            let grid = draw.grid.iter().find(|(grid, _)| grid == path);
            let Some(option) = grid.and_then(|(_, index)| options.get(*index)) else {
                return Err(at(
                    path,
                    &"`grid_search` stands within what is drawn; a grid's size has to be known",
                ));
            };
            drawn(&option.0, path, draw, later)?
        }
        Node::Table(table) => {
            let mut map = Map::new();
            for (name, parameter) in table {
                let value = drawn(&parameter.0, &format!("{path}/{name}"), draw, later)?;
                map.insert(name.clone(), value);
            }
            Value::Object(map)
        }
        Node::List(parameters) => {
            let parameters = parameters.iter().enumerate();
            let values = parameters.map(|(index, parameter)| {
                drawn(&parameter.0, &format!("{path}/{index}"), draw, later)
            });
            Value::Array(values.collect::<Result<_>>()?)
        }
        Node::SampleFrom(_) | Node::Cases(_) => {
            later.push((path.to_owned(), node.clone()));
            // Not to be seen: it is absent until it is drawn.
            Value::Null
        }
    })
}

fn resolved(node: &Node, config: &Config) -> Result<Parameter> {
    match node {
        Node::SampleFrom(sample) => (sample.sample)(config),
        Node::Cases(cases) => case(cases, config),
        other => Ok(Parameter(other.clone())),
    }
}

pub(super) fn case(
    Cases {
        of,
        cases,
        otherwise,
    }: &Cases,
    config: &Config,
) -> Result<Parameter> {
    let value = match config.value(of) {
        None | Some(Value::Null) => {
            return Err(Error::misuse(format!("the configuration has no `{of}`")));
        }
        Some(value) => case_name(value),
    };
    let found = cases.get(&value).or(otherwise.as_deref());
    found.cloned().ok_or_else(|| {
        let known: Vec<_> = cases.keys().map(String::as_str).collect();
        Error::misuse(format!(
            "`{of}` is {value}, and there are cases for {}; add one, or `otherwise`",
            known.join(", ")
        ))
    })
}

fn add_grids(node: &Node, path: &str, grids: &mut Vec<(String, usize)>) {
    if let Node::Grid(options) = node {
        grids.push((path.to_owned(), options.len()));
    }
    for (path, part) in node.parts(path) {
        add_grids(part, &path, grids);
    }
}

fn check(node: &Node, path: &str, keys: &Keys) -> Result<()> {
    let check_all = |options: &[Parameter], name: &str| {
        if options.is_empty() {
            return Err(at(path, &format!("`{name}` has no options")));
        }
        options
            .iter()
            .try_for_each(|option| check(&option.0, path, keys))
    };
    match node {
        Node::Domain(domain) => domain.check().map_err(|error| at(path, &error)),
        Node::Choice(options) => check_all(options, "choice"),
        Node::Grid(options) => check_all(options, "grid_search"),
        Node::Table(_) | Node::List(_) => {
            if let Node::Table(table) = node {
                table.keys().try_for_each(|name| check_name(name))?;
            }
            let mut parts = node.parts(path).into_iter();
            parts.try_for_each(|(path, part)| check(part, &path, keys))
        }
        Node::Cases(cases) => {
            check_names(cases, path, keys)?;
            let mut cases = cases.all();
            cases.try_for_each(|case| check(&case.0, path, keys))
        }
        Node::Constant(_) | Node::SampleFrom(_) => Ok(()),
    }
}

/// Fails if a name could be mistaken for a path.
fn check_name(name: &str) -> Result<()> {
    match name.contains('/') {
        false => Ok(()),
        true => Err(Error::misuse(format!(
            "the parameter {name:?} has a `/`, which stands between the names of nested ones: rename it"
        ))),
    }
}

/// Fails if the deciding parameter does not exist, or if it never has the value of a case.
fn check_names(cases: &Cases, path: &str, keys: &Keys) -> Result<()> {
    let of = &cases.of;
    if keys.place(of) == Place::Nothing {
        let instead = keys.instead_of(of);
        let what = format!("`sample_from` is of `{of}`, which no configuration has{instead}");
        return Err(at(path, &what));
    }
    let Some(values) = keys.values(of) else {
        return Ok(());
    };
    match cases.cases.keys().find(|case| !values.contains(*case)) {
        None => Ok(()),
        Some(case) => {
            let instead = fields::instead(case, values.iter().map(String::as_str));
            let what = format!("`cases` has {case}, a value that `{of}` never has{instead}");
            Err(at(path, &what))
        }
    }
}

fn at(path: &str, error: &dyn std::fmt::Display) -> Error {
    Error::misuse(format!("the parameter `{path}`: {error}"))
}

/// The paths at which configurations of a space may have values, each with its possible value.
#[derive(Debug)]
pub(crate) struct Keys(Vec<(String, Possible)>);

#[derive(Debug)]
enum Possible {
    Value(Value),
    Drawn,
    /// The value comes from a closure, and may be a table.
    Anything,
}

/// The target of a path.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    /// A value, in some configurations.
    Value,
    /// A table or a list of values.
    Group,
    Nothing,
}

impl Space {
    pub(crate) fn keys(&self) -> Keys {
        let mut found = Vec::new();
        for (name, parameter) in self.table() {
            add(&parameter.0, name.clone(), &mut found);
        }
        Keys(found)
    }
}

impl Keys {
    pub(crate) fn place(&self, path: &str) -> Place {
        if self.at(path).next().is_some() {
            return Place::Value;
        }
        match self.0.iter().any(|(known, _)| is_below(known, path)) {
            true => Place::Group,
            false => Place::Nothing,
        }
    }

    /// Returns the values at a path, as cases name them, if the space lists all of them.
    pub(super) fn values(&self, path: &str) -> Option<BTreeSet<String>> {
        if self.place(path) != Place::Value {
            return None;
        }
        let values = self.at(path).map(|possible| match possible {
            Possible::Value(value) => Some(case_name(value)),
            Possible::Drawn | Possible::Anything => None,
        });
        values.collect()
    }

    fn at<'a>(&'a self, path: &'a str) -> impl Iterator<Item = &'a Possible> {
        let there = self.0.iter().filter(move |(known, possible)| {
            known == path || matches!(possible, Possible::Anything) && is_below(path, known)
        });
        there.map(|(_, possible)| possible)
    }

    /// Returns the end of a message about an unknown path: the nearest known path, and all of them.
    pub(crate) fn instead_of(&self, path: &str) -> String {
        let known: BTreeSet<_> = self.0.iter().map(|(known, _)| known.as_str()).collect();
        fields::instead(path, known)
    }
}

fn is_below(path: &str, above: &str) -> bool {
    let rest = path.strip_prefix(above);
    rest.is_some_and(|rest| rest.starts_with('/'))
}

pub(super) fn case_name(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

fn add(node: &Node, path: String, found: &mut Vec<(String, Possible)>) {
    match node {
        Node::Constant(value) => {
            let leaves = leaves_below(path, value).into_iter();
            found.extend(leaves.map(|(path, value)| (path, Possible::Value(value.clone()))));
        }
        Node::Domain(_) => found.push((path, Possible::Drawn)),
        Node::Choice(options) | Node::Grid(options) => {
            for option in options {
                add(&option.0, path.clone(), found);
            }
        }
        Node::Table(table) if table.is_empty() => {
            found.push((path, Possible::Value(Value::Object(Default::default()))));
        }
        Node::Table(_) | Node::List(_) => {
            for (path, part) in node.parts(&path) {
                add(part, path, found);
            }
        }
        Node::SampleFrom(_) => found.push((path, Possible::Anything)),
        Node::Cases(cases) => {
            for case in cases.all() {
                add(&case.0, path.clone(), found);
            }
        }
    }
}

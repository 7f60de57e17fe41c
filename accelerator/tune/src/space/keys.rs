//! The parameters and values that configurations of a space may have, by path.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Node, Parameter, Space};
use crate::config::leaves_below;
use crate::names;

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
    /// Collects the keys of its configurations.
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
        names::instead(path, known)
    }
}

fn is_below(path: &str, above: &str) -> bool {
    let rest = path.strip_prefix(above);
    rest.is_some_and(|rest| rest.starts_with('/'))
}

/// Returns the name of a value in cases.
pub(super) fn case_name(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

fn add(node: &Node, path: String, found: &mut Vec<(String, Possible)>) {
    let mut add_all = |parameters: &mut dyn Iterator<Item = (String, &Parameter)>| {
        for (path, parameter) in parameters {
            add(&parameter.0, path, found);
        }
    };
    match node {
        Node::Constant(value) => {
            let leaves = leaves_below(path, value).into_iter();
            found.extend(leaves.map(|(path, value)| (path, Possible::Value(value.clone()))));
        }
        Node::Domain(_) => found.push((path, Possible::Drawn)),
        Node::Choice(options) | Node::Grid(options) => {
            add_all(&mut options.iter().map(|option| (path.clone(), option)));
        }
        Node::Table(table) if table.is_empty() => {
            found.push((path, Possible::Value(Value::Object(Default::default()))));
        }
        Node::Table(table) => add_all(
            &mut table
                .iter()
                .map(|(name, parameter)| (format!("{path}/{name}"), parameter)),
        ),
        Node::List(parameters) => {
            let parameters = parameters.iter().enumerate();
            add_all(
                &mut parameters.map(|(index, parameter)| (format!("{path}/{index}"), parameter)),
            );
        }
        Node::SampleFrom(_) => found.push((path, Possible::Anything)),
        Node::Cases(cases) => {
            let cases = cases.cases.values().chain(cases.otherwise.as_deref());
            add_all(&mut cases.map(|case| (path.clone(), case)));
        }
    }
}

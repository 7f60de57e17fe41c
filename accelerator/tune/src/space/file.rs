//! Parameters in files.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{Cases, Domain, Node, Parameter};
use crate::error::{Error, Result};
use crate::fields;

/// Reads a parameter. A table of one entry whose key is the name of a distribution is one; any other is a table.
pub(super) fn parse(path: &str, value: Value) -> Result<Parameter> {
    let node = match value {
        Value::Object(map) => match single(map) {
            Ok((name, value)) => match parse_named(path, &name, value)? {
                Ok(node) => node,
                Err(value) => table(path, [(name, value)].into_iter().collect())?,
            },
            Err(map) => table(path, map)?,
        },
        Value::Array(values) => {
            let values = values.into_iter().enumerate();
            let parameters =
                values.map(|(index, value)| parse(&below(path, &index.to_string()), value));
            list(parameters.collect::<Result<_>>()?)
        }
        value => Node::Constant(value),
    };
    Ok(Parameter(node))
}

/// Returns a parameter as a file has it.
pub(super) fn value(parameter: Parameter) -> Value {
    let values = |parameters: Vec<Parameter>| parameters.into_iter().map(value).collect::<Vec<_>>();
    let named = |table: BTreeMap<String, Parameter>| {
        let table = table.into_iter();
        table
            .map(|(name, parameter)| (name, value(parameter)))
            .collect::<Map<_, _>>()
    };
    match parameter.0 {
        Node::Constant(constant) => constant,
        Node::Domain(domain) => {
            let (name, arguments) = domain.to_file();
            json!({name: arguments})
        }
        Node::Choice(options) => json!({CHOICE: values(options)}),
        Node::Grid(options) => json!({GRID: values(options)}),
        Node::Table(table) => Value::Object(named(table)),
        Node::List(parameters) => Value::Array(values(parameters)),
        Node::SampleFrom(_) => json!({SAMPLE_FROM: CLOSURE}),
        Node::Cases(cases) => {
            let mut map = Map::new();
            map.insert("of".to_owned(), cases.of.into());
            map.insert("cases".to_owned(), Value::Object(named(cases.cases)));
            if let Some(otherwise) = cases.otherwise {
                map.insert("otherwise".to_owned(), value(*otherwise));
            }
            json!({SAMPLE_FROM: map})
        }
    }
}

const CHOICE: &str = "choice";
const GRID: &str = "grid_search";
const SAMPLE_FROM: &str = "sample_from";
const CLOSURE: &str = "a closure of the program";

/// The only entry of a map, or the map again.
fn single(mut map: Map<String, Value>) -> Result<(String, Value), Map<String, Value>> {
    if map.len() != 1 {
        return Err(map);
    }
    let Some(name) = map.keys().next().cloned() else {
        return Err(map);
    };
    match map.remove(&name) {
        Some(value) => Ok((name, value)),
        None => Err(map),
    }
}

/// Parses the distribution of that name; returns the value again if the name is none of a distribution.
fn parse_named(path: &str, name: &str, value: Value) -> Result<Result<Node, Value>> {
    let wrong = |what: &dyn std::fmt::Display| {
        Error::misuse(format!("the parameter `{path}`: `{name}`: {what}"))
    };
    let arguments = |value: Value, what: &str| match value {
        Value::Array(arguments) => Ok(arguments),
        other => Err(wrong(&format!("{other} stands where {what} is expected"))),
    };
    if Domain::NAMES.contains(&name) {
        let count = 2 + usize::from(name.starts_with('q'));
        let arguments = arguments(value, &format!("a list of {count} numbers"))?;
        if arguments.len() != count {
            let found = arguments.len();
            return Err(wrong(&format!("it has {count} numbers, not {found}")));
        }
        let domain = Domain::from_file(name, &arguments).map_err(|error| wrong(&error))?;
        domain.check().map_err(|error| wrong(&error))?;
        return Ok(Ok(Node::Domain(domain)));
    }
    match name {
        CHOICE | GRID => {
            let options = arguments(value, "a list of options")?;
            if options.is_empty() {
                return Err(wrong(&"it has no options"));
            }
            let options = options.into_iter().map(|option| parse(path, option));
            let options = options.collect::<Result<Vec<_>>>()?;
            Ok(Ok(match name {
                CHOICE => Node::Choice(options),
                _ => Node::Grid(options),
            }))
        }
        SAMPLE_FROM => match value {
            Value::Object(mut map) => {
                let Some(Value::String(of)) = map.remove("of") else {
                    return Err(wrong(&"`of` names no parameter"));
                };
                let Some(Value::Object(cases)) = map.remove("cases") else {
                    return Err(wrong(&"`cases` is no table"));
                };
                let otherwise = map.remove("otherwise");
                if let Some(unknown) = map.keys().next() {
                    return Err(wrong(&format!(
                        "it has `of`, `cases` and `otherwise`, and no `{unknown}`"
                    )));
                }
                let cases = cases.into_iter();
                let cases = cases.map(|(name, case)| Ok((name, parse(path, case)?)));
                let otherwise = otherwise.map(|otherwise| parse(path, otherwise));
                Ok(Ok(Node::Cases(Cases {
                    of,
                    cases: cases.collect::<Result<_>>()?,
                    otherwise: otherwise.transpose()?.map(Box::new),
                })))
            }
            Value::String(text) if text == CLOSURE => {
                // Of a journal: shown, and never drawn from.
                Ok(Ok(Node::Constant(json!({SAMPLE_FROM: CLOSURE}))))
            }
            other => Err(wrong(&format!(
                "{other} stands where a table with `of` and `cases` is expected"
            ))),
        },
        _ => match nearest(name, &value) {
            Some(known) => Err(wrong(&format!(
                "there is no such distribution; did you mean `{known}`?"
            ))),
            None => Ok(Err(value)),
        },
    }
}

/// Returns the keyword that is most like a name and that takes such a value.
fn nearest(name: &str, value: &Value) -> Option<&'static str> {
    match value {
        Value::Array(_) if name == "grid" => Some(GRID),
        Value::Array(_) if name.len() > 3 => {
            fields::nearest(name, Domain::NAMES.into_iter().chain([CHOICE, GRID]))
        }
        Value::Object(map) if map.contains_key("cases") => fields::nearest(name, [SAMPLE_FROM]),
        _ => None,
    }
}

fn table(path: &str, map: Map<String, Value>) -> Result<Node> {
    let parameters = map.into_iter();
    let parameters = parameters.map(|(name, value)| {
        let parameter = parse(&below(path, &name), value)?;
        Ok((name, parameter))
    });
    Ok(Node::Table(parameters.collect::<Result<_>>()?))
}

/// A list of constants is a constant.
fn list(parameters: Vec<Parameter>) -> Node {
    let constants = parameters.iter().map(|parameter| match &parameter.0 {
        Node::Constant(value) => Some(value.clone()),
        _ => None,
    });
    match constants.collect() {
        Some(values) => Node::Constant(Value::Array(values)),
        None => Node::List(parameters),
    }
}

pub(super) fn below(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        path => format!("{path}/{name}"),
    }
}

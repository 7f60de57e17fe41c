//! Parses the content of files; errors have the path of the wrong field.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::value::json_number;

/// Reads a value.
///
/// # Errors
/// [`Error::is_misuse`] with the path of the field, what was expected and what was found.
pub(crate) fn parse<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let error = error.into_inner();
        let said = match &*path {
            "." => error.to_string(),
            path => format!("`{path}`: {error}"),
        };
        Error::misuse(said).with_source(error)
    })
}

/// The fields of a table whose `type` is one of those, and that type.
pub(crate) fn of_type(mut table: Map<String, Value>, types: &[&str]) -> Result<(String, Value)> {
    match table.remove("type") {
        Some(Value::String(name)) if types.contains(&&*name) => Ok((name, Value::Object(table))),
        found => Err(Error::misuse(format!(
            "`type` is {}; it is one of {}",
            found.map_or_else(|| "missing".to_owned(), |found| found.to_string()),
            types.join(", ")
        ))),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoFields {}

/// Converts a TOML document to JSON. In configurations, NaN and infinities become words.
///
/// # Errors
/// [`Error::is_misuse`] with the path of a value that JSON does not have: a date, or such a number elsewhere.
pub(crate) fn to_json(path: &str, value: toml::Value) -> Result<Value> {
    let below = |name: &str| match path {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    };
    Ok(match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) if number.is_finite() || is_of_configurations(path) => {
            json_number(number)
        }
        toml::Value::Float(number) => {
            return Err(Error::misuse(format!(
                "`{path}` is {number}; it is a finite number, or left out"
            )));
        }
        toml::Value::Boolean(flag) => flag.into(),
        toml::Value::Datetime(date) => {
            return Err(Error::misuse(format!(
                "`{path}` is the date {date}, and no date is expected here: write it as a text"
            )));
        }
        toml::Value::Array(values) => {
            let values = values.into_iter().enumerate();
            let values = values.map(|(index, value)| to_json(&format!("{path}[{index}]"), value));
            Value::Array(values.collect::<Result<_>>()?)
        }
        toml::Value::Table(table) => {
            let fields = table.into_iter().map(|(name, value)| {
                let value = to_json(&below(&name), value)?;
                Ok((name, value))
            });
            Value::Object(fields.collect::<Result<_>>()?)
        }
    })
}

fn is_of_configurations(path: &str) -> bool {
    let places = [
        "space",
        "config",
        "points_to_evaluate",
        "scheduler.hyperparam_mutations",
    ];
    let rests = places.iter().filter_map(|place| path.strip_prefix(place));
    rests.into_iter().any(|rest| rest.starts_with(['.', '[']))
}

/// Returns the known name that is most like an unknown one. The last part of a path may match alone.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |known: &str| {
        let last = known.rsplit('/').next().unwrap_or(known);
        let to = |known: &str| strsim::damerau_levenshtein(name, known);
        to(known).min(to(last))
    };
    let length = |text: &str| text.chars().count();
    let known = known.into_iter().map(|known| (distance(known), known));
    let near = known.filter(|(distance, known)| {
        *distance <= MOST_EDITS && *distance < length(name).min(length(known))
    });
    near.min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}

/// Returns the end of a message about an unknown name: the nearest known one, and all of them.
pub(crate) fn instead<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<_> = known.into_iter().collect();
    let there_are = match known.is_empty() {
        true => "there are none".to_owned(),
        false => format!("there are {}", known.join(", ")),
    };
    match nearest(name, known) {
        Some(near) => format!("; did you mean `{near}`? {there_are}"),
        None => format!("; {there_are}"),
    }
}

/// The most characters in which a suggestion differs.
const MOST_EDITS: usize = 2;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::search::SearchSpec;

    const SPEC: &str = "name = 's'\nmetric = 'loss'\nmode = 'min'\nspace = {}\n";

    fn refusal(name: &str, text: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        let error = SearchSpec::from_file(&path).unwrap_err();
        assert!(error.is_misuse(), "{error}");
        let start = format!("the specification {}: ", path.display());
        error.to_string().strip_prefix(&start).unwrap().to_owned()
    }

    #[test]
    fn an_error_names_the_field_what_was_expected_and_what_was_found() {
        let refusals = r#"
seed = 'x' => `seed`: invalid type: string "x", expected u64
metrics = 3 => `metrics`: unknown field `metrics`, expected
order = { ordered = { workers = -1 } } => `order.ordered.workers`: invalid value: integer `-1`, expected usize
order = { ordered = { workers = 1, worker = 2 } } => `order.ordered.worker`: unknown field `worker`, expected `workers`
checkpoints = { frequency = 0.5 } => `checkpoints.frequency`: invalid type: floating point `0.5`, expected u64
scheduler = { type = 'asha', max_t = 'x' } => `scheduler`: `max_t`: invalid type: string "x", expected u64
scheduler = { type = 'ahsa' } => `scheduler`: `type` is "ahsa"; it is one of fifo, asha,
scheduler = { max_t = 3 } => `scheduler`: `type` is missing
scheduler = { type = 'fifo', max_t = 3 } => `scheduler`: `max_t`: unknown field
search_alg = { type = 'optuna', sampler = 3 } => `search_alg`: `sampler`: invalid type: integer `3`, expected a string
stop = { plateau = { metric = 'loss', results = 'x' } } => `stop`: `plateau`: `results`: invalid type: string "x", expected usize
stop = { loss = true } => `stop`: `loss` is true; use a number
points_to_evaluate = [{}, 3] => `points_to_evaluate[1]`: invalid type: integer `3`, expected a map
time_budget_s = nan => `time_budget_s` is NaN
report_timeout_s = inf => `report_timeout_s` is inf
stop = { loss = -inf } => `stop.loss` is -inf
seed = 2026-01-01 => `seed` is the date 2026-01-01"#;
        for line in refusals.trim().lines() {
            let (text, expected) = line.split_once(" => ").unwrap();
            let said = refusal("spec.toml", &format!("{SPEC}{text}"));
            assert!(said.starts_with(expected), "{text}: {said}");
        }
        let said = refusal("spec.json", r#"{"name": "s", "metric": 3}"#);
        assert!(said.starts_with("`metric`: invalid type: integer `3`"));
        let said = refusal("spec.toml", "name = 's'");
        assert!(said.starts_with("missing field `metric`"), "{said}");
    }

    #[test]
    fn the_nearest_name_is_one_that_differs_little() {
        let known = ["lr", "wd", "opt/momentum", "opt/name"];
        for (name, expected) in [
            ("lrr", Some("lr")),
            ("rl", Some("lr")),
            ("opt/momentumm", Some("opt/momentum")),
            ("momentum", Some("opt/momentum")),
            ("x", None),
            ("xy", None),
            ("learning_rate", None),
        ] {
            assert_eq!(nearest(name, known), expected, "{name}");
        }
        let said = instead("lrr", ["lr", "wd"]);
        assert_eq!(said, "; did you mean `lr`? there are lr, wd");
        assert_eq!(instead("lr", []), "; there are none");
    }
}

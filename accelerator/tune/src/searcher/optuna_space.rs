//! A space in Optuna's terms.

use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::space::{Domain, Node, Parameter, Space};

/// The parameters that Optuna draws, and their places in a configuration.
#[derive(Debug)]
pub(super) struct OptunaSpace {
    /// The configuration, with null in place of each drawn parameter.
    template: Config,
    drawn: Vec<(String, Drawn)>,
}

#[derive(Debug)]
enum Drawn {
    Domain(Domain),
    /// Optuna draws the index of an option, which may be any value.
    Choice(Vec<Value>),
}

impl OptunaSpace {
    /// Fails where Optuna cannot draw a parameter, with its path.
    pub(super) fn new(space: &Space) -> Result<Self> {
        space.check()?;
        let mut drawn = Vec::new();
        let mut template = Map::new();
        for (name, parameter) in space.table() {
            template.insert(name.clone(), template_value(name, parameter, &mut drawn)?);
        }
        Ok(Self {
            template: template.into(),
            drawn,
        })
    }

    /// Returns the distributions by path, as Optuna's `json_to_distribution` reads them.
    pub(super) fn distributions(&self) -> Result<Value> {
        let distributions = self.drawn.iter().map(|(path, drawn)| {
            let distribution = match drawn {
                Drawn::Domain(domain) => distribution(path, *domain)?,
                Drawn::Choice(options) => {
                    let indices: Vec<_> = (0..options.len()).collect();
                    json!({"name": "CategoricalDistribution", "attributes": {"choices": indices}})
                }
            };
            Ok((path.clone(), distribution))
        });
        Ok(Value::Object(distributions.collect::<Result<_>>()?))
    }

    /// The configuration of what Optuna has drawn.
    pub(super) fn config(&self, drawn: &Value) -> Result<Config> {
        let mut config = self.template.clone();
        for (path, parameter) in &self.drawn {
            let found = drawn.get(path);
            let value = match parameter {
                // As the space has it: Optuna may draw the upper bound, which the space leaves out.
                Drawn::Domain(domain) => found.and_then(Value::as_f64).map(|it| domain.clamp(it)),
                Drawn::Choice(options) => found
                    .and_then(Value::as_u64)
                    .and_then(|index| options.get(usize::try_from(index).ok()?).cloned()),
            };
            let value = value.ok_or_else(|| {
                let message = format!("Optuna suggests {drawn}, which has no value for `{path}`");
                Error::new(Kind::Searcher, message)
            })?;
            config.set(path, value);
        }
        Ok(config)
    }
}

/// A parameter with null where something is drawn.
fn template_value(
    path: &str,
    parameter: &Parameter,
    drawn: &mut Vec<(String, Drawn)>,
) -> Result<Value> {
    let below = |name: &dyn std::fmt::Display| format!("{path}/{name}");
    match &parameter.0 {
        Node::Constant(value) => Ok(value.clone()),
        Node::Domain(domain) => {
            // That it can be is checked here, before anything is started.
            distribution(path, *domain)?;
            drawn.push((path.to_owned(), Drawn::Domain(*domain)));
            Ok(Value::Null)
        }
        Node::Choice(options) => {
            let options = options.iter().map(|option| {
                let mut nested = Vec::new();
                let value = template_value(path, option, &mut nested)?;
                match nested.is_empty() {
                    true => Ok(value),
                    false => Err(refused(
                        path,
                        "a choice whose options are drawn themselves",
                        "draw what is in them beside it",
                    )),
                }
            });
            let options = options.collect::<Result<_>>()?;
            drawn.push((path.to_owned(), Drawn::Choice(options)));
            Ok(Value::Null)
        }
        Node::Table(table) => {
            let entries = table.iter().map(|(name, parameter)| {
                Ok((
                    name.clone(),
                    template_value(&below(name), parameter, drawn)?,
                ))
            });
            Ok(Value::Object(entries.collect::<Result<_>>()?))
        }
        Node::List(list) => {
            let values = list.iter().enumerate();
            let values =
                values.map(|(index, parameter)| template_value(&below(&index), parameter, drawn));
            Ok(Value::Array(values.collect::<Result<_>>()?))
        }
        Node::Grid(_) => Err(refused(
            path,
            "`grid_search`",
            "use `choice`, or the search algorithm `variants`",
        )),
        Node::SampleFrom(_) | Node::Cases(_) => Err(refused(
            path,
            "`sample_from`",
            "compute it in the trial, or use the search algorithm `variants`",
        )),
    }
}

fn distribution(path: &str, domain: Domain) -> Result<Value> {
    let float = |low: f64, high: f64, step: Option<f64>, log: bool| {
        let attributes = json!({"low": low, "high": high, "step": step, "log": log});
        Ok(json!({"name": "FloatDistribution", "attributes": attributes}))
    };
    let int = |low: i64, high: i64, step: i64, log: bool| {
        let attributes = json!({"low": low, "high": high, "step": step, "log": log});
        Ok(json!({"name": "IntDistribution", "attributes": attributes}))
    };
    match domain {
        Domain::Uniform(low, high) => float(low, high, None, false),
        Domain::QUniform(low, high, q) => float(low, high, Some(q), false),
        Domain::LogUniform(low, high) => float(low, high, None, true),
        // Optuna's upper bounds are included.
        Domain::RandInt(low, high) | Domain::QRandInt(low, high, 1) => int(low, high - 1, 1, false),
        Domain::QRandInt(low, high, q) => {
            let first = low.div_euclid(q) + i64::from(low.rem_euclid(q) != 0);
            int(first * q, high.div_euclid(q) * q, q, false)
        }
        Domain::LogRandInt(low, high) => int(low, high - 1, 1, true),
        Domain::QLogUniform(..) => Err(refused(path, "`qloguniform`", "use `loguniform`")),
        Domain::QLogRandInt(..) => Err(refused(path, "`qlograndint`", "use `lograndint`")),
        Domain::Randn(..) | Domain::QRandn(..) => Err(refused(
            path,
            "a normal distribution",
            "use `uniform` between bounds",
        )),
    }
}

fn refused(path: &str, what: &str, advice: &str) -> Error {
    Error::misuse(format!(
        "the parameter `{path}` is {what}, which Optuna cannot draw; {advice}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(space: Value) -> Result<OptunaSpace> {
        OptunaSpace::new(&serde_json::from_value(space).unwrap())
    }

    #[test]
    fn domains_become_distributions_of_optuna() {
        let space = of(json!({
            "a": {"uniform": [0.5, 2.0]},
            "b": {"quniform": [0.0, 0.5, 0.25]},
            "c": {"loguniform": [0.5, 2.0]},
            "d": {"randint": [1, 5]},
            "e": {"qrandint": [15, 130, 16]},
            "f": {"lograndint": [1, 1024]},
            "g": {"choice": ["x", [1, 2], null]},
            "h": {"i": {"qrandint": [1, 5, 1]}},
            "j": 7,
        }))
        .unwrap();
        let float = |low: f64, high: f64, step: Option<f64>, log: bool| {
            json!({"name": "FloatDistribution",
                "attributes": {"low": low, "high": high, "step": step, "log": log}})
        };
        let int = |low: i64, high: i64, step: i64, log: bool| {
            json!({"name": "IntDistribution",
                "attributes": {"low": low, "high": high, "step": step, "log": log}})
        };
        let expected = json!({
            "a": float(0.5, 2.0, None, false),
            "b": float(0.0, 0.5, Some(0.25), false),
            "c": float(0.5, 2.0, None, true),
            "d": int(1, 4, 1, false),
            "e": int(16, 128, 16, false),
            "f": int(1, 1023, 1, true),
            "g": {"name": "CategoricalDistribution", "attributes": {"choices": [0, 1, 2]}},
            "h/i": int(1, 4, 1, false),
        });
        assert_eq!(space.distributions().unwrap(), expected);
    }

    #[test]
    fn what_optuna_draws_becomes_a_configuration_of_the_space() {
        let space = of(json!({
            "lr": {"uniform": [0.0, 1.0]},
            "g": {"choice": ["x", [1, {"y": 2}], null]},
            "h": {"layers": {"randint": [1, 5]}, "l": [{"randint": [0, 2]}, 9]},
            "epochs": 7,
        }))
        .unwrap();
        let drawn = json!({"lr": 1.0, "g": 1, "h/layers": 4, "h/l/0": 1});
        let lr = 1.0_f64.next_down();
        let expected = json!({
            "lr": lr, "g": [1, {"y": 2}], "h": {"layers": 4, "l": [1, 9]}, "epochs": 7,
        });
        let config = space.config(&drawn).unwrap();
        assert_eq!(Value::Object(config.as_map().clone()), expected);
        let error = space.config(&json!({"lr": 0.5, "g": 3})).unwrap_err();
        assert!(error.is_searcher() && error.to_string().contains("`g`"));
    }

    #[test]
    fn what_optuna_cannot_draw_is_refused_by_its_path() {
        for (parameter, what, advice) in [
            (json!({"grid_search": [1, 2]}), "grid_search", "choice"),
            (json!({"randn": [0.0, 1.0]}), "normal", "uniform"),
            (json!({"qrandn": [0.0, 1.0, 0.5]}), "normal", "uniform"),
            (
                json!({"qloguniform": [1.0, 8.0, 1.0]}),
                "qloguniform",
                "`loguniform`",
            ),
            (
                json!({"qlograndint": [1, 8, 2]}),
                "qlograndint",
                "`lograndint`",
            ),
            (
                json!({"sample_from": {"of": "x", "cases": {"1": 2}}}),
                "sample_from",
                "in the trial",
            ),
            (
                json!({"choice": [{"momentum": {"uniform": [0.0, 1.0]}}, 1]}),
                "drawn themselves",
                "beside it",
            ),
        ] {
            let space = json!({"x": 1, "optimizer": {"p": parameter}});
            let error = of(space).unwrap_err();
            let message = error.to_string();
            assert!(error.is_misuse(), "{message}");
            for part in ["`optimizer/p`", what, advice, "Optuna"] {
                assert!(message.contains(part), "{part}: {message}");
            }
        }
    }
}

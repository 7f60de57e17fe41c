//! The specification of a search.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::Config;
use crate::core::{CheckpointSettings, SearchOrder};
use crate::error::{Error, Kind, Result};
use crate::fields::{self, NoFields};
use crate::objective::{Mode, Objective};
use crate::pool::WorkerReuse;
use crate::scheduler::Scheduler;
use crate::searcher::Optuna;
use crate::slots::Resources;
use crate::space::Space;
use crate::stop::Stop;

/// A search, as a file describes it.
///
/// ```
/// use accelerator_tune::SearchSpec;
///
/// let spec: SearchSpec = serde_json::from_str(r#"{
///     "name": "mnist",
///     "metric": "mean_accuracy",
///     "mode": "max",
///     "space": {"lr": {"loguniform": [1e-4, 1e-1]}, "momentum": {"uniform": [0.1, 0.9]}},
///     "num_samples": 9,
///     "scheduler": {"type": "asha", "max_t": 16},
///     "stop": {"training_iteration": 16}
/// }"#)?;
/// assert_eq!(spec.num_samples, 9);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SearchSpec {
    /// The first part of its trials' names.
    pub name: String,
    /// The metric that it optimizes.
    pub metric: String,
    /// The direction of the metric.
    pub mode: Mode,
    /// The space from which configurations are drawn.
    #[serde(alias = "config")]
    pub space: Space,
    /// The number of configurations to draw; with grids, the number of times that each of their points is tried.
    #[serde(default = "one")]
    pub num_samples: u32,
    /// The seed from which all randomness follows.
    #[serde(default)]
    pub seed: u64,
    /// Points of the space to try first. Each replaces a sample, and all are tried; see
    /// [`Search::points_to_evaluate`](crate::Search::points_to_evaluate).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points_to_evaluate: Vec<Config>,
    /// The algorithm that suggests configurations.
    #[serde(default)]
    pub search_alg: SearchAlgorithm,
    /// The scheduler that ends trials early.
    #[serde(default)]
    pub scheduler: Scheduler,
    /// The rules that end a trial.
    #[serde(default)]
    pub stop: Stop,
    /// The order in which reports are decided about.
    #[serde(default)]
    pub order: SearchOrder,
    /// The number of times that a failed trial is repeated, from its newest checkpoint; -1 for any number of times.
    #[serde(default)]
    pub max_failures: MaxFailures,
    /// Lets configurations that are equal in their first iterations train those once.
    #[serde(default)]
    pub share_prefixes: bool,
    /// Lets trials report without a metric that the scheduler or a stop rule looks at, which is then ignored. Otherwise
    /// it is an error if the first report of the search has not all of them, or if a program prints a JSON object with
    /// numbers, and without the search's metric, before that report.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disable_strict_metric_checking: bool,
    /// The settings for when trials save, and which checkpoints are kept.
    #[serde(default)]
    pub checkpoints: CheckpointSettings,
    /// The resources of each trial.
    #[serde(default)]
    pub resources_per_trial: Resources,
    /// The choice to run several trials in a process, one after the other.
    #[serde(default)]
    pub reuse_workers: WorkerReuse,
    /// The number of trials that run at the same time; `None` is as many as fit the hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<usize>,
    /// The program that trials run, with placeholders; see [`Search::run_programs`](crate::Search::run_programs). None where
    /// trials are processes of the program that searches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub program: Vec<String>,
    /// The folder below which each trial writes what TensorBoard shows: `tensorboard --logdir FOLDER`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensorboard: Option<PathBuf>,
    /// The number of seconds after which the search pauses, to be resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_budget_s: Option<f64>,
    /// The seconds that a trial may take for an iteration, and its process to start; one that takes longer has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report_timeout_s: Option<f64>,
}

impl SearchSpec {
    /// Describes a search of one configuration without parameters, drawn once.
    pub(crate) fn new(name: impl Into<String>, objective: Objective) -> Self {
        Self {
            name: name.into(),
            metric: objective.metric,
            mode: objective.mode,
            space: Space::default(),
            num_samples: 1,
            seed: 0,
            points_to_evaluate: Vec::new(),
            search_alg: SearchAlgorithm::default(),
            scheduler: Scheduler::default(),
            stop: Stop::default(),
            order: SearchOrder::default(),
            max_failures: MaxFailures::default(),
            share_prefixes: false,
            disable_strict_metric_checking: false,
            checkpoints: CheckpointSettings::default(),
            resources_per_trial: Resources::default(),
            reuse_workers: WorkerReuse::default(),
            slots: None,
            program: Vec::new(),
            tensorboard: None,
            time_budget_s: None,
            report_timeout_s: None,
        }
    }

    /// Reads a file, TOML or, where its name ends in `.json`, JSON.
    ///
    /// # Errors
    /// [`Error::is_not_found`] where there is none; [`Error::is_misuse`] with what is wrong in it.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = fs::read_to_string(path).map_err(|error| Error::io("read", path, error))?;
        let is_json = path
            .extension()
            .is_some_and(|extension| extension == "json");
        let wrong = |error: &dyn std::fmt::Display| {
            Error::misuse(format!("the specification {}: {error}", path.display()))
        };
        let value = match is_json {
            true => serde_json::from_str(&text).map_err(|error| wrong(&error))?,
            false => {
                let document = toml::from_str(&text).map_err(|error| wrong(&error))?;
                fields::to_json("", toml::Value::Table(document)).map_err(|error| wrong(&error))?
            }
        };
        fields::parse(value).map_err(|error| wrong(&error))
    }

    /// Returns its objective.
    #[must_use]
    pub fn objective(&self) -> Objective {
        Objective::new(self.metric.clone(), self.mode)
    }

    /// Returns it as the journal's head holds it.
    pub(crate) fn to_json(&self) -> Result<Value> {
        serde_json::to_value(self)
            .map_err(|error| Error::misuse(format!("the search cannot be written: {error}")))
    }

    /// Fails where this is not the search that `before` describes. What only says how it is carried out may differ.
    pub(crate) fn check_same(&self, before: &Value, folder: &Path) -> Result<()> {
        let now = self.to_json()?;
        let (Value::Object(now), Value::Object(before)) = (&now, before) else {
            return Ok(());
        };
        let names = now.keys().chain(before.keys());
        let mut differing: Vec<_> = names
            .filter(|name| !HOW.contains(&name.as_str()) && now.get(*name) != before.get(*name))
            .collect();
        differing.sort_unstable();
        differing.dedup();
        let Some(first) = differing.first() else {
            return Ok(());
        };
        let shown =
            |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), Value::to_string);
        let others = match differing.len() {
            1 => String::new(),
            more => format!(" ({} more differ)", more - 1),
        };
        Err(Error::new(
            Kind::Conflict,
            format!(
                "{} holds another search: its `{first}` is {}, and now {}{others}; choose another folder (`--folder`), or remove that one",
                folder.display(),
                shown(before.get(*first)),
                shown(now.get(*first)),
            ),
        ))
    }
}

/// The algorithm that suggests configurations.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(
    tag = "type",
    rename_all = "snake_case",
    try_from = "Map<String, Value>"
)]
pub enum SearchAlgorithm {
    /// Draws at random, and tries the points of grids.
    #[default]
    Variants,
    /// A sampler of Optuna.
    Optuna(Optuna),
    /// A [`Searcher`](crate::Searcher) of the program that searches, as its [`config`](crate::Searcher::config) has it.
    Custom {
        /// Its kind and settings.
        searcher: Value,
    },
}

/// Serde's own would not say which field is wrong.
impl TryFrom<Map<String, Value>> for SearchAlgorithm {
    type Error = Error;

    fn try_from(table: Map<String, Value>) -> Result<Self> {
        let types = ["variants", "random", "basic_variant", "optuna", "custom"];
        let (name, rest) = fields::of_type(table, &types)?;
        match &*name {
            "optuna" => fields::parse(rest).map(Self::Optuna),
            "custom" => Ok(Self::Custom {
                searcher: rest["searcher"].clone(),
            }),
            "variants" | "random" | "basic_variant" => {
                fields::parse::<NoFields>(rest).map(|_| Self::Variants)
            }
            name => Err(Error::misuse(format!(
                "no search algorithm has the type {name:?}"
            ))),
        }
    }
}

impl From<Optuna> for SearchAlgorithm {
    fn from(optuna: Optuna) -> Self {
        Self::Optuna(optuna)
    }
}

/// The number of times that a failed trial is repeated.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(from = "i64", into = "i64")]
pub enum MaxFailures {
    /// Repeats at most that many times.
    AtMost(u32),
    /// Repeats until it succeeds.
    Unlimited,
}

impl MaxFailures {
    pub(crate) fn most(self) -> Option<u32> {
        match self {
            Self::AtMost(most) => Some(most),
            Self::Unlimited => None,
        }
    }
}

impl Default for MaxFailures {
    fn default() -> Self {
        Self::AtMost(0)
    }
}

impl From<i64> for MaxFailures {
    fn from(most: i64) -> Self {
        match most {
            ..0 => Self::Unlimited,
            most => Self::AtMost(u32::try_from(most).unwrap_or(u32::MAX)),
        }
    }
}

impl From<MaxFailures> for i64 {
    fn from(most: MaxFailures) -> Self {
        match most {
            MaxFailures::AtMost(most) => most.into(),
            MaxFailures::Unlimited => -1,
        }
    }
}

/// The fields that say how a search is carried out, and not which it is.
const HOW: [&str; 7] = [
    "disable_strict_metric_checking",
    "report_timeout_s",
    "resources_per_trial",
    "reuse_workers",
    "slots",
    "tensorboard",
    "time_budget_s",
];

fn one() -> u32 {
    1
}

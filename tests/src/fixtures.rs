//! The tables and trajectories produced by Accelerate and PyTorch.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Returns the folder of the fixtures: `ACCEL_FIXTURES`, relative to the workspace's root, or else the one beside the
/// sources of this crate.
pub fn folder() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    std::env::var_os("ACCEL_FIXTURES").map_or_else(
        || here.join("fixtures"),
        |folder| here.join("..").join(folder),
    )
}

/// `sharding.json`.
#[derive(Debug, Deserialize)]
pub struct Sharding {
    pub cases: Vec<ShardingCase>,
}

/// A table of Accelerate's sharding classes.
#[derive(Clone, Debug, Deserialize)]
pub struct ShardingCase {
    pub samples: i64,
    pub batch_size: usize,
    pub world_size: usize,
    pub drop_last: bool,
    pub split_batches: bool,
    /// For data sets read by index; `None` for iterable ones.
    pub even_batches: Option<bool>,
    pub ranks: Table,
}

impl ShardingCase {
    /// Returns true if no rank gets a batch.
    pub fn is_empty(&self) -> bool {
        match &self.ranks {
            Table::Batches(ranks) => ranks.iter().all(Vec::is_empty),
            Table::Samples(ranks) => ranks.iter().all(Vec::is_empty),
        }
    }
}

/// The batches or samples of each rank.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Table {
    Batches(Vec<Vec<Vec<i64>>>),
    Samples(Vec<Vec<i64>>),
}

/// `training.json`.
#[derive(Debug, Deserialize)]
pub struct Training {
    pub problems: BTreeMap<String, Problem>,
    pub cases: Vec<Case>,
}

/// Samples and initial weights, `[out, in]` as in PyTorch.
#[derive(Clone, Debug, Deserialize)]
pub struct Problem {
    pub x: Vec<f32>,
    pub y: Vec<i64>,
    pub initial: Weights,
}

/// The parameters of `Linear(4, 16) → tanh → Linear(16, 3)`, row-major.
#[derive(Clone, Debug, Deserialize, serde::Serialize)]
pub struct Weights {
    #[serde(rename = "hidden.weight")]
    pub hidden_weight: Vec<f32>,
    #[serde(rename = "hidden.bias")]
    pub hidden_bias: Vec<f32>,
    #[serde(rename = "output.weight")]
    pub output_weight: Vec<f32>,
    #[serde(rename = "output.bias")]
    pub output_bias: Vec<f32>,
}

/// A run of PyTorch DDP under Accelerate.
#[derive(Clone, Debug, Deserialize)]
pub struct Case {
    pub world_size: usize,
    pub batch_size: usize,
    pub samples: usize,
    pub accumulate: usize,
    pub optimizer: Optimizer,
    pub lr: f64,
    pub momentum: Option<f64>,
    pub clip: Option<f64>,
    pub epochs: u64,
    pub even_batches: bool,
    pub losses: Vec<f64>,
    pub grad_norms: Vec<f64>,
    #[serde(rename = "final")]
    pub last: Weights,
}

/// The optimizers of the trajectories.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    Adamw,
    Sgd,
}

impl Sharding {
    /// Reads the file.
    ///
    /// # Panics
    ///
    /// If it is missing or invalid, or holds no case.
    pub fn load() -> Self {
        let sharding: Self = load("sharding.json");
        assert!(!sharding.cases.is_empty(), "sharding.json holds no case");
        sharding
    }
}

impl Training {
    /// Reads the file.
    ///
    /// # Panics
    ///
    /// If it is missing or invalid, or holds no case.
    pub fn load() -> Self {
        let training: Self = load("training.json");
        assert!(!training.cases.is_empty(), "training.json holds no case");
        training
    }

    /// Returns the samples of a case.
    pub fn problem(&self, case: &Case) -> &Problem {
        &self.problems[&case.samples.to_string()]
    }
}

impl Weights {
    /// Returns all parameters, one after the other.
    pub fn flat(&self) -> Vec<f32> {
        [
            &self.hidden_weight[..],
            &self.hidden_bias,
            &self.output_weight,
            &self.output_bias,
        ]
        .concat()
    }
}

fn load<T: DeserializeOwned>(name: &str) -> T {
    let path = folder().join(name);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

//! Loads the fixtures.

use std::collections::BTreeMap;
use std::path::Path;

use accelerator::train::TrainingArguments;
use burn::tensor::FloatDType;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::models::{Sample, Weights};

#[derive(Debug, Deserialize)]
pub struct Fixture {
    parameters: BTreeMap<String, Parameter>,
    #[serde(default)]
    train: Vec<Row>,
    #[serde(default)]
    eval: Vec<Row>,
    cases: Vec<Case>,
    #[serde(default)]
    tokens: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Parameter {
    values: Vec<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Row {
    Tokens { tokens: Vec<u8>, label: u8 },
    Pixels { pixels: String, label: u8 },
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    pub name: String,
    arguments: Map<String, Value>,
    pub train: usize,
    pub eval: usize,
    precision: String,
    pub world_size: usize,
    pub metric: Option<String>,
    #[serde(default)]
    pub metric_values: Vec<f64>,
    early_stopping: Option<Map<String, Value>>,
    pub resume: Option<Resume>,
    pub huggingface: Given,
    exact: Option<Exact>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    pub from: u64,
    pub arguments: Map<String, Value>,
}

/// The results of Hugging Face's Trainer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Given {
    pub steps: u64,
    pub epochs: u64,
    pub learning_rates: Vec<f64>,
    pub losses: Vec<f64>,
    pub grad_norms: Vec<f64>,
    pub log: Vec<Entry>,
    pub saved: Vec<u64>,
    pub checkpoints: Vec<u64>,
    pub best: Option<Best>,
    pub banner: Vec<String>,
    pub printed: Vec<String>,
    pub r#final: Weights,
}

pub type Entry = BTreeMap<String, f64>;

#[derive(Clone, Debug, Deserialize)]
pub struct Best {
    pub step: Option<u64>,
    pub metric: f64,
}

/// The exact values where the numbers of Hugging Face are biased.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exact {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    log: Vec<Entry>,
    r#final: Weights,
}

impl Fixture {
    pub fn load(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/trainer");
        let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
        let mut fixture: Self = serde_json::from_str(&text).unwrap();
        for case in fixture.cases.iter_mut().chain(&mut fixture.tokens) {
            if let Some(exact) = &case.exact {
                let given = &mut case.huggingface;
                given.losses.clone_from(&exact.losses);
                given.grad_norms.clone_from(&exact.grad_norms);
                given.log.clone_from(&exact.log);
                given.r#final.clone_from(&exact.r#final);
            }
        }
        fixture
    }

    pub fn cases_in(&self, dtype: FloatDType) -> impl Iterator<Item = &Case> {
        let all = self.cases.iter().chain(&self.tokens);
        all.filter(move |case| case.dtype() == dtype)
    }

    pub fn is_of_tokens(&self, case: &Case) -> bool {
        self.tokens.iter().any(|other| other.name == case.name)
    }

    /// Returns the initial weights.
    pub fn weights(&self, case: &Case) -> Weights {
        if self.is_of_tokens(case) {
            return Weights::from([("weight".to_owned(), vec![0.0])]);
        }
        let values = |parameter: &Parameter| parameter.values.clone();
        let parameters = self.parameters.iter();
        parameters
            .map(|(path, of)| (path.clone(), values(of)))
            .collect()
    }

    pub fn train(&self, case: &Case) -> Vec<Sample> {
        if self.is_of_tokens(case) {
            return vec![(vec![1.0, 1.0, 2.0], 0.0), (vec![4.0], 0.0)];
        }
        samples(&self.train, case.train)
    }

    pub fn eval(&self, case: &Case) -> Vec<Sample> {
        samples(&self.eval, case.eval)
    }
}

/// Returns the first `count` rows, or as many points of the line.
fn samples(rows: &[Row], count: usize) -> Vec<Sample> {
    let point = |at: usize| {
        let x = at as f64 / count as f64;
        (vec![x], 2.0 * x + 3.0)
    };
    match rows {
        [] => (0..count).map(point).collect(),
        rows => rows[..count].iter().map(Row::sample).collect(),
    }
}

impl Row {
    fn sample(&self) -> Sample {
        match self {
            Self::Tokens { tokens, label } => {
                let padded = tokens.iter().chain(&[0; 12]).take(12);
                (padded.copied().map(f64::from).collect(), f64::from(*label))
            }
            Self::Pixels { pixels, label } => {
                let byte = |at| u8::from_str_radix(&pixels[at..at + 2], 16).unwrap();
                let starts = (0..pixels.len()).step_by(2);
                let values = starts.map(|at| f64::from(byte(at)) / 256.0);
                (values.collect(), f64::from(*label))
            }
        }
    }
}

/// An argument of Hugging Face's that ours leaves to the program, which brings its own loss function.
const LABEL_SMOOTHING: &str = "label_smoothing_factor";

impl Case {
    pub fn dtype(&self) -> FloatDType {
        match &*self.precision {
            "f32" => FloatDType::F32,
            "f64" => FloatDType::F64,
            other => panic!("{}: expected f32 or f64, found {other}", self.name),
        }
    }

    /// Returns the arguments. One that ours does not know is an error.
    pub fn arguments(&self, folder: &Path, more: &[&Map<String, Value>]) -> TrainingArguments {
        let mut all = self.arguments.clone();
        all.remove(LABEL_SMOOTHING);
        for more in self.early_stopping.iter().chain(more.iter().copied()) {
            all.extend(more.clone());
        }
        all.insert("output_dir".to_owned(), folder.to_str().into());
        all.insert("train_sampling_strategy".to_owned(), "sequential".into());
        all.insert("disable_tqdm".to_owned(), true.into());
        serde_json::from_value(Value::Object(all)).unwrap()
    }

    pub fn label_smoothing(&self) -> f64 {
        self.number(LABEL_SMOOTHING).unwrap_or(0.0)
    }

    pub fn number(&self, argument: &str) -> Option<f64> {
        self.arguments.get(argument)?.as_f64()
    }

    pub fn is_exact(&self) -> bool {
        self.exact.is_none()
    }

    /// Returns the threshold of early stopping.
    pub fn threshold(&self) -> f64 {
        let arguments = self.early_stopping.as_ref();
        let threshold = arguments.and_then(|of| of.get("early_stopping_threshold"));
        threshold.and_then(Value::as_f64).unwrap_or(0.0)
    }
}

//! How far a run is, from the entries of its journal.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::record::{EndStatus, Entry, Record};

/// What is known of a run so far.
#[derive(Debug, Default)]
pub(super) struct Progress {
    keys: HashMap<u32, String>,
    /// The last value of each series.
    values: BTreeMap<String, f64>,
    step: Option<u64>,
    epoch: Option<f64>,
    max_steps: Option<f64>,
    epochs: Option<f64>,
    /// The first metrics of this attempt: when, and how much was done.
    first: Option<(u64, f64)>,
    last_ms: u64,
    has_finished: bool,
}

impl Progress {
    /// Takes an entry, and says whether it changes what is told.
    pub(super) fn take(&mut self, entry: &Entry) -> Changed {
        match &entry.record {
            Record::Series { i, key } => {
                self.keys.insert(*i, key.clone());
                return Changed::No;
            }
            Record::Attempt { .. } => {
                self.first = None;
                self.has_finished = false;
            }
            Record::Param { set } => self.read_length(set),
            Record::Metrics(metrics) => {
                // What is logged for an earlier step, such as a test's mean at step 1, does not take it back.
                self.step = self.step.max(Some(metrics.step));
                self.epoch = match (self.epoch, metrics.epoch) {
                    (Some(known), Some(epoch)) => Some(known.max(epoch)),
                    (known, epoch) => epoch.or(known),
                };
                for point in &metrics.points {
                    if let Some(key) = self.keys.get(&point.series) {
                        self.values.insert(key.clone(), point.value.0);
                    }
                }
                if let (None, Some(done)) = (self.first, self.done()) {
                    self.first = Some((entry.ms, done));
                }
            }
            Record::End { status, .. } => {
                self.has_finished = *status == EndStatus::Finished;
                self.last_ms = entry.ms;
                return Changed::Ended;
            }
            _ => return Changed::No,
        }
        self.last_ms = entry.ms;
        Changed::Yes
    }

    /// What Kubeflow Trainer takes. A run that has not finished is at most 99 percent done.
    pub(super) fn status(&self) -> Value {
        let mut status = json!({});
        let done = self.done().map(|done| (done * 100.0) as u64);
        let percent = match (self.has_finished, done) {
            (true, _) => Some(100),
            (false, done) => done.map(|percent| percent.min(99)),
        };
        if let Some(percent) = percent {
            status["progressPercentage"] = json!(percent);
        }
        if let Some(seconds) = self.remaining_seconds() {
            status["estimatedRemainingSeconds"] = json!(seconds);
        }
        let metric = |name: &str, value: String| json!({"name": name, "value": value});
        let step = self.step.map(|step| metric("step", step.to_string()));
        let epoch = self.epoch.map(|epoch| metric("epoch", epoch.to_string()));
        // With an exponent, every number is short enough.
        let values = self
            .values
            .iter()
            .filter(|(name, _)| name.chars().count() <= LONGEST_NAME);
        let values = values.map(|(name, value)| metric(name, format!("{value:?}")));
        let metrics: Vec<_> = step
            .into_iter()
            .chain(epoch)
            .chain(values)
            .take(MOST_METRICS)
            .collect();
        status["metrics"] = json!(metrics);
        let time = UNIX_EPOCH + Duration::from_millis(self.last_ms);
        status["lastUpdatedTime"] = json!(humantime::format_rfc3339_seconds(time).to_string());
        json!({ "trainerStatus": status })
    }

    /// The share that is done, from 0 to 1: of `max_steps`, else of the epochs, where hyperparameters name either.
    fn done(&self) -> Option<f64> {
        let step = self.step.map(|step| step as f64);
        let of_steps = step.zip(self.max_steps);
        let (at, whole) = of_steps.or(self.epoch.zip(self.epochs))?;
        Some((at / whole).clamp(0.0, 1.0))
    }

    fn remaining_seconds(&self) -> Option<u64> {
        if self.has_finished {
            return Some(0);
        }
        let (begun, before) = self.first?;
        let done = self.done().filter(|&done| done > before)?;
        let seconds = self.last_ms.saturating_sub(begun) as f64 / 1e3;
        // The field has 32 bits.
        let left = seconds * (1.0 - done) / (done - before);
        Some((left as u64).min(i32::MAX as u64))
    }

    fn read_length(&mut self, set: &BTreeMap<String, Value>) {
        let positive = |name: &str| {
            let value = set.get(name).and_then(Value::as_f64);
            value.filter(|value| *value > 0.0 && value.is_finite())
        };
        self.max_steps = positive("max_steps").or(self.max_steps);
        let epochs = positive("num_train_epochs").or_else(|| positive("epochs"));
        self.epochs = epochs.or(self.epochs);
    }
}

/// What the TrainJob's resource takes; it refuses the whole of a status that has more.
const MOST_METRICS: usize = 256;
const LONGEST_NAME: usize = 64;

/// What an entry changes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Changed {
    No,
    Yes,
    /// And the attempt has ended.
    Ended,
}

//! The metrics that trials report.

use std::collections::BTreeMap;
use std::collections::btree_map;

use serde::{Deserialize, Serialize};

use crate::value::Number;

/// Named numbers that a trial reports after an iteration.
///
/// In JSON, each is a [`Number`](crate::Number).
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Metrics(BTreeMap<String, Number>);

impl Metrics {
    /// The value of a metric.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<f64> {
        self.0.get(name).map(|number| number.0)
    }

    /// Sets a metric.
    pub fn insert(&mut self, name: impl Into<String>, value: f64) {
        self.0.insert(name.into(), Number(value));
    }

    /// All metrics, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0
            .iter()
            .map(|(name, number)| (name.as_str(), number.0))
    }
}

impl<K: Into<String>, const N: usize> From<[(K, f64); N]> for Metrics {
    fn from(metrics: [(K, f64); N]) -> Self {
        metrics.into_iter().collect()
    }
}

impl<K: Into<String>> FromIterator<(K, f64)> for Metrics {
    fn from_iter<I: IntoIterator<Item = (K, f64)>>(metrics: I) -> Self {
        let metrics = metrics.into_iter();
        Self(
            metrics
                .map(|(name, value)| (name.into(), Number(value)))
                .collect(),
        )
    }
}

impl IntoIterator for Metrics {
    type Item = (String, f64);
    type IntoIter =
        std::iter::Map<btree_map::IntoIter<String, Number>, fn((String, Number)) -> (String, f64)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter().map(|(name, number)| (name, number.0))
    }
}

//! What a trial measured.

use std::collections::BTreeMap;
use std::collections::btree_map;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// Named numbers that a trial reports after an iteration.
///
/// In JSON, NaN and the infinities are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.
///
/// ```
/// use accelerator_tune::Metrics;
///
/// let metrics = Metrics::from([("mean_accuracy", 0.97), ("loss", 0.1)]);
/// assert_eq!(metrics.value("loss"), Some(0.1));
/// ```
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

/// A number in JSON: a word where JSON has none.
pub(crate) fn json_number(value: f64) -> Value {
    match value.is_finite() {
        true => value.into(),
        false if value.is_nan() => "NaN".into(),
        false if value > 0.0 => "Infinity".into(),
        false => "-Infinity".into(),
    }
}

/// A number that JSON can hold, whatever it is.
#[derive(Clone, Copy, Debug)]
pub struct Number(f64);

impl PartialEq for Number {
    /// NaN equals itself: two reports of the same bits are the same.
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        json_number(self.0).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(f64),
            Word(String),
        }
        Ok(Self(match Written::deserialize(deserializer)? {
            Written::Number(value) => value,
            Written::Word(word) => match &*word {
                "NaN" => f64::NAN,
                "Infinity" => f64::INFINITY,
                "-Infinity" => f64::NEG_INFINITY,
                _ => return Err(D::Error::custom(format!("`{word}` is no number"))),
            },
        }))
    }
}

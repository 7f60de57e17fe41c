//! Values of configurations, and floats that JSON does not have.
//!
//! This crate writes NaN and the infinities as the words `"NaN"`, `"Infinity"` and `"-Infinity"` in all JSON, and reads
//! these words as numbers wherever it expects a number.

use std::collections::BTreeMap;

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Error as _, IntoDeserializer, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, forward_to_deserialize_any};
use serde_json::{Error, Map, Value};

/// A float in JSON: NaN and the infinities are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.
#[derive(Clone, Copy, Debug)]
pub struct Number(
    /// The float itself.
    pub f64,
);

/// A value of a [`Parameter`](crate::Parameter) or a [`Config`](crate::Config): any value that JSON has, and floats
/// that it does not have, which become the words of a [`Number`].
pub trait IntoValue {
    /// Converts the value to JSON.
    fn into_value(self) -> Value;
}

/// Converts a number to JSON; NaN and infinities become words.
pub(crate) fn json_number(value: f64) -> Value {
    match value.is_finite() {
        true => value.into(),
        false if value.is_nan() => "NaN".into(),
        false if value > 0.0 => "Infinity".into(),
        false => "-Infinity".into(),
    }
}

/// Parses a value. If the type has a float, a word is a number there.
pub(crate) fn parse<T: DeserializeOwned>(value: &Value) -> Result<T, Error> {
    match has_word(value) {
        true => T::deserialize(WithWords(value)),
        false => T::deserialize(value),
    }
}

/// Returns the float that a word means.
fn of_word(word: &str) -> Option<f64> {
    match word {
        "NaN" => Some(f64::NAN),
        "Infinity" => Some(f64::INFINITY),
        "-Infinity" => Some(f64::NEG_INFINITY),
        _ => None,
    }
}

fn has_word(value: &Value) -> bool {
    match value {
        Value::String(text) => of_word(text).is_some(),
        Value::Array(values) => values.iter().any(has_word),
        Value::Object(map) => map.values().any(has_word),
        _ => false,
    }
}

impl PartialEq for Number {
    /// NaN equals itself: two reports with the same bits are equal.
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
        let value = Value::deserialize(deserializer)?;
        parse(&value).map(Self).map_err(D::Error::custom)
    }
}

/// A value in which words are numbers if a float is expected.
struct WithWords<'a>(&'a Value);

impl WithWords<'_> {
    fn word(&self) -> Option<f64> {
        self.0.as_str().and_then(of_word)
    }
}

impl<'de> Deserializer<'de> for WithWords<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(values) => {
                let mut values = SeqDeserializer::new(values.iter().map(WithWords));
                let read = visitor.visit_seq(&mut values)?;
                values.end()?;
                Ok(read)
            }
            Value::Object(map) => {
                let entries = map.iter();
                let entries = entries.map(|(name, value)| (name.as_str(), WithWords(value)));
                let mut entries = MapDeserializer::new(entries);
                let read = visitor.visit_map(&mut entries)?;
                entries.end()?;
                Ok(read)
            }
            value => value.deserialize_any(visitor),
        }
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.word() {
            Some(float) => visitor.visit_f64(float),
            None => self.0.deserialize_f64(visitor),
        }
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, Error> for WithWords<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl IntoValue for f64 {
    fn into_value(self) -> Value {
        json_number(self)
    }
}

impl IntoValue for f32 {
    fn into_value(self) -> Value {
        f64::from(self).into_value()
    }
}

impl<T: IntoValue> IntoValue for Option<T> {
    fn into_value(self) -> Value {
        self.map_or(Value::Null, IntoValue::into_value)
    }
}

impl<T: IntoValue> IntoValue for Vec<T> {
    fn into_value(self) -> Value {
        self.into_iter().map(IntoValue::into_value).collect()
    }
}

impl<T: IntoValue, const N: usize> IntoValue for [T; N] {
    fn into_value(self) -> Value {
        self.into_iter().map(IntoValue::into_value).collect()
    }
}

impl<T: IntoValue + Clone> IntoValue for &[T] {
    fn into_value(self) -> Value {
        self.to_vec().into_value()
    }
}

/// Implements the trait for types all values of which JSON has.
macro_rules! into_value {
    ($($type:ty)*) => {$(
        impl IntoValue for $type {
            fn into_value(self) -> Value {
                self.into()
            }
        }
    )*};
}

into_value! {
    () bool i8 i16 i32 i64 isize u8 u16 u32 u64 usize &str String std::borrow::Cow<'_, str> serde_json::Number
    Map<String, Value> Value
}

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
        let named = metrics.map(|(name, value)| (name.into(), Number(value)));
        Self(named.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Settings {
        clip: f64,
        low: Option<f32>,
        bounds: (f64, f64),
        by_name: BTreeMap<String, Vec<f64>>,
        name: String,
        layers: u8,
    }

    #[test]
    fn words_are_numbers_where_a_type_has_a_float() {
        let value = json!({
            "clip": "Infinity", "low": "-Infinity", "bounds": ["-Infinity", 1], "by_name": {"a": [0.5, "Infinity"]},
            "name": "Infinity", "layers": 3,
        });
        let expected = Settings {
            clip: f64::INFINITY,
            low: Some(f32::NEG_INFINITY),
            bounds: (f64::NEG_INFINITY, 1.0),
            by_name: BTreeMap::from([("a".to_owned(), vec![0.5, f64::INFINITY])]),
            name: "Infinity".to_owned(),
            layers: 3,
        };
        assert_eq!(parse::<Settings>(&value).unwrap(), expected);
        assert!(parse::<f64>(&json!("NaN")).unwrap().is_nan());
        assert!(parse::<f64>(&json!("inf")).is_err());
        assert!(parse::<u8>(&json!("NaN")).is_err());
        assert!(parse::<[f64; 1]>(&json!(["NaN", 1])).is_err());
        assert_eq!(parse::<Value>(&value).unwrap(), value);
    }

    #[test]
    fn floats_that_json_has_not_are_words_within_lists_too() {
        let value = vec![Some(f64::NAN), None, Some(0.5)].into_value();
        assert_eq!(value, json!(["NaN", null, 0.5]));
        assert_eq!([f32::NEG_INFINITY].into_value(), json!(["-Infinity"]));
    }
}

//! Hyperparameters as a flat map.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::error::{Error, Kind, Result};

/// The values of a map, those of maps within it with keys that are joined with dots. Lists stay as they are.
pub(crate) fn flatten(hyperparameters: &impl Serialize) -> Result<BTreeMap<String, Value>> {
    let value = serde_json::to_value(hyperparameters).map_err(|error| {
        Error::new(
            Kind::Misuse,
            format!("hyperparameters cannot be written as JSON: {error}"),
        )
        .with_source(error)
    })?;
    let mut flat = BTreeMap::new();
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                insert(&mut flat, key, value);
            }
        }
        Value::Null => {}
        other => {
            return Err(Error::new(
                Kind::Misuse,
                format!("hyperparameters must be a struct or a map, found {other}"),
            ));
        }
    }
    Ok(flat)
}

fn insert(flat: &mut BTreeMap<String, Value>, key: String, value: Value) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (inner, value) in map {
                insert(flat, format!("{key}.{inner}"), value);
            }
        }
        value => {
            flat.insert(key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_keys_are_joined_with_dots() {
        let flat = flatten(&serde_json::json!({
            "lr": 0.1, "model": { "layers": [1, 2], "conv": { "kernel": 3 }, "extra": {} }
        }));
        let expected = [
            ("lr", serde_json::json!(0.1)),
            ("model.conv.kernel", serde_json::json!(3)),
            ("model.extra", serde_json::json!({})),
            ("model.layers", serde_json::json!([1, 2])),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value));
        assert_eq!(flat.unwrap(), BTreeMap::from(expected));
        assert!(flatten(&3).unwrap_err().is_misuse());
        assert!(flatten(&()).unwrap().is_empty());
    }
}

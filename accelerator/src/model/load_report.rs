use core::fmt;

use serde::{Deserialize, Serialize};

/// The largest number of names of a kind that are shown.
const SHOWN: usize = 10;

/// The parts of a model that were in a file, and those that were not. Its `Display` form lists the first ten of
/// each kind.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// The parameters and buffers that have the file's values, by their names in the model.
    pub loaded: Vec<String>,
    /// The parameters that the file does not have; they keep their values.
    pub missing: Vec<String>,
    /// The names in the file that the model does not have.
    pub unexpected: Vec<String>,
    /// The parameters that the file has in another shape; they keep their values.
    pub misshapen: Vec<Misshapen>,
    /// The parameters that the file has in another element type; they keep their values.
    pub mistyped: Vec<Mistyped>,
}

/// A tensor that a file has in another shape than the model.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Misshapen {
    /// Its name in the model.
    pub name: String,
    /// The shape that the model needs, in the file's layout.
    pub expected: Vec<usize>,
    /// The shape in the file.
    pub found: Vec<usize>,
}

/// A tensor that a file has in another element type than the model.
///
/// ```
/// use accelerator::model::LoadOptions;
/// use accelerator::prelude::*;
/// use burn::nn::{Linear, LinearConfig};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("model.safetensors");
/// # let header = br#"{"bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"weight":{"dtype":"BF16","shape":[2,1],"data_offsets":[4,8]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat())?;
///
/// let accelerator = Accelerator::new()?;
/// let model: Linear = LinearConfig::new(2, 1).init(&accelerator.device());
/// // A file whose weight is in bf16.
/// let (model, report) = accelerator.load_model_with(model, &path, &LoadOptions::new().allow_partial())?;
/// let [weight] = &report.mistyped[..] else { panic!("the bias has its type") };
/// assert_eq!((&*weight.name, &*weight.expected, &*weight.found), ("weight", "f32", "bf16"));
/// # let _: Linear = model;
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Mistyped {
    /// Its name in the model.
    pub name: String,
    /// The type in the model.
    pub expected: String,
    /// The type in the file.
    pub found: String,
}

impl LoadReport {
    /// Returns `true` if the file had every parameter as the model needs it, and nothing else.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.misshapen.is_empty()
            && self.mistyped.is_empty()
    }

    /// Returns the number of parameters and buffers of the model.
    fn parameters(&self) -> usize {
        self.loaded.len() + self.missing.len() + self.misshapen.len() + self.mistyped.len()
    }

    /// Returns a hint at wrong options, if the names give one.
    pub(super) fn hint(&self) -> Option<String> {
        self.prefix_hint().or_else(|| self.layout_hint())
    }

    fn prefix_hint(&self) -> Option<String> {
        let first = self.missing.first()?;
        let prefix = self.unexpected.iter().find_map(|name| {
            let prefix = name.strip_suffix(first.as_str())?;
            prefix.ends_with('.').then_some(prefix)
        })?;
        let found = self
            .missing
            .iter()
            .filter(|name| self.unexpected.contains(&format!("{prefix}{name}")))
            .count();
        Some(format!(
            "`LoadOptions::strip_prefix({prefix:?})` would find {found} of the missing"
        ))
    }

    fn layout_hint(&self) -> Option<String> {
        let turned = self
            .misshapen
            .iter()
            .any(|tensor| tensor.expected.iter().rev().eq(&tensor.found));
        let renamed = self.missing.iter().any(|name| {
            name.strip_suffix("gamma")
                .is_some_and(|owner| self.unexpected.contains(&format!("{owner}weight")))
        });
        (turned || renamed).then(|| {
            "it looks like PyTorch's layout: try `LoadOptions::with_layout(FileLayout::PyTorch)`"
                .to_owned()
        })
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} parameters and buffers loaded",
            self.loaded.len(),
            self.parameters()
        )?;
        let quoted = |name: &String| format!("`{name}`");
        list(f, "missing from the file", &self.missing, quoted)?;
        list(f, "unexpected in the file", &self.unexpected, quoted)?;
        list(f, "misshapen", &self.misshapen, |tensor| {
            format!(
                "`{}` (expected {:?}, found {:?})",
                tensor.name, tensor.expected, tensor.found
            )
        })?;
        list(f, "of another type", &self.mistyped, |tensor| {
            format!(
                "`{}` (expected {}, found {})",
                tensor.name, tensor.expected, tensor.found
            )
        })
    }
}

fn list<T>(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    items: &[T],
    shown: impl Fn(&T) -> String,
) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = items.iter().take(SHOWN).map(shown).collect();
    write!(f, "; {} {what}: {}", items.len(), names.join(", "))?;
    match items.len().checked_sub(SHOWN) {
        None | Some(0) => Ok(()),
        Some(more) => write!(f, " and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn ten_of_each_kind_are_shown_with_the_count() {
        let report = LoadReport {
            loaded: names(&["a"]),
            missing: (0..12).map(|i| format!("m{i}")).collect(),
            misshapen: vec![Misshapen {
                name: "w".to_owned(),
                expected: vec![2, 3],
                found: vec![4],
            }],
            ..LoadReport::default()
        };
        let text = report.to_string();
        assert!(text.starts_with("1 of 14 parameters"), "{text}");
        assert!(text.contains("12 missing from the file: `m0`"), "{text}");
        assert!(text.contains("`m9` and 2 more"), "{text}");
        assert!(!text.contains("`m10`"), "{text}");
        assert!(text.contains("`w` (expected [2, 3], found [4])"), "{text}");
        assert!(!report.is_complete());
    }

    #[test]
    fn a_prefix_is_guessed_from_the_names() {
        let report = LoadReport {
            missing: names(&["a.weight", "b.weight", "c"]),
            unexpected: names(&["net.b.weight", "net.a.weight"]),
            ..LoadReport::default()
        };
        let hint = report.hint().unwrap();
        assert!(hint.contains("\"net.\"") && hint.contains("2 of"), "{hint}");
    }

    #[test]
    fn pytorchs_layout_is_guessed_from_norms() {
        let report = LoadReport {
            missing: names(&["norm.gamma"]),
            unexpected: names(&["norm.weight"]),
            ..LoadReport::default()
        };
        assert!(report.hint().unwrap().contains("PyTorch"));
    }
}

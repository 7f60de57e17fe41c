use core::num::NonZeroU64;

use regex::Regex;

use super::format::FileLayout;
use crate::core::error::{Error, Result};

/// Options of [`Accelerator::save_model_with`](crate::Accelerator::save_model_with).
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct SaveOptions {
    pub(super) layout: FileLayout,
    pub(super) max_shard_size: Option<NonZeroU64>,
}

impl SaveOptions {
    /// Saves into one file, in Burn's layout.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how parameters are named and shaped. Default: [`FileLayout::Burn`].
    pub fn with_layout(mut self, layout: FileLayout) -> Self {
        self.layout = layout;
        self
    }

    /// Writes several files and an index where the tensors come to more than `bytes`, in the form
    /// that Hugging Face's tools read: `model-00001-of-00003.safetensors`, …, and
    /// `model.safetensors.index.json`. A tensor is never split: one that is larger has a file of
    /// its own. Default, and 0: one file, whatever its size.
    pub fn with_max_shard_size(mut self, bytes: u64) -> Self {
        self.max_shard_size = NonZeroU64::new(bytes);
        self
    }
}

/// Settings of [`Accelerator::load_model_with`](crate::Accelerator::load_model_with): how to read a model, and
/// which differences to accept.
///
/// Names of the file are changed first, in the order in which the changes were asked for, and
/// then looked for in the model.
///
/// ```
/// use accelerator::model::{FileLayout, LoadOptions};
///
/// let options = LoadOptions::new()
///     .with_layout(FileLayout::PyTorch)
///     .strip_prefix("module.")
///     .rename("classifier.weight", "head.weight")
///     .rename_pattern(r"^encoder\.layer\.(\d+)\.", "blocks.$1.")?
///     .allow_partial();
/// # let _ = options;
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct LoadOptions {
    pub(super) layout: Option<FileLayout>,
    pub(super) mode: MismatchMode,
    pub(super) casts: Casts,
    renames: Vec<Rename>,
}

/// The treatment of a file that does not fit the model.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum MismatchMode {
    #[default]
    Strict,
    Partial,
}

/// The treatment of values in another float type than the model's.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Casts {
    #[default]
    Refused,
    Floats,
}

#[derive(Clone, Debug)]
enum Rename {
    Exact(String, String),
    Pattern(Regex, String),
    Prefix(String),
}

impl LoadOptions {
    /// The file must fit the model: every parameter by its own path, shape and type, and nothing
    /// else.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how the file names and shapes parameters. Default: the layout that the file names, else
    /// [`FileLayout::Burn`]. One that contradicts the file is an error.
    ///
    /// With [`FileLayout::PyTorch`], `num_batches_tracked` of batch norms, which Burn does not have, is
    /// left out without a word.
    pub fn with_layout(mut self, layout: FileLayout) -> Self {
        self.layout = Some(layout);
        self
    }

    /// Takes `prefix` off the names that begin with it.
    pub fn strip_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.renames.push(Rename::Prefix(prefix.into()));
        self
    }

    /// Calls the file's tensor `from` by the name `to`.
    pub fn rename(mut self, from: impl Into<String>, to: impl Into<String>) -> Self {
        self.renames.push(Rename::Exact(from.into(), to.into()));
        self
    }

    /// Replaces every match of the regular expression `pattern` in a name; `$1` in `replacement`
    /// is its first group, `${name}` one with a name.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] for a pattern that is not a regular expression.
    pub fn rename_pattern(mut self, pattern: &str, replacement: impl Into<String>) -> Result<Self> {
        let pattern = Regex::new(pattern).map_err(|error| {
            Error::config(format!("rename_pattern: not a regular expression: {error}"))
        })?;
        self.renames
            .push(Rename::Pattern(pattern, replacement.into()));
        Ok(self)
    }

    /// Loads what fits; the rest of the model stays as it is, and the
    /// [`LoadReport`](super::LoadReport) says what that was. A file of which nothing fits is an
    /// error all the same.
    pub fn allow_partial(mut self) -> Self {
        self.mode = MismatchMode::Partial;
        self
    }

    /// Casts values in another float type (f64, f32, f16, bf16) to the model's. Default: that is
    /// an error, since it changes the values.
    pub fn cast_floats(mut self) -> Self {
        self.casts = Casts::Floats;
        self
    }

    /// Returns the name in the model of `name` in the file.
    pub(super) fn renamed(&self, name: &str) -> String {
        let mut name = name.to_owned();
        for rename in &self.renames {
            match rename {
                Rename::Exact(from, to) if name == *from => name.clone_from(to),
                Rename::Exact(..) => {}
                Rename::Pattern(pattern, to) => {
                    name = pattern.replace_all(&name, to.as_str()).into_owned();
                }
                Rename::Prefix(prefix) => {
                    if let Some(rest) = name.strip_prefix(prefix.as_str()) {
                        name = rest.to_owned();
                    }
                }
            }
        }
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_change_in_the_order_asked_for() {
        let options = LoadOptions::new()
            .strip_prefix("module.")
            .rename_pattern(r"^layer\.(\d+)\.", "blocks.$1.")
            .unwrap()
            .rename("blocks.0.w", "first.weight");
        assert_eq!(options.renamed("module.layer.0.w"), "first.weight");
        assert_eq!(options.renamed("layer.12.w"), "blocks.12.w");
        assert_eq!(options.renamed("other"), "other");
    }

    #[test]
    fn a_pattern_that_is_none_is_refused() {
        assert!(
            LoadOptions::new()
                .rename_pattern("(", "")
                .unwrap_err()
                .is_config()
        );
    }
}

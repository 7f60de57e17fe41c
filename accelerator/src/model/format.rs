//! The format of model files, and the options of saving and loading. The format fixes the names of files, and the
//! names, shapes and element types in them.

use core::num::NonZeroU64;

use burn::tensor::{BoolStore, DType};
use regex::Regex;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use crate::core::error::{Error, Result};

/// The names and shapes of parameters in a model file.
///
/// | | [`Burn`](Self::Burn) | [`PyTorch`](Self::PyTorch) |
/// |---|---|---|
/// | weight of a `Linear` | `[in, out]` | `[out, in]` |
/// | scale and shift of a norm | `gamma`, `beta` | `weight`, `bias` |
/// | variant of an enum | a part of the path | left out |
///
/// [`Peft`](Self::Peft) is for adapters. The files say which layout they have, so that loading finds out by itself; files
/// of other programs do not, and count as [`Burn`](Self::Burn) unless
/// [`LoadOptions::with_layout`](super::LoadOptions::with_layout) says otherwise or their names are those of PEFT.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub enum FileLayout {
    /// The layout of the module, for Burn programs.
    #[default]
    Burn,
    /// The layout of `torch.nn`, for Python programs: `load_state_dict` takes it.
    PyTorch,
    /// The adapters of a model alone, as `peft`, Hugging Face's library, saves and loads them: the file
    /// `adapter_model.safetensors`, and `adapter_config.json` beside it.
    ///
    /// Saving takes a model with the LoRA adapters that
    /// [`apply_lora`](burn::module::Module::apply_lora) attaches to `Linear` and `Embedding` layers. Other layers that are
    /// trained as well are saved whole, as PEFT's `modules_to_save`.
    ///
    /// Loading attaches the adapters that the model does not have yet, with the ranks and the scales of the files, and then
    /// freezes all other parameters as `apply_lora` does, except in `modules_to_save`. Load before
    /// [`prepare`](crate::Accelerator::prepare). Parameters that are not in the file keep their values.
    ///
    /// ```
    /// use accelerator::model::{FileLayout, SaveOptions};
    /// use accelerator::prelude::*;
    /// use burn::module::{Lora, Module};
    /// use burn::nn::{Linear, LinearConfig};
    ///
    /// #[derive(Debug, Module)]
    /// struct Net {
    ///     head: Linear,
    /// }
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("adapter_model.safetensors");
    /// let accelerator = Accelerator::new()?;
    /// let base = Net { head: LinearConfig::new(8, 4).init(&accelerator.device()) };
    /// let tuned = accelerator.prepare(base.clone().apply_lora(Lora::new(2, 4.0)))?;
    /// accelerator.save_model_with(&tuned, &path, &SaveOptions::new().with_layout(FileLayout::Peft))?;
    ///
    /// let tuned = accelerator.load_model(base, folder.path())?;
    /// assert_eq!(tuned.head.weight.adapter().map(|adapter| adapter.scale), Some(2.0));
    /// // For inference without the cost of adapters.
    /// let merged = tuned.valid().materialize();
    /// # let _ = merged;
    /// # Ok::<(), Error>(())
    /// ```
    Peft,
}

impl FileLayout {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Burn => "burn",
            Self::PyTorch => "pytorch",
            Self::Peft => "peft",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        [Self::Burn, Self::PyTorch, Self::Peft]
            .into_iter()
            .find(|layout| layout.name() == name)
    }

    /// Returns the `format` by which Hugging Face's tools recognize the framework of the tensors. They refuse
    /// unknown formats, and so Burn's layout, which they would misread.
    pub(super) fn format(self) -> &'static str {
        match self {
            Self::Burn => "burn",
            Self::PyTorch | Self::Peft => "pt",
        }
    }
}

/// The name by which PEFT looks for the tensors of adapters.
pub(super) const ADAPTER_FILE: &str = "adapter_model.safetensors";

/// The prefix of all names in PEFT's files.
pub(super) const PEFT_PREFIX: &str = "base_model.model.";

/// The entry of a file's metadata that has the hashes of the parameters that were left out, by their paths.
pub(super) const LEFT_OUT: &str = "left_out_hashes";

/// The kind of container that has the parts of an adapter.
const ADAPTER: &str = "Reparameterization";

/// The current place of a visitor or mapper in a module.
#[derive(Clone, Debug, Default)]
pub(super) struct FilePath {
    names: Vec<String>,
    /// The kind of container to which each name belongs: `Struct:Linear`, `Vec`, `Enum:Norm`.
    containers: Vec<String>,
}

impl FilePath {
    pub(super) fn enter(&mut self, name: &str, container: &str) {
        self.names.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    pub(super) fn exit(&mut self) {
        self.names.pop();
        self.containers.pop();
    }

    pub(super) fn name(&self, layout: FileLayout) -> String {
        match layout {
            FileLayout::Burn => self.names.join("."),
            FileLayout::PyTorch => self.pytorch_name(),
            FileLayout::Peft => self.peft_name(),
        }
    }

    /// Returns the names, in PEFT's files, of the factors of an adapter of the parameter at this place; `None` if PEFT adapts
    /// no such parameter.
    pub(super) fn factor_names(&self) -> Option<[String; 2]> {
        let names = match (self.owner()?, self.names.last()?.as_str()) {
            ("Struct:Linear", "weight") => ["lora_A.weight", "lora_B.weight"],
            ("Struct:Embedding", "weight") => ["lora_embedding_A", "lora_embedding_B"],
            _ => return None,
        };
        let module = self.module();
        let dot = if module.is_empty() { "" } else { "." };
        Some(names.map(|name| format!("{PEFT_PREFIX}{module}{dot}{name}")))
    }

    /// Returns the place of the parameter that is adapted, if a factor of a LoRA adapter is at this place.
    pub(super) fn adapted(&self) -> Option<Self> {
        let at = self.containers.iter().position(|name| name == ADAPTER)?;
        (self.names[at] == "lora").then(|| Self {
            names: self.names[..at].to_vec(),
            containers: self.containers[..at].to_vec(),
        })
    }

    fn peft_name(&self) -> String {
        let factor = self.adapted().and_then(|adapted| adapted.factor_names());
        match (factor, self.names.last().map(String::as_str)) {
            (Some([a, _]), Some("a")) => a,
            (Some([_, b]), Some("b")) => b,
            _ => format!("{PEFT_PREFIX}{}", self.pytorch_name()),
        }
    }

    /// Returns the module that has the parameter at this place, under PyTorch's conventions.
    pub(super) fn module(&self) -> String {
        let mut owner = self.clone();
        owner.exit();
        owner.pytorch_name()
    }

    pub(super) fn is_linear_weight(&self) -> bool {
        self.owner() == Some("Struct:Linear") && self.names.last().is_some_and(|n| n == "weight")
    }

    fn pytorch_name(&self) -> String {
        let mut names: Vec<&str> = self
            .names
            .iter()
            .zip(&self.containers)
            .filter(|(_, container)| !container.starts_with("Enum:"))
            .map(|(name, _)| name.as_str())
            .collect();
        if let Some(last) = names.last_mut()
            && self.owner().is_some_and(is_norm)
        {
            *last = match *last {
                "gamma" => "weight",
                "beta" => "bias",
                other => other,
            };
        }
        names.join(".")
    }

    fn owner(&self) -> Option<&str> {
        let mut containers = self.containers.iter().rev();
        containers
            .find(|container| container.starts_with("Struct:") || container.starts_with("Enum:"))
            .map(String::as_str)
    }
}

fn is_norm(owner: &str) -> bool {
    matches!(
        owner,
        "Struct:BatchNorm"
            | "Struct:GroupNorm"
            | "Struct:InstanceNorm"
            | "Struct:LayerNorm"
            | "Struct:RmsNorm"
    )
}

/// Returns the type in a file. The format has none for quantised tensors, which are bytes there: the values and the scales,
/// as Burn packs them.
pub(super) fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 | DType::QFloat(_) => Dtype::U8,
        DType::Bool(_) => Dtype::BOOL,
    }
}

/// Returns the entry of a file's metadata under which the quantisation of a tensor is.
pub(super) fn quantization_key(name: &str) -> String {
    format!("{name}.quantization")
}

/// Returns the description of a quantised type in a file's metadata.
pub(super) fn quantization(dtype: DType) -> Option<String> {
    match dtype {
        DType::QFloat(scheme) => Some(format!("{scheme:?}")),
        _ => None,
    }
}

/// Returns the type of Burn; `None` for one that Burn does not have, such as f8.
pub(super) fn burn_dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        _ => return None,
    })
}

/// The file names of a model.
#[derive(Clone, Debug)]
pub(crate) struct FileNames {
    pub(super) single: String,
    stem: String,
}

impl FileNames {
    /// Makes the names of `model.safetensors`: itself, `model-00001-of-00002.safetensors`, …, and
    /// `model.safetensors.index.json`.
    pub(crate) fn new(single: &str) -> Self {
        Self {
            single: single.to_owned(),
            stem: single
                .strip_suffix(".safetensors")
                .unwrap_or(single)
                .to_owned(),
        }
    }

    pub(crate) fn index(&self) -> String {
        format!("{}.safetensors.index.json", self.stem)
    }

    pub(super) fn shard(&self, number: usize, count: usize) -> String {
        format!("{}-{number:05}-of-{count:05}.safetensors", self.stem)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        name == self.single || name == self.index() || self.is_shard(name)
    }

    pub(super) fn is_shard(&self, name: &str) -> bool {
        let numbers = name
            .strip_prefix(&self.stem)
            .and_then(|rest| rest.strip_prefix('-'))
            .and_then(|rest| rest.strip_suffix(".safetensors"))
            .and_then(|rest| rest.split_once("-of-"));
        numbers.is_some_and(|(number, count)| {
            [number, count]
                .iter()
                .all(|part| part.len() >= 5 && part.bytes().all(|byte| byte.is_ascii_digit()))
        })
    }
}

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

    /// If the tensors are larger than `bytes` in total, writes several files and an index, in the form that Hugging
    /// Face's tools read: `model-00001-of-00003.safetensors`, …, and `model.safetensors.index.json`. A tensor is
    /// never split: one that is larger has a file of its own. Default, and 0: one file, whatever its size.
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
    pub(super) allows_partial: bool,
    pub(super) casts_floats: bool,
    renames: Vec<Rename>,
}

#[derive(Clone, Debug)]
enum Rename {
    Exact(String, String),
    Pattern(Regex, String),
    Prefix(String),
}

impl LoadOptions {
    /// Requires a file that fits the model: it has every parameter by its path, shape and type, and nothing else.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how the file names and shapes parameters. Default: the layout that the file names, else
    /// [`FileLayout::Burn`]. A layout that contradicts the file is an error.
    ///
    /// With [`FileLayout::PyTorch`], `num_batches_tracked` of batch norms, which Burn does not have, is
    /// left out without a word.
    pub fn with_layout(mut self, layout: FileLayout) -> Self {
        self.layout = Some(layout);
        self
    }

    /// Removes `prefix` from the names that begin with it.
    pub fn strip_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.renames.push(Rename::Prefix(prefix.into()));
        self
    }

    /// Renames the file's tensor `from` to `to`.
    pub fn rename(mut self, from: impl Into<String>, to: impl Into<String>) -> Self {
        self.renames.push(Rename::Exact(from.into(), to.into()));
        self
    }

    /// Replaces every match of the regular expression `pattern` in a name. In `replacement`, `$1` is the first group,
    /// and `${name}` a named one.
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

    /// Loads the parts of the file that fit. The rest of the model stays as it is, and the
    /// [`LoadReport`](super::LoadReport) lists the differences. A file of which nothing fits is still an error.
    pub fn allow_partial(mut self) -> Self {
        self.allows_partial = true;
        self
    }

    /// Casts values in another float type (f64, f32, f16, bf16) to the model's. Default: a different type is an
    /// error, since a cast changes the values.
    pub fn cast_floats(mut self) -> Self {
        self.casts_floats = true;
        self
    }

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

    fn place(parts: &[(&str, &str)]) -> FilePath {
        let mut place = FilePath::default();
        for (name, container) in parts {
            place.enter(name, container);
        }
        place
    }

    #[test]
    fn pytorch_names_norms_and_skips_variants() {
        let norm = place(&[
            ("blocks", "Struct:Net"),
            ("0", "Vec"),
            ("Batch", "Enum:Norm"),
            ("gamma", "Struct:BatchNorm"),
        ]);
        assert_eq!(norm.name(FileLayout::Burn), "blocks.0.Batch.gamma");
        assert_eq!(norm.name(FileLayout::PyTorch), "blocks.0.weight");
        assert!(!norm.is_linear_weight());
    }

    #[test]
    fn gamma_of_another_module_keeps_its_name() {
        let own = place(&[("gamma", "Struct:Own")]);
        assert_eq!(own.name(FileLayout::PyTorch), "gamma");
    }

    #[test]
    fn the_weight_of_a_linear_is_told_from_others() {
        let weight = |owner| place(&[("x", "Struct:Net"), ("weight", owner)]).is_linear_weight();
        assert!(weight("Struct:Linear"));
        assert!(!weight("Struct:Embedding"));
    }

    #[test]
    fn shards_are_told_from_other_files() {
        let names = FileNames::new("model.safetensors");
        assert!(names.is_shard(&names.shard(1, 3)) && names.has(&names.shard(1, 3)));
        assert!(names.has(&names.single) && names.has(&names.index()));
        for other in [
            "model.safetensors",
            "model.safetensors.index.json",
            "model-00001-of-00002.bin",
            "model-1-of-2.safetensors",
            "model-final-00001-of-00002.safetensors",
            "other-00001-of-00002.safetensors",
        ] {
            assert!(!names.is_shard(other), "{other}");
        }
    }

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

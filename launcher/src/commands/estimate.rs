//! `accel-launch estimate-memory`: the memory that training a model takes, from its file alone.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::num::NonZeroU64;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::de::{self, DeserializeOwned, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::text::{columns, json, print, size};

/// Arguments of `accel-launch estimate-memory`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EstimateArgs {
    /// A safetensors file, or the index of a sharded one (`….safetensors.index.json`).
    ///
    /// Only headers are read, whatever the size of the file.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Estimate training with units that are sharded over this many processes, too.
    ///
    /// A unit is taken to be the tensors with the same path up to its first number, such as `layers.3`. Other tensors stay
    /// whole.
    #[arg(long, value_name = "N")]
    shards: Option<NonZeroU64>,

    /// Print JSON, in bytes.
    #[arg(long)]
    json: bool,
}

/// Reads the headers and prints the estimate.
///
/// # Errors
/// When the file is not there or no safetensors file, or standard output cannot be written.
pub(crate) fn run(arguments: &EstimateArgs) -> Result<ExitCode> {
    let tensors = read_tensors(&arguments.file)?;
    let mut report = MemoryEstimate::of(&tensors);
    report.sharded = arguments
        .shards
        .map(|shards| ShardedEstimate::of(&tensors, shards));
    print(&if arguments.json {
        json(&report)?
    } else {
        report.text(&arguments.file)
    })
}

/// The memory of a model, in bytes per process.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
struct MemoryEstimate {
    tensors: u64,
    elements: u64,
    dtypes: Vec<Dtype>,
    parameters: u64,
    gradients: u64,
    /// The flat buffers in which several ranks reduce gradients.
    buckets: u64,
    optimizers: Optimizers,
    totals: Totals,
    #[serde(skip_serializing_if = "Option::is_none")]
    sharded: Option<ShardedEstimate>,
    left_out: [&'static str; 1],
}

/// The memory of a model whose units are sharded, in bytes per process.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
struct ShardedEstimate {
    processes: u64,
    units: u64,
    /// The largest unit, whose parameters are whole while it runs.
    largest_unit: u64,
    totals: Totals,
}

#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
struct Dtype {
    dtype: String,
    tensors: u64,
    elements: u64,
    bytes: u64,
    /// True if it can have a gradient.
    trained: bool,
}

/// The state of optimizers: values of each parameter, in its type.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
struct Optimizers {
    sgd: u64,
    sgd_momentum: u64,
    adam: u64,
}

/// Parameters, and for training gradients, buckets and the optimizer's state.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
struct Totals {
    inference: u64,
    sgd: u64,
    sgd_momentum: u64,
    adam: u64,
}

impl ShardedEstimate {
    fn of(tensors: &BTreeMap<String, Tensor>, processes: NonZeroU64) -> Self {
        let mut units: BTreeMap<&str, BTreeMap<String, Tensor>> = BTreeMap::new();
        let mut rest = BTreeMap::new();
        for (name, tensor) in tensors {
            let tensors = match unit_of(name).filter(|_| is_trained(&tensor.dtype)) {
                Some(unit) => units.entry(unit).or_default(),
                None => &mut rest,
            };
            tensors.insert(name.clone(), tensor.clone());
        }
        let rest = MemoryEstimate::of(&rest).totals;
        let sizes: Vec<Totals> = units
            .values()
            .map(|unit| MemoryEstimate::of(unit).totals)
            .collect();
        let largest_unit = sizes.iter().map(|unit| unit.inference).max().unwrap_or(0);
        // Whole parameters in the buffer of a collective, and as tensors; in backward, the same of gradients.
        let total = |of: &dyn Fn(&Totals) -> u64, whole: u64| {
            let units = sizes.iter().map(of).fold(0, u64::saturating_add);
            of(&rest)
                .saturating_add(units.div_ceil(processes.get()))
                .saturating_add(largest_unit.saturating_mul(whole))
        };
        Self {
            processes: processes.get(),
            units: units.len() as u64,
            largest_unit,
            totals: Totals {
                inference: total(&|totals| totals.inference, 2),
                sgd: total(&|totals| totals.sgd, 4),
                sgd_momentum: total(&|totals| totals.sgd_momentum, 4),
                adam: total(&|totals| totals.adam, 4),
            },
        }
    }
}

impl MemoryEstimate {
    fn of(tensors: &BTreeMap<String, Tensor>) -> Self {
        let mut dtypes: BTreeMap<&str, Dtype> = BTreeMap::new();
        for tensor in tensors.values() {
            let dtype = dtypes.entry(&tensor.dtype).or_insert_with(|| Dtype {
                dtype: tensor.dtype.clone(),
                trained: is_trained(&tensor.dtype),
                ..Dtype::default()
            });
            dtype.tensors += 1;
            dtype.elements = dtype.elements.saturating_add(tensor.elements);
            dtype.bytes = dtype.bytes.saturating_add(tensor.bytes);
        }
        let mut dtypes: Vec<Dtype> = dtypes.into_values().collect();
        dtypes.sort_by_key(|dtype| std::cmp::Reverse(dtype.bytes));
        let sum = |of: &dyn Fn(&Dtype) -> u64| dtypes.iter().map(of).fold(0, u64::saturating_add);
        let trained = |dtype: &Dtype| if dtype.trained { dtype.bytes } else { 0 };
        let (parameters, gradients) = (sum(&|dtype| dtype.bytes), sum(&trained));
        let buckets = sum(&|dtype| match dtype.dtype.as_str() {
            _ if !dtype.trained => 0,
            "F64" => dtype.bytes,
            // Halves are summed in f32.
            _ => dtype.elements.saturating_mul(4),
        });
        let optimizers = Optimizers {
            sgd: 0,
            sgd_momentum: gradients,
            adam: gradients.saturating_mul(2),
        };
        let training = [parameters, gradients, buckets];
        let total = |optimizer| {
            training
                .iter()
                .fold(optimizer, |a: u64, b| a.saturating_add(*b))
        };
        Self {
            tensors: tensors.len() as u64,
            elements: sum(&|dtype| dtype.elements),
            parameters,
            gradients,
            buckets,
            optimizers,
            totals: Totals {
                inference: parameters,
                sgd: total(optimizers.sgd),
                sgd_momentum: total(optimizers.sgd_momentum),
                adam: total(optimizers.adam),
            },
            sharded: None,
            left_out: ["activations"],
            dtypes,
        }
    }

    fn text(&self, path: &Path) -> String {
        let mut text = format!(
            "{}: {} tensors, {} elements\n\n",
            path.display(),
            self.tensors,
            self.elements
        );
        let mut rows = vec![["dtype", "tensors", "elements", "size"].map(str::to_owned)];
        rows.extend(self.dtypes.iter().map(|dtype| {
            // Escaped, so that a file cannot control the terminal.
            let name = dtype.dtype.escape_debug();
            let name = match dtype.trained {
                true => name.to_string(),
                false => format!("{name} (not trained)"),
            };
            [
                name,
                dtype.tensors.to_string(),
                dtype.elements.to_string(),
                size(dtype.bytes),
            ]
        }));
        text += &columns(&rows);
        let Optimizers {
            sgd,
            sgd_momentum,
            adam,
        } = self.optimizers;
        let rows = [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("buckets, with several processes", self.buckets),
            ("state of SGD", sgd),
            ("state of SGD with momentum", sgd_momentum),
            ("state of Adam or AdamW", adam),
            ("total, inference", self.totals.inference),
            ("total, training with SGD", self.totals.sgd),
            (
                "total, training with SGD and momentum",
                self.totals.sgd_momentum,
            ),
            ("total, training with Adam or AdamW", self.totals.adam),
        ];
        text += "\nOf each process:\n";
        text += &columns(&rows.map(|(name, bytes)| [name.to_owned(), size(bytes)]));
        if let Some(sharded) = &self.sharded {
            text += &format!(
                "\nOf each of {} processes, over which {} units are sharded (`ACCEL_UNITS=shard`):\n",
                sharded.processes, sharded.units
            );
            let rows = [
                ("parameters of the largest unit", sharded.largest_unit),
                ("total, inference", sharded.totals.inference),
                ("total, training with SGD", sharded.totals.sgd),
                (
                    "total, training with SGD and momentum",
                    sharded.totals.sgd_momentum,
                ),
                ("total, training with Adam or AdamW", sharded.totals.adam),
            ];
            text += &columns(&rows.map(|(name, bytes)| [name.to_owned(), size(bytes)]));
        }
        text += "\nLeft out: activations, which grow with the batch and depend on the program \
                 (`find_executable_batch_size`\ntries what fits), and what the device keeps for \
                 itself.\n";
        text
    }
}

/// Returns `true` if values of this type have gradients. Running means and the like are floats too; a file does
/// not tell them apart.
fn is_trained(dtype: &str) -> bool {
    dtype.starts_with('F') || dtype.starts_with("BF")
}

/// Returns the path of the unit that a tensor is in: up to its first number.
fn unit_of(name: &str) -> Option<&str> {
    let mut end = 0;
    for word in name.split('.') {
        end += word.len();
        if word.parse::<u64>().is_ok() {
            return name.get(..end);
        }
        end += 1;
    }
    None
}

/// The longest header that the format allows, and the longest index that is read.
const MAX_HEADER: u64 = 100_000_000;

/// A tensor, as a header describes it.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Tensor {
    bytes: u64,
    dtype: String,
    elements: u64,
}

/// Reads the tensors of a file, or of all files of an index, by name.
///
/// # Errors
/// If a file cannot be read, is no safetensors file or index, or lacks a tensor of the index.
fn read_tensors(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    if path
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        return read_shards(path);
    }
    read_file(path)
}

fn read_file(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let wrong = |what: String| {
        Error::usage(format!(
            "{} is no safetensors file: {what}; expected a file such as model.safetensors, or the \
             index of one in shards (model.safetensors.index.json)",
            path.display()
        ))
    };
    let mut file = open(path)?;
    let size = file
        .metadata()
        .map_err(|error| unreadable(path, error))?
        .len();
    let mut length = [0; 8];
    if size < 8 {
        return Err(wrong(format!("it has {size} bytes")));
    }
    let failed = |error| unreadable(path, error);
    file.read_exact(&mut length).map_err(failed)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length > size - 8 {
        return Err(wrong(format!(
            "its first bytes announce a header of {length} bytes, in a file of {size}"
        )));
    }
    let header: Header =
        parse(file, length).map_err(|error| wrong(format!("its header: {error}")))?;
    let expected = header.data.saturating_add(8 + length);
    if size != expected {
        return Err(wrong(format!(
            "its header describes a file of {expected} bytes ({} of them data), and it has {size}{}",
            header.data,
            match size < expected {
                true => ": it was cut off",
                false => "",
            }
        )));
    }
    Ok(header.tensors)
}

/// Reads JSON of so many bytes, without keeping its text.
fn parse<T: DeserializeOwned>(file: impl Read, length: u64) -> serde_json::Result<T> {
    let mut reader = serde_json::Deserializer::from_reader(BufReader::new(file.take(length)));
    let value = T::deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// The key of a header's metadata, which is no tensor.
const METADATA: &str = "__metadata__";

/// The tensors of a header, checked one by one as they are read.
#[derive(Default)]
struct Header {
    tensors: BTreeMap<String, Tensor>,
    /// The end of the last tensor, counted from the end of the header.
    data: u64,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> std::result::Result<Self, D::Error> {
        reader.deserialize_map(Self::default())
    }
}

impl<'de> Visitor<'de> for Header {
    type Value = Self;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> std::result::Result<Self, A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let shown = quoted(&name);
            let entry: HeaderEntry = map
                .next_value()
                .map_err(|error| de::Error::custom(format!("the tensor {shown}: {error}")))?;
            self.data = self.data.max(entry.data_offsets[1]);
            let tensor = entry.tensor(&shown).map_err(de::Error::custom)?;
            if self.tensors.insert(name, tensor).is_some() {
                let error = format!("the tensor {shown} is there twice");
                return Err(de::Error::custom(error));
            }
        }
        Ok(self)
    }
}

#[derive(Deserialize)]
struct HeaderEntry {
    data_offsets: [u64; 2],
    dtype: String,
    shape: Vec<u64>,
}

impl HeaderEntry {
    /// Returns the tensor; `name` is quoted.
    fn tensor(self, name: &str) -> std::result::Result<Tensor, String> {
        let Self { dtype, shape, .. } = self;
        let [start, end] = self.data_offsets;
        let elements = shape.iter().try_fold(1_u64, |a, &b| a.checked_mul(b));
        let (Some(bytes), Some(elements)) = (end.checked_sub(start), elements) else {
            return Err(format!(
                "the tensor {name} has the shape {shape:?} and lies from {start} to {end}"
            ));
        };
        let expected = width(&dtype).map(|width| elements.checked_mul(width));
        if expected.is_some_and(|expected| expected != Some(bytes)) {
            return Err(format!(
                "the tensor {name} of {dtype} has the shape {shape:?}, and {bytes} bytes"
            ));
        }
        Ok(Tensor {
            bytes,
            dtype,
            elements,
        })
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// A text of a file, escaped so that it cannot control a terminal.
fn quoted(text: &str) -> String {
    format!("`{}`", text.escape_debug())
}

/// The bytes of an element, if the type is known and has whole bytes.
fn width(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "I8" | "U8" | "F8_E4M3" | "F8_E5M2" => 1,
        "BF16" | "F16" | "I16" | "U16" => 2,
        "F32" | "I32" | "U32" => 4,
        "F64" | "I64" | "U64" => 8,
        _ => return None,
    })
}

fn read_shards(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let file = open(path)?;
    let size = file
        .metadata()
        .map_err(|error| unreadable(path, error))?
        .len();
    if size > MAX_HEADER {
        return Err(Error::usage(format!(
            "{} has {size} bytes; expected an index of at most {MAX_HEADER}",
            path.display()
        )));
    }
    let index: Index = parse(file, MAX_HEADER).map_err(|error| {
        let message = format!(
            "{} is no index of a safetensors file: expected a `weight_map`",
            path.display()
        );
        Error::usage(message).with_source(error)
    })?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, shard) in index.weight_map {
        shards.entry(shard).or_default().push(name);
    }
    let mut tensors = BTreeMap::new();
    for (shard, names) in shards {
        let mut parts = Path::new(&shard).components();
        let beside = matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(_)), None)
        );
        if !beside || shard.chars().any(char::is_control) {
            return Err(Error::usage(format!(
                "{}: expected the names of files beside it, found {}",
                path.display(),
                quoted(&shard)
            )));
        }
        // An index among them is no safetensors file, and is refused as such.
        let mut found = read_file(&path.with_file_name(&shard))?;
        for name in names {
            let tensor = found.remove(&name).ok_or_else(|| {
                Error::usage(format!(
                    "{} says that {} is in {}, where it is not: the files do not belong together",
                    path.display(),
                    quoted(&name),
                    quoted(&shard)
                ))
            })?;
            tensors.insert(name, tensor);
        }
    }
    Ok(tensors)
}

fn open(path: &Path) -> Result<File> {
    let found = std::fs::metadata(path).map_err(|error| unreadable(path, error))?;
    if found.is_dir() {
        return Err(Error::usage(format!(
            "{} is a folder; expected a safetensors file, or its index{}",
            path.display(),
            match inside(path) {
                Some(file) => format!(", such as {}", file.display()),
                None => String::new(),
            }
        )));
    }
    // Opening a pipe could wait for ever.
    if !found.is_file() {
        return Err(Error::usage(format!(
            "{} is no regular file; expected a safetensors file, or its index",
            path.display()
        )));
    }
    File::open(path).map_err(|error| unreadable(path, error))
}

/// A file that was meant, perhaps: in the folder, or in the newest checkpoint in it.
fn inside(folder: &Path) -> Option<PathBuf> {
    let names = std::fs::read_dir(folder).ok()?;
    let mut paths: Vec<PathBuf> = names.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let ends_with = |path: &&PathBuf, end| path.to_str().is_some_and(|path| path.ends_with(end));
    let index = paths
        .iter()
        .find(|path| ends_with(path, ".safetensors.index.json"));
    let file = index.or_else(|| paths.iter().find(|path| ends_with(path, ".safetensors")));
    file.cloned().or_else(|| {
        let is_checkpoint = |path: &&PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with("checkpoint-")) && path.is_dir()
        };
        inside(paths.iter().rfind(is_checkpoint)?)
    })
}

fn unreadable(path: &Path, error: std::io::Error) -> Error {
    Error::usage(format!("cannot read {}", path.display())).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_reduced_in_full_precision_and_integers_not_at_all() {
        let tensor = |dtype: &str, elements, bytes| Tensor {
            bytes,
            dtype: dtype.to_owned(),
            elements,
        };
        let tensors = BTreeMap::from([
            ("a".to_owned(), tensor("BF16", 100, 200)),
            ("b".to_owned(), tensor("F64", 10, 80)),
            ("c".to_owned(), tensor("I64", 3, 24)),
        ]);
        let report = MemoryEstimate::of(&tensors);
        assert_eq!((report.tensors, report.elements), (3, 113));
        assert_eq!((report.parameters, report.gradients), (304, 280));
        assert_eq!(report.buckets, 480);
        assert_eq!(report.optimizers.adam, 560);
        assert_eq!(report.totals.adam, 304 + 280 + 480 + 560);
        assert_eq!(report.totals.inference, 304);
        let dtypes: Vec<_> = report.dtypes.iter().map(|x| x.dtype.as_str()).collect();
        assert_eq!(dtypes, ["BF16", "F64", "I64"]);
    }
}

//! The headers of safetensors files: eight bytes of length, and JSON of that length.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path};

use serde::Deserialize;

use crate::error::{Error, Result};

/// The most that the format allows.
const LONGEST: u64 = 100_000_000;

/// A tensor, as a header describes it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Tensor {
    pub(super) bytes: u64,
    pub(super) dtype: String,
    pub(super) elements: u64,
}

/// The tensors of a file, or of all files of an index, by name.
///
/// # Errors
/// Where a file cannot be read, is no safetensors file or index, or lacks what the index says.
pub(super) fn read(path: &Path) -> Result<BTreeMap<String, Tensor>> {
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
    if length > LONGEST || length > size - 8 {
        return Err(wrong(format!(
            "its first bytes announce a header of {length} bytes, in a file of {size}"
        )));
    }
    let mut text = Vec::new();
    file.take(length).read_to_end(&mut text).map_err(failed)?;
    parse(&text).map_err(wrong)
}

/// What a header holds beside tensors.
const METADATA: &str = "__metadata__";

#[derive(Deserialize)]
struct Entry {
    data_offsets: [u64; 2],
    dtype: String,
    shape: Vec<u64>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn parse(text: &[u8]) -> std::result::Result<BTreeMap<String, Tensor>, String> {
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(text).map_err(|error| format!("its header: {error}"))?;
    let tensors = header.into_iter().filter(|(name, _)| name != METADATA);
    tensors
        .map(|(name, entry)| {
            let entry: Entry = serde_json::from_value(entry)
                .map_err(|error| format!("the tensor `{name}`: {error}"))?;
            let [start, end] = entry.data_offsets;
            let elements = entry.shape.iter().try_fold(1_u64, |a, &b| a.checked_mul(b));
            let (Some(bytes), Some(elements)) = (end.checked_sub(start), elements) else {
                return Err(format!(
                    "the tensor `{name}` has the shape {:?} and lies from {start} to {end}",
                    entry.shape
                ));
            };
            let expected = width(&entry.dtype).map(|width| elements.checked_mul(width));
            if expected.is_some_and(|expected| expected != Some(bytes)) {
                return Err(format!(
                    "the tensor `{name}` of {} has the shape {:?}, and {bytes} bytes",
                    entry.dtype, entry.shape
                ));
            }
            let tensor = Tensor {
                bytes,
                dtype: entry.dtype,
                elements,
            };
            Ok((name, tensor))
        })
        .collect()
}

/// The bytes of an element, where the type is known and has whole bytes.
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
    let text = std::fs::read(path).map_err(|error| unreadable(path, error))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| {
        let message = format!(
            "{} is no index of a safetensors file: expected a `weight_map`",
            path.display()
        );
        Error::usage(message).with_source(error)
    })?;
    let mut tensors = BTreeMap::new();
    for shard in index.weight_map.values().collect::<BTreeSet<_>>() {
        let mut parts = Path::new(shard).components();
        if !matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(_)), None)
        ) {
            return Err(Error::usage(format!(
                "{}: expected the names of files beside it, found `{shard}`",
                path.display()
            )));
        }
        // An index among them is no safetensors file, and is refused as such.
        let mut found = read_file(&path.with_file_name(shard))?;
        for (name, _) in index.weight_map.iter().filter(|(_, file)| *file == shard) {
            let tensor = found.remove(name).ok_or_else(|| {
                Error::usage(format!(
                    "{} says that `{name}` is in {shard}, where it is not: the files do not belong \
                     together",
                    path.display()
                ))
            })?;
            tensors.insert(name.clone(), tensor);
        }
    }
    Ok(tensors)
}

fn open(path: &Path) -> Result<File> {
    let file = File::open(path).map_err(|error| unreadable(path, error))?;
    let is_folder = file.metadata().is_ok_and(|metadata| metadata.is_dir());
    if is_folder {
        return Err(Error::usage(format!(
            "{} is a folder; expected a safetensors file in it, or its index",
            path.display()
        )));
    }
    Ok(file)
}

fn unreadable(path: &Path, error: std::io::Error) -> Error {
    Error::usage(format!("cannot read {}", path.display())).with_source(error)
}

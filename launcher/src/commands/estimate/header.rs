//! The headers of safetensors files: eight bytes of length, and JSON of that length.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde::de::{self, DeserializeOwned, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::{Error, Result};

/// The longest header that the format allows, and the longest index that is read.
const MAX_HEADER: u64 = 100_000_000;

/// A tensor, as a header describes it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Tensor {
    pub(super) bytes: u64,
    pub(super) dtype: String,
    pub(super) elements: u64,
}

/// Reads the tensors of a file, or of all files of an index, by name.
///
/// # Errors
/// If a file cannot be read, is no safetensors file or index, or lacks what the index says.
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

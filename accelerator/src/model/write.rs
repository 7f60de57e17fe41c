use core::num::NonZeroU64;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufWriter, Write};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::snapshot::{ModelSnapshot, SnapshotEntry};
use super::{FileLayout, SaveOptions, dtype};
use crate::core::error::{Error, Kind, Result};

/// Takes the files of a model one after the other: the name of each, and what writes it.
pub(crate) type Sink<'a> =
    dyn FnMut(&str, &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> Result<()> + 'a;

/// The file names of a model.
#[derive(Clone, Debug)]
pub(crate) struct FileNames {
    /// The name when there is one file.
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

    /// Tells if a file has one of the names.
    pub(super) fn has(&self, name: &str) -> bool {
        name == self.single || name == self.index() || self.is_shard(name)
    }

    /// Tells if a file has the name of a shard of this model.
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

impl ModelSnapshot {
    /// Writes one file, or several and then their index, to `sink`, a tensor at a time. Returns
    /// the names of the files, the index last.
    ///
    /// A parameter that is found under several paths (the same id and the same bits) is written
    /// once; the metadata of its file then has an entry `path of the other: path of the written`,
    /// as Hugging Face's `save_model` leaves it.
    pub(crate) fn write(
        &self,
        names: &FileNames,
        options: &SaveOptions,
        sink: &mut Sink<'_>,
    ) -> Result<Vec<String>> {
        let layout = options.layout;
        let (records, aliases) = self.records(layout)?;
        let shards = shards(&records, options.max_shard_size);
        let mut written = Vec::new();
        let mut weight_map = BTreeMap::new();
        for (number, shard) in (1..).zip(&shards) {
            let name = match shards.len() {
                1 => names.single.clone(),
                count => names.shard(number, count),
            };
            let header = header(shard, layout, &aliases).map_err(|error| {
                Error::new(Kind::Io, "the header of a model file cannot be made").with_source(error)
            })?;
            sink(&name, &mut |writer| {
                write_file(&header, shard, layout, writer)
            })?;
            for record in shard {
                weight_map.insert(record.name, name.clone());
            }
            written.push(name);
        }
        if shards.len() > 1 {
            let total: usize = records.iter().map(|record| record.bytes).sum();
            let index = serde_json::json!({
                "metadata": { "total_size": total },
                "weight_map": weight_map,
            });
            sink(&names.index(), &mut |writer| {
                serde_json::to_writer_pretty(&mut *writer, &index)?;
                writer.write_all(b"\n")
            })?;
            written.push(names.index());
        }
        Ok(written)
    }

    /// Returns the records to write, and the names that are aliases of others.
    fn records(&self, layout: FileLayout) -> Result<(Vec<Record<'_>>, BTreeMap<&str, &str>)> {
        let mut records: Vec<Record<'_>> = Vec::new();
        let mut aliases = BTreeMap::new();
        let mut by_id: HashMap<u64, Vec<usize>> = HashMap::new();
        for entry in self.entries() {
            let record = Record::new(entry, layout)?;
            let same_id = by_id.entry(entry.id).or_default();
            // Clones of a parameter keep its id, and may have been trained apart since.
            let twin = same_id.iter().find(|&&at| {
                records[at].shape == record.shape
                    && records[at].entry.data(layout) == entry.data(layout)
            });
            if let Some(&at) = twin {
                aliases.insert(record.name, records[at].name);
            } else {
                same_id.push(records.len());
                records.push(record);
            }
        }
        let mut names: Vec<&str> = records.iter().map(|record| record.name).collect();
        names.extend(aliases.keys());
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::new(
                Kind::Model,
                format!(
                    "two parameters of the model would have the name `{}` in the file; rename a \
                     field, or save in Burn's layout",
                    twice[0]
                ),
            ));
        }
        Ok((records, aliases))
    }
}

/// A tensor of a file.
struct Record<'a> {
    entry: &'a SnapshotEntry,
    name: &'a str,
    dtype: Dtype,
    shape: &'a [usize],
    bytes: usize,
}

impl<'a> Record<'a> {
    fn new(entry: &'a SnapshotEntry, layout: FileLayout) -> Result<Self> {
        let name = entry.name(layout);
        let dtype = dtype::to_file(entry.dtype).ok_or_else(|| {
            Error::new(
                Kind::Model,
                format!(
                    "the parameter `{name}` is of {:?}, which safetensors files cannot hold",
                    entry.dtype
                ),
            )
        })?;
        let shape = entry.shape(layout);
        Ok(Self {
            entry,
            name,
            dtype,
            shape,
            bytes: shape.iter().product::<usize>() * dtype.bitsize() / 8,
        })
    }
}

/// Cuts the list where the next tensor would exceed the size.
fn shards<'a, 'b>(
    records: &'b [Record<'a>],
    max_size: Option<NonZeroU64>,
) -> Vec<Vec<&'b Record<'a>>> {
    let mut shards = vec![Vec::new()];
    let mut size = 0;
    for record in records {
        if size > 0 && max_size.is_some_and(|max| (size + record.bytes) as u64 > max.get()) {
            shards.push(Vec::new());
            size = 0;
        }
        size += record.bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push(record);
        }
    }
    for shard in &mut shards {
        // Wide elements first, so that each tensor is aligned to its elements.
        shard.sort_by_key(|record| core::cmp::Reverse(record.dtype.bitsize()));
    }
    shards
}

/// Returns the length and the header of a file, to the first byte of data.
fn header(
    shard: &[&Record<'_>],
    layout: FileLayout,
    aliases: &BTreeMap<&str, &str>,
) -> serde_json::Result<Vec<u8>> {
    let mut metadata: BTreeMap<&str, &str> = aliases
        .iter()
        .filter(|(_, kept)| shard.iter().any(|record| record.name == **kept))
        .map(|(alias, kept)| (*alias, *kept))
        .collect();
    metadata.insert("format", layout.format());
    metadata.insert("layout", layout.name());
    let mut tensors = Vec::with_capacity(shard.len());
    let mut start = 0;
    for record in shard {
        let end = start + record.bytes;
        let info = TensorInfo {
            dtype: record.dtype,
            shape: record.shape.to_vec(),
            data_offsets: (start, end),
        };
        tensors.push((record.name, info));
        start = end;
    }
    let mut json = serde_json::to_vec(&SafetensorsHeader { metadata, tensors })?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

fn write_file(
    header: &[u8],
    shard: &[&Record<'_>],
    layout: FileLayout,
    writer: &mut dyn Write,
) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(1 << 20, writer);
    writer.write_all(header)?;
    for record in shard {
        let data = record.entry.data(layout);
        let bytes = data.bytes();
        if bytes.len() != record.bytes {
            return Err(io::Error::other(format!(
                "`{}` came as {} bytes; expected {} for {:?} of {:?}",
                record.name,
                bytes.len(),
                record.bytes,
                record.shape,
                record.dtype
            )));
        }
        writer.write_all(bytes)?;
    }
    writer.flush()
}

/// A header whose metadata are in order too, which the format's own crate keeps in a hash map.
struct SafetensorsHeader<'a> {
    metadata: BTreeMap<&'a str, &'a str>,
    tensors: Vec<(&'a str, TensorInfo)>,
}

impl Serialize for SafetensorsHeader<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1 + self.tensors.len()))?;
        map.serialize_entry("__metadata__", &self.metadata)?;
        for (name, info) in &self.tensors {
            map.serialize_entry(name, info)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}

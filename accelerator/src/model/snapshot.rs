use core::fmt;
use core::num::NonZeroU64;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, BufWriter, Write};

use accelerator_collective::ProcessGroup;
use burn::module::{ModuleVisitor, Param, ParamId, Parameter};
use burn::tensor::kind::Basic;
use burn::tensor::quantization::quantized_data_len;
use burn::tensor::{Bool, BoolStore, Bytes, DType, Int, Shape, Tensor, TensorData};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::format::{
    FileLayout, FileNames, FilePath, LEFT_OUT, SaveOptions, file_dtype, quantization,
    quantization_key,
};
use super::frozen::{self, Hashes};
use crate::core::agreement;
use crate::core::dyn_module::DynModule;
use crate::core::error::{Error, Kind, Result};
use crate::core::offload::{Offload, Scratch};
use crate::core::partition::{KeptBy, Piece, is_sharded, piece_of};

/// The values of a model at one moment, in the order in which Burn visits it.
///
/// Taking one is cheap: it holds the tensors, which nothing changes in place while they are held, and they become bytes when
/// they are written, on whatever thread that is. Of a sharded model, it holds the bytes of whole parameters.
#[derive(Debug)]
pub(crate) struct ModelSnapshot {
    entries: Vec<SnapshotEntry>,
    /// The parameters that it does not have.
    left_out: Hashes,
}

/// A function that takes the files of a model one after the other: the name of each, and a function that writes it.
pub(crate) type Sink<'a> =
    dyn FnMut(&str, &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> Result<()> + 'a;

/// A parameter or buffer of a model.
pub(super) struct SnapshotEntry {
    pub(super) id: u64,
    pub(super) dtype: DType,
    path: String,
    /// The path under PyTorch's conventions.
    pytorch_name: String,
    peft_name: String,
    /// The shape in the module.
    shape: Vec<usize>,
    /// The shape that Burn saves, which is that of the module except for column-major linear layers.
    saved_shape: Vec<usize>,
    is_linear_weight: bool,
    is_factor: bool,
    value: ReadValue,
}

/// Reads the values of a parameter as a file has them: as Burn saves them, or the matrix of the module transposed.
type ReadValue = Box<dyn Fn(Orientation) -> TensorData + Send>;

#[derive(Clone, Copy, Eq, PartialEq)]
enum Orientation {
    AsSaved,
    Transposed,
}

impl ModelSnapshot {
    /// Takes the snapshot of a model that is not sharded, with only the hashes of the parameters at some paths.
    pub(crate) fn of(
        group: &ProcessGroup,
        model: &dyn DynModule,
        left_out: &HashSet<String>,
    ) -> Result<Self> {
        let mut entries = Vec::new();
        // `valid` brings running statistics up to date, which are a step behind otherwise.
        let valid: &dyn DynModule = &model.valid();
        valid.visit(&mut EntryVisitor {
            gathering: None,
            place: FilePath::default(),
            wanted: &|place| !left_out.contains(&place.name(FileLayout::Burn)),
            take: &mut |entry| entries.push(entry),
        });
        let left_out = frozen::hashes(group, model, left_out)?;
        Ok(Self { entries, left_out })
    }

    /// Takes the same snapshot on rank 0, into whose memory pieces of parameters are gathered one after the other. All ranks
    /// call it.
    #[track_caller]
    pub(crate) fn gathered(
        group: &ProcessGroup,
        model: &dyn DynModule,
        left_out: &HashSet<String>,
    ) -> Result<Option<Self>> {
        let wanted = |place: &FilePath| !left_out.contains(&place.name(FileLayout::Burn));
        let mut snapshot = Self::gathered_parts(group, model, &wanted)?;
        if snapshot.is_some() || is_sharded(model) {
            let left_out = frozen::hashes(group, model, left_out)?;
            if let Some(snapshot) = &mut snapshot {
                snapshot.left_out = left_out;
            }
        }
        Ok(snapshot)
    }

    /// Takes the snapshot of the parameters and buffers at some places only.
    #[track_caller]
    pub(super) fn gathered_parts(
        group: &ProcessGroup,
        model: &dyn DynModule,
        wanted: &dyn Fn(&FilePath) -> bool,
    ) -> Result<Option<Self>> {
        let is_main = group.rank() == 0;
        let gathering = is_sharded(model).then(|| Gathering {
            group: group.for_purpose("gather a sharded model"),
            known: HashMap::new(),
            failure: None,
        });
        if gathering.is_none() && !is_main {
            return Ok(None);
        }
        let mut entries = Vec::new();
        let mut visitor = EntryVisitor {
            gathering,
            place: FilePath::default(),
            wanted,
            take: &mut |entry| {
                if is_main {
                    entries.push(entry);
                }
            },
        };
        // `valid` brings running statistics up to date, which are a step behind otherwise.
        let model: &dyn DynModule = &model.valid();
        model.visit(&mut visitor);
        let Some(gathering) = visitor.gathering else {
            return Ok(Some(Self::with(entries)));
        };
        let failure = gathering.failure;
        let gathered = failure.map_or(Ok(is_main.then_some(Self::with(entries))), Err);
        agreement::together(group, gathered, "gather a sharded model")
    }

    fn with(entries: Vec<SnapshotEntry>) -> Self {
        Self {
            entries,
            left_out: Hashes::new(),
        }
    }

    /// Writes one file, or several and then their index, to `sink`, a tensor at a time. The metadata of the first file has
    /// the hashes of the parameters that are left out.
    ///
    /// A parameter that is found under several paths (the same id and the same bits) is written
    /// once; the metadata of its file then has an entry `path of the other: path of the written`,
    /// as Hugging Face's `save_model` leaves it.
    pub(crate) fn write(
        &self,
        names: &FileNames,
        options: &SaveOptions,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let layout = options.layout;
        let (records, aliases) = self.records(layout)?;
        let shards = shards(&records, options.max_shard_size);
        let mut left_out = Some(&self.left_out).filter(|hashes| !hashes.is_empty());
        let mut weight_map = BTreeMap::new();
        for (number, shard) in (1..).zip(&shards) {
            let name = match shards.len() {
                1 => names.single.clone(),
                count => names.shard(number, count),
            };
            let left_out = left_out.take();
            let header = header(shard, layout, &aliases, left_out).map_err(|error| {
                Error::new(Kind::Io, "the header of a model file cannot be made").with_source(error)
            })?;
            sink(&name, &mut |writer| {
                write_file(&header, shard, layout, writer)
            })?;
            for record in shard {
                weight_map.insert(record.name, name.clone());
            }
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
        }
        Ok(())
    }

    fn records(&self, layout: FileLayout) -> Result<(Vec<Record<'_>>, BTreeMap<&str, &str>)> {
        let mut records: Vec<Record<'_>> = Vec::new();
        let mut aliases = BTreeMap::new();
        let mut by_id: HashMap<u64, Vec<usize>> = HashMap::new();
        for entry in &self.entries {
            let record = Record::new(entry, layout)?;
            let same_id = by_id.entry(entry.id).or_default();
            // Clones of a parameter keep its id, and may have been trained apart since. PEFT reads no aliases.
            let twin = same_id.iter().find(|&&at| {
                layout != FileLayout::Peft
                    && records[at].shape == record.shape
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
            return Err(Error::model(format!(
                "two parameters of the model would have the name `{}` in the file; rename a \
                     field, or save in Burn's layout",
                twice[0]
            )));
        }
        Ok((records, aliases))
    }
}

/// Calls `take` with each parameter and buffer of a model, in the order in which Burn visits them. If this rank holds only a
/// piece of a parameter, the entry has the shape of the whole one and the values of the piece.
pub(super) fn visit_entries(model: &dyn DynModule, take: &mut dyn FnMut(SnapshotEntry)) {
    model.visit(&mut EntryVisitor {
        gathering: None,
        place: FilePath::default(),
        wanted: &|_| true,
        take,
    });
}

impl SnapshotEntry {
    pub(super) fn name(&self, layout: FileLayout) -> &str {
        match layout {
            FileLayout::Burn => &self.path,
            FileLayout::PyTorch => &self.pytorch_name,
            FileLayout::Peft => &self.peft_name,
        }
    }

    /// Returns the shape in a file.
    pub(super) fn shape(&self, layout: FileLayout) -> Vec<usize> {
        match self.dtype {
            DType::QFloat(scheme) => {
                vec![quantized_data_len(
                    &scheme,
                    &Shape::from(self.saved_shape.clone()),
                )]
            }
            _ if self.is_transposed(layout) => self.shape.iter().rev().copied().collect(),
            _ => self.saved_shape.clone(),
        }
    }

    /// Returns `true` if a file in this layout has the matrix transposed.
    pub(super) fn is_transposed(&self, layout: FileLayout) -> bool {
        match layout {
            FileLayout::Burn => false,
            FileLayout::PyTorch => self.is_linear_weight,
            FileLayout::Peft => self.is_linear_weight || self.is_factor,
        }
    }

    /// Returns `true` if a file in this layout has this parameter or buffer in any case.
    pub(super) fn is_required(&self, layout: FileLayout) -> bool {
        layout != FileLayout::Peft || self.is_factor
    }

    /// Returns the values, brought to the host.
    pub(super) fn data(&self, layout: FileLayout) -> TensorData {
        let data = (self.value)(match self.is_transposed(layout) {
            true => Orientation::Transposed,
            false => Orientation::AsSaved,
        });
        match self.dtype {
            // Files have one byte for each.
            DType::Bool(_) => data.convert_dtype(DType::Bool(BoolStore::Native)),
            _ => data,
        }
    }
}

impl fmt::Debug for SnapshotEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotEntry")
            .field("path", &self.path)
            .field("shape", &self.shape)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

struct EntryVisitor<'a> {
    gathering: Option<Gathering>,
    place: FilePath,
    wanted: &'a dyn Fn(&FilePath) -> bool,
    take: &'a mut dyn FnMut(SnapshotEntry),
}

/// Gathers the pieces of parameters on rank 0.
struct Gathering {
    group: ProcessGroup,
    /// The values so far, for other places of a tied parameter.
    known: HashMap<ParamId, Bytes>,
    /// The first failure. After one of the group, nothing more is gathered.
    failure: Option<Error>,
}

impl Gathering {
    /// Returns the values of the whole parameter.
    fn whole(&mut self, id: ParamId, piece: &Piece, own: &TensorData) -> Bytes {
        if let Some(bytes) = self.known.get(&id) {
            return bytes.clone();
        }
        if self.failure.as_ref().is_some_and(Error::is_collective) {
            return Bytes::from_bytes_vec(Vec::new());
        }
        let width = own.dtype().size();
        let gathered = piece.gather(&self.group, width, own.bytes(), KeptBy::Main);
        let bytes = gathered.unwrap_or_else(|error| {
            self.failure.get_or_insert(error);
            Vec::new()
        });
        let _offloading = Offload::enter(piece.offload.as_ref());
        let bytes = Scratch::of(bytes).into_bytes().shared();
        self.known.insert(id, bytes.clone());
        bytes
    }
}

impl EntryVisitor<'_> {
    fn visit<const D: usize, K: Basic + 'static>(&mut self, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        if !(self.wanted)(&self.place) {
            return;
        }
        let value = param.val();
        let (mut dtype, device) = (value.dtype(), value.device());
        let is_linear_weight = D == 2 && self.place.is_linear_weight();
        let (shape, saved_shape, read): (Vec<usize>, Vec<usize>, ReadValue);
        let piece = piece_of(param.id).filter(|piece| piece.partition.is_divided());
        if let Some(piece) = piece {
            let (_, _, mapper) = param.clone().consume();
            shape = piece.partition.whole_shape().to_vec();
            let sample = Tensor::<D, K>::empty(shape.clone(), (&device, dtype));
            saved_shape = mapper.on_save(sample).dims().to_vec();
            let whole = self
                .gathering
                .as_mut()
                .map(|gathering| gathering.whole(param.id, &piece, &value.clone().into_data()));
            let whole_shape = shape.clone();
            read = Box::new(move |orientation| {
                let Some(whole) = &whole else {
                    return value.clone().into_data();
                };
                let data = TensorData::from_bytes(whole.clone(), whole_shape.clone(), dtype);
                let whole = Tensor::<D, K>::from_data(data, (&device, dtype));
                match orientation {
                    Orientation::Transposed => whole.transpose().into_data(),
                    Orientation::AsSaved => mapper.on_save(whole).into_data(),
                }
            });
        } else {
            let saved = param.transform_for_save().val();
            (shape, saved_shape) = (value.dims().to_vec(), saved.dims().to_vec());
            // The blocks of a quantised matrix are transposed with it.
            dtype = saved.dtype();
            read = Box::new(move |orientation| match orientation {
                Orientation::Transposed => value.clone().transpose().into_data(),
                Orientation::AsSaved => saved.clone().into_data(),
            });
        }
        (self.take)(SnapshotEntry {
            id: param.id.val(),
            dtype,
            path: self.place.name(FileLayout::Burn),
            pytorch_name: self.place.name(FileLayout::PyTorch),
            peft_name: self.place.name(FileLayout::Peft),
            shape,
            saved_shape,
            is_linear_weight,
            is_factor: D == 2 && self.place.adapted().is_some(),
            value: read,
        });
    }
}

impl ModuleVisitor for EntryVisitor<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visit(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.visit(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.visit(param);
    }
}

struct Record<'a> {
    entry: &'a SnapshotEntry,
    name: &'a str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: usize,
}

impl<'a> Record<'a> {
    fn new(entry: &'a SnapshotEntry, layout: FileLayout) -> Result<Self> {
        let name = entry.name(layout);
        let dtype = file_dtype(entry.dtype);
        if matches!(entry.dtype, DType::QFloat(_)) && layout != FileLayout::Burn {
            return Err(Error::model(format!(
                "`{name}` is quantised, and only files in Burn's layout hold quantised parameters: save in that layout, or \
                 `materialize` the model first"
            )));
        }
        let shape = entry.shape(layout);
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        Ok(Self {
            entry,
            name,
            dtype,
            shape,
            bytes,
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
    left_out: Option<&Hashes>,
) -> serde_json::Result<Vec<u8>> {
    let mut metadata: BTreeMap<&str, &str> = aliases
        .iter()
        .filter(|(_, kept)| shard.iter().any(|record| record.name == **kept))
        .map(|(alias, kept)| (*alias, *kept))
        .collect();
    metadata.insert("format", layout.format());
    metadata.insert("layout", layout.name());
    let left_out = left_out.map(serde_json::to_string).transpose()?;
    metadata.extend(left_out.iter().map(|hashes| (LEFT_OUT, &**hashes)));
    let quantized = shard.iter().filter_map(|record| {
        let description = quantization(record.entry.dtype)?;
        Some((quantization_key(record.name), description))
    });
    let quantized: Vec<_> = quantized.collect();
    metadata.extend(quantized.iter().map(|(key, scheme)| (&**key, &**scheme)));
    let mut tensors = Vec::with_capacity(shard.len());
    let mut start = 0;
    for record in shard {
        let end = start + record.bytes;
        let info = TensorInfo {
            dtype: record.dtype,
            shape: record.shape.clone(),
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

/// A header with its metadata in a fixed order, too: the format's own crate keeps them in a hash map.
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

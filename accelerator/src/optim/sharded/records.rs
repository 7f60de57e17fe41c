//! Optimizer records, split by parameter (whole or pieces).

use std::collections::BTreeMap;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType};
use burn_pack::{Reader, Scalar, Tensor, Writer};

use crate::core::error::Result;
use crate::core::offload::Scratch;
use crate::core::partition::{Partition, Piece, byte_range};
use crate::optim::record_io::{bytes_of, reader, unwritable};

/// A record of Burn's, taken apart by parameters.
#[derive(Clone, Default)]
pub(super) struct Records(pub(super) BTreeMap<ParamId, RecordEntry>);

/// The state of a parameter, or of a piece of it.
#[derive(Clone, Default)]
pub(super) struct RecordEntry {
    path: Option<String>,
    scalars: Vec<(String, Scalar)>,
    tensors: Vec<RecordField>,
}

#[derive(Clone)]
pub(super) struct RecordField {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Bytes,
}

impl Records {
    pub(super) fn of(optimizer: &ModuleOptimizer) -> Result<Self> {
        Self::read(bytes_of(optimizer)?)
    }

    pub(super) fn read(record: Bytes) -> Result<Self> {
        let reader: Reader = reader(record)?;
        let mut records = Self::default();
        for (id, path) in reader.metadata() {
            if let Ok(id) = id.parse::<u64>() {
                records.entry(id).path = Some(path.clone());
            }
        }
        for (name, value) in reader.scalars() {
            if let Some((id, name)) = split(name) {
                records.entry(id).scalars.push((name, *value));
            }
        }
        for tensor in reader.into_tensors().map_err(unwritable)? {
            let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(unwritable)?;
            if let Some((id, name)) = split(&name) {
                records.entry(id).tensors.push(RecordField {
                    name,
                    dtype,
                    shape: shape.to_vec(),
                    bytes,
                });
            }
        }
        Ok(records)
    }

    pub(super) fn into_bytes(self) -> Result<Bytes> {
        let mut tensors = Vec::new();
        let (mut scalars, mut paths) = (Vec::new(), Vec::new());
        for (id, entry) in self.0 {
            let id = id.val();
            paths.extend(entry.path.map(|path| (id.to_string(), path)));
            let named = entry.scalars.into_iter();
            scalars.extend(named.map(|(name, value)| (format!("{id}.{name}"), value)));
            tensors.extend(entry.tensors.into_iter().map(|field| {
                let name = format!("{id}.{}", field.name);
                Tensor::new(name, field.dtype, field.shape, Some(id), field.bytes)
            }));
        }
        let mut writer = Writer::new(tensors);
        for (name, value) in scalars {
            writer = writer.with_scalar(&name, value);
        }
        for (id, path) in paths {
            writer = writer.with_metadata(&id, &path);
        }
        let mut bytes = Scratch::zeroed(writer.size().map_err(unwritable)?);
        writer.write_into(bytes.as_mut()).map_err(unwritable)?;
        Ok(bytes.into_bytes().shared())
    }

    pub(super) fn size(&self) -> usize {
        let fields = self.0.values().flat_map(|entry| &entry.tensors);
        fields.map(|field| field.bytes.len()).sum()
    }

    fn entry(&mut self, id: u64) -> &mut RecordEntry {
        self.0.entry(ParamId::from(id)).or_default()
    }
}

impl RecordEntry {
    /// Returns a rank's part of the state of a whole parameter.
    pub(super) fn cut(self, piece: &Piece) -> Option<Self> {
        let (range, partition) = (piece.range(), &piece.partition);
        if range.is_empty() && partition.elements() > 0 {
            return None;
        }
        if range.len() == partition.elements() {
            return Some(self);
        }
        let cut = |field: RecordField| {
            if !field.is_cut_like(partition) {
                return field;
            }
            let place = byte_range(range.clone(), field.dtype.size());
            RecordField {
                shape: piece.shape(),
                bytes: Scratch::of(field.bytes[place].to_vec()).into_bytes(),
                ..field
            }
        };
        Some(Self {
            tensors: self.tensors.into_iter().map(cut).collect(),
            ..self
        })
    }

    /// Takes out the tensors that are cut like the parameter.
    pub(super) fn take_cut(&mut self, partition: &Partition) -> Vec<RecordField> {
        let (cut, rest) = self
            .tensors
            .drain(..)
            .partition(|field| field.is_cut_like(partition));
        self.tensors = rest;
        cut
    }

    pub(super) fn push(&mut self, field: RecordField) {
        self.tensors.push(field);
    }

    /// Joins the ranks' parts of the state of a parameter. Returns `None` if a rank with elements of the parameter has no
    /// state for it, or if its tensors do not match those of the first rank.
    pub(super) fn join(parts: Vec<Option<Self>>, partition: &Partition) -> Option<Self> {
        let mut parts = parts.into_iter().enumerate();
        // A rank without elements of the parameter may have counted fewer steps.
        let holds_some = |rank| !partition.range(rank).is_empty() || partition.elements() == 0;
        let first = |(rank, part): (usize, Option<Self>)| Some((rank, part?));
        let (rank, mut whole) = parts
            .by_ref()
            .filter(|(rank, _)| holds_some(*rank))
            .find_map(first)?;
        let length = partition.range(rank).len();
        if length == partition.elements() {
            return Some(whole);
        }
        let mut reached = partition.range(rank).end;
        let mut rest = Vec::new();
        for (rank, part) in parts {
            let range = partition.range(rank);
            if range.is_empty() {
                continue;
            }
            reached = range.end;
            rest.push((range.len(), part?));
        }
        if partition.range(rank).start != 0 || reached != partition.elements() {
            return None;
        }
        for (at, field) in whole.tensors.iter_mut().enumerate() {
            if field.shape.iter().product::<usize>() != length {
                continue;
            }
            let mut bytes = field.bytes.to_vec();
            for (length, part) in &rest {
                let other = part.tensors.get(at)?;
                if other.name != field.name || other.bytes.len() != length * field.dtype.size() {
                    return None;
                }
                bytes.extend_from_slice(&other.bytes);
            }
            field.bytes = Scratch::of(bytes).into_bytes();
            field.shape = partition.whole_shape().to_vec();
        }
        Some(whole)
    }
}

impl RecordField {
    /// Returns `true` if there is one element for each of the parameter.
    fn is_cut_like(&self, partition: &Partition) -> bool {
        let elements = self.shape.iter().product::<usize>();
        elements == partition.elements() && self.bytes.len() == elements * self.dtype.size()
    }
}

fn split(name: &str) -> Option<(u64, String)> {
    let (id, name) = name.split_once('.')?;
    Some((id.parse().ok()?, name.to_owned()))
}

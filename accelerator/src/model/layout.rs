use core::fmt;
use std::collections::HashMap;

use accelerator_collective::ProcessGroup;
use accelerator_manifest::Parameter;
use burn::module::{
    Module, ModuleMapper, ModuleVisitor, Param, ParamId, Parameter as ParameterTensor,
};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Result};
use crate::core::module::{ModulePath, visit_floats};
use crate::core::partition::{Piece, give_id, piece_of};
use crate::core::tensor::any_rank;

/// The advice, in errors about a replaced parameter, on how to give a parameter another value.
pub(crate) const KEEP_THE_ID: &str = "`Param::from_tensor` makes a parameter with another id, for which an optimizer \
     starts from nothing; to give a parameter another value, keep its id: \
     `Param::initialized(param.id, value.detach().require_grad())`";

/// Every parameter and buffer of a model, in the order in which Burn visits them.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Layout(Vec<LayoutEntry>);

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct LayoutEntry {
    /// Burn's id; random per process until the model is prepared, so no part of the comparison.
    pub(crate) id: u64,
    path: String,
    shape: Vec<usize>,
    dtype: String,
    /// `None` for what takes no gradient.
    trainable: Option<Float>,
    /// The piece, if this rank holds only a piece of the parameter. Not compared either.
    #[serde(skip)]
    piece: Option<Piece>,
}

/// The types in which a parameter can be trained.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum Float {
    Bf16,
    F16,
    F32,
    F64,
}

impl Float {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
            Self::F64 => DType::F64,
        }
    }

    pub(crate) fn width(self) -> usize {
        self.dtype().size()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Trainable {
    pub(crate) id: ParamId,
    pub(crate) path: String,
    /// The shape of what this rank holds of it.
    pub(crate) shape: Vec<usize>,
    pub(crate) float: Float,
    /// Set if this rank holds only a piece of it.
    pub(crate) piece: Option<Piece>,
}

impl Layout {
    pub(crate) fn of(model: &dyn DynModule) -> Self {
        let mut reader = LayoutReader {
            path: ModulePath::default(),
            entries: Vec::new(),
        };
        model.visit(&mut reader);
        Self(reader.entries)
    }

    /// Returns the paths, shapes and ids, and draws nothing.
    pub(crate) fn undrawn(model: &dyn DynModule) -> Self {
        let mut reader = UndrawnReader(LayoutReader {
            path: ModulePath::default(),
            entries: Vec::new(),
        });
        model.visit(&mut reader);
        Self(reader.0.entries)
    }

    pub(crate) fn ids(&self) -> Vec<u64> {
        self.0.iter().map(|entry| entry.id).collect()
    }

    pub(crate) fn path_of(&self, id: u64) -> Option<&str> {
        let mut entries = self.0.iter();
        Some(&entries.find(|entry| entry.id == id)?.path)
    }

    pub(crate) fn parameters(&self) -> impl Iterator<Item = Parameter> {
        self.0.iter().map(|entry| Parameter {
            path: entry.path.clone(),
            id: entry.id.to_string(),
            shape: entry.shape.iter().map(|&size| size as u64).collect(),
            dtype: entry.dtype.clone(),
        })
    }

    /// Returns, for each entry, the first one with its id: another one if a parameter is tied.
    fn first_places(&self) -> Vec<usize> {
        let mut first = HashMap::new();
        let places = self.0.iter().enumerate();
        places
            .map(|(at, entry)| *first.entry(entry.id).or_insert(at))
            .collect()
    }

    /// Compares the layout of a model that was saved with that of this one. What is trained may
    /// differ: parameters can be frozen for the rest.
    pub(crate) fn check_saved(&self, mine: &Self) -> Result<()> {
        let count = self.0.len().max(mine.0.len());
        let fits = |at: &usize| match (self.0.get(*at), mine.0.get(*at)) {
            (Some(saved), Some(mine)) => {
                (&saved.path, &saved.shape, &saved.dtype) == (&mine.path, &mine.shape, &mine.dtype)
            }
            _ => false,
        };
        let (theirs, ours) = (self.first_places(), mine.first_places());
        match (0..count).find(|at| !fits(at)) {
            None => match (0..count).find(|&at| theirs[at] != ours[at]) {
                None => Ok(()),
                Some(at) => Err(Error::model(format!(
                    "the checkpoint does not fit this model: `{}` is {} in the checkpoint, and {} in the \
                         model; build the model that was saved",
                    mine.0[at].path,
                    self.tie(at, &theirs),
                    mine.tie(at, &ours),
                ))),
            },
            Some(at) => Err(Error::model(format!(
                "the checkpoint does not fit this model: at parameter {at} of {count}, it has \
                     {}, and the model has {}; build the model that was saved",
                ShownEntry(self.0.get(at)),
                ShownEntry(mine.0.get(at)),
            ))),
        }
    }

    pub(crate) fn trainable(&self) -> Vec<Trainable> {
        let mut seen = Vec::new();
        let mut parameters = Vec::new();
        for entry in &self.0 {
            // A parameter that is used in two places has one gradient.
            if let Some(float) = entry.trainable
                && !seen.contains(&entry.id)
            {
                seen.push(entry.id);
                parameters.push(Trainable {
                    id: ParamId::from(entry.id),
                    path: entry.path.clone(),
                    shape: match &entry.piece {
                        Some(piece) => piece.shape(),
                        None => entry.shape.clone(),
                    },
                    float,
                    piece: entry.piece.clone(),
                });
            }
        }
        parameters
    }

    /// Compares the layouts of all ranks with rank 0's. All ranks see the same list, so all get
    /// the same error.
    pub(crate) fn check_against(&self, ranks: &[Self]) -> Result<()> {
        let Some((first, others)) = ranks.split_first() else {
            return Ok(());
        };
        let places = first.first_places();
        for (rank, other) in (1..).zip(others) {
            let count = first.0.len().max(other.0.len());
            if let Some(at) = (0..count).find(|&at| !same(first.0.get(at), other.0.get(at))) {
                return Err(Error::model(format!(
                    "the model differs between ranks: at parameter {at} of {count}, rank 0 \
                         has {}, and rank {rank} has {}; build the same model on every rank",
                    ShownEntry(first.0.get(at)),
                    ShownEntry(other.0.get(at)),
                )));
            }
            let theirs = other.first_places();
            if let Some(at) = (0..count).find(|&at| places[at] != theirs[at]) {
                return Err(Error::model(format!(
                    "the model differs between ranks: `{}` is {} on rank 0, and {} on rank {rank}; build the \
                         same model on every rank",
                    first.0[at].path,
                    first.tie(at, &places),
                    other.tie(at, &theirs),
                )));
            }
        }
        Ok(())
    }

    /// Describes an entry whose id others may have.
    fn tie(&self, at: usize, first_places: &[usize]) -> String {
        match first_places[at] {
            first if first == at => "a parameter of its own".to_owned(),
            first => format!("tied to `{}`", self.0[first].path),
        }
    }
}

impl Float {
    pub(crate) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::BF16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            DType::F32 | DType::Flex32 => Some(Self::F32),
            DType::F64 => Some(Self::F64),
            _ => None,
        }
    }
}

fn same(left: Option<&LayoutEntry>, right: Option<&LayoutEntry>) -> bool {
    match (left, right) {
        (Some(left), Some(right)) => {
            left.path == right.path
                && left.shape == right.shape
                && left.dtype == right.dtype
                && left.trainable == right.trainable
        }
        (left, right) => left.is_none() && right.is_none(),
    }
}

struct ShownEntry<'a>(Option<&'a LayoutEntry>);

impl fmt::Display for ShownEntry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(entry) => {
                write!(f, "`{}` of {:?} {}", entry.path, entry.shape, entry.dtype)?;
                if entry.trainable.is_none() {
                    f.write_str(", frozen")
                } else {
                    Ok(())
                }
            }
            None => f.write_str("nothing"),
        }
    }
}

struct LayoutReader {
    path: ModulePath,
    entries: Vec<LayoutEntry>,
}

impl LayoutReader {
    fn push(&mut self, id: ParamId, shape: Vec<usize>, dtype: DType, trainable: Option<Float>) {
        let piece = piece_of(id);
        let shape = match &piece {
            Some(piece) => piece.partition.whole_shape().to_vec(),
            None => shape,
        };
        self.entries.push(LayoutEntry {
            id: id.val(),
            path: self.path.as_str().to_owned(),
            shape,
            dtype: format!("{dtype:?}").to_lowercase(),
            trainable,
            piece,
        });
    }
}

impl ModuleVisitor for LayoutReader {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let dtype = value.dtype();
        let trainable = Float::of(dtype).filter(|_| value.is_require_grad());
        self.push(param.id, value.dims().to_vec(), dtype, trainable);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let value = param.val();
        self.push(param.id, value.dims().to_vec(), value.dtype(), None);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let value = param.val();
        self.push(param.id, value.dims().to_vec(), value.dtype(), None);
    }
}

/// Reads a layout without initializing parameters.
struct UndrawnReader(LayoutReader);

impl UndrawnReader {
    fn push<T: ParameterTensor>(&mut self, param: &Param<T>) {
        // A layer may transpose a parameter when it is initialized.
        let mut shape = param.lazy_shape().to_vec();
        shape.sort_unstable();
        self.0.entries.push(LayoutEntry {
            id: param.id.val(),
            path: self.0.path.as_str().to_owned(),
            shape,
            dtype: String::new(),
            trainable: None,
            piece: None,
        });
    }
}

impl ModuleVisitor for UndrawnReader {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter_module(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit_module(name, container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.push(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.push(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.push(param);
    }
}

const CHUNK: usize = 64 << 20;

/// Gives every rank rank 0's values and parameter ids. The layouts were compared before. Pieces of parameters keep their
/// values.
///
/// Ids must be equal since optimizer records are keyed by them.
#[track_caller]
pub(crate) fn from_rank_zero(
    group: &ProcessGroup,
    model: BoxedModule,
    layout: &Layout,
) -> Result<BoxedModule> {
    let mut ids = layout.ids();
    group.broadcast(&mut ids, 0)?;
    let mut reader = ReplicaSource { values: Vec::new() };
    model.visit(&mut reader);
    let values = broadcast(group, reader.values)?;
    let model = match group.rank() {
        0 => model,
        _ => model.map(&mut ReplicaWriter {
            ids: ids.into_iter(),
            values: values.into_iter(),
        }),
    };
    #[cfg(target_os = "linux")]
    let model = super::shared::share_frozen(group, model)?;
    Ok(model)
}

pub(crate) fn float_values(model: &dyn DynModule) -> Vec<(String, Vec<f32>)> {
    let mut values = Vec::new();
    visit_floats(model, |float| {
        let value = any_rank(&float.value);
        let value = match value.dtype() {
            DType::QFloat(_) => value.dequantize(),
            _ => value,
        };
        // It is of that type now.
        let data = value.into_data().convert_dtype(DType::F32).try_to_vec();
        values.push((float.path.to_owned(), data.unwrap_or_default()));
    });
    values
}

/// Replaces `values` by rank 0's, several in one broadcast.
#[track_caller]
fn broadcast(group: &ProcessGroup, values: Vec<TensorData>) -> Result<Vec<TensorData>> {
    let mut theirs = Vec::with_capacity(values.len());
    let mut rest = values.into_iter().peekable();
    let mut flat = Vec::new();
    while rest.peek().is_some() {
        flat.clear();
        let mut parts = Vec::new();
        while let Some(value) =
            rest.next_if(|value| flat.is_empty() || flat.len() + value.bytes().len() <= CHUNK)
        {
            let start = flat.len();
            flat.extend_from_slice(value.bytes());
            parts.push((start..flat.len(), value.shape().clone(), value.dtype()));
        }
        group.broadcast(&mut flat, 0)?;
        theirs.extend(parts.into_iter().map(|(range, shape, dtype)| {
            TensorData::from_bytes_vec(flat[range].to_vec(), shape, dtype)
        }));
    }
    Ok(theirs)
}

struct ReplicaSource {
    values: Vec<TensorData>,
}

impl ModuleVisitor for ReplicaSource {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if piece_of(param.id).is_none() {
            self.values.push(param.val().into_data());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.values.push(param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.values.push(param.val().into_data());
    }
}

/// Maps in the order in which [`ReplicaSource`] visits.
struct ReplicaWriter {
    ids: std::vec::IntoIter<u64>,
    values: std::vec::IntoIter<TensorData>,
}

impl ReplicaWriter {
    fn map<const D: usize, K: Basic>(
        &mut self,
        mut param: Param<Tensor<D, K>>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: ParameterTensor,
    {
        let is_piece = piece_of(param.id).is_some();
        if let Some(id) = self.ids.next() {
            give_id(&mut param, ParamId::from(id));
        }
        if is_piece {
            return param;
        }
        let Some(data) = self.values.next() else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let new = Tensor::<D, K>::from_data(data, (&old.device(), old.dtype()))
            .set_require_grad(old.is_require_grad());
        Param::from_mapped_value(id, new, mapper)
    }
}

impl ModuleMapper for ReplicaWriter {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.map(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.map(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.map(param)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::quantization::QuantScheme;

    use super::*;

    fn entry(path: &str, shape: &[usize]) -> LayoutEntry {
        LayoutEntry {
            id: 1,
            path: path.to_owned(),
            shape: shape.to_vec(),
            dtype: "f32".to_owned(),
            trainable: Some(Float::F32),
            piece: None,
        }
    }

    #[test]
    fn the_first_difference_and_its_rank_are_named() {
        let good = Layout(vec![entry("a.weight", &[2, 3]), entry("a.bias", &[3])]);
        let wide = Layout(vec![entry("a.weight", &[2, 3]), entry("a.bias", &[4])]);
        let error = good
            .check_against(&[good.clone(), good.clone(), wide])
            .unwrap_err();
        assert!(error.is_model());
        let text = error.to_string();
        assert!(
            text.contains("rank 2") && text.contains("`a.bias` of [4]"),
            "{text}"
        );
    }

    #[test]
    fn quantised_values_are_read_as_floats() {
        let device = burn::tensor::Device::default();
        let weight = Param::from_tensor(Tensor::<2>::ones([2, 4], &device));
        let weight = weight.map(|value| value.quantize_dynamic(&QuantScheme::default()));
        let [(path, values)] = &float_values(&weight)[..] else {
            panic!("one parameter");
        };
        assert_eq!((&**path, values.len()), ("", 8));
        assert!(values.iter().all(|value| (value - 1.0).abs() < 0.02));
    }

    #[test]
    fn a_shorter_layout_differs() {
        let long = Layout(vec![entry("a", &[1]), entry("b", &[1])]);
        let short = Layout(vec![entry("a", &[1])]);
        let text = long
            .check_against(&[long.clone(), short])
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("`b`") && text.contains("rank 1 has nothing"),
            "{text}"
        );
    }

    #[test]
    fn ids_do_not_count() {
        let mut other = Layout(vec![entry("a", &[1])]);
        other.0[0].id = 99;
        let layout = Layout(vec![entry("a", &[1])]);
        layout.check_against(&[layout.clone(), other]).unwrap();
    }
}

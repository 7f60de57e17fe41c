//! The values of all parameters of a model: read, or replaced by those of rank 0.

use accelerator_collective::ProcessGroup;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Parameter};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};

use super::layout::Layout;
use crate::core::error::Result;
use crate::core::module_path::ModulePath;

/// The number of bytes of parameters per broadcast.
const CHUNK: usize = 64 << 20;

/// Gives every rank rank 0's values and parameter ids. The layouts were compared before.
///
/// Ids must be equal since optimizer records are keyed by them.
#[track_caller]
pub(crate) fn from_rank_zero<M: Module>(
    group: &ProcessGroup,
    model: M,
    layout: &Layout,
) -> Result<M> {
    let mut ids = layout.ids();
    group.broadcast(&mut ids, 0)?;
    let mut reader = ReplicaSource { values: Vec::new() };
    model.visit(&mut reader);
    let values = broadcast(group, reader.values)?;
    if group.rank() == 0 {
        return Ok(model);
    }
    Ok(model.map(&mut ReplicaWriter {
        ids: ids.into_iter(),
        values: values.into_iter(),
    }))
}

/// Returns the values of all parameters that are floats, by their paths.
pub(crate) fn float_values<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    let mut reader = ValueReader {
        path: ModulePath::default(),
        values: Vec::new(),
    };
    model.visit(&mut reader);
    reader.values
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
        self.values.push(param.val().into_data());
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
    fn map<const D: usize, K: Basic>(&mut self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        let (Some(id), Some(data)) = (self.ids.next(), self.values.next()) else {
            return param;
        };
        let (_, old, mapper) = param.consume();
        let new = Tensor::<D, K>::from_data(data, (&old.device(), old.dtype()))
            .set_require_grad(old.is_require_grad());
        Param::from_mapped_value(ParamId::from(id), new, mapper)
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

struct ValueReader {
    path: ModulePath,
    values: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for ValueReader {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let data = param.val().into_data().convert_dtype(DType::F32);
        // It is of that type now.
        let values = data.try_to_vec().unwrap_or_default();
        self.values.push((self.path.as_str().to_owned(), values));
    }
}

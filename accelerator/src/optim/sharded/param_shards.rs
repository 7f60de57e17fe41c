use core::fmt;
use core::ops::Range;
use std::collections::{HashMap, HashSet};

use burn::backend::DispatchTensor;
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bytes, Device, Shape, Tensor};

use super::partition::Partition;
use crate::core::module_path::ModulePath;
use crate::core::tensor_rank::with_rank;
use crate::optim::fused::step;

/// This rank's pieces of parameters, as a module that Burn's optimizers step. They have the ids,
/// paths and numbers of dimensions of what they are pieces of.
#[derive(Clone, Default)]
pub(super) struct ParamShards(Vec<ParamShard>);

#[derive(Clone)]
pub(super) struct ParamShard {
    pub(super) id: ParamId,
    path: String,
    /// The elements of the parameter that it has.
    pub(super) range: Range<usize>,
    shape: Vec<usize>,
    /// The source of its gradient, and the place of its result.
    pub(super) sums: ShardGradients,
    /// The elements, on a plain device.
    pub(super) value: DispatchTensor,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ShardGradients {
    /// Its gradient was copied.
    Copied,
    /// Its gradient stands for them.
    Waiting,
    /// It lies in their place, and its value is the old one.
    Replaced,
}

impl ParamShards {
    pub(super) fn one(id: ParamId, path: &str, shape: Vec<usize>, value: DispatchTensor) -> Self {
        Self(vec![ParamShard {
            id,
            path: path.to_owned(),
            range: 0..shape.iter().product(),
            shape,
            sums: ShardGradients::Copied,
            value,
        }])
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut ParamShard> {
        self.0.iter_mut()
    }

    /// Returns the shards that do not lie in the place of their sums.
    pub(super) fn into_elsewhere(self) -> impl Iterator<Item = ParamShard> {
        let shards = self.0.into_iter();
        shards.filter(|shard| shard.sums != ShardGradients::Replaced)
    }

    /// The values.
    pub(super) fn into_bytes(self) -> impl Iterator<Item = (ParamId, Bytes)> {
        self.0
            .into_iter()
            .map(|shard| (shard.id, shard.into_bytes()))
    }
}

impl From<ParamShard> for ParamShards {
    fn from(shard: ParamShard) -> Self {
        Self(vec![shard])
    }
}

impl ParamShard {
    pub(super) fn dimensions(&self) -> usize {
        self.shape.len()
    }

    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The values.
    pub(super) fn into_bytes(self) -> Bytes {
        let data = Tensor::<1>::from_dispatch(self.value).into_data();
        data.into_parts().0
    }
}

impl Module for ParamShards {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _device: &Device) -> Self {
        self
    }

    fn to_device(self, _device: &Device) -> Self {
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        for shard in &self.0 {
            visitor.enter_module(&shard.path, "");
            with_rank!(shard.dimensions(), D => {
                let value = Tensor::<D>::from_dispatch(shard.value.clone());
                visitor.visit_float(&Param::initialized(shard.id, leaf(value)));
            });
            visitor.exit_module(&shard.path, "");
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let map = |mut shard: ParamShard| {
            mapper.enter_module(&shard.path, "");
            shard.value = with_rank!(shard.dimensions(), D => {
                let value = leaf(Tensor::<D>::from_dispatch(shard.value));
                let step = || mapper.map_float(Param::initialized(shard.id, value));
                let (param, replaced) = match shard.sums {
                    ShardGradients::Waiting => step::step_next(shard.id, shard.range.clone(), step),
                    ShardGradients::Copied | ShardGradients::Replaced => (step(), false),
                };
                if replaced {
                    shard.sums = ShardGradients::Replaced;
                }
                let (_, value, _) = param.consume();
                value.inner().into_dispatch()
            });
            mapper.exit_module(&shard.path, "");
            shard
        };
        Self(self.0.into_iter().map(map).collect())
    }
}

impl fmt::Debug for ParamShards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths = self.0.iter().map(|shard| (&shard.path, &shard.range));
        f.debug_map().entries(paths).finish()
    }
}

/// Takes this rank's pieces out of a model, of the parameters that have a gradient, and notes which all
/// ranks step.
pub(super) struct ShardReader<'a> {
    rank: usize,
    partitions: &'a HashMap<ParamId, Partition>,
    averaged: HashSet<ParamId>,
    path: ModulePath,
    shards: ParamShards,
    stepped: HashSet<ParamId>,
}

impl<'a> ShardReader<'a> {
    /// Creates a reader for the parameters with these ids.
    pub(super) fn new(
        rank: usize,
        partitions: &'a HashMap<ParamId, Partition>,
        averaged: HashSet<ParamId>,
    ) -> Self {
        Self {
            rank,
            partitions,
            averaged,
            path: ModulePath::default(),
            shards: ParamShards::default(),
            stepped: HashSet::new(),
        }
    }

    pub(super) fn finish(self) -> (ParamShards, HashSet<ParamId>) {
        (self.shards, self.stepped)
    }
}

impl ModuleVisitor for ShardReader<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // A tied parameter is stepped in its first place, as by Burn.
        if !self.averaged.remove(&param.id) {
            return;
        }
        let Some(partition) = self.partitions.get(&param.id) else {
            return;
        };
        let value = param.val().inner();
        self.stepped.insert(param.id);
        let range = partition.range(self.rank);
        if range.is_empty() {
            return;
        }
        let shape = partition.shape(self.rank);
        let value = if range.len() == partition.elements() {
            value
        } else {
            let flat = value.reshape([partition.elements()]).slice([range.clone()]);
            flat.reshape(Shape::from(shape.clone()))
        };
        self.shards.0.push(ParamShard {
            id: param.id,
            path: self.path.as_str().to_owned(),
            range,
            shape,
            sums: ShardGradients::Copied,
            value: value.into_dispatch(),
        });
    }
}

/// A tensor of plain values as one whose gradient is known.
pub(super) fn leaf<const D: usize>(value: Tensor<D>) -> Tensor<D> {
    Tensor::from_inner(value).require_grad()
}

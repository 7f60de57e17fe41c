use core::fmt;
use core::ops::Range;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Bytes, Device, Shape, Tensor, TensorData};

use crate::core::module::ModulePath;
use crate::core::partition::Partition;
use crate::core::tensor::{from_data, register, with_rank};
use crate::model::Trainable;
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
    pub(super) shape: Vec<usize>,
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
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut ParamShard> {
        self.0.iter_mut()
    }

    /// Returns the shards that do not lie in the place of their sums.
    pub(super) fn into_elsewhere(self) -> impl Iterator<Item = ParamShard> {
        let shards = self.0.into_iter();
        shards.filter(|shard| shard.sums != ShardGradients::Replaced)
    }
}

impl ParamShard {
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
            with_rank!(shard.shape.len(), D => {
                let value = Tensor::<D>::from_dispatch(shard.value.clone());
                visitor.visit_float(&Param::initialized(shard.id, leaf(value)));
            });
            visitor.exit_module(&shard.path, "");
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let map = |mut shard: ParamShard| {
            mapper.enter_module(&shard.path, "");
            shard.value = with_rank!(shard.shape.len(), D => {
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
    partitions: &'a HashMap<ParamId, Arc<Partition>>,
    averaged: HashSet<ParamId>,
    path: ModulePath,
    shards: ParamShards,
    stepped: HashSet<ParamId>,
}

impl<'a> ShardReader<'a> {
    pub(super) fn new(
        rank: usize,
        partitions: &'a HashMap<ParamId, Arc<Partition>>,
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

/// Elements of the tensor that is stepped: 8 rows and 6 columns, where there are two dimensions.
const ELEMENTS: usize = 48;
/// The sizes of the gradients of the steps: an optimizer that clips by itself does so at one of them.
const SCALES: [f64; 3] = [1.0, 1e-3, 1e3];

/// Returns `true` if an optimizer without state steps each element of a parameter by itself: a small tensor in
/// its place comes out the same, bit for bit, as a whole and in pieces.
///
/// Numbers are fixed, but processors with other vectors may round otherwise: one rank asks, and tells the others.
pub(super) fn is_element_wise(
    blank: &ModuleOptimizer,
    parameter: &Trainable,
    device: &Device,
) -> bool {
    // It may be by norm, for a group that cannot be asked for.
    if blank.has_gradient_clipping() {
        return false;
    }
    let probe = || {
        let run = |from, to| run(&mut blank.clone(), parameter, device, from, to);
        let whole = run(0, ELEMENTS);
        whole == [run(0, 10), run(10, 33), run(33, ELEMENTS)].concat()
    };
    // An optimizer may refuse a shape.
    catch_unwind(AssertUnwindSafe(probe)).unwrap_or(false)
}

/// An optimizer without state, after it has stepped a small tensor in the place of a parameter; `None` if it
/// does not step such tensors.
pub(in crate::optim) fn step_sample(
    blank: &ModuleOptimizer,
    parameter: &Trainable,
    device: &Device,
) -> Option<ModuleOptimizer> {
    let mut optimizer = blank.clone();
    let probe = || run(&mut optimizer, parameter, device, 0, ELEMENTS);
    // An optimizer may refuse a shape.
    let stepped = catch_unwind(AssertUnwindSafe(probe));
    stepped.ok().map(|_| optimizer)
}

/// The values of elements `from` to `to` after three steps.
fn run(
    optimizer: &mut ModuleOptimizer,
    parameter: &Trainable,
    device: &Device,
    from: usize,
    to: usize,
) -> Vec<u8> {
    let mut shape = vec![1; parameter.shape.len().max(1)];
    if to - from == ELEMENTS && shape.len() > 1 {
        (shape[0], shape[1]) = (8, ELEMENTS / 8);
    } else {
        shape[0] = to - from;
    }
    let (id, dtype) = (parameter.id, parameter.float.dtype());
    let tensor = |seed: u64, scale: f64| {
        let values: Vec<f64> = (from..to).map(|at| scale * noise(seed, at)).collect();
        let data = TensorData::new(values, shape.clone()).convert_dtype(dtype);
        from_data(data, device)
    };
    let start = tensor(0, 1.0);
    let mut shards = ParamShards(vec![ParamShard {
        id,
        path: parameter.path.clone(),
        range: 0..to - from,
        shape: shape.clone(),
        sums: ShardGradients::Copied,
        value: start,
    }]);
    for (step, scale) in (1..).zip(SCALES) {
        let mut gradients = GradientsParams::new();
        register(&mut gradients, id, tensor(step, scale));
        shards = optimizer.step(0.01, shards, gradients);
    }
    let shards = shards.0.into_iter();
    shards
        .flat_map(|shard| shard.into_bytes().to_vec())
        .collect()
}

/// A number between -1 and 1 that depends on nothing else: Knuth's multiplicative hash, twice.
fn noise(seed: u64, at: usize) -> f64 {
    let mut bits = (seed << 32) + at as u64 + 1;
    for _ in 0..2 {
        bits = bits.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits ^= bits >> 29;
    }
    (bits >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::grad_clipping::GradientClippingConfig;
    use burn::module::{ParamGroup, ParamId};
    use burn::optim::momentum::MomentumConfig;
    use burn::optim::{
        AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig,
        LionConfig, MuonConfig, RmsPropConfig, SgdConfig,
    };

    use super::*;
    use crate::model::Float;
    use crate::optim::InitFused;
    use crate::optim::unsharded::is_fused;

    fn is_cut(optimizer: ModuleOptimizer, path: &str, shape: &[usize], float: Float) -> bool {
        let parameter = Trainable {
            id: ParamId::new(),
            path: path.to_owned(),
            shape: shape.to_vec(),
            float,
            piece: None,
        };
        is_element_wise(&optimizer, &parameter, &Device::flex())
    }

    #[test]
    fn burns_optimizers_are_told_apart() {
        let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        let by_element: [(&str, ModuleOptimizer); 9] = [
            ("adagrad", AdaGradConfig::new().init()),
            ("adam", AdamConfig::new().init()),
            ("adamw", AdamWConfig::new().init()),
            ("adan", AdanConfig::new().init()),
            ("fused", AdamWConfig::new().init_fused()),
            ("lion", LionConfig::new().init()),
            ("momentum", momentum.init()),
            ("rmsprop", RmsPropConfig::new().init()),
            ("sgd", SgdConfig::new().init()),
        ];
        for (name, optimizer) in by_element {
            for float in [Float::F32, Float::F64] {
                for shape in [&[300][..], &[30, 10], &[5, 6, 10]] {
                    assert!(
                        is_cut(optimizer.clone(), "", shape, float),
                        "{name} {shape:?}"
                    );
                }
            }
        }
        let whole: [(&str, ModuleOptimizer); 4] = [
            ("adafactor", AdafactorConfig::new().init()),
            ("lamb", LambConfig::new().init()),
            ("muon", MuonConfig::new().init()),
            (
                "clipped",
                AdamWConfig::new()
                    .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
                    .init(),
            ),
        ];
        for (name, optimizer) in whole {
            assert!(!is_cut(optimizer, "", &[30, 10], Float::F32), "{name}");
        }
    }

    #[test]
    fn what_is_fused_is_found_out() {
        let fused = || AdamWConfig::new().init_fused();
        let group = ParamGroup::from_predicate("special");
        let sgd = SgdConfig::new().build();
        let clipping = GradientClippingConfig::Norm(1.0);
        let cases = [
            (fused(), "layer.weight", Float::F32, true),
            (fused(), "layer.weight", Float::F64, true),
            // Burn's operations, with gradients of that type.
            (fused(), "layer.weight", Float::F16, false),
            (SgdConfig::new().init_fused(), "", Float::F32, true),
            (SgdConfig::new().init(), "", Float::F32, false),
            (
                fused().with_group(group, sgd, None),
                "special",
                Float::F32,
                false,
            ),
            // It clips the gradient itself.
            (
                fused().with_grad_clipping(clipping.init()),
                "",
                Float::F32,
                false,
            ),
        ];
        for (optimizer, path, float, expected) in cases {
            let parameter = Trainable {
                id: ParamId::new(),
                path: path.to_owned(),
                shape: vec![30, 10],
                float,
                piece: None,
            };
            let found = is_fused(&optimizer, &parameter, &Device::flex());
            assert_eq!(found, expected, "{path} {float:?}");
        }
    }

    #[test]
    fn a_group_is_asked_for_its_own() {
        let group = ParamGroup::from_predicate("special");
        let optimizer = || {
            let lamb = LambConfig::new().build();
            SgdConfig::new()
                .init()
                .with_group(group.clone(), lamb, None)
        };
        assert!(is_cut(optimizer(), "layer.weight", &[30, 10], Float::F32));
        assert!(!is_cut(
            optimizer(),
            "special.weight",
            &[30, 10],
            Float::F32
        ));
    }
}

//! State of the size that steps leave, for a trial of what else fits in memory.

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};

use super::param_shards::{ParamShard, ParamShards, ShardReader};
use super::partition::Partitioner;
use super::{Shards, probe};
use crate::core::tensor_rank::with_rank;
use crate::model::Trainable;

/// An optimizer without state, after it has stepped what this rank has of a model's parameters. The model stays as
/// it is.
///
/// One parameter is stepped after the other, beside gradients of all: that takes the memory that a step takes, but for
/// copies of the parameters.
pub(in crate::optim) fn state_for_trial<M: Module>(
    mut optimizer: ModuleOptimizer,
    shards: Option<&Shards>,
    model: &M,
    parameters: &[Trainable],
    device: &Device,
) -> ModuleOptimizer {
    let (rank, ranks) = shards.map_or((0, 1), |shards| {
        (shards.group.rank(), shards.group.world_size())
    });
    let mut partitions = Partitioner::new(ranks);
    for parameter in parameters {
        // Where the processors of ranks round otherwise, it is rank 0 whose answer counts in a step: this is about
        // sizes alone.
        partitions.settle(parameter, || {
            shards.is_some_and(|shards| probe::is_element_wise(&shards.blank, parameter, device))
        });
    }
    let ids = parameters.iter().map(|parameter| parameter.id).collect();
    let mut reader = ShardReader::new(rank, partitions.known(), ids);
    model.visit(&mut reader);
    let (shards, _) = reader.finish();
    let with_gradient = |shard: ParamShard| {
        let mut gradients = GradientsParams::new();
        with_rank!(shard.dimensions(), D => {
            let value = Tensor::<D>::from_dispatch(shard.value.clone());
            gradients.register(shard.id, value.ones_like());
        });
        (shard, gradients)
    };
    let shards: Vec<_> = shards.into_elsewhere().map(with_gradient).collect();
    for (shard, gradients) in shards {
        drop(optimizer.step(0.0, ParamShards::from(shard), gradients));
    }
    optimizer
}

//! The state of an optimizer whose model holds pieces of parameters, as one with sharded units does.

use std::collections::HashMap;

use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::Device;

use super::param_shards::is_element_wise;
use super::records::Records;
use super::{FullState, Shards};
use crate::context::Context;
use crate::core::dyn_module::DynModule;
use crate::core::error::{Error, Result};
use crate::core::partition::Partition;
use crate::model::Layout;
use crate::optim::record_io::load;
use crate::unit;

/// The pieces of parameters that an optimizer steps on this rank.
pub(in crate::optim) struct PieceState {
    rank: usize,
    device: Device,
    /// The partitions of the parameters of all models that were stepped.
    partitions: HashMap<ParamId, Partition>,
}

impl PieceState {
    pub(in crate::optim) fn new(context: &Context) -> Self {
        Self {
            rank: context.rank(),
            device: context.device.clone(),
            partitions: HashMap::new(),
        }
    }

    /// Before a step, finds the parameters of which the model holds pieces. When they are first stepped, it cuts the state
    /// that was loaded for them to this rank's part.
    pub(in crate::optim) fn settle(
        &mut self,
        model: &dyn DynModule,
        optimizer: &mut ModuleOptimizer,
        shards: Option<&Shards>,
    ) -> Result<()> {
        let mut found = unit::partitions(model);
        if found.iter().any(|(id, partition)| {
            let settled = self.partitions.get(id);
            settled.is_some_and(|settled| settled != partition)
        }) {
            return Err(Error::misuse(
                "the model was prepared again, and its sharded parameters are now divided differently from when the \
                 optimizer last stepped: call `save_state` before you prepare the model again, and `resume` afterwards",
            ));
        }
        found.retain(|id, _| !self.partitions.contains_key(id));
        if found.is_empty() {
            return Ok(());
        }
        if shards.is_some() {
            return Err(Error::misuse(
                "the optimizer was prepared as `Sharded`, but its model has sharded units, whose optimizer state is \
                 divided among the ranks already: prepare the optimizer without `Sharded`",
            ));
        }
        self.check(model, &found, optimizer)?;
        self.cut(optimizer, &found)?;
        self.partitions.extend(found);
        Ok(())
    }

    /// Forgets what was settled: the optimizer has loaded the state of whole parameters.
    pub(in crate::optim) fn reset(&mut self) {
        self.partitions.clear();
    }

    pub(in crate::optim) fn full_state(&self) -> Option<FullState> {
        (!self.partitions.is_empty()).then(|| FullState::of_pieces(self.partitions.clone()))
    }

    /// Rejects an optimizer that is not element-wise.
    fn check(
        &self,
        model: &dyn DynModule,
        partitions: &HashMap<ParamId, Partition>,
        optimizer: &ModuleOptimizer,
    ) -> Result<()> {
        let blank = optimizer.clone().load_record(OptimizerRecord::default());
        let mut parameters = Layout::of(model).trainable().into_iter();
        let whole = parameters.find(|parameter| {
            partitions.contains_key(&parameter.id)
                && !is_element_wise(&blank, parameter, &self.device)
        });
        let Some(parameter) = whole else {
            return Ok(());
        };
        Err(Error::misuse(format!(
            "the optimizer does not step each element of `{}` independently, but each rank has only a piece of this \
             parameter: use SGD, Adam, AdamW or another element-wise optimizer, with no gradient clipping in its \
             configuration (call `clip_norm`, which uses the norm over all ranks), or set `units` to `recompute`",
            parameter.path
        )))
    }

    /// Keeps this rank's part of the state of these parameters.
    fn cut(
        &self,
        optimizer: &mut ModuleOptimizer,
        partitions: &HashMap<ParamId, Partition>,
    ) -> Result<()> {
        let mut records = Records::of(optimizer)?;
        if !records.0.keys().any(|id| partitions.contains_key(id)) {
            return Ok(());
        }
        for (id, partition) in partitions {
            if let Some(entry) = records.0.remove(id)
                && let Some(entry) = entry.cut(partition, self.rank)
            {
                records.0.insert(*id, entry);
            }
        }
        let blank = optimizer.clone().load_record(OptimizerRecord::default());
        *optimizer = load(
            "an optimizer of sharded units",
            blank,
            records.into_bytes()?,
        )?;
        Ok(())
    }
}

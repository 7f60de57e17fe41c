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
    /// `None` until the optimizer has a model to step.
    partitions: Option<HashMap<ParamId, Partition>>,
}

impl PieceState {
    pub(in crate::optim) fn new(context: &Context) -> Self {
        Self {
            rank: context.rank(),
            device: context.device.clone(),
            partitions: None,
        }
    }

    /// Settles before the first step which parameters the model holds pieces of: the optimizer keeps this rank's part of
    /// the state that it was loaded with.
    pub(in crate::optim) fn settle(
        &mut self,
        model: &dyn DynModule,
        optimizer: &mut ModuleOptimizer,
        shards: Option<&Shards>,
    ) -> Result<()> {
        if self.partitions.is_some() {
            return Ok(());
        }
        let partitions = unit::partitions(model);
        if !partitions.is_empty() {
            if shards.is_some() {
                return Err(Error::misuse(
                    "an optimizer was prepared as `Sharded`, and its model has sharded units, whose state lies on the ranks \
                     already: prepare the optimizer without `Sharded`",
                ));
            }
            self.check(model, optimizer)?;
            *optimizer = self.cut(optimizer, &partitions)?;
        }
        self.partitions = Some(partitions);
        Ok(())
    }

    /// Forgets what was settled: the optimizer has loaded the state of whole parameters.
    pub(in crate::optim) fn reset(&mut self) {
        self.partitions = None;
    }

    pub(in crate::optim) fn full_state(&self) -> Option<FullState> {
        let partitions = self.partitions.as_ref()?;
        (!partitions.is_empty()).then(|| FullState::of_pieces(partitions.clone()))
    }

    /// Refuses an optimizer that looks at parameters as a whole.
    fn check(&self, model: &dyn DynModule, optimizer: &ModuleOptimizer) -> Result<()> {
        let blank = optimizer.clone().load_record(OptimizerRecord::default());
        let mut parameters = Layout::of(model).trainable().into_iter();
        let whole = parameters.find(|parameter| {
            parameter.piece.is_some() && !is_element_wise(&blank, parameter, &self.device)
        });
        let Some(parameter) = whole else {
            return Ok(());
        };
        Err(Error::misuse(format!(
            "the optimizer does not step each element of `{}` by itself, and each rank holds a piece of it: use SGD, Adam, \
             AdamW or another one that does, without gradient clipping in its configuration (`clip_norm` clips by the norm \
             of all ranks), or set `units` to `recompute`",
            parameter.path
        )))
    }

    fn cut(
        &self,
        optimizer: &ModuleOptimizer,
        partitions: &HashMap<ParamId, Partition>,
    ) -> Result<ModuleOptimizer> {
        let mut records = Records::of(optimizer)?;
        if !records.0.keys().any(|id| partitions.contains_key(id)) {
            return Ok(optimizer.clone());
        }
        for (id, partition) in partitions {
            if let Some(entry) = records.0.remove(id)
                && let Some(entry) = entry.cut(partition, self.rank)
            {
                records.0.insert(*id, entry);
            }
        }
        let blank = optimizer.clone().load_record(OptimizerRecord::default());
        load(
            "an optimizer of sharded units",
            blank,
            records.into_bytes()?,
        )
    }
}

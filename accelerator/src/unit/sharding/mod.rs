//! Units whose parameters are sharded over the ranks (ZeRO stage 3). Each rank holds one piece of every trainable
//! parameter, and the whole parameters of a unit only while the unit runs. See the README of `unit`.

mod cut;
mod exchange;
mod join;

use std::sync::Arc;

use burn::module::{ModuleMapper, Param, Parameter};
use burn::tensor::{Bool, Int, Tensor};

pub(super) use self::cut::Cutter;
pub(super) use self::exchange::{BlockGradient, Pass, Sharding, weigh};
pub(crate) use self::join::whole;
use crate::context::Context;
use crate::core::agreement;
use crate::core::draws::drawing;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::{Error, Result};

/// Distributes the parameters of a model's units over the ranks: each is cut, and a rank keeps its piece. Values and ids
/// are those of rank 0. Parameters that rank 0 has not drawn yet are drawn one after the other, in the order of the model;
/// other ranks do not draw those of units. All ranks call it, with models of the same layout.
#[track_caller]
pub(crate) fn shard(context: &Arc<Context>, model: BoxedModule) -> Result<BoxedModule> {
    let group = context.group.for_purpose("shard a model");
    let cutter = Cutter::new(context, group.clone(), &model);
    // All ranks have reached this call, so rank 0 can hold the lock on the generator without blocking a rank that has
    // yet to join.
    let turn = context.is_main_process().then(drawing);
    let mut first = DrawInOrder(context.is_main_process());
    let (model, cutter) = cutter.applied_to(model, &mut first);
    drop(turn);
    // Every unit puts it back.
    let cutter = cutter.ok_or_else(|| Error::model("the units of a model could not be changed"))?;
    // Waits for rank 0 to finish, so that no other rank draws in between.
    agreement::together(&group, cutter.finish(), "shard a model")?;
    context.forward_collectives.note();
    Ok(model)
}

/// Initializes parameters outside units, in the order of the model.
struct DrawInOrder(bool);

impl DrawInOrder {
    fn draw<T: Parameter>(&self, param: Param<T>) -> Param<T> {
        if self.0 {
            drop(param.base());
        }
        param
    }
}

impl ModuleMapper for DrawInOrder {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.draw(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.draw(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.draw(param)
    }
}

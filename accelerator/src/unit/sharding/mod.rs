//! Units whose parameters are sharded over the ranks (ZeRO stage 3). Each rank holds one piece of every trainable
//! parameter, and the whole parameters of a unit only while the unit runs. See the README of `unit`.

mod cut;
mod exchange;
mod join;

use core::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Parameter};
use burn::tensor::{Bool, Int, Tensor};

use self::cut::{Cuts, Cutter};
pub(super) use self::exchange::{BlockGradient, Pass, Sharding, weigh};
use self::join::{Joiner, UnitPartitions};
use crate::context::Context;
use crate::core::agreement;
use crate::core::draws::drawing;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Result};
use crate::core::module::Unchanged;
use crate::core::partition::{Partition, partition_of};
use crate::model::TiedParameters;

/// Distributes the parameters of a model's units over the ranks: each is cut, and a rank keeps its piece. Values and ids
/// are those of rank 0. Parameters that rank 0 has not drawn yet are drawn one after the other, in the order of the model;
/// other ranks do not draw those of units. All ranks call it, with models of the same layout.
#[track_caller]
pub(crate) fn shard(context: &Arc<Context>, model: BoxedModule) -> Result<BoxedModule> {
    let group = context.group.for_purpose("shard a model");
    let cutter = Cutter::new(context, Cuts::even(&group, &model));
    // All ranks have reached this call, so rank 0 can hold the lock on the generator without blocking a rank that has
    // yet to join.
    let turn = context.is_main_process().then(drawing);
    let mut first = DrawInOrder(context.is_main_process());
    let (model, cutter) = Change::Shard(cutter).applied_to(model, &mut first);
    drop(turn);
    let Some(Change::Shard(cutter)) = cutter else {
        return Err(unfinished());
    };
    let outcome = cutter.finish();
    // Waits for rank 0 to finish, so that no other rank draws in between.
    let told = agreement::exchange(&group, outcome.as_ref().err(), "shard a model");
    outcome.and(told)?;
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

/// The ranks on which [`whole`] makes the model whole. The others take part.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum WholeOn {
    All,
    Main,
}

/// Returns the model with whole parameters. If its units are sharded, all ranks call it.
#[track_caller]
pub(crate) fn whole(context: &Context, model: BoxedModule, on: WholeOn) -> Result<BoxedModule> {
    Ok(joined(context, model, on)?.0)
}

/// Returns the model with whole parameters, and the partitions of those that were cut, unit by unit.
#[track_caller]
fn joined(
    context: &Context,
    model: BoxedModule,
    on: WholeOn,
) -> Result<(BoxedModule, VecDeque<UnitPartitions>)> {
    let group = context.group.for_purpose("gather a sharded model");
    let is_kept = on == WholeOn::All || context.is_main_process();
    let joiner = Joiner::new(group, is_kept);
    let (model, Some(Change::Join(joiner))) =
        Change::Join(joiner).applied_to(model, &mut Unchanged)
    else {
        return Err(unfinished());
    };
    Ok((model, joiner.finish()?))
}

/// The error if a unit takes the change and does not put it back, which would be a bug of this crate.
fn unfinished() -> Error {
    Error::model("the units of a model could not be changed")
}

/// The partitions of the parameters that a model had, unit by unit.
#[derive(Debug)]
pub(crate) struct FormerSharding(VecDeque<UnitPartitions>);

/// Returns the model with whole parameters, which may be changed before they are [sharded again](reshard). If its units
/// are sharded, all ranks call it.
#[track_caller]
pub(crate) fn unshard(
    context: &Context,
    model: BoxedModule,
) -> Result<(BoxedModule, FormerSharding)> {
    let (model, units) = joined(context, model, WholeOn::All)?;
    Ok((model, FormerSharding(units)))
}

/// Shards the parameters of a model as they were before.
pub(crate) fn reshard(
    context: &Arc<Context>,
    model: BoxedModule,
    former: FormerSharding,
) -> BoxedModule {
    if former.0.iter().all(VecDeque::is_empty) {
        return model;
    }
    let cutter = Cutter::new(context, Cuts::Given(former.0));
    let (model, _) = Change::Shard(cutter).applied_to(model, &mut Unchanged);
    TiedParameters::of(&model).retie(model)
}

/// Returns the partitions of the parameters of which a model holds pieces.
pub(crate) fn partitions(model: &dyn DynModule) -> HashMap<ParamId, Partition> {
    let mut finder = PartitionFinder::default();
    model.visit(&mut finder);
    finder.0
}

#[derive(Default)]
struct PartitionFinder(HashMap<ParamId, Partition>);

impl ModuleVisitor for PartitionFinder {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some((partition, _)) = partition_of(param.id) {
            self.0.insert(param.id, partition);
        }
    }
}

thread_local! {
    /// The change that a model's units make while it is mapped. A mapper sees only parameters.
    static CHANGE: RefCell<Option<Change>> = const { RefCell::new(None) };
}

/// A change to the outermost units of a model. Nested units are part of the outer one.
pub(super) enum Change {
    Shard(Cutter),
    Join(Joiner),
}

impl Change {
    /// Takes the change that this thread makes. None is made until it is [put back](Self::put_back).
    pub(super) fn take() -> Option<Self> {
        CHANGE.take()
    }

    pub(super) fn put_back(self) {
        CHANGE.set(Some(self));
    }

    /// Changes the block of the unit with this number. Returns its new sharding.
    pub(super) fn apply(
        &mut self,
        number: usize,
        block: BoxedModule,
        sharding: Option<Arc<Sharding>>,
    ) -> (BoxedModule, Option<Arc<Sharding>>) {
        match (self, sharding) {
            (Self::Shard(cutter), None) => {
                let (block, sharding) = cutter.cut(number, block);
                (block, sharding.map(Arc::new))
            }
            (Self::Join(joiner), sharding) => {
                let pieces = sharding.as_ref().map(|sharding| &*sharding.pieces);
                (joiner.join(block, pieces), None)
            }
            (Self::Shard(_), sharding) => (block, sharding),
        }
    }

    /// Applies this change to the units of a model, and `rest` to all other parameters. Returns the change, or `None` if a
    /// unit took it and did not put it back.
    fn applied_to<M: ModuleMapper>(
        self,
        model: BoxedModule,
        rest: &mut M,
    ) -> (BoxedModule, Option<Self>) {
        // A parameter may panic while it is initialized.
        struct Cleared;
        impl Drop for Cleared {
            fn drop(&mut self) {
                drop(Change::take());
            }
        }
        let _cleared = Cleared;
        self.put_back();
        (model.map(rest), Self::take())
    }
}

//! Makes a model known to the reduction, when it is prepared and when it is resumed.

use accelerator_collective::Activity;
use burn::module::Module;
use serde::{Deserialize, Serialize};

use super::hook::HookInstance;
use super::model_state::{ModelSettings, ModelState};
use super::reduce_context::ReduceContext;
use crate::core::agreement::Failure;
use crate::core::device::Operations;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::{self, Error, Result};
use crate::model::{self, Layout, ModelFile, TiedParameters, restore_values};
use crate::precision::{Precision, Scaler, ScalerState};
use crate::unit::{self, Units};

/// Gives every rank rank 0's values and ids, and makes the model known by them.
#[track_caller]
pub(crate) fn prepare(context: &ReduceContext, model: BoxedModule) -> Result<BoxedModule> {
    let units = context.settings.units;
    // Its units are sharded already if it was prepared before.
    let model = unit::whole(context.group(), model)?;
    let (model, found) = unit::prepare(model, units);
    if found == 0 && units != Units::Plain && context.is_main_process() {
        error::warn(&format!(
            "units are set to `{units}`, and a model that is prepared has none: wrap its blocks in `nn::Unit`"
        ));
    }
    let device = context.autodiff_device();
    let on_autodiff =
        model::check_autodiff(&model).and_then(|()| check_operations(context, &model));
    let model = if model.devices().iter().all(|found| *found == device) {
        model
    } else {
        model.fork(&device)
    };
    let model = match units.are_sharded(&context.context) {
        true => shard(context, model, &on_autodiff)?,
        false => model,
    };
    // Reading the layout initialises lazy parameters, in one order on every rank.
    let layout = Layout::of(&model);
    let known = context.models.with_parameters(&layout);
    let between_steps = known
        .as_ref()
        .map(|model_state| check_between_steps(model_state));
    let group = context.group();
    if group.world_size() == 1 {
        on_autodiff?;
        between_steps.transpose()?;
        return make_known(context, model, &layout, known.as_deref());
    }
    let all_between_steps = compare(context, &on_autodiff, &layout, between_steps.as_ref())?;
    on_autodiff?;
    // One that is new on some rank is new on all of them.
    let all_between_steps: Option<Vec<_>> = all_between_steps.into_iter().collect();
    let known = known.filter(|_| all_between_steps.is_some());
    if let Some(all_between_steps) = all_between_steps {
        between_steps.transpose()?;
        for (rank, between_steps) in all_between_steps.into_iter().enumerate() {
            between_steps.map_err(|failure| failure.into_error(rank, "prepare the model again"))?;
        }
        // Each rank has statistics of its own, which rank 0's replace.
        model::sync_buffers(context, &model)?;
    }
    let model = model::from_rank_zero(group, model, &layout)?;
    // Parameters have rank 0's ids now, and running statistics keep each rank's own.
    let layout = Layout::of(&model);
    // Of rank 0's values, so all ranks come to the same answer.
    make_known(context, model, &layout, known.as_deref())
}

/// Compares the models of the ranks, and returns each rank's check that the model is between steps.
#[track_caller]
fn compare(
    context: &ReduceContext,
    on_autodiff: &Result<()>,
    layout: &Layout,
    between_steps: Option<&Result<()>>,
) -> Result<Vec<Option<Result<(), Failure>>>> {
    let report = |checked: &Result<()>| checked.as_ref().copied().map_err(Failure::of);
    let mine = PrepareReport {
        on_autodiff: report(on_autodiff),
        layout: layout.clone(),
        between_steps: between_steps.map(report),
    };
    let preparing = context.group().for_purpose("prepare a model");
    let reports: Vec<PrepareReport> = preparing.all_gather_object(&mine)?;
    on_autodiff.clone()?;
    let (mut layouts, mut all_between_steps) = (Vec::new(), Vec::new());
    for (rank, report) in reports.into_iter().enumerate() {
        let on_autodiff = report.on_autodiff;
        on_autodiff.map_err(|failure| failure.into_error(rank, "prepare a model"))?;
        layouts.push(report.layout);
        all_between_steps.push(report.between_steps);
    }
    layout.check_against(&layouts)?;
    Ok(all_between_steps)
}

/// Shards the units of a model over the ranks.
#[track_caller]
fn shard(
    context: &ReduceContext,
    model: BoxedModule,
    on_autodiff: &Result<()>,
) -> Result<BoxedModule> {
    compare(context, on_autodiff, &Layout::undrawn(&model), None)?;
    context.warn_of_restart("a model with sharded units");
    if context.settings.hook.is_some() && context.world_size() > 1 {
        return Err(Error::misuse(
            "a communication hook needs whole gradients, but gradients of sharded units are reduced in pieces: remove the \
             communication hook, or set `units` to `recompute`",
        ));
    }
    unit::shard(&context.context, model)
}

/// Refuses a model whose operations would not be recomputed, though the program asks for it.
fn check_operations(context: &ReduceContext, model: &BoxedModule) -> Result<()> {
    let strategy = context.autodiff_device().gradient_checkpointing_strategy();
    let devices = model.devices();
    let mut trained = devices.iter().filter(|device| device.is_autodiff());
    if context.operations == Operations::Keep
        || trained.all(|device| device.gradient_checkpointing_strategy() == strategy)
    {
        return Ok(());
    }
    Err(Error::misuse(
        "operations are to be recomputed, and a model that is prepared was built on another device: build it on \
         `accelerator.device()`",
    ))
}

#[derive(Deserialize, Serialize)]
struct PrepareReport {
    /// Fails if the model is not on a device that records gradients.
    on_autodiff: Result<(), Failure>,
    layout: Layout,
    /// Fails, for a model that was prepared before, if something of a step of it would be lost.
    between_steps: Option<Result<(), Failure>>,
}

/// Makes a model of that layout known, that was given `before`, or is new.
fn make_known(
    context: &ReduceContext,
    model: BoxedModule,
    layout: &Layout,
    before: Option<&ModelState>,
) -> Result<BoxedModule> {
    let tied = TiedParameters::checked(&model)?;
    let (model, leaf_before_prepare) = model::fresh_leaves(model);
    let model = tied.retie(model);
    let prior = match before {
        Some(before) => PriorState {
            leaf_before_prepare: before.leaf_before_prepare,
            scaler: before.scaler_state(),
            steps: before.steps(),
        },
        None => {
            if context.is_main_process() {
                context.models.warn_replaced(layout);
            }
            PriorState {
                leaf_before_prepare,
                ..PriorState::default()
            }
        }
    };
    let hook = context.communication_hook();
    insert(context, layout, tied, prior, hook);
    Ok(model)
}

/// Refuses to prepare a model again where what it did since its last step would be lost.
fn check_between_steps(model_state: &ModelState) -> Result<()> {
    model_state
        .round()
        .check_together("prepare a model again")?;
    if model_state.has_pending_step() {
        return Err(Error::misuse(
            "a model is prepared again while gradients of it wait for their step: give them to the optimizer, or \
             drop them, first",
        ));
    }
    match model_state.open_micro_steps() {
        0 => Ok(()),
        open => Err(Error::misuse(format!(
            "a model is prepared again between optimizer steps, and {open} micro-steps of the next one are \
             done: end the window with `trigger_sync`, or prepare it at the end of an epoch; for a training \
             from the start, build the model anew, since a clone is the same model"
        ))),
    }
}

/// Gives a prepared model the values and ids in the file that rank 0 opens, and makes it known by them, after this
/// many steps, with that scale of its losses and that hook.
#[track_caller]
pub(crate) fn resume(
    context: &ReduceContext,
    model: BoxedModule,
    open: impl FnOnce(Activity) -> Result<ModelFile>,
    saved: &Layout,
    steps: u64,
    scaler: Option<ScalerState>,
    hook: Option<HookInstance>,
) -> Result<BoxedModule> {
    let given = Layout::of(&model);
    let model = restore_values(context, model, open, saved)?;
    // Nothing has the ids any more under which the model was prepared.
    context.models.forget(&given);
    let prior = PriorState {
        leaf_before_prepare: None,
        scaler,
        steps,
    };
    let tied = TiedParameters::of(&model);
    insert(context, &Layout::of(&model), tied, prior, hook);
    Ok(model)
}

/// The state that a model brings along from before it is made known.
#[derive(Default)]
struct PriorState {
    /// See [`ModelState::is_clone_from_before`].
    leaf_before_prepare: Option<u64>,
    scaler: Option<ScalerState>,
    steps: u64,
}

/// Makes a model of that layout known, in that state, with that hook.
fn insert(
    context: &ReduceContext,
    layout: &Layout,
    tied: TiedParameters,
    prior: PriorState,
    hook: Option<HookInstance>,
) {
    let scaler = (context.settings.precision == Precision::F16).then(|| {
        let fresh = Scaler::new(context.settings.loss_scale);
        match prior.scaler {
            Some(state) => fresh.with_state(state),
            None => fresh,
        }
    });
    let model_state = ModelState::new(ModelSettings {
        bucket_size: context.settings.bucket_size,
        device_reducer: context.device_reducer.clone(),
        hook,
        ids: layout.ids(),
        leaf_before_prepare: prior.leaf_before_prepare,
        on_non_finite_loss: context.settings.on_non_finite_loss,
        overlap: context.overlap,
        parameters: layout.trainable(),
        scaler,
        steps: prior.steps,
        tied,
    });
    context.models.insert(layout, model_state);
    context.failed_calls.reset();
}

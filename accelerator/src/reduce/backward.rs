use std::sync::Arc;

use accelerator_fault::{Point, fail_point};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

use super::backward_calls::BackwardCall;
use super::compression::Compression;
use super::element_values;
use super::gradients::{AveragedGradients, WindowResult};
use super::model_state::{ModelState, WorkingCopy};
use super::reduce_context::{ReduceContext, ReduceScope, SameBatches};
use super::reduced_gradients::{GradientStorage, NormAsked, ReducedGradients, StepCommit};
use super::reducer::{ReducedWindow, Reducer};
use super::warnings::ModelWarnings;
use super::window::{Window, check_all_known};
use crate::core::dyn_module::DynModule;
use crate::core::error::{self, Error, Result};
use crate::data::batch::Weight;
use crate::model::Trainable;
use crate::precision::{Finiteness, Precision, SkipNotice};
use crate::timeline::{EventSubject, Phase, Timeline};
use crate::unit;

pub(crate) enum MicroStep {
    /// The backward pass of this loss, which is the mean over the batch.
    Loss(Tensor<1>),
    /// A backward pass that the program has run.
    Finished(GradientsParams),
}

impl MicroStep {
    /// Returns the gradients, and the loss where it is known.
    fn run(
        self,
        model: &dyn DynModule,
        scale: Option<f64>,
        timeline: &Timeline,
    ) -> (GradientsParams, Option<Tensor<1>>) {
        let _backward = timeline.span(Phase::Backward);
        match self {
            Self::Loss(loss) => {
                let gradients = scaled(loss.clone(), scale).backward();
                let gradients = model.gradients(gradients);
                (gradients, Some(loss.inner()))
            }
            Self::Finished(gradients) => (gradients, None),
        }
    }
}

/// See [`Accelerator::backward`](crate::Accelerator::backward) and [`average`](crate::Accelerator::average).
/// `before_reduction` is called by all ranks as a window ends.
#[track_caller]
pub(crate) fn backward(
    context: &ReduceContext,
    step: MicroStep,
    model: &dyn DynModule,
    weight: Weight,
    scope: ReduceScope,
    before_reduction: impl FnOnce(&ModelState) -> Result<()>,
) -> Result<AveragedGradients> {
    let group = context.group();
    // If collectives are forbidden here, only this rank makes the call and no other rank waits for it.
    let needs_no_ranks = scope == ReduceScope::Local || group.world_size() == 1;
    if needs_no_ranks || group.check_allowed("`backward`").is_err() {
        return run_backward(context, step, model, weight, scope, before_reduction, None);
    }
    let batch = weight.ticket.as_ref().map(|ticket| ticket.position());
    let open = context.failed_calls.begin();
    let gradients = run_backward(
        context,
        step,
        model,
        weight,
        scope,
        before_reduction,
        Some(open.call()),
    );
    open.end(gradients.as_ref().err());
    if let Err(error) = &gradients
        && let Ok(model_state) = context.models.find(model)
        && model_state.layout().has_pieces()
    {
        // The other ranks may wait in a unit for this one.
        group.abort(error.to_string());
    }
    gradients.map_err(|error| match batch {
        Some(batch) => error.at_batch(batch),
        None => error,
    })
}

#[track_caller]
fn run_backward(
    context: &ReduceContext,
    step: MicroStep,
    model: &dyn DynModule,
    weight: Weight,
    scope: ReduceScope,
    before_reduction: impl FnOnce(&ModelState) -> Result<()>,
    call: Option<&BackwardCall>,
) -> Result<AveragedGradients> {
    let _backward = unit::backward_begins(context, weight.count);
    let model_state = context.models.find_to_train(model)?;
    model_state.note_trained();
    model_state.tied().check(model)?;
    // Only this backward pass can consume the graph of the working copy.
    let copy = model_state.take_working();
    let group = context.group();
    if group.world_size() > 1 {
        // An error from the forward pass explains more than the errors that follow from it.
        let forward_outcome = context.forward_collectives.check();
        // If a `SyncBatchNorm` was misused on this rank, it is not known whether the others call `backward` too, so the
        // call is not counted; if they do, their windows differ in batches.
        forward_outcome
            .and_then(|()| Ok(group.check_allowed("`backward`")?))
            .inspect_err(|_| call.into_iter().for_each(BackwardCall::mark_synchronized))?;
    }
    if scope == ReduceScope::Global {
        model_state
            .round()
            .check_together("average its gradients")?;
    }
    check(&step, &weight, &model_state)?;
    if scope == ReduceScope::Local && model_state.layout().has_pieces() {
        return Err(Error::misuse(
            "local training steps each rank by itself, but the parameters of sharded units are divided among the ranks: set \
             `units` to `recompute`, or train with `accelerator.backward`",
        ));
    }
    if let Some(ticket) = &weight.ticket {
        ticket.begin();
    }
    let steps = context.accumulation.steps();
    let timeline = &context.timeline;
    let scale = model_state.window().begin(model_state.loss_scale());
    let ends = |before: usize| weight.ends_window(before + 1, steps);
    // A single rank's gradients are returned unchanged if there is nothing to sum and no loss scale to undo.
    let needs_no_ranks = scope == ReduceScope::Local || group.world_size() == 1;
    let hands_on_untouched = needs_no_ranks && scale.is_none() && weight.count > 0.0;
    if hands_on_untouched && model_state.open_micro_steps() == 0 && ends(0) {
        // Nobody looks at its gradients.
        drop(copy);
        warn_precision_unused(context, &model_state.warnings);
        timeline.backward_begins();
        let (gradients, loss) = step.run(model, scale, timeline);
        let known = |parameter: &&Trainable| element_values::peek(&gradients, parameter).is_some();
        let unknown = gradients.len() - model_state.parameters().iter().filter(known).count();
        check_all_known(unknown)?;
        check_some_trained(&model_state, !gradients.is_empty())?;
        // Faults that are left to the caller concern connections and files, and there are none here.
        let _ = fail_point(group.rank(), Point::Step(model_state.steps()));
        if scope == ReduceScope::Global {
            let trigger = &context.trigger;
            trigger.receive(trigger.send(group));
        }
        let gradients = ReducedGradients::new(
            model_state.clone(),
            context.device.clone(),
            weight.epoch,
            weight.ticket.into_iter().collect(),
            GradientStorage::Untouched {
                gradients,
                loss,
                samples: weight.count,
            },
        );
        if model_state.reads_losses() {
            gradients.check_loss(group.rank())?;
        }
        return Ok(AveragedGradients(WindowResult::Reduced(Box::new(
            gradients,
        ))));
    }
    let _turn = model_state.turn.take(group)?;
    let (window, _group_turn) = {
        let mut window = model_state.window();
        if let Some(epoch) = window.left_epoch(&weight)
            && context.is_main_process()
        {
            let warnings = &model_state.warnings;
            warnings.left_epoch(epoch, window.micro_steps());
        }
        if !ends(window.micro_steps()) {
            drop(copy);
            timeline.backward_begins();
            let (gradients, loss) = step.run(model, scale, timeline);
            let _copy = timeline.span(Phase::Copy(EventSubject::Whole));
            // Nothing is sent here, but a collective may have run during the backward pass.
            let crossed = context.forward_collectives.check();
            return crossed
                .and_then(|()| {
                    let loss = model_state.micro_loss(loss);
                    window.add(
                        model_state.parameters(),
                        || model_state.lend(group),
                        gradients,
                        loss,
                        weight,
                    )
                })
                .map(|()| AveragedGradients(WindowResult::Accumulating))
                .inspect_err(|_| *window = Window::default());
        }
        // Windows of other models are sent over the same group.
        let group_turn = match scope {
            ReduceScope::Global => context.guard.take(group)?,
            ReduceScope::Local => None,
        };
        (core::mem::take(&mut *window), group_turn)
    };
    warn_precision_unused(context, &model_state.warnings);
    timeline.backward_begins();
    // Faults that are left to the caller concern connections and files; there are none here.
    let _ = fail_point(group.rank(), Point::Step(model_state.steps()));
    let reduced = match scope {
        ReduceScope::Global => {
            before_reduction(&model_state)?;
            reduce_window(
                context,
                &model_state,
                window,
                step,
                (model, copy),
                &weight,
                call,
            )?
        }
        ReduceScope::Local => sum_locally(context, &model_state, window, step, model, &weight)?,
    };
    if context.settings.same_batches == SameBatches::Unexpected {
        let warnings = &model_state.warnings;
        warnings.same_losses(context, reduced.same_losses);
    }
    if reduced.sums.total <= 0.0 {
        if scope == ReduceScope::Local {
            model_state.count_step();
            let model = model_state.first_id();
            reduced
                .tickets
                .iter()
                .for_each(|ticket| ticket.commit(model));
            let epoch = weight.epoch;
            return Ok(AveragedGradients(WindowResult::Idle { epoch }));
        }
        return Err(Error::misuse(
            "the weights of this step add up to 0 over all ranks: there is no sample to average \
             over",
        ));
    }
    // All ranks get the same result here, except in steps with local scope.
    check_some_trained(&model_state, reduced.sums.some_present())?;
    let wants_norm = reduced.wants_norm;
    let mut gradients = ReducedGradients::new(
        model_state.clone(),
        context.device.clone(),
        weight.epoch,
        reduced.tickets,
        GradientStorage::Sums(reduced.sums),
    );
    // Computing the norm is collective, so all ranks do it now: later, only some of them might ask for it.
    if wants_norm && (gradients.is_sharded() || scale.is_some()) {
        let (part, bytes) = (EventSubject::Control, model_state.parameters().len() * 8);
        let _reduce = timeline.span(Phase::Reduce { part, bytes });
        gradients.whole_norm(NormAsked::ByAll)?;
    }
    if let Some(scale) = scale {
        // All ranks see the same sums.
        let finiteness = match gradients.norm() {
            Some(norm) if norm.is_finite() => Finiteness::Finite,
            _ => Finiteness::NotFinite,
        };
        if let Some(commit) = &mut gradients.commit {
            commit.finiteness = Some(finiteness);
        }
        if finiteness == Finiteness::NotFinite {
            // There is nothing to step with.
            let commit = gradients.commit.take();
            commit.into_iter().for_each(StepCommit::commit);
            tracing::debug!(
                step = model_state.steps(),
                scale,
                "a step is skipped: gradients are not finite"
            );
            if context.is_main_process() || scope == ReduceScope::Local {
                report_skip(&model_state, scale);
            }
            return Ok(AveragedGradients(WindowResult::Overflowed {
                scale,
                epoch: weight.epoch,
                scope,
            }));
        }
    }
    Ok(AveragedGradients(WindowResult::Reduced(Box::new(
        gradients,
    ))))
}

/// Runs the backward pass of the last micro-step, and sums the window over the ranks.
#[track_caller]
fn reduce_window(
    context: &ReduceContext,
    model_state: &Arc<ModelState>,
    window: Window,
    step: MicroStep,
    (model, copy): (&dyn DynModule, WorkingCopy),
    weight: &Weight,
    call: Option<&BackwardCall>,
) -> Result<ReducedWindow> {
    let group = context.group();
    let scale = window.loss_scale();
    let compression = context.settings.compression;
    // With a hook or f16 compression, all ranks reduce gradients in host memory.
    if context.settings.hook.is_none() && compression != Compression::F16 {
        context.device_reducer.settle(group)?;
    }
    context.device_reducer.window_begins();
    let mut scheduler = model_state.scheduler();
    if context.forward_collectives.is_noted() || matches!(step, MicroStep::Finished(_)) {
        scheduler.give_way();
    }
    let repair = scheduler.repair();
    let timeline = &context.timeline;
    let reducer = Reducer::new(
        model_state,
        group,
        window,
        weight.count,
        compression,
        repair,
        timeline,
    )?;
    let reducer = reducer.with_control(call, context);
    let backward = timeline.span(Phase::Backward);
    let (loss, (gradients, reducer, observation)) = match step {
        MicroStep::Loss(loss) => {
            let value = loss.clone();
            let loss = scaled(loss, scale);
            let ran = scheduler.backward(loss, model, copy, model_state, reducer);
            (Some(value.inner()), ran)
        }
        MicroStep::Finished(gradients) => (None, (gradients, reducer, None)),
    };
    drop(backward);
    let loss = model_state.micro_loss(loss);
    let mut reduced = reducer.finish(model_state, gradients, loss, weight.ticket.clone())?;
    scheduler.learn(observation, &mut reduced, model_state, group)?;
    model_state.note_overlap(scheduler.report());
    context.device_reducer.window_ends();
    Ok(reduced)
}

/// Runs the backward pass of the last micro-step, and adds the window up on this rank alone.
fn sum_locally(
    context: &ReduceContext,
    model_state: &Arc<ModelState>,
    window: Window,
    step: MicroStep,
    model: &dyn DynModule,
    weight: &Weight,
) -> Result<ReducedWindow> {
    let (group, timeline) = (context.group(), &context.timeline);
    let scale = window.loss_scale();
    let reducer = Reducer::alone(model_state, group, window, weight.count, timeline);
    let (gradients, loss) = step.run(model, scale, timeline);
    let loss = model_state.micro_loss(loss);
    reducer.finish(model_state, gradients, loss, weight.ticket.clone())
}

/// Multiplies the loss by its scale, in full precision: without a scale, small half-precision gradients are 0.
fn scaled(loss: Tensor<1>, scale: Option<f64>) -> Tensor<1> {
    let Some(scale) = scale else {
        return loss;
    };
    let loss = match loss.dtype() {
        DType::F16 | DType::BF16 => loss.cast(DType::F32),
        _ => loss,
    };
    loss.mul_scalar(scale)
}

/// Refuses a window with samples in which no parameter of the model has a gradient.
fn check_some_trained(model_state: &ModelState, some: bool) -> Result<()> {
    if some {
        return Ok(());
    }
    let parameters = model_state.parameters();
    Err(Error::misuse(format!(
        "the loss does not depend on this model: none of its {} parameters (`{}`, …) has a gradient on any \
         rank; pass the model that the loss was computed from, and do not detach it from there",
        parameters.len(),
        parameters.first().map_or("", |first| &first.path),
    )))
}

fn warn_precision_unused(context: &ReduceContext, warnings: &ModelWarnings) {
    let precision = context.settings.precision;
    if precision != Precision::No && context.is_main_process() {
        warnings.precision_unused(precision);
    }
}

/// Explains the first skipped step, and warns after many in a row that something else is wrong.
fn report_skip(model_state: &ModelState, scale: f64) {
    match model_state.skip_notice() {
        None => {}
        Some(SkipNotice::First) => error::tell(&format!(
            "step {} is skipped: its gradients are not finite at the loss scale {scale}, and the next losses are scaled \
             by {}; the first steps in f16 often are, until the scale fits (reported once per model)",
            model_state.steps().saturating_sub(1),
            model_state.loss_scale().unwrap_or(scale)
        )),
        Some(SkipNotice::Many(skips)) => error::warn(&format!(
            "{skips} steps in a row were skipped, and gradients are not finite at the loss scale {scale} either: look \
             for an overflow of f16 in the forward pass (above 65504), or for a loss that is not finite; `bf16` has the \
             range of f32, and `LossScale::with_initial` begins lower (reported once per model)"
        )),
    }
}

fn check(step: &MicroStep, weight: &Weight, model_state: &ModelState) -> Result<()> {
    if weight.uneven {
        return Err(Error::misuse(
            "this batch is of a loader with the tail policy `uneven`, under which ranks may run \
             different numbers of steps; train with `exact` (no sample twice, every rank the \
             same number of steps), and keep `uneven` for evaluation",
        ));
    }
    weight.check_count()?;
    let loss = match step {
        MicroStep::Loss(loss) => loss,
        MicroStep::Finished(_) if model_state.loss_scale().is_none() => return Ok(()),
        MicroStep::Finished(_) => {
            return Err(Error::misuse(
                "the precision is f16, whose losses are scaled before their backward pass, and these gradients come \
                 from one that the program has run: call `backward` with the loss, or compute in bf16 or f32",
            ));
        }
    };
    let [elements] = loss.dims();
    if elements != 1 {
        return Err(Error::misuse(format!(
            "the loss has {elements} elements; expected one, the mean over the batch"
        )));
    }
    if !loss.is_tracked() {
        return Err(Error::misuse(
            "the loss does not depend on a trainable parameter: build the model on \
             `accelerator.device()`, and compute the loss from the model, not from \
             `model.valid()`",
        ));
    }
    Ok(())
}

mod control;
mod sending;

use core::mem::replace;
use core::panic::Location;
use std::sync::Arc;

use accelerator_collective::{Buffer, Pending, ProcessGroup, TransportKind};
use burn::backend::DispatchTensor;
use burn::optim::GradientsParams;

use super::backward_calls::BackwardCall;
use super::bucket_layout::SumScope;
use super::bucket_set::{BucketSet, FlushedGradient};
use super::bucket_sums::BucketSums;
use super::compression::{Compression, CompressionScale};
use super::device_reduce::{DeviceReducer, PendingReduce};
use super::element_values;
use super::loss::{self, LossSum, MicroLoss, OnNonFiniteLoss};
use super::model_state::{ModelName, ModelState};
use super::updates::SeenUpdates;
use super::window::{self, Totals, Window, check_all_known};
use crate::core::error::{Error, Result};
use crate::core::tensor::register;
use crate::data::ConsumeTicket;
use crate::precision::Cast;
use crate::reduce::pace::Pace;
use crate::reduce::reduce_context::ReduceContext;
use crate::reduce::trigger::Trigger;
use crate::timeline::{EventSubject, Phase, Timeline};

/// Sums a window over the ranks: takes the gradients of its last micro-step, in the middle of
/// backward or after it, and sends what is complete.
///
/// All ranks issue the same operations: with compression, the weight; the buckets in their order;
/// the control vector; then again what was sent too early somewhere; with compression and sharded sums,
/// whether all fit; then all compressed buckets if one did not. With NCCL, the loss goes before the control vector; with a
/// hook, the control vector goes before the buckets; if a loss that is not finite is refused, ranks gather all losses in the
/// end. See the README of `reduce`.
#[derive(Debug)]
pub(super) struct Reducer {
    /// The first field: it is dropped before operations in flight, so that the other ranks receive the failure first.
    collective: PendingCollective,

    model: ModelName,
    /// The updates of the model on this rank before this window.
    updates: SeenUpdates,
    bucket_set: Box<BucketSet>,
    /// The totals of the window, with the last micro-step.
    totals: Totals,
    tickets: Vec<ConsumeTicket>,
    weight: f64,
    /// The factor of the loss before backward.
    loss_scale: f64,
    /// The cast that makes each parameter's gradient of the one that is looked at in backward.
    casts: Vec<Option<Arc<Cast>>>,

    group: ProcessGroup,
    /// The place of the program's call of `backward`, for errors: much is sent from inside Burn.
    caller: &'static Location<'static>,
    /// The call of `backward`, which knows the failed calls before it.
    call: Option<BackwardCall>,
    timeline: Timeline,
    send_mode: SendMode,
    sum_scope: SumScope,
    compression: Compression,
    repair: Repair,
    device_reducer: Arc<DeviceReducer>,
    /// The flag that travels along.
    trigger: Option<Arc<Trigger>>,
    pace: Option<Arc<Pace>>,
    wants_norm: bool,

    /// The bucket that is sent next.
    next: usize,
    /// Buckets that were sent before backward ended.
    early: usize,
    /// The sum of all ranks' weights, on its way.
    weighing: Option<Pending>,
    /// The scale of compressed sums, once the weight of all ranks is known.
    scale: Option<CompressionScale>,
    /// The loss, on its way from device to device.
    sent_loss: Option<PendingReduce>,
    /// The control vector, on its way.
    control: Option<Pending>,
    /// Set if buckets hold the mean gradient in the end, not sums.
    handed_over: bool,
    /// The first error that could not be returned when it happened.
    outcome: Result<()>,
}

/// The need to fill buckets once more, on this rank or another one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Repair {
    Possible,
    Unneeded,
}

/// The result of a window, over all ranks.
pub(super) struct ReducedWindow {
    /// The sums Σ weight · gradient, and which parameters had a gradient somewhere.
    pub(super) sums: BucketSums,
    pub(super) tickets: Vec<ConsumeTicket>,
    /// Set if all ranks have the same loss, to the bit.
    pub(super) same_losses: bool,
    pub(super) wants_norm: bool,
    /// The number of buckets that this rank sent before its backward ended.
    pub(super) early: usize,
    /// The number of buckets that were reduced again, since a rank had sent them too early.
    pub(super) repaired: usize,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ReadWait {
    Yes,
    /// Backward does not wait for anything.
    No,
}

/// The thread of an operation: this one, or the communication thread, beside other operations.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum SendMode {
    Blocking,
    InFlight,
    /// There is none: sums stay those of this rank.
    Nowhere,
}

impl Reducer {
    /// Creates the reducer of a window, whose last micro-step has that weight. Every rank calls it before that
    /// step's backward.
    #[track_caller]
    pub(super) fn new(
        model_state: &ModelState,
        group: &ProcessGroup,
        window: Window,
        weight: f64,
        compression: Compression,
        repair: Repair,
        timeline: &Timeline,
    ) -> Result<Self> {
        let compression = if group.world_size() == 1 {
            Compression::None
        } else {
            compression
        };
        let alone = Self::alone(model_state, group, window, weight, timeline);
        let sum_scope = match alone.bucket_set.layout.cuts() {
            Some(cuts) => SumScope::Own {
                cuts: cuts.clone(),
                group: group.clone(),
            },
            None if alone.bucket_set.layout.has_pieces() => SumScope::Pieces {
                group: group.clone(),
            },
            None => SumScope::Whole,
        };
        let mut reducer = Self {
            compression,
            send_mode: match group.world_size() {
                1 => SendMode::Nowhere,
                _ => SendMode::InFlight,
            },
            repair,
            scale: None,
            sum_scope,
            wants_norm: model_state.wants_norm(),
            ..alone
        };
        if compression == Compression::None {
            reducer.scale = Some(compression.scale(1.0));
        } else {
            reducer.start_weighing()?;
        }
        Ok(reducer)
    }

    /// Creates the reducer of a window that stays on this rank: its sums are those of its own gradients.
    #[track_caller]
    pub(super) fn alone(
        model_state: &ModelState,
        group: &ProcessGroup,
        window: Window,
        weight: f64,
        timeline: &Timeline,
    ) -> Self {
        let loss_scale = window.loss_scale().unwrap_or(1.0);
        let (mut bucket_set, tickets, mut totals) = window.into_parts(|| model_state.lend(group));
        model_state.renew(group, &mut bucket_set);
        totals.micro_steps += 1;
        totals.weight += weight;
        Self {
            collective: PendingCollective::new(group),
            model: model_state.model(),
            updates: model_state.updates().seen(),
            bucket_set,
            totals,
            tickets,
            weight,
            loss_scale,
            casts: Vec::new(),
            group: group.clone(),
            caller: Location::caller(),
            call: None,
            timeline: timeline.clone(),
            send_mode: SendMode::Nowhere,
            sum_scope: SumScope::Whole,
            compression: Compression::None,
            repair: Repair::Unneeded,
            device_reducer: model_state.device_reducer.clone(),
            trigger: None,
            pace: None,
            wants_norm: false,
            next: 0,
            early: 0,
            weighing: None,
            scale: Some(Compression::None.scale(1.0)),
            sent_loss: None,
            control: None,
            handed_over: false,
            outcome: Ok(()),
        }
    }

    /// The group, whose errors name the caller of `backward`.
    fn caller_group(&self) -> ProcessGroup {
        self.group.for_caller(self.caller)
    }

    /// Sets the casts that make the parameters' gradients of those that are looked at in half precision.
    pub(super) fn with_casts(self, casts: Vec<Option<Arc<Cast>>>) -> Self {
        Self { casts, ..self }
    }

    /// Adds the number of calls that failed before `call`, the flag of the trigger, and the pace of this rank to the
    /// control vector.
    pub(super) fn with_control(self, call: Option<&BackwardCall>, context: &ReduceContext) -> Self {
        Self {
            call: call.cloned(),
            trigger: Some(context.trigger.clone()),
            pace: Some(context.pace.clone()),
            ..self
        }
    }

    /// Returns `true` if this rank has nothing to give in the last micro-step.
    pub(super) fn is_idle(&self) -> bool {
        self.weight <= 0.0
    }

    pub(super) fn members(&self, bucket: usize) -> &[usize] {
        self.bucket_set.layout.members(bucket)
    }

    /// A bucket is complete, if these are the gradients of its members. It is sent as soon as
    /// those before it are.
    pub(super) fn complete(
        &mut self,
        bucket: usize,
        gradients: &mut dyn Iterator<Item = Option<DispatchTensor>>,
    ) {
        if self.outcome.is_err() {
            return;
        }
        if !self.bucket_set.buckets[bucket].is_open() {
            return;
        }
        let copy = self
            .timeline
            .span(Phase::Copy(EventSubject::bucket(bucket)));
        let bucket_set = &mut self.bucket_set;
        bucket_set.save_undo(&self.group, bucket);
        let layout = bucket_set.layout.clone();
        for (&parameter, gradient) in layout.members(bucket).iter().zip(gradients) {
            bucket_set.parameters[parameter].flushed =
                gradient.map_or(FlushedGradient::Absent, FlushedGradient::Seen);
        }
        bucket_set.add_flushed(bucket, self.weight);
        bucket_set.clear_unwritten(bucket, |record| record.flushed.gradient().is_some());
        bucket_set.buckets[bucket].mark_complete();
        drop(copy);
        // Backward does not wait for anybody.
        if self
            .weighing
            .as_ref()
            .is_some_and(|total| !total.is_ready())
        {
            return;
        }
        self.outcome = self
            .send_complete()
            .and_then(|()| self.send_read_back(ReadWait::No));
        self.early = self.next;
    }

    /// Sends what is left once backward has ended with these gradients, and waits for the sums.
    ///
    /// If this fails although something was sent, the group fails with it: the other ranks wait
    /// for what this one does not send.
    pub(super) fn finish(
        mut self,
        model_state: &Arc<ModelState>,
        gradients: GradientsParams,
        loss: MicroLoss,
        ticket: Option<ConsumeTicket>,
    ) -> Result<ReducedWindow> {
        self.totals.batches.add(ticket.as_ref());
        window::note(&mut self.tickets, ticket);
        match self.conclude(model_state, gradients, loss) {
            Ok(repaired) => self.into_reduced(model_state, repaired),
            Err(error) => {
                self.collective.abort(&error);
                Err(error)
            }
        }
    }

    /// Sends what is left, and waits for everything. Returns the number of buckets that were sent too early.
    fn conclude(
        &mut self,
        model_state: &ModelState,
        mut gradients: GradientsParams,
        loss: MicroLoss,
    ) -> Result<usize> {
        replace(&mut self.outcome, Ok(()))?;
        self.totals.loss.add(self.weight, loss);
        if self.is_idle() {
            // It may have computed garbage, except in pieces, which are sums over the ranks.
            let mut computed = core::mem::take(&mut gradients);
            let parameters = model_state.parameters().iter();
            for parameter in parameters.filter(|parameter| parameter.piece.is_some()) {
                if let Some(gradient) = element_values::take(&mut computed, parameter) {
                    register(&mut gradients, parameter.id, gradient);
                }
            }
        }
        if !self.totals.loss.read.is_finite()
            && model_state.on_non_finite_loss == OnNonFiniteLoss::Warn
        {
            let whose = format!("the loss of rank {}", self.group.rank());
            model_state.warn_non_finite_loss(&whose, self.totals.loss.read / self.totals.weight);
        }
        check_all_known(self.fill(model_state, &mut gradients))?;
        let repaired = match model_state.hook() {
            Some(hook) if self.group.world_size() > 1 && self.send_mode != SendMode::Nowhere => {
                self.hand_over(model_state, hook)?;
                0
            }
            _ => self.exchange(model_state, &gradients)?,
        };
        let bucket_set = &mut self.bucket_set;
        for record in &mut bucket_set.parameters {
            record.written |= record.has_gradient;
        }
        // An idle rank has none of its own, and that is as it should be.
        if self.totals.weight > 0.0 {
            let parameters = model_state.parameters().iter().zip(&bucket_set.parameters);
            let missing = parameters.filter(|(_, record)| !record.written && record.present);
            let paths: Vec<_> = missing.map(|(known, _)| known.path.as_str()).collect();
            let warnings = &model_state.warnings;
            warnings.missing_gradients(self.group.rank(), &paths);
        }
        Ok(repaired)
    }

    /// Sends the buckets that are left and the control vector, and receives the sums. Returns the number of buckets
    /// that were sent too early.
    fn exchange(&mut self, model_state: &ModelState, gradients: &GradientsParams) -> Result<usize> {
        if self.send_mode == SendMode::InFlight && self.early == 0 && !is_networked(&self.group) {
            self.send_mode = SendMode::Blocking;
        }
        self.send_complete()?;
        self.send_read_back(ReadWait::Yes)?;
        self.send_loss()?;
        self.send_control()?;
        self.receive()?;
        self.receive_control()?;
        let repaired = self.redo(model_state, gradients)?;
        self.settle(model_state)?;
        Ok(repaired)
    }

    fn into_reduced(
        mut self,
        model_state: &Arc<ModelState>,
        repaired: usize,
    ) -> Result<ReducedWindow> {
        self.collective.mark_complete();
        if self.send_mode != SendMode::Nowhere {
            let windows = control::check_windows(&self);
            if let Err(error) = &windows
                && self.device_reducer.nccl().is_some()
            {
                // What GPUs have begun together does not fit together, and would not end.
                self.group.abort(error.to_string());
            }
            windows?;
        }
        let sums = self.sums()?;
        // All ranks see the same sum.
        if !sums.header.loss.is_finite() && model_state.on_non_finite_loss == OnNonFiniteLoss::Fail
        {
            let (rank, loss) = (self.group.rank(), self.totals.loss.read);
            return Err(match self.send_mode {
                SendMode::Nowhere => loss::error(model_state.steps(), [(rank, loss)]),
                _ => loss::error(
                    model_state.steps(),
                    (0..).zip(control::gather_losses(&self)?),
                ),
            });
        }
        let (total, read, wants_norm) = (sums.header.weight, sums.header.loss, sums.wants_norm());
        let same_losses = self.send_mode != SendMode::Nowhere && sums.losses_agree(&self.group);
        let is_on_devices = self.send_mode != SendMode::Nowhere && self.bucket_set.is_on_device();
        Ok(ReducedWindow {
            sums: BucketSums {
                norm_broadcast_group: is_on_devices.then(|| self.group.clone()),
                bucket_set: Some(self.bucket_set),
                divisor: match self.handed_over {
                    true => 1.0,
                    false => total * self.loss_scale,
                },
                loss: LossSum {
                    read,
                    ..self.totals.loss
                },
                ranks: self.group.world_size(),
                model_state: model_state.clone(),
                sum_scope: self.sum_scope,
                total,
            },
            tickets: self.tickets,
            same_losses,
            wants_norm,
            early: self.early,
            repaired,
        })
    }

    /// Fills the open buckets, and compares what the others were filled with. Returns the number of gradients of
    /// unknown parameters.
    fn fill(&mut self, model_state: &ModelState, gradients: &mut GradientsParams) -> usize {
        let mut unknown = gradients.len();
        let bucket_set = &mut self.bucket_set;
        let layout = bucket_set.layout.clone();
        for bucket in 0..layout.len() {
            let _copy = self
                .timeline
                .span(Phase::Copy(EventSubject::bucket(bucket)));
            let is_open = bucket_set.buckets[bucket].is_open();
            for &index in layout.members(bucket) {
                let parameter = &model_state.parameters()[index];
                let gradient = match self.repair {
                    // Another rank may ask for it once more.
                    Repair::Possible => element_values::peek(gradients, parameter),
                    Repair::Unneeded => element_values::take(gradients, parameter),
                };
                let record = &mut bucket_set.parameters[index];
                record.has_gradient = gradient.is_some();
                unknown -= usize::from(gradient.is_some());
                if is_open {
                    record.gradient = gradient;
                } else {
                    let cast = self.casts.get(index).and_then(Option::as_deref);
                    let is_same = record.flushed.is_of(gradient.as_ref(), cast);
                    bucket_set.buckets[bucket].needs_retry |= !is_same;
                }
            }
            if is_open {
                if self.repair == Repair::Possible {
                    bucket_set.save_undo(&self.group, bucket);
                }
                bucket_set.add_gradients(bucket, self.weight);
                bucket_set.clear_unwritten(bucket, |record| record.has_gradient);
                bucket_set.buckets[bucket].mark_complete();
            }
        }
        bucket_set.release_flushed();
        unknown
    }
}

/// The collective operations of one window. A rank that has started them must issue all of them: the other ranks wait for
/// the rest, or would take this rank's next operations for it. If the rest does not follow, the group fails on all
/// ranks.
#[derive(Debug)]
struct PendingCollective {
    group: ProcessGroup,
    state: PendingState,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum PendingState {
    /// No operation was accepted: one that the group refuses at once does not count.
    NotStarted,
    Started,
    /// All operations were issued, or the group has failed.
    Ended,
}

impl PendingCollective {
    fn new(group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            state: PendingState::NotStarted,
        }
    }

    fn mark_started(&mut self) {
        self.state = PendingState::Started;
    }

    fn mark_complete(&mut self) {
        self.state = PendingState::Ended;
    }

    /// Fails the group where operations were started: the rest does not follow because of this error. Does nothing to a
    /// group that failed before.
    fn abort(&mut self, error: &Error) {
        self.end(&format!(
            "it stopped in the middle of reducing gradients: {error}"
        ));
    }

    fn end(&mut self, reason: &str) {
        if self.state == PendingState::Started {
            self.group.abort(reason);
        }
        self.state = PendingState::Ended;
    }
}

impl Drop for PendingCollective {
    fn drop(&mut self) {
        // The group reports a panic itself, when its last handle is dropped.
        if !std::thread::panicking() {
            self.end("it dropped gradients of which a part was sent");
        }
    }
}

/// Waits for what was started, and notes how long.
fn waited(
    timeline: &Timeline,
    part: EventSubject,
    bytes: usize,
    pending: Pending,
) -> Result<Buffer> {
    let _reduce = timeline.span(Phase::Reduce { part, bytes });
    Ok(pending.wait()?)
}

/// Returns `true` if operations gain from being started: connections carry several at a time, and between hosts the
/// communication thread sends one bucket while this one copies the next. Memory is as fast as the thread that works on
/// it.
fn is_networked(group: &ProcessGroup) -> bool {
    matches!(
        group.transport(),
        TransportKind::Tcp | TransportKind::Hierarchical
    )
}

#[cfg(test)]
mod tests;

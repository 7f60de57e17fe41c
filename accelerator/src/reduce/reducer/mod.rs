mod control;
mod handover;
mod pending;
mod repair;
mod sending;

use core::mem::replace;
use core::panic::Location;
use std::sync::Arc;

use accelerator_collective::{Pending, ProcessGroup};
use burn::backend::DispatchTensor;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use self::pending::PendingCollective;
use self::sending::{is_networked, waited};
use super::bucket_set::{BucketSet, BucketState, FlushObserver};
use super::compression::{Compression, CompressionScale};
use super::device_reduce::{DeviceReducer, PendingReduce};
use super::element_values;
use super::failed_calls::BackwardCall;
use super::loss_sum::LossSum;
use super::model_state::{ModelName, ModelState};
use super::non_finite_loss::{self, OnNonFiniteLoss};
use super::shard::SumScope;
use super::updates::SeenUpdates;
use super::window::{self, BatchFingerprint, Window, check_all_known};
use crate::core::error::Result;
use crate::data::ConsumeTicket;
use crate::precision::Cast;
use crate::reduce::trigger::Trigger;
use crate::timeline::{EventSubject, Phase, Timeline};

/// Sums a window over the ranks: takes the gradients of its last micro-step, in the middle of
/// backward or after it, and sends what is complete.
///
/// All ranks issue the same operations: with compression, the weight; the buckets in their order;
/// the control vector; then again what was sent too early somewhere; with compression and spread sums,
/// whether all fit; then all compressed buckets if one did not. See the README of `gradient`.
#[derive(Debug)]
pub(super) struct Reducer {
    /// First, so that others hear of a failure before what is on its way is given up.
    promise: PendingCollective,
    batches: BatchFingerprint,
    /// Where the program called `backward`, for errors: much is sent from inside Burn.
    caller: &'static Location<'static>,
    /// By parameter: what makes its gradient of the one that is looked at in backward.
    casts: Vec<Option<Arc<Cast>>>,
    compression: Compression,
    control: Option<Pending>,
    /// Buckets that were sent before backward ended.
    early: usize,
    /// What this rank tells of calls before this one.
    call: Option<BackwardCall>,
    group: ProcessGroup,
    /// Whether buckets hold the mean gradient in the end, or sums.
    handed_over: bool,
    ledger: Box<BucketSet>,
    loss: LossSum,
    /// By what the loss was multiplied before backward.
    loss_scale: f64,
    marks: Vec<ConsumeTicket>,
    /// How many calls of `backward` are in the window.
    micro_steps: usize,
    /// Whose gradients these are.
    model: ModelName,
    /// The bucket that is sent next.
    next: usize,
    /// What went wrong while nobody could be told.
    outcome: Result<()>,
    pace: SendMode,
    repair: Repair,
    /// How sums on a device get to other ranks.
    road: Option<Arc<DeviceReducer>>,
    scale: Option<CompressionScale>,
    /// The loss, on its way from device to device.
    sent_loss: Option<PendingReduce>,
    spread: SumScope,
    timeline: Timeline,
    /// How this rank has updated the model before this window.
    updates: SeenUpdates,
    /// The weight of the window, with the last micro-step.
    total: f64,
    /// The flag that travels along.
    trigger: Option<Arc<Trigger>>,
    /// Whether this rank wants to know the norm.
    wants_norm: bool,
    weighing: Option<Pending>,
    /// The weight of the last micro-step.
    weight: f64,
}

/// Whether buckets may have to be filled once more, on this rank or another one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Repair {
    Possible,
    Unneeded,
}

/// What a window comes to, over all ranks.
#[derive(Debug)]
pub(super) struct Reduced {
    /// With Σ weight · gradient, and which parameters had a gradient somewhere.
    pub(super) ledger: Box<BucketSet>,
    pub(super) loss: LossSum,
    /// The ranks, where each has the sums on a device of its own.
    pub(super) apart: Option<ProcessGroup>,
    /// How many ranks sent theirs.
    pub(super) ranks: usize,
    /// Which of the sums this rank has.
    pub(super) spread: SumScope,
    /// Whether all ranks have the same loss, to the bit.
    pub(super) same_losses: bool,
    /// Whether some rank wants to know the norm.
    pub(super) wants_norm: bool,
    /// Where the batches end that are in it.
    pub(super) marks: Vec<ConsumeTicket>,
    /// Σ weight.
    pub(super) total: f64,
    /// What the sums are to be divided by.
    pub(super) divisor: f64,
    /// How many buckets this rank sent before its backward ended.
    pub(super) early: usize,
    /// How many buckets were reduced again, since a rank had sent them too early.
    pub(super) repaired: usize,
}

/// Whether to wait for what is being read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ReadWait {
    Yes,
    /// Backward does not wait for anything.
    No,
}

/// Whether an operation runs on this thread, or beside others on the communication thread.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum SendMode {
    Blocking,
    InFlight,
    /// There is none: sums stay those of this rank.
    Nowhere,
}

impl Reducer {
    /// For a window, whose last micro-step has that weight. Every rank calls it before that
    /// step's backward.
    #[track_caller]
    pub(super) fn new(
        slot: &ModelState,
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
        let alone = Self::alone(slot, group, window, weight, timeline);
        let spread = match alone.ledger.layout.cuts() {
            Some(cuts) => SumScope::Own {
                cuts: cuts.clone(),
                group: group.clone(),
            },
            None => SumScope::Whole,
        };
        let mut reducer = Self {
            compression,
            pace: match group.world_size() {
                1 => SendMode::Nowhere,
                _ => SendMode::InFlight,
            },
            repair,
            scale: None,
            spread,
            wants_norm: slot.wants_norm(),
            ..alone
        };
        if compression == Compression::None {
            reducer.scale = Some(compression.scale(1.0));
        } else {
            reducer.start_weighing()?;
        }
        Ok(reducer)
    }

    /// For a window that stays on this rank: its sums are those of its own gradients.
    #[track_caller]
    pub(super) fn alone(
        slot: &ModelState,
        group: &ProcessGroup,
        window: Window,
        weight: f64,
        timeline: &Timeline,
    ) -> Self {
        let (mut ledger, marks, before) = window.into_parts(|| slot.lend(group));
        slot.renew(group, &mut ledger);
        Self {
            promise: PendingCollective::new(group),
            batches: before.batches,
            caller: Location::caller(),
            casts: Vec::new(),
            compression: Compression::None,
            control: None,
            early: 0,
            call: None,
            group: group.clone(),
            handed_over: false,
            ledger,
            loss: before.loss,
            loss_scale: 1.0,
            marks,
            micro_steps: before.micro_steps + 1,
            model: slot.model(),
            next: 0,
            outcome: Ok(()),
            pace: SendMode::Nowhere,
            repair: Repair::Unneeded,
            road: slot.road().cloned(),
            scale: Some(Compression::None.scale(1.0)),
            sent_loss: None,
            spread: SumScope::Whole,
            timeline: timeline.clone(),
            total: before.weight + weight,
            updates: slot.updates().seen(),
            trigger: None,
            wants_norm: false,
            weighing: None,
            weight,
        }
    }

    /// For gradients of a loss that was multiplied by `scale`.
    pub(super) fn with_loss_scale(self, scale: f64) -> Self {
        Self {
            loss_scale: scale,
            ..self
        }
    }

    /// For gradients that are looked at in half precision: what makes those of the parameters of them.
    pub(super) fn with_casts(self, casts: Vec<Option<Arc<Cast>>>) -> Self {
        Self { casts, ..self }
    }

    /// Lets that flag travel along.
    pub(super) fn with_trigger(self, trigger: Arc<Trigger>) -> Self {
        Self {
            trigger: Some(trigger),
            ..self
        }
    }

    /// Tells the other ranks how often this one failed before.
    pub(super) fn with_call(self, call: &BackwardCall) -> Self {
        Self {
            call: Some(call.clone()),
            ..self
        }
    }

    /// Whether this rank has nothing to give in the last micro-step.
    pub(super) fn is_idle(&self) -> bool {
        self.weight <= 0.0
    }

    /// The parameters of a bucket, by number.
    pub(super) fn members(&self, bucket: usize) -> &[usize] {
        self.ledger.layout.members(bucket)
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
        let Some(mut store) = self.ledger.open(bucket) else {
            return;
        };
        let copy = self
            .timeline
            .span(Phase::Copy(EventSubject::bucket(bucket)));
        let ledger = &mut self.ledger;
        ledger.keep(&self.group, bucket, &store);
        let layout = ledger.layout.clone();
        for (&parameter, gradient) in layout.members(bucket).iter().zip(gradients) {
            ledger.sights[parameter] = gradient.map_or(FlushObserver::Absent, FlushObserver::Seen);
        }
        let seen = |parameter: usize| ledger.sights[parameter].gradient();
        ledger.enter(bucket, &mut store, seen, self.weight);
        ledger.clear(bucket, &mut store, |parameter| seen(parameter).is_some());
        ledger.stages[bucket] = BucketState::Complete(store);
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
            .and_then(|()| self.send_read(ReadWait::No));
        self.early = self.next;
    }

    /// Backward has ended, and these are the gradients. Sends what is left, and waits for the
    /// sums. `loss` is the mean over the micro-step, in one element.
    ///
    /// Where this fails although something was sent, the group fails with it: the other ranks wait
    /// for what this one does not send.
    pub(super) fn finish(
        mut self,
        slot: &ModelState,
        gradients: GradientsParams,
        loss: Tensor<1>,
        mark: Option<ConsumeTicket>,
    ) -> Result<Reduced> {
        self.batches.add(mark.as_ref());
        window::note(&mut self.marks, mark);
        match self.conclude(slot, gradients, loss) {
            Ok(repaired) => self.into_reduced(slot, repaired),
            Err(error) => {
                self.promise.break_for(&error);
                Err(error)
            }
        }
    }

    /// Sends what is left, and waits for everything. Tells how many buckets were sent too early.
    fn conclude(
        &mut self,
        slot: &ModelState,
        mut gradients: GradientsParams,
        loss: Tensor<1>,
    ) -> Result<usize> {
        replace(&mut self.outcome, Ok(()))?;
        if self.weight > 0.0 {
            self.loss.add(self.weight, slot.micro_loss(loss));
        } else {
            // What an idle rank computed may be anything.
            gradients = GradientsParams::new();
        }
        if !self.loss.read.is_finite() && slot.on_non_finite_loss() == OnNonFiniteLoss::Warn {
            let whose = format!("the loss of rank {}", self.group.rank());
            slot.warn_non_finite_loss(&whose, self.loss.read / self.total);
        }
        check_all_known(self.fill(slot, &mut gradients))?;
        let repaired = match slot.hook() {
            Some(hook) if self.group.world_size() > 1 && self.pace != SendMode::Nowhere => {
                self.hand_over(slot, hook)?;
                0
            }
            _ => self.exchange(slot, &gradients)?,
        };
        let ledger = &mut self.ledger;
        for (written, here) in ledger.written.iter_mut().zip(&ledger.here) {
            *written |= here;
        }
        // An idle rank has none of its own, and that is as it should be.
        if self.total > 0.0 {
            slot.warn_missing_gradients(self.group.rank(), &ledger.written, &ledger.present);
        }
        Ok(repaired)
    }

    /// Sends the buckets that are left, and the control vector, and takes in what comes to that. Tells
    /// how many buckets were sent too early.
    fn exchange(&mut self, slot: &ModelState, gradients: &GradientsParams) -> Result<usize> {
        if self.pace == SendMode::InFlight && self.early == 0 && !is_networked(&self.group) {
            self.pace = SendMode::Blocking;
        }
        self.send_complete()?;
        self.send_read(ReadWait::Yes)?;
        self.send_loss()?;
        self.send_control()?;
        self.receive()?;
        self.receive_control()?;
        let repaired = self.redo(slot, gradients)?;
        self.settle(slot)?;
        Ok(repaired)
    }

    fn into_reduced(mut self, slot: &ModelState, repaired: usize) -> Result<Reduced> {
        self.promise.keep();
        if self.pace != SendMode::Nowhere {
            let windows = control::check_windows(&self);
            if let Err(error) = &windows
                && self.road.as_ref().is_some_and(|road| road.nccl().is_some())
            {
                // What GPUs have begun together does not fit together, and would not end.
                self.group.abort(error.to_string());
            }
            windows?;
        }
        let sums = self.sums()?;
        // All ranks see the same sum.
        if !sums.header.loss.is_finite() && slot.on_non_finite_loss() == OnNonFiniteLoss::Fail {
            let (rank, loss) = (self.group.rank(), self.loss.read);
            return Err(match self.pace {
                SendMode::Nowhere => non_finite_loss::error(slot.steps(), [(rank, loss)]),
                _ => {
                    non_finite_loss::error(slot.steps(), (0..).zip(control::gather_losses(&self)?))
                }
            });
        }
        let (total, read, wants_norm) = (sums.header.weight, sums.header.loss, sums.wants_norm());
        let same_losses = self.pace != SendMode::Nowhere && sums.losses_agree(&self.group);
        let is_apart = self.pace != SendMode::Nowhere && self.ledger.is_on_device();
        Ok(Reduced {
            loss: LossSum { read, ..self.loss },
            marks: self.marks,
            total,
            divisor: match self.handed_over {
                true => 1.0,
                false => total * self.loss_scale,
            },
            early: self.early,
            ranks: self.group.world_size(),
            apart: is_apart.then_some(self.group),
            repaired,
            same_losses,
            spread: self.spread,
            wants_norm,
            ledger: self.ledger,
        })
    }

    /// Fills the buckets that are open, and compares what the others were filled with. Tells how
    /// many gradients are of no parameter that is known.
    fn fill(&mut self, slot: &ModelState, gradients: &mut GradientsParams) -> usize {
        let mut strangers = gradients.len();
        let ledger = &mut self.ledger;
        let layout = ledger.layout.clone();
        for bucket in 0..layout.len() {
            let _copy = self
                .timeline
                .span(Phase::Copy(EventSubject::bucket(bucket)));
            let open = ledger.open(bucket);
            for &index in layout.members(bucket) {
                let parameter = &slot.parameters()[index];
                let gradient = match self.repair {
                    // Another rank may ask for it once more.
                    Repair::Possible => element_values::look(gradients, parameter),
                    Repair::Unneeded => element_values::take(gradients, parameter),
                };
                ledger.here[index] = gradient.is_some();
                strangers -= usize::from(gradient.is_some());
                if open.is_some() {
                    ledger.held[index] = gradient;
                } else {
                    let cast = self.casts.get(index).and_then(Option::as_deref);
                    ledger.wrong[bucket] |= !ledger.sights[index].is_of(gradient.as_ref(), cast);
                }
            }
            if let Some(mut store) = open {
                if self.repair == Repair::Possible {
                    ledger.keep(&self.group, bucket, &store);
                }
                ledger.enter_held(bucket, &mut store, self.weight);
                ledger.clear(bucket, &mut store, |index| ledger.here[index]);
                ledger.stages[bucket] = BucketState::Complete(store);
            }
        }
        ledger.forget();
        strangers
    }
}

#[cfg(test)]
mod tests;

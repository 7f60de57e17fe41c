pub(super) mod control;
mod handover;
mod promise;

use core::mem::replace;
use core::ops::Range;
use core::panic::Location;
use std::sync::Arc;

use accelerator_collective::{Buffer, Cut, Pending, ProcessGroup, ReduceOp, TransportKind};
use burn::backend::DispatchTensor;
use burn::optim::GradientsParams;

use self::promise::Promise;
use super::compression::{self, Compression, Scale};
use super::ledger::{Fit, Ledger, Sight, Stage};
use super::slot::{ModelName, Slot};
use super::spread::Spread;
use super::values;
use super::window::{self, Window, check_all_known};
use crate::accelerator::Trigger;
use crate::data::Mark;
use crate::error::{Error, Result};
use crate::timeline::{Part, Phase, Timeline};

/// Sums a window over the ranks: takes the gradients of its last micro-step, in the middle of
/// backward or after it, and sends what is complete.
///
/// All ranks issue the same operations: with compression, the weight; the buckets in their order;
/// the control vector; then again what was sent too early somewhere; with compression and spread sums,
/// whether all fit; then all compressed buckets if one did not. See the README of this folder.
#[derive(Debug)]
pub(super) struct Reducer {
    /// First, so that others hear of a failure before what is on its way is given up.
    promise: Promise,
    /// Where the program called `backward`, for errors: much is sent from inside Burn.
    caller: &'static Location<'static>,
    compression: Compression,
    control: Option<Pending>,
    /// Buckets that were sent before backward ended.
    early: usize,
    group: ProcessGroup,
    /// Whether buckets hold the mean gradient in the end, or sums.
    handed_over: bool,
    ledger: Ledger,
    /// Σ weight · loss of the window.
    loss: f64,
    /// By what the loss was multiplied before backward.
    loss_scale: f64,
    marks: Vec<Mark>,
    /// How many calls of `backward` are in the window.
    micro_steps: usize,
    /// Whose gradients these are.
    model: ModelName,
    /// The bucket that is sent next.
    next: usize,
    /// What went wrong while nobody could be told.
    outcome: Result<()>,
    pace: Pace,
    repair: Repair,
    scale: Option<Scale>,
    spread: Spread,
    timeline: Timeline,
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
    pub(super) ledger: Ledger,
    /// The mean loss.
    pub(super) loss: f64,
    /// Which of the sums this rank has.
    pub(super) spread: Spread,
    /// Whether some rank wants to know the norm.
    pub(super) wants_norm: bool,
    /// Where the batches end that are in it.
    pub(super) marks: Vec<Mark>,
    /// Σ weight.
    pub(super) total: f64,
    /// What the sums are to be divided by.
    pub(super) divisor: f64,
    /// How many buckets this rank sent before its backward ended.
    pub(super) early: usize,
    /// How many buckets were reduced again, since a rank had sent them too early.
    pub(super) repaired: usize,
}

/// Whether an operation runs on this thread, or beside others on the communication thread.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Pace {
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
        slot: &Slot,
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
        let spread = match alone.ledger.layout.bounds() {
            Some(_) => Spread::Own(group.clone()),
            None => Spread::Whole,
        };
        let mut reducer = Self {
            compression,
            pace: Pace::InFlight,
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
        slot: &Slot,
        group: &ProcessGroup,
        window: Window,
        weight: f64,
        timeline: &Timeline,
    ) -> Self {
        let (ledger, marks, before) = window.into_parts(slot, group);
        Self {
            promise: Promise::new(group),
            caller: Location::caller(),
            compression: Compression::None,
            control: None,
            early: 0,
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
            pace: Pace::Nowhere,
            repair: Repair::Unneeded,
            scale: Some(Compression::None.scale(1.0)),
            spread: Spread::Whole,
            timeline: timeline.clone(),
            total: before.weight + weight,
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

    /// Lets that flag travel along.
    pub(super) fn with_trigger(self, trigger: Arc<Trigger>) -> Self {
        Self {
            trigger: Some(trigger),
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
        let Some(mut buffer) = self.ledger.open(bucket) else {
            return;
        };
        let copy = self.timeline.span(Phase::Copy(Part::bucket(bucket)));
        let ledger = &mut self.ledger;
        ledger.keep(&self.group, bucket, &buffer);
        let layout = ledger.layout.clone();
        for (&parameter, gradient) in layout.members(bucket).iter().zip(gradients) {
            ledger.sights[parameter] = gradient.map_or(Sight::Absent, Sight::Seen);
        }
        let seen = |parameter: usize| ledger.sights[parameter].gradient();
        ledger.enter(bucket, &mut buffer, seen, self.weight);
        ledger.clear(bucket, &mut buffer, |parameter| seen(parameter).is_some());
        ledger.stages[bucket] = Stage::Complete(buffer);
        drop(copy);
        // Backward does not wait for anybody.
        if self
            .weighing
            .as_ref()
            .is_some_and(|total| !total.is_ready())
        {
            return;
        }
        self.outcome = self.send_complete();
        self.early = self.next;
    }

    /// Backward has ended, and these are the gradients. Sends what is left, and waits for the
    /// sums. `loss` is the mean over the micro-step.
    ///
    /// Where this fails although something was sent, the group fails with it: the other ranks wait
    /// for what this one does not send.
    pub(super) fn finish(
        mut self,
        slot: &Slot,
        gradients: GradientsParams,
        loss: f64,
        mark: Option<Mark>,
    ) -> Result<Reduced> {
        window::note(&mut self.marks, mark);
        match self.conclude(slot, gradients, loss) {
            Ok(repaired) => self.into_reduced(repaired),
            Err(error) => {
                self.promise.break_for(&error);
                Err(error)
            }
        }
    }

    /// Sends what is left, and waits for everything. Tells how many buckets were sent too early.
    fn conclude(
        &mut self,
        slot: &Slot,
        mut gradients: GradientsParams,
        loss: f64,
    ) -> Result<usize> {
        replace(&mut self.outcome, Ok(()))?;
        if self.weight > 0.0 {
            self.loss += self.weight * loss;
        } else {
            // What an idle rank computed may be anything.
            gradients = GradientsParams::new();
        }
        check_all_known(self.fill(slot, &mut gradients))?;
        let repaired = match slot.hook() {
            Some(hook) if self.group.world_size() > 1 && self.pace != Pace::Nowhere => {
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
            slot.report_missing(&ledger.written, &ledger.present);
        }
        Ok(repaired)
    }

    /// Sends the buckets that are left, and the control vector, and takes in what comes to that. Tells
    /// how many buckets were sent too early.
    fn exchange(&mut self, slot: &Slot, gradients: &GradientsParams) -> Result<usize> {
        if self.pace == Pace::InFlight && self.early == 0 && !is_networked(&self.group) {
            self.pace = Pace::Blocking;
        }
        self.send_complete()?;
        self.send_control()?;
        self.receive()?;
        self.receive_control()?;
        let repaired = self.redo(slot, gradients)?;
        self.settle(slot)?;
        Ok(repaired)
    }

    fn into_reduced(mut self, repaired: usize) -> Result<Reduced> {
        self.promise.keep();
        if self.pace != Pace::Nowhere {
            control::check_windows(&self)?;
        }
        let control = control::values(&self.ledger.control)?;
        let (total, loss) = (control[0], control[1]);
        Ok(Reduced {
            loss: loss / total,
            marks: self.marks,
            total,
            divisor: match self.handed_over {
                true => 1.0,
                false => total * self.loss_scale,
            },
            early: self.early,
            repaired,
            spread: self.spread,
            wants_norm: control[control::WANTS_NORM] > 0.0,
            ledger: self.ledger,
        })
    }

    /// Fills the buckets that are open, and compares what the others were filled with. Tells how
    /// many gradients are of no parameter that is known.
    fn fill(&mut self, slot: &Slot, gradients: &mut GradientsParams) -> usize {
        let mut strangers = gradients.len();
        let ledger = &mut self.ledger;
        let layout = ledger.layout.clone();
        for bucket in 0..layout.len() {
            let _copy = self.timeline.span(Phase::Copy(Part::bucket(bucket)));
            let open = ledger.open(bucket);
            for &index in layout.members(bucket) {
                let parameter = &slot.parameters()[index];
                let gradient = match self.repair {
                    // Another rank may ask for it once more.
                    Repair::Possible => values::look(gradients, parameter),
                    Repair::Unneeded => values::take(gradients, parameter),
                };
                ledger.here[index] = gradient.is_some();
                strangers -= usize::from(gradient.is_some());
                if open.is_some() {
                    ledger.held[index] = gradient;
                } else {
                    ledger.wrong[bucket] |= !ledger.sights[index].is_of(gradient.as_ref());
                }
            }
            if let Some(mut buffer) = open {
                if self.repair == Repair::Possible {
                    ledger.keep(&self.group, bucket, &buffer);
                }
                ledger.enter_held(bucket, &mut buffer, self.weight);
                ledger.clear(bucket, &mut buffer, |index| ledger.here[index]);
                ledger.stages[bucket] = Stage::Complete(buffer);
            }
        }
        ledger.forget();
        strangers
    }

    /// Reduces the buckets again that some rank has sent too early. Tells how many there were.
    fn redo(&mut self, slot: &Slot, gradients: &GradientsParams) -> Result<usize> {
        let ledger = &mut self.ledger;
        let layout = ledger.layout.clone();
        let control = control::values(&ledger.control)?;
        let flags = control::HEADER + slot.parameters().len();
        for (wrong, sum) in ledger.wrong.iter_mut().zip(&control[flags..]) {
            *wrong = *sum > 0.0;
        }
        if self.repair == Repair::Unneeded && ledger.wrong.contains(&true) {
            return Err(Error::misuse(
                "another rank sends gradients while backward runs, and this one does not: build the same \
                 layers on every rank",
            ));
        }
        let mut count = 0;
        for bucket in 0..layout.len() {
            let ledger = &mut self.ledger;
            if !ledger.wrong[bucket] {
                continue;
            }
            count += 1;
            let (Stage::Summed(mut buffer) | Stage::Rounded(mut buffer, _)) =
                replace(&mut ledger.stages[bucket], Stage::Lost)
            else {
                continue;
            };
            ledger.restore(bucket, &mut buffer);
            for &index in layout.members(bucket) {
                ledger.held[index] = values::look(gradients, &slot.parameters()[index]);
            }
            ledger.enter_held(bucket, &mut buffer, self.weight);
            ledger.clear(bucket, &mut buffer, |index| ledger.here[index]);
            self.send(bucket, buffer)?;
        }
        if count > 0 {
            self.receive()?;
        }
        Ok(count)
    }

    /// Sends buckets in their order, up to the first that is not complete.
    fn send_complete(&mut self) -> Result<()> {
        if let Some(total) = self.weighing.take() {
            let total = waited(&self.timeline, Part::Weight, 8, total)?;
            let total_weight = total.as_slice::<f64>()?[0];
            self.scale = Some(self.compression.scale(total_weight * self.loss_scale));
            self.ledger.total = Some(total);
        }
        while self.next < self.ledger.layout.len() {
            let Some(buffer) = self.ledger.complete(self.next) else {
                break;
            };
            self.send(self.next, buffer)?;
            self.next += 1;
        }
        Ok(())
    }

    fn send(&mut self, bucket: usize, buffer: Buffer) -> Result<()> {
        let (Some(dtype), Some(scale)) = (self.compression.wire(buffer.dtype()), self.scale) else {
            return self.send_exactly(bucket, buffer);
        };
        let spare = self.ledger.wires[bucket].take();
        let mut wire = spare.unwrap_or_else(|| self.group.buffer(dtype, buffer.len()));
        {
            let _copy = self.timeline.span(Phase::Copy(Part::bucket(bucket)));
            compression::compress(&buffer, &mut wire, scale);
        }
        let pending = self.start(bucket, wire)?;
        self.ledger.stages[bucket] = Stage::SentRounded(buffer, pending);
        Ok(())
    }

    fn send_exactly(&mut self, bucket: usize, mut buffer: Buffer) -> Result<()> {
        self.ledger.stages[bucket] = match self.pace {
            Pace::Nowhere => Stage::Summed(buffer),
            Pace::InFlight => Stage::Sent(self.start(bucket, buffer)?),
            Pace::Blocking => {
                let (part, bytes) = (Part::bucket(bucket), buffer.bytes().len());
                let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
                let (group, caller) = (&self.group, self.caller);
                match self.cut(bucket) {
                    Some(cut) => {
                        group.reduce_scatter_buffer_at(&mut buffer, ReduceOp::Sum, cut, caller)?;
                    }
                    None => group.all_reduce_buffer_at(&mut buffer, ReduceOp::Sum, caller)?,
                }
                self.promise.give();
                Stage::Summed(buffer)
            }
        };
        Ok(())
    }

    /// Lets the sums of a bucket travel, or what was rounded of them.
    fn start(&mut self, bucket: usize, buffer: Buffer) -> Result<Pending> {
        let (group, caller) = (&self.group, self.caller);
        let pending = match self.cut(bucket) {
            Some(cut) => group.start_reduce_scatter_at(buffer, ReduceOp::Sum, cut, caller)?,
            None => group.start_all_reduce_at(buffer, ReduceOp::Sum, caller)?,
        };
        self.promise.give();
        Ok(pending)
    }

    /// Which elements of a bucket each rank gets, where that is not all.
    fn cut(&self, bucket: usize) -> Option<&Arc<Cut>> {
        match self.spread {
            Spread::Whole => None,
            Spread::Own(_) => self.ledger.layout.cut(bucket),
        }
    }

    /// Takes in the buckets that are on their way. Of those that travelled rounded, the unrounded
    /// sums of this rank stay as they are until `settle`.
    fn receive(&mut self) -> Result<()> {
        let ledger = &mut self.ledger;
        let timeline = &self.timeline;
        for bucket in 0..ledger.layout.len() {
            ledger.stages[bucket] = match replace(&mut ledger.stages[bucket], Stage::Lost) {
                Stage::Sent(pending) => {
                    let bytes = ledger.layout.bytes(bucket);
                    Stage::Summed(waited(timeline, Part::bucket(bucket), bytes, pending)?)
                }
                Stage::SentRounded(sums, pending) => {
                    let bytes = sums.bytes().len() / 2;
                    let wire = waited(timeline, Part::bucket(bucket), bytes, pending)?;
                    let _copy = timeline.span(Phase::Copy(Part::bucket(bucket)));
                    let cut = ledger.layout.cut(bucket);
                    let mut own = own_ranges(&self.spread, cut, wire.len());
                    let fit = if own.all(|range| compression::is_finite(&wire, range)) {
                        Fit::Within
                    } else {
                        Fit::Beyond
                    };
                    ledger.wires[bucket] = Some(wire);
                    Stage::Rounded(sums, fit)
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Takes rounded sums over, or reduces all of them again as they are if one of them is not
    /// finite: all ranks see the same bits or tell each other, so all of them do. All, since what a
    /// parameter gets must not depend on the bucket in which it lies.
    fn settle(&mut self, slot: &Slot) -> Result<()> {
        let mut stages = self.ledger.stages.iter();
        let mut fits = !stages.any(|stage| matches!(stage, Stage::Rounded(_, Fit::Beyond)));
        if self.compression != Compression::None && matches!(self.spread, Spread::Own(_)) {
            fits = self.all_agree(fits)?;
        }
        if !fits {
            slot.report_range(self.compression);
        }
        for bucket in 0..self.ledger.layout.len() {
            let ledger = &mut self.ledger;
            ledger.stages[bucket] = match replace(&mut ledger.stages[bucket], Stage::Lost) {
                Stage::Rounded(mut sums, _) => match (&ledger.wires[bucket], self.scale) {
                    (Some(wire), Some(scale)) if fits => {
                        let _copy = self.timeline.span(Phase::Copy(Part::bucket(bucket)));
                        let cut = ledger.layout.cut(bucket);
                        for range in own_ranges(&self.spread, cut, wire.len()) {
                            compression::expand(wire, &mut sums, range, scale);
                        }
                        Stage::Summed(sums)
                    }
                    _ => Stage::Complete(sums),
                },
                other => other,
            };
            if let Some(buffer) = ledger.complete(bucket) {
                self.send_exactly(bucket, buffer)?;
            }
        }
        self.receive()
    }
}

/// The elements of a bucket that this rank gets, where it is cut so.
fn own_ranges<'a>(
    spread: &Spread,
    cut: Option<&'a Arc<Cut>>,
    len: usize,
) -> impl Iterator<Item = Range<usize>> + use<'a> {
    let own = match (spread, cut) {
        (Spread::Own(group), Some(cut)) => Some(cut.of(group.rank())),
        _ => None,
    };
    let whole = own.is_none().then_some(0..len);
    own.into_iter().flatten().cloned().chain(whole)
}

/// Waits for what was started, and notes how long.
fn waited(timeline: &Timeline, part: Part, bytes: usize, pending: Pending) -> Result<Buffer> {
    let _reduce = timeline.span(Phase::Reduce { part, bytes });
    Ok(pending.wait()?)
}

/// Whether started operations gain from others in flight: connections carry several, whereas
/// memory is as fast as the thread that works on it.
fn is_networked(group: &ProcessGroup) -> bool {
    matches!(
        group.transport(),
        TransportKind::Tcp | TransportKind::Hierarchical
    )
}

#[cfg(test)]
mod tests;

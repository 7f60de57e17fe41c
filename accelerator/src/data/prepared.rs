use core::fmt;
use core::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use accelerator_plan::{EpochPlan, Plan, TailPolicy};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;

use super::batch::UncountedPadding;
use super::builder::{Loader, SampleSource};
use super::cursor::{Cursor, EpochPass, EpochPosition};
use super::epoch::{self, Epoch, LoaderContext, OpenEpoch};
use super::exchange_step::ReadPosition;
use super::opaque;
use super::order::{EpochAssignment, SampleOrder, Spec};
use super::source::{CheckedItem, DRAWN_HINT, SourceSlice};
use super::stream::{self, Sharing};
use crate::context::Context;
use crate::core::agreement::{self, Term};
use crate::core::error::{Error, Result};

/// This rank's share of a data set, made by
/// [`Accelerator::prepare`](crate::Accelerator::prepare).
///
/// [`epoch`](Self::epoch) gives its batches with their weights. It is a Burn `DataLoader` as
/// well, for code that wants one: that way gives the bare batches, without idle ones, and counts
/// epochs by itself.
///
/// It shares out samples, and no more: each rank trains a model of its own on its share unless the model is prepared, too,
/// and its gradients come of [`Accelerator::backward`](crate::Accelerator::backward).
pub struct PreparedLoader<O> {
    pub(super) context: LoaderContext,
    pub(super) cursor: Arc<Cursor>,
    /// Set once a plan of the training was made of it.
    is_planned: AtomicBool,
    /// The number of times that it was read as a Burn loader.
    pub(super) passes: AtomicU64,
    pub(super) samples: Samples<O>,
}

pub(super) enum Samples<O> {
    /// One of Burn's own loaders.
    Opaque(Arc<dyn DataLoader<O>>),
    Shared {
        /// The plan of an epoch; that of a stream has full steps, and no number of samples.
        plan: Plan,
        source: SampleSource<O>,
        spec: Spec,
    },
}

impl<O> Clone for Samples<O> {
    fn clone(&self) -> Self {
        match self {
            Self::Opaque(loader) => Self::Opaque(loader.clone()),
            Self::Shared { plan, source, spec } => Self::Shared {
                plan: plan.clone(),
                source: source.clone(),
                spec: spec.clone(),
            },
        }
    }
}

impl<O: Send + 'static> PreparedLoader<O> {
    #[track_caller]
    pub(crate) fn sharded(
        context: &Arc<Context>,
        uncounted: &UncountedPadding,
        loader: Loader<O>,
    ) -> Result<Self> {
        let Loader { origin, spec } = loader;
        let world_size = context.world_size();
        let described = match &origin {
            SampleSource::Indexed(source) => format!("{} samples, {spec}", source.len()),
            SampleSource::Stream(stream) => format!("a stream ({}), {spec}", stream.sharing),
        };
        let digests = match &origin {
            SampleSource::Indexed(source) if world_size > 1 => source.digests(),
            _ => None,
        };
        // An error of one rank is reported to all, below.
        let samples = share_out(origin, spec, world_size);
        let described = match &samples {
            Ok(_) => described,
            Err(error) => format!("{described}: {error:?}"),
        };
        let items = agree_on_items(context, described, digests)?;
        // From here on it is the same on all ranks.
        let samples = samples.map_err(|error| error.about(context.next_loader_name()))?;
        if let Some(item) = items.iter().find(|item| item.changes_between_reads()) {
            return Err(Error::config(format!(
                "the data set of a loader gives {item}: ranks cannot share it out by index {DRAWN_HINT}"
            )));
        }
        Ok(Self::new(LoaderContext::new(context, uncounted), samples))
    }

    #[track_caller]
    pub(crate) fn opaque(
        context: &Arc<Context>,
        uncounted: &UncountedPadding,
        loader: Arc<dyn DataLoader<O>>,
    ) -> Result<Self> {
        let items = loader.num_items();
        let described = format!("{items} samples");
        agreement::check(
            context.group(),
            "one of Burn's own data loaders",
            &described,
        )?;
        // One that does not know its length may say 0.
        if items == 0 && loader.iter().next().is_none() {
            return Err(no_samples().about(context.next_loader_name()));
        }
        let samples = Samples::Opaque(loader.to_device(&context.device));
        Ok(Self::new(LoaderContext::new(context, uncounted), samples))
    }

    fn new(context: LoaderContext, samples: Samples<O>) -> Self {
        Self {
            context,
            cursor: Arc::default(),
            is_planned: AtomicBool::new(false),
            passes: AtomicU64::new(0),
            samples,
        }
    }

    /// Returns its number among the loaders of the program.
    pub(crate) fn number(&self) -> u64 {
        self.context.number
    }

    /// Samples of a full step over all ranks, where it is known.
    pub(crate) fn global_batch(&self) -> Option<u64> {
        self.loader_state().global_batch
    }

    /// A training is planned with it, or its steps were told.
    pub(crate) fn note_planned(&self) {
        self.is_planned.store(true, Ordering::Relaxed);
    }

    /// Returns the global batch that a plan used, if one was made.
    pub(crate) fn planned_batch(&self) -> Option<u64> {
        let is_planned = self.is_planned.load(Ordering::Relaxed);
        self.global_batch().filter(|_| is_planned)
    }

    /// Returns this rank's batches of that epoch. Each epoch is shuffled differently, and has the same order each
    /// time it is requested. One of Burn's own loaders keeps its own order instead, which continues with each pass.
    ///
    /// After [`resume`](crate::Accelerator::resume), the epoch in which the checkpoint was saved
    /// begins with the first batch that was not used yet; any other one is whole. Batches keep their numbers:
    /// [`Batch::step`](super::Batch::step), and those of [`enumerate`](Epoch::enumerate).
    ///
    /// An epoch whose end the program has not seen is not finished: where it is cut short by `take(n)`, a checkpoint that
    /// is saved behind the loop continues with the rest of it, of which `take` gives `n` more. Cut it by the number
    /// instead: `if batch.step() == n { break }`, which holds after `resume` too.
    ///
    /// While batches are taken, the device's random generator is set from the seed, the rank, the
    /// loader, the epoch and the step: dropout is reproducible, and another one on each rank. So is what a
    /// batcher draws; see [random numbers](crate::data#random-numbers).
    #[track_caller]
    pub fn epoch(&self, epoch: u64) -> Epoch<O> {
        let caller = Location::caller();
        self.context.uncounted.forget();
        let pass = self.cursor.begin(epoch);
        let start = pass.yielded();
        let steps = self.fixed_epoch(epoch).map(|plan| {
            // What was used lies within the samples, which `resume` has compared.
            let rest = plan.clone().starting_at(start.consumed).unwrap_or(plan);
            rest.steps(self.context.shared.rank())
        });
        let open = self.open(epoch, start, pass.clone(), caller);
        Epoch::new(self.context.clone(), open, pass, steps)
    }

    /// Returns this rank's batches of one pass for evaluation: each sample once, in the same order each time. See
    /// [`Batch::real`](super::Batch::real) for an example.
    #[track_caller]
    pub fn eval(&self) -> Epoch<O> {
        self.epoch(0)
    }

    fn open(
        &self,
        epoch: u64,
        start: EpochPosition,
        pass: Arc<EpochPass>,
        caller: &'static Location<'static>,
    ) -> OpenEpoch<O> {
        let context = self.context.clone();
        match self.samples.clone() {
            Samples::Opaque(loader) => Box::new(move |skip| {
                let step = start.step.saturating_add(skip);
                opaque::feed(loader, &context.shared, EpochPosition { step, ..start })
            }),
            Samples::Shared {
                plan,
                source: SampleSource::Indexed(source),
                spec,
            } => Box::new(move |skip| {
                let mut assignment = EpochAssignment::new(&spec, &plan, source.len(), epoch);
                if spec.order.is_given() {
                    let position = ReadPosition {
                        epoch,
                        loader: context.number,
                        step: start.step.saturating_add(skip),
                    };
                    let group = context.shared.group();
                    assignment = EpochAssignment::agreed(assignment, group, position, caller);
                }
                let rest = assignment.and_then(|assignment| {
                    assignment.continues_from(start)?;
                    pass.deal(assignment.digest);
                    assignment.share.starting_at(start.consumed)
                });
                let plan = match rest {
                    Ok(plan) => plan,
                    Err(error) => return Box::new(core::iter::once(Err(error))),
                };
                let loader = epoch::BatchLoader {
                    context,
                    epoch,
                    first: skip,
                    plan,
                    source,
                    spec,
                    steps_before: start.step,
                };
                loader.feed()
            }),
            Samples::Shared {
                plan,
                source: SampleSource::Stream(stream),
                spec,
            } => Box::new(move |skip| {
                (stream.feed)(stream::StreamPass {
                    caller,
                    context,
                    epoch,
                    plan,
                    skip,
                    spec,
                    start,
                })
            }),
        }
    }

    /// Returns the number of steps of this rank in a whole epoch. `None` for streams and Burn's own loaders, which do
    /// not know it, and if a sampler of your own decides it anew for each epoch.
    ///
    /// [`resume`](crate::Accelerator::resume) on another number of ranks may change it: ask after it, or after
    /// [`resume_loader`](crate::Accelerator::resume_loader). Rank 0 warns if it was asked before.
    pub fn steps(&self) -> Option<u64> {
        self.note_planned();
        let rank = self.context.shared.rank();
        if let Samples::Shared { spec, .. } = &self.samples
            && let Some(batches) = spec.order.batches()
        {
            let ranks = self.context.shared.world_size();
            return Some(spec.rounds(batches, ranks).ok()?.epoch(0).steps(rank));
        }
        Some(self.fixed_epoch(0)?.steps(rank))
    }

    /// The plan of that epoch, if it is known before the epoch begins.
    fn fixed_epoch(&self, epoch: u64) -> Option<EpochPlan> {
        match &self.samples {
            Samples::Shared {
                plan,
                source: SampleSource::Indexed(_),
                spec,
            } if !spec.order.varies() => Some(plan.epoch(epoch)),
            _ => None,
        }
    }

    /// Returns the number of samples of the whole data set, over all ranks; 0 for a stream, whose length is not
    /// known.
    pub fn samples(&self) -> u64 {
        self.known_samples().unwrap_or(0)
    }

    /// Returns the number of samples over all ranks; `None` for a stream.
    pub(crate) fn known_samples(&self) -> Option<u64> {
        match &self.samples {
            Samples::Opaque(loader) => Some(loader.num_items() as u64),
            Samples::Shared { source, .. } => source.len(),
        }
    }

    /// The part from `start` to `end` of the data set, shared out among the same ranks.
    pub(super) fn part(&self, start: usize, end: usize) -> Result<Self> {
        let samples = match &self.samples {
            Samples::Opaque(loader) => Samples::Opaque(loader.slice(start, end)),
            Samples::Shared {
                source: SampleSource::Stream(_),
                ..
            } => self.samples.clone(),
            Samples::Shared {
                source: SampleSource::Indexed(source),
                spec,
                ..
            } => {
                let end = (end as u64).min(source.len());
                let start = (start as u64).min(end);
                let source = SourceSlice {
                    len: end - start,
                    source: source.clone(),
                    start,
                };
                let mut spec = spec.clone();
                spec.order = spec.order.slice(start as usize..end as usize);
                Samples::Shared {
                    plan: spec.plan(source.len, self.context.shared.world_size())?,
                    source: SampleSource::Indexed(Arc::new(source)),
                    spec,
                }
            }
        };
        Ok(Self::new(self.context.clone(), samples))
    }

    /// The same samples, on another device.
    pub(super) fn on(&self, device: &Device) -> Self {
        let samples = match &self.samples {
            Samples::Opaque(loader) => Samples::Opaque(loader.to_device(device)),
            samples => samples.clone(),
        };
        let context = LoaderContext {
            device: device.clone(),
            ..self.context.clone()
        };
        Self::new(context, samples)
    }
}

/// Compares a loader and the items of its data set between ranks.
#[track_caller]
fn agree_on_items(
    context: &Context,
    described: String,
    digests: Option<Result<Vec<CheckedItem>>>,
) -> Result<Vec<CheckedItem>> {
    let group = context.group();
    if context.world_size() > 1 {
        // Of a data set that one rank cannot read, the others hear that, and not that theirs is another one.
        let failed = digests.as_ref().and_then(|digests| digests.as_ref().err());
        agreement::exchange(group, failed, "read items of the data set of a loader")?;
    }
    let items = digests.transpose()?.unwrap_or_default();
    let mut terms = vec![Term::new("a data loader", described)];
    terms.extend(items.iter().map(item_term));
    agreement::check_all(group, &terms)?;
    Ok(items)
}

/// An item of a data set that each rank has read.
fn item_term(item: &CheckedItem) -> Term {
    Term::new("the data set of a loader", item.fingerprint())
        .shown_as(item.to_string())
        .with_hint(ITEM_HINT)
}

/// The hint for a data set that is not the same on every rank.
const ITEM_HINT: &str = " (draw it from a seed that all ranks have; leave the order to `shuffle`, `sampler` or \
                         `weighted` of the builder, and augmentation to `map_samples`; where items are meant to \
                         differ, say `without_item_check`)";

fn share_out<O>(source: SampleSource<O>, spec: Spec, ranks: usize) -> Result<Samples<O>> {
    let plan = match &source {
        SampleSource::Indexed(source) => {
            let len = source.len();
            spec.order.check(len)?;
            let plan = spec.plan(len, ranks)?;
            check_some_steps(&plan, len, &spec, ranks)?;
            plan
        }
        SampleSource::Stream(stream) => {
            check_stream(&spec, stream.sharing)?;
            spec.plan(0, ranks)?
        }
    };
    Ok(Samples::Shared { plan, source, spec })
}

/// Refuses a data set of which no rank ever gets a batch: a training on it would end at once, in silence.
fn check_some_steps(plan: &Plan, samples: u64, spec: &Spec, ranks: usize) -> Result<()> {
    if samples == 0 {
        return Err(no_samples());
    }
    let epoch = match spec.order.batches() {
        Some(batches) => spec.rounds(batches, ranks)?.epoch(0),
        None if spec.order.varies() => return Ok(()),
        None => plan.epoch(0),
    };
    if (0..ranks).any(|rank| epoch.steps(rank) > 0) {
        return Ok(());
    }
    Err(Error::config(format!(
        "{samples} samples do not fill a step of {ranks} ranks, and the tail policy `{}` drops an incomplete step \
         (settings: {spec}): choose the policy `exact`, or smaller batches",
        spec.tail
    )))
}

fn no_samples() -> Error {
    Error::config(
        "the data set has no samples, so an epoch would have no steps: look at how it was read, or leave the loader out",
    )
}

fn check_stream(spec: &Spec, sharing: Sharing) -> Result<()> {
    if !matches!(spec.order, SampleOrder::Sequential) {
        return Err(Error::config(format!(
            "a stream keeps its own order, and this loader's is {}: shuffle within the stream, or build \
             the loader with a data set",
            spec.order
        )));
    }
    if sharing == Sharing::Dispatched && spec.tail == TailPolicy::Uneven {
        return Err(Error::config(
            "under the tail policy `uneven` ranks may run different numbers of steps, and a dispatched \
             stream has them meet in each: choose `exact`, `pad` or `drop`, or `build_stream`",
        ));
    }
    Ok(())
}

impl<O> fmt::Debug for PreparedLoader<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("PreparedLoader");
        debug
            .field("device", &self.context.device)
            .field("number", &self.context.number);
        if let Samples::Shared { plan, source, spec } = &self.samples {
            match source {
                SampleSource::Indexed(_) => debug.field("plan", plan),
                SampleSource::Stream(stream) => {
                    debug.field("stream", &stream.sharing).field("spec", spec)
                }
            };
        }
        debug.finish_non_exhaustive()
    }
}

/// The bare batches, each pass another epoch. Idle batches are left out, since this interface
/// could not say that they do not count.
impl<O: Send + 'static> DataLoader<O> for PreparedLoader<O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let epoch = self.passes.fetch_add(1, Ordering::Relaxed);
        Box::new(BurnIterator {
            done: 0,
            epoch: self.epoch(epoch),
            total: self.num_items(),
        })
    }

    /// Counts the items: 0 for a stream, which does not tell; those of epoch 0 if batches are given.
    fn num_items(&self) -> usize {
        match &self.samples {
            Samples::Opaque(loader) => {
                let ranks = self.context.shared.world_size();
                loader.num_items().div_ceil(ranks)
            }
            Samples::Shared {
                plan,
                source: SampleSource::Indexed(source),
                spec,
            } => match EpochAssignment::new(spec, plan, source.len(), 0) {
                Ok(assignment) => assignment.share.real(self.context.shared.rank()),
                // The error is returned when the first batch is requested.
                Err(_) => 0,
            },
            Samples::Shared { .. } => 0,
        }
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        Arc::new(self.on(device))
    }

    /// A stream has no slices, and is given whole. The numbers of a sampler are those in the slice.
    ///
    /// # Panics
    ///
    /// Never: the part is shared out by the settings that were accepted for the whole.
    #[expect(
        clippy::expect_used,
        reason = "a smaller data set fits wherever the whole did"
    )]
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        Arc::new(
            self.part(start, end)
                .expect("settings that were accepted before"),
        )
    }
}

struct BurnIterator<O> {
    done: usize,
    epoch: Epoch<O>,
    total: usize,
}

impl<O> Iterator for BurnIterator<O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.epoch.next()? {
                Ok(batch) if batch.is_idle() => {}
                Ok(batch) => {
                    self.done += batch.real();
                    return Some(Ok(batch.into_inner()));
                }
                Err(error) => return Some(Err(DatasetError::new(error))),
            }
        }
    }
}

impl<O> DataLoaderIterator<O> for BurnIterator<O> {
    fn progress(&self) -> Progress {
        Progress::new(self.done, self.total, Some("items".to_owned()))
    }
}

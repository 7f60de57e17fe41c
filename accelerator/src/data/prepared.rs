use core::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use accelerator_plan::Plan;
use burn::data::dataloader::DataLoader;
use burn::tensor::Device;

use super::builder::{Loader, Spec};
use super::cursor::Cursor;
use super::epoch::{Epoch, Reseed};
use super::feed;
use super::opaque;
use super::source::{Slice, Source};
use crate::accelerator::Accelerator;
use crate::agreement;
use crate::error::Result;
use crate::timeline::Timeline;

/// This rank's share of a data set, made by
/// [`Accelerator::prepare`](crate::Accelerator::prepare).
///
/// [`epoch`](Self::epoch) gives its batches with their weights. It is a Burn `DataLoader` as
/// well, for code that wants one: that way gives the bare batches, without idle ones, and counts
/// epochs by itself.
pub struct PreparedLoader<O> {
    pub(super) cursor: Arc<Cursor>,
    pub(super) device: Device,
    /// How often it was read as a Burn loader.
    pub(super) passes: AtomicU64,
    pub(super) place: Place,
    pub(super) samples: Samples<O>,
    timeline: Timeline,
}

/// Whose share it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) number: u64,
    pub(super) rank: usize,
    pub(super) seed: u64,
    pub(super) world_size: usize,
}

pub(super) enum Samples<O> {
    /// One of Burn's own loaders.
    Opaque(Arc<dyn DataLoader<O>>),
    Planned {
        plan: Plan,
        source: Arc<dyn Source<O>>,
        spec: Spec,
    },
}

impl<O: Send + 'static> PreparedLoader<O> {
    #[track_caller]
    pub(crate) fn sharded(accelerator: &Accelerator, loader: Loader<O>) -> Result<Self> {
        let Loader { source, spec } = loader;
        let plan = spec.plan(source.len(), accelerator.world_size())?;
        let described = format!("{} samples, {spec}", source.len());
        agreement::check(accelerator.group(), "a data loader", &described)?;
        Ok(Self::new(
            accelerator.shared.device.clone(),
            Place::of(accelerator),
            Samples::Planned { plan, source, spec },
            accelerator.shared.timeline.clone(),
        ))
    }

    pub(crate) fn opaque(accelerator: &Accelerator, loader: Arc<dyn DataLoader<O>>) -> Self {
        let device = accelerator.shared.device.clone();
        let loader = loader.to_device(&device);
        let timeline = accelerator.shared.timeline.clone();
        let samples = Samples::Opaque(loader);
        Self::new(device, Place::of(accelerator), samples, timeline)
    }

    fn new(device: Device, place: Place, samples: Samples<O>, timeline: Timeline) -> Self {
        Self {
            cursor: Arc::default(),
            device,
            passes: AtomicU64::new(0),
            place,
            samples,
            timeline,
        }
    }

    /// This rank's batches of that epoch. Shuffled orders differ from epoch to epoch, and are
    /// the same each time one epoch is asked for. A loader of Burn's own keeps its own order
    /// instead, which goes on with each pass.
    ///
    /// After [`resume`](crate::Accelerator::resume), the epoch in which the checkpoint was saved
    /// begins with the first batch that was not used yet; any other one is whole.
    ///
    /// While batches are taken, the device's random generator is set from the seed, the rank, the
    /// loader, the epoch and the step: dropout is reproducible, and another one on each rank.
    pub fn epoch(&self, epoch: u64) -> Epoch<O> {
        let pass = self.cursor.begin(epoch);
        let start = pass.yielded();
        let reseed = Reseed::new(self.device.clone(), self.place, epoch);
        let (feed, steps) = match &self.samples {
            Samples::Opaque(loader) => (opaque::feed(loader.clone(), self.place, start), None),
            Samples::Planned { plan, source, spec } => {
                // What was used lies within the samples, which `resume` has compared.
                let plan = match plan.epoch(epoch).starting_at(start.consumed) {
                    Ok(plan) => plan,
                    Err(_) => plan.epoch(epoch),
                };
                let steps = plan.steps(self.place.rank);
                let share = feed::Share {
                    device: self.device.clone(),
                    epoch,
                    plan,
                    rank: self.place.rank,
                    source: source.clone(),
                    spec: *spec,
                    steps_before: start.step,
                    timeline: self.timeline.clone(),
                };
                (share.feed(), Some(steps))
            }
        };
        Epoch::new(feed, pass, reseed, steps, self.timeline.clone())
    }

    /// How many steps this rank runs in a whole epoch; `None` for one of Burn's own loaders, which do
    /// not tell.
    pub fn steps(&self) -> Option<u64> {
        match &self.samples {
            Samples::Opaque(_) => None,
            Samples::Planned { plan, .. } => Some(plan.epoch(0).steps(self.place.rank)),
        }
    }

    /// How many samples the whole data set has, over all ranks.
    pub fn samples(&self) -> u64 {
        match &self.samples {
            Samples::Opaque(loader) => loader.num_items() as u64,
            Samples::Planned { source, .. } => source.len(),
        }
    }

    /// The part from `start` to `end` of the data set, shared out among the same ranks.
    pub(super) fn part(&self, start: usize, end: usize) -> Result<Self> {
        let samples = match &self.samples {
            Samples::Opaque(loader) => Samples::Opaque(loader.slice(start, end)),
            Samples::Planned { source, spec, .. } => {
                let end = (end as u64).min(source.len());
                let start = (start as u64).min(end);
                let source = Slice {
                    len: end - start,
                    source: source.clone(),
                    start,
                };
                Samples::Planned {
                    plan: spec.plan(source.len, self.place.world_size)?,
                    source: Arc::new(source),
                    spec: *spec,
                }
            }
        };
        let timeline = self.timeline.clone();
        Ok(Self::new(
            self.device.clone(),
            self.place,
            samples,
            timeline,
        ))
    }

    /// The same samples, on another device.
    pub(super) fn on(&self, device: &Device) -> Self {
        let samples = match &self.samples {
            Samples::Opaque(loader) => Samples::Opaque(loader.to_device(device)),
            Samples::Planned { plan, source, spec } => Samples::Planned {
                plan: plan.clone(),
                source: source.clone(),
                spec: *spec,
            },
        };
        Self::new(device.clone(), self.place, samples, self.timeline.clone())
    }
}

impl Place {
    fn of(accelerator: &Accelerator) -> Self {
        Self {
            number: accelerator.next_loader(),
            rank: accelerator.rank(),
            seed: accelerator.seed(),
            world_size: accelerator.world_size(),
        }
    }
}

impl<O> fmt::Debug for PreparedLoader<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("PreparedLoader");
        debug
            .field("device", &self.device)
            .field("place", &self.place);
        if let Samples::Planned { plan, .. } = &self.samples {
            debug.field("plan", plan);
        }
        debug.finish_non_exhaustive()
    }
}

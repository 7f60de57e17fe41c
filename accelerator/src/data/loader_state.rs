use std::sync::atomic::{AtomicU64, Ordering};

use accelerator_plan::Plan;
use serde::{Deserialize, Serialize};

use super::cursor::{Cursor, EpochPosition, Restored};
use super::order::{SampleOrder, Spec};
use super::prepared::{PreparedLoader, Samples};
use super::steppers::Steppers;
use super::stream::Sharing;
use crate::core::error::{Error, Kind, Result};

/// The state of a loader that a checkpoint keeps.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct LoaderState {
    pub(crate) samples: u64,
    /// The order in words.
    pub(crate) order: String,
    /// The tail policy in words.
    pub(crate) tail: String,
    /// The batch size that the user gave, in words.
    pub(crate) size: String,
    /// Samples of a full step over all ranks; `None` for one of Burn's own loaders.
    pub(crate) global_batch: Option<u64>,
    /// Its number among the loaders of the program, from which dropout is seeded.
    pub(crate) number: u64,
    /// The number of times that it was read as a Burn loader.
    pub(crate) passes: u64,
    /// Set if an optimizer has stepped with its batches.
    pub(crate) trained: bool,
    /// `None` if it was never read.
    pub(crate) spot: Option<EpochPosition>,
    /// Set while the program was taking its batches.
    #[serde(default)]
    pub(crate) is_open: bool,
    /// The models that have stepped with its batches.
    #[serde(default)]
    pub(crate) steppers: Steppers,
    /// Set if gradients were made from a batch that is not used yet.
    #[serde(skip)]
    pub(crate) waits: bool,
}

/// The way in which a loader continues.
pub(crate) struct LoaderResume<'a> {
    /// Returns the samples of a step over all ranks, given their former number.
    pub(crate) global_batch: &'a dyn Fn(u64) -> u64,
    /// Set if an epoch that was not finished is continued.
    pub(crate) goes_on: bool,
    /// Set if `Position::epoch` is that of this loader.
    pub(crate) leads: bool,
    /// Set if there were as many ranks.
    pub(crate) same_world: bool,
}

impl<O: Send + 'static> PreparedLoader<O> {
    pub(crate) fn loader_state(&self) -> LoaderState {
        let position = self.cursor.position();
        let passes = self.passes.load(Ordering::Relaxed);
        // The pass that is not finished is to be begun again.
        let is_in_pass = position.is_some_and(|position| {
            !position.finished && passes.checked_sub(1) == Some(position.epoch)
        });
        let (order, tail, size, global_batch) = match &self.samples {
            Samples::Opaque(_) => opaque(),
            Samples::Planned { plan, spec, .. } => (
                spec.order().to_string(),
                spec.tail().to_string(),
                spec.size(),
                (!matches!(spec.order(), SampleOrder::Batched(_))).then(|| plan.global_batch()),
            ),
            Samples::Stream {
                plan, spec, stream, ..
            } => match stream.sharing() {
                // Of both, a place is the same.
                Sharing::Dispatched | Sharing::Interleaved => (
                    "that of a stream".to_owned(),
                    spec.tail().to_string(),
                    spec.size(),
                    Some(plan.global_batch()),
                ),
                Sharing::Parts => (
                    "that of a stream in parts".to_owned(),
                    spec.tail().to_string(),
                    spec.size(),
                    None,
                ),
            },
        };
        LoaderState {
            samples: self.samples(),
            order,
            tail,
            size,
            global_batch,
            number: self.place.number,
            passes: passes - u64::from(is_in_pass),
            trained: self.cursor.is_trained(),
            spot: position,
            is_open: self.cursor.is_open(),
            steppers: self.cursor.steppers(),
            waits: self.cursor.waits(),
        }
    }

    /// Tells if an index gives another item each time, if one process alone reads: several compare items in
    /// `prepare`.
    pub(crate) fn draws_at_each_read(&self) -> bool {
        match &self.samples {
            Samples::Planned { source, .. } if self.place.world_size == 1 => {
                matches!(source.digests(), Some(Ok(items)) if items.iter().any(|item| item.changes_between_reads()))
            }
            _ => false,
        }
    }

    /// Goes on where a loader stood that is `name`d so in errors.
    pub(crate) fn resume_from(
        mut self,
        name: &str,
        saved: &LoaderState,
        how: &LoaderResume<'_>,
    ) -> Result<Self> {
        let mine = self.loader_state();
        saved.compare(name, &mine)?;
        let in_mid_epoch = how.goes_on && saved.spot.is_some_and(|spot| spot.step > 0);
        let world_size = self.place.world_size;
        match &mut self.samples {
            Samples::Planned {
                plan, source, spec, ..
            } => {
                let len = source.len();
                keep_batch(name, saved, &mine, how, (plan, spec), (len, world_size))?;
            }
            Samples::Stream {
                plan, spec, stream, ..
            } if stream.sharing() != Sharing::Parts => {
                keep_batch(name, saved, &mine, how, (plan, spec), (0, world_size))?;
            }
            Samples::Stream { .. } if in_mid_epoch && saved.size != mine.size => {
                return Err(Error::new(
                    Kind::Checkpoint,
                    format!(
                        "{name} is a stream that is read in parts, which goes on in mid-epoch with batches \
                         as before only: it had {} when the checkpoint was saved, and has {} here",
                        saved.size, mine.size
                    ),
                ));
            }
            Samples::Opaque(_) if in_mid_epoch && !how.same_world => {
                return Err(other_world(name, "one of Burn's own", "LoaderBuilder"));
            }
            Samples::Stream { .. } if in_mid_epoch && !how.same_world => {
                let builder = "LoaderBuilder::build_dispatched_stream";
                return Err(other_world(name, "a stream that is read in parts", builder));
            }
            Samples::Opaque(_) | Samples::Stream { .. } => {}
        }
        self.place.number = saved.number;
        self.passes = AtomicU64::new(saved.passes);
        let leads = how.leads && saved.trained && self.place.rank == 0;
        self.cursor = Cursor::restored(Restored {
            position: saved.spot,
            steppers: saved.steppers.clone(),
            trained: saved.trained,
            goes_on: how.goes_on,
            first_epoch: saved.spot.filter(|_| leads).map(EpochPosition::next_epoch),
        });
        Ok(self)
    }
}

impl LoaderState {
    /// Checks that positions mean the same.
    fn compare(&self, name: &str, mine: &Self) -> Result<()> {
        let differs = |what: &str, saved: &str, mine: &str| {
            Err(Error::new(
                Kind::Checkpoint,
                format!(
                    "the checkpoint does not fit {name}: its {what} was {saved} when it was saved, \
                     and is {mine} in this program; build it as it was, or start afresh in another \
                     folder"
                ),
            ))
        };
        if self.samples != mine.samples {
            let (saved, mine) = (self.samples.to_string(), mine.samples.to_string());
            return differs("number of samples", &saved, &mine);
        }
        if self.order != mine.order {
            return differs("order", &self.order, &mine.order);
        }
        if self.tail != mine.tail {
            return differs("tail policy", &self.tail, &mine.tail);
        }
        Ok(())
    }
}

/// Goes on with the batch size of the checkpoint, where the program has not given another one.
fn keep_batch(
    name: &str,
    saved: &LoaderState,
    mine: &LoaderState,
    how: &LoaderResume<'_>,
    (plan, spec): (&mut Plan, &mut Spec),
    (samples, world_size): (u64, usize),
) -> Result<()> {
    // It may have gone on before.
    let fresh = spec.clone().agreed(None);
    let own = fresh.plan(samples, world_size)?.global_batch();
    let wanted = match saved.global_batch {
        Some(global_batch) if mine.size == saved.size => (how.global_batch)(global_batch),
        None if mine.size == saved.size => own,
        _ => {
            tracing::info!(
                "{name} had {} when the checkpoint was saved, and has {} here, which holds",
                saved.size,
                mine.size
            );
            own
        }
    };
    let agreed = fresh.agreed((wanted != own).then_some(wanted));
    match agreed.plan(samples, world_size) {
        Ok(shared_out) => (*plan, *spec) = (shared_out, agreed),
        Err(error) if saved.trained => return Err(error),
        // Its batches are only looked at: their size changes no weights.
        Err(error) => {
            tracing::debug!("{name} keeps its own batch size of {own} over all ranks: {error:?}");
        }
    }
    Ok(())
}

fn other_world(name: &str, what: &str, builder: &str) -> Error {
    Error::new(
        Kind::Checkpoint,
        format!(
            "{name} is {what}, which goes on in mid-epoch with as many ranks as before only; build it with \
             `accelerator::data::{builder}`, or start as many ranks"
        ),
    )
}

/// Returns the known properties of one of Burn's own loaders.
fn opaque() -> (String, String, String, Option<u64>) {
    let own = || "that of one of Burn's own loaders".to_owned();
    (own(), own(), own(), None)
}

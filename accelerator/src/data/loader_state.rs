use std::sync::atomic::{AtomicU64, Ordering};

use accelerator_plan::Plan;
use serde::{Deserialize, Serialize};

use super::builder::SampleSource;
use super::cursor::{Cursor, EpochPosition, Restored};
use super::order::Spec;
use super::prepared::{PreparedLoader, Samples};
use super::source::CheckedItem;
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
    /// Its number among the loaders of the program.
    pub(crate) number: u64,
    /// The number of times that it was read as a Burn loader.
    pub(crate) passes: u64,
    /// Set if an optimizer has stepped with its batches.
    pub(crate) trained: bool,
    /// `None` if it was never read.
    #[serde(rename = "spot")]
    pub(crate) position: Option<EpochPosition>,
    /// Set while the program was taking its batches.
    #[serde(default)]
    pub(crate) is_open: bool,
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
    pub(crate) continues: bool,
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
            Samples::Opaque(_) => {
                let own = || "that of one of Burn's own loaders".to_owned();
                (own(), own(), own(), None)
            }
            Samples::Shared { plan, source, spec } => {
                let (order, is_steady) = match source {
                    SampleSource::Indexed(_) => (spec.order.to_string(), !spec.order.is_batched()),
                    SampleSource::Stream(stream) => match stream.sharing {
                        // Of both, a place is the same.
                        Sharing::Dispatched | Sharing::Interleaved => {
                            ("that of a stream".to_owned(), true)
                        }
                        Sharing::Parts => ("that of a stream in parts".to_owned(), false),
                    },
                };
                let global_batch = is_steady.then(|| plan.global_batch());
                (order, spec.tail.to_string(), spec.size(), global_batch)
            }
        };
        LoaderState {
            samples: self.samples(),
            order,
            tail,
            size,
            global_batch,
            number: self.context.number,
            passes: passes - u64::from(is_in_pass),
            trained: self.cursor.is_trained(),
            position,
            is_open: self.cursor.is_open(),
            steppers: self.cursor.steppers(),
            waits: self.cursor.waits(),
        }
    }

    /// Tells if an index gives another item each time, if one process alone reads: several compare items in
    /// `prepare`.
    pub(crate) fn draws_at_each_read(&self) -> bool {
        match &self.samples {
            Samples::Shared {
                source: SampleSource::Indexed(source),
                ..
            } if self.context.shared.world_size() == 1 => {
                matches!(source.digests(), Some(Ok(items)) if items.iter().any(CheckedItem::changes_between_reads))
            }
            _ => false,
        }
    }

    /// Continues where a loader stood that is `name`d so in errors.
    pub(crate) fn resume_from(
        mut self,
        name: &str,
        saved: &LoaderState,
        how: &LoaderResume<'_>,
    ) -> Result<Self> {
        let mine = self.loader_state();
        saved.compare(name, &mine)?;
        let in_mid_epoch =
            how.continues && saved.position.is_some_and(|position| position.step > 0);
        match &mut self.samples {
            Samples::Opaque(_) if in_mid_epoch && !how.same_world => {
                return Err(other_world(name, "one of Burn's own", "LoaderBuilder"));
            }
            Samples::Opaque(_) => {}
            Samples::Shared {
                source: SampleSource::Stream(stream),
                ..
            } if stream.sharing == Sharing::Parts => {
                if in_mid_epoch && saved.size != mine.size {
                    return Err(Error::new(
                        Kind::Checkpoint,
                        format!(
                            "{name} is a stream that is read in parts, which continues in mid-epoch with batches \
                             as before only: it had {} when the checkpoint was saved, and has {} here",
                            saved.size, mine.size
                        ),
                    ));
                }
                if in_mid_epoch && !how.same_world {
                    let builder = "LoaderBuilder::build_dispatched_stream";
                    return Err(other_world(name, "a stream that is read in parts", builder));
                }
            }
            Samples::Shared { plan, spec, .. } => {
                keep_batch(name, saved, &mine.size, how, (plan, spec))?;
            }
        }
        self.context.number = saved.number;
        self.passes = AtomicU64::new(saved.passes);
        let leads = how.leads && saved.trained && self.context.shared.rank() == 0;
        self.cursor = Cursor::restored(Restored {
            position: saved.position,
            steppers: saved.steppers.clone(),
            trained: saved.trained,
            continues: how.continues,
            first_epoch: saved
                .position
                .filter(|_| leads)
                .map(EpochPosition::next_epoch),
        });
        Ok(self)
    }
}

impl LoaderState {
    /// Checks that positions mean the same.
    fn compare(&self, name: &str, mine: &Self) -> Result<()> {
        let number = |samples: u64| samples.to_string();
        for (what, saved, mine) in [
            (
                "number of samples",
                &number(self.samples),
                &number(mine.samples),
            ),
            ("order", &self.order, &mine.order),
            ("tail policy", &self.tail, &mine.tail),
        ] {
            if saved != mine {
                return Err(Error::new(
                    Kind::Checkpoint,
                    format!(
                        "the checkpoint does not fit {name}: its {what} was {saved} when it was saved, \
                         and is {mine} in this program; build it as it was, or start afresh in another \
                         folder"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Continues with the batch size of the checkpoint, where the program has not given another one.
fn keep_batch(
    name: &str,
    saved: &LoaderState,
    size: &str,
    how: &LoaderResume<'_>,
    (plan, spec): (&mut Plan, &mut Spec),
) -> Result<()> {
    let (samples, ranks) = (plan.samples(), plan.world_size());
    // It may have gone on before.
    let fresh = spec.clone().agreed(None);
    let own = fresh.plan(samples, ranks)?.global_batch();
    let wanted = match saved.global_batch {
        Some(global_batch) if size == saved.size => (how.global_batch)(global_batch),
        None if size == saved.size => own,
        _ => {
            tracing::info!(
                "{name} had {} when the checkpoint was saved, and has {size} here, which holds",
                saved.size
            );
            own
        }
    };
    let agreed = fresh.agreed((wanted != own).then_some(wanted));
    match agreed.plan(samples, ranks) {
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
            "{name} is {what}, which continues in mid-epoch with as many ranks as before only; build it with \
             `accelerator::data::{builder}`, or start as many ranks"
        ),
    )
}

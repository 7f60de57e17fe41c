//! The warnings about a model, each given once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::compression::Compression;
use crate::context::Context;
use crate::core::error::{self, Once};
use crate::precision::Precision;

#[derive(Debug, Default)]
pub(super) struct ModelWarnings {
    left_epoch: Once,
    missing_gradients: Once,
    non_finite_loss: Once,
    precision_unused: Once,
    range: Once,
    /// The number of consecutive windows up to now in which all ranks had the same loss.
    same_losses: AtomicU64,
    unclipped: Once,
    unread: Once,
    /// Set once a copy was made to be trained through.
    works_on_copies: AtomicBool,
}

/// The number of consecutive windows with the same loss on all ranks before the warning. A model that begins with
/// zeros, and whose first steps overflow or have a rate of 0, has the same loss for any samples.
const SAME_LOSSES: u64 = 8;

impl ModelWarnings {
    /// Warns that this many micro-steps of an epoch that was left go into a step of another epoch.
    pub(super) fn left_epoch(&self, epoch: u64, micro_steps: usize) {
        warn(&self.left_epoch, || {
            format!(
                "epoch {epoch} was left with {micro_steps} micro-steps in an accumulation window that is open, and \
                 they go into the first step of the next epoch: end the window before leaving, with \
                 `batch.weight().trigger_sync()`, or keep it open on purpose, with `no_sync`"
            )
        });
    }

    /// Warns that this rank had no gradient for parameters that others trained.
    pub(super) fn missing_gradients(&self, rank: usize, paths: &[&str]) {
        if !paths.is_empty() {
            warn(&self.missing_gradients, || {
                format!(
                    "these parameters had no gradient on rank {rank}, and one on others: it counted as zeros there: \
                     {paths:?}"
                )
            });
        }
    }

    /// Warns of a loss that is not finite. If losses are scaled, as in f16, it does not damage the model: its step is
    /// skipped.
    pub(super) fn non_finite_loss(&self, step: u64, whose: &str, loss: f64, scale: Option<f64>) {
        let consequence = match scale {
            Some(_) => {
                "the step is skipped, as every step with such a loss will be; look for an overflow of f16 in the \
                 forward pass (above 65504), lower the learning rate"
            }
            None => {
                "the parameters are not finite from this step on, and training cannot recover; lower the learning \
                 rate, clip gradients"
            }
        };
        warn(&self.non_finite_loss, || {
            format!(
                "{whose} in step {step} is {loss}: {consequence}, or look at the samples; `stop_at_non_finite_loss` \
                 of the builder makes it an error"
            )
        });
    }

    /// Notes that a copy that takes gradients was asked for, whatever of it had to be cast.
    pub(super) fn note_copied(&self) {
        self.works_on_copies.store(true, Ordering::Relaxed);
    }

    /// Warns that a precision was asked for but is not used, if no copy was ever made to be trained through.
    pub(super) fn precision_unused(&self, precision: Precision) {
        if !self.works_on_copies.load(Ordering::Relaxed) {
            warn(&self.precision_unused, || {
                format!(
                    "the precision is {precision}, and a model is trained in full precision all the same: its \
                     forward pass does not use the working copy; write `accelerator.forward(&model, |model| …)` \
                     around it, with `accelerator.to_working(input)` for what goes in"
                )
            });
        }
    }

    /// Warns that a compressed bucket had to be reduced again.
    pub(super) fn range(&self, step: u64, compression: Compression) {
        warn(&self.range, || {
            format!(
                "gradients of step {step} that were sent as {compression} are not finite: they were too large, and \
                 the step was reduced again in f32, or they are not finite themselves"
            )
        });
    }

    /// Notes if all ranks of a window had the same loss, to the bit. Returns `true` once, if they had in
    /// [`SAME_LOSSES`] windows one after the other.
    fn count_same_losses(&self, same: bool) -> bool {
        let count = self.same_losses.load(Ordering::Relaxed);
        if count >= SAME_LOSSES {
            return false;
        }
        let count = if same { count + 1 } else { 0 };
        self.same_losses.store(count, Ordering::Relaxed);
        count == SAME_LOSSES
    }

    /// Warns if all ranks compute the same values, so that they duplicate each other's work.
    pub(super) fn same_losses(&self, context: &Context, same: bool) {
        if !self.count_same_losses(same) || !context.is_main_process() {
            return;
        }
        let loaders = match context.loaders.load(Ordering::Relaxed) {
            0 => "no data loader was prepared; ",
            _ => "",
        };
        report(&format!(
            "all {} ranks had the same loss, to the bit, in {SAME_LOSSES} steps one after the other: they train \
                 on the same samples, so that all of them together do what one does alone; {loaders}pass the loader \
                 through `accelerator.prepare`, take the batches of `loader.epoch(epoch)`, and draw what is made by \
                 hand from another seed on each rank; where it is meant, build the accelerator with \
                 `allow_same_batches()`",
            context.world_size()
        ));
    }

    /// Warns that a clip covers none of the parameters, of which this is the first.
    pub(super) fn unclipped(&self, parameters: usize, first: &str) {
        warn(&self.unclipped, || {
            format!(
                "a clip that was asked for covers none of the {parameters} trainable parameters of its model: `only` \
                 is given paths such as `{first}`"
            )
        });
    }

    /// Warns that gradients are not logged, since each rank has only a part of them.
    pub(super) fn unread(&self) {
        warn(&self.unread, || {
            "no histograms of gradients are logged: with a `Sharded` optimizer each rank has a part of them alone"
                .to_owned()
        });
    }
}

fn warn(once: &Once, text: impl FnOnce() -> String) {
    if once.first() {
        report(&text());
    }
}

fn report(text: &str) {
    error::warn(&format!("{text} (reported once per model)"));
}

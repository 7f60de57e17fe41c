//! Losses that are not finite: nothing comes of training on from there.

use crate::core::error::{Error, Kind};
use crate::core::user_message;

/// The fate of a step whose loss is not finite.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum OnNonFiniteLoss {
    /// It takes place, and is told once.
    #[default]
    Warn,
    /// It fails, on all ranks; in local training on the rank whose loss it is.
    Fail,
}

impl OnNonFiniteLoss {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Warn => "told once",
            Self::Fail => "an error",
        }
    }
}

/// Warns of a non-finite loss. If losses are scaled, as in f16, it does not damage the model: its step is skipped.
pub(super) fn warn(step: u64, whose: &str, loss: f64, scale: Option<f64>) {
    let consequence = match scale {
        Some(_) => {
            "the step is skipped, as every step with such a loss will be; look for an overflow of f16 in the forward \
             pass (above 65504), lower the learning rate"
        }
        None => {
            "the parameters are not finite from this step on, and training cannot recover; lower the learning rate, \
             clip gradients"
        }
    };
    user_message::warn(&format!(
        "{whose} in step {step} is {loss}: {consequence}, or look at the samples; `stop_at_non_finite_loss` of the \
         builder makes it an error (this warning is given once per model)"
    ));
}

/// The error for one, of ranks with their losses.
pub(super) fn error(step: u64, losses: impl IntoIterator<Item = (usize, f64)>) -> Error {
    let bad = losses.into_iter().filter(|(_, loss)| !loss.is_finite());
    let bad: Vec<_> = bad
        .map(|(rank, loss)| format!("{loss} on rank {rank}"))
        .collect();
    let message = format!(
        "the loss of step {} is not finite: {}; the model is as it was before this step: lower the learning rate, \
         clip gradients, or look at the samples, and go on from a checkpoint",
        step,
        bad.join(", ")
    );
    Error::new(Kind::NotFinite, message)
}

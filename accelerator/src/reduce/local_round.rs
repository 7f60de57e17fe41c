use crate::core::error::{Error, Result};

/// The local steps of a rank on a model since the replicas of all ranks were the same.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LocalRound {
    /// Set while replicas differ, or something beside the model waits for the end of the round.
    apart: bool,
    /// The weight of the samples that this rank stepped with.
    samples: f64,
    /// Set if a sharded optimizer was to step, until the error is returned.
    met_shards: bool,
    /// Windows that ended, this rank's idle ones included: the same number on every rank.
    steps: u64,
}

/// The effect of an unfinished round on calls outside of it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OpenRoundConcern {
    /// Replicas differ, or the outer optimizer waits.
    Apart,
    /// One rank alone has nothing to average.
    None,
}

impl LocalRound {
    /// A window has ended.
    pub(crate) fn count(&mut self, samples: f64, concern: OpenRoundConcern) {
        self.steps += 1;
        self.samples += samples;
        self.apart |= concern == OpenRoundConcern::Apart;
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    pub(crate) fn samples(&self) -> f64 {
        self.samples
    }

    /// Returns `true` if replicas differ, so that there is nothing to save.
    pub(crate) fn is_apart(&self) -> bool {
        self.apart
    }

    /// A sharded optimizer was to step, and did not.
    pub(crate) fn meet_shards(&mut self) {
        self.met_shards = true;
    }

    /// Tells once that a sharded optimizer was to step.
    pub(crate) fn check_whole(&mut self) -> Result<()> {
        match core::mem::take(&mut self.met_shards) {
            true => Err(sharded()),
            false => Ok(()),
        }
    }

    /// Refuses what needs the same replicas on every rank. All ranks count the same steps, so all get
    /// the same error.
    pub(crate) fn check_together(&self, action: &str) -> Result<()> {
        if !self.apart {
            return Ok(());
        }
        Err(Error::misuse(format!(
            "cannot {action} in the middle of local training: each rank took {} steps of its own since \
             parameters were averaged; call `average` first, or do it when `step` has returned \
             `LocalOutcome::Averaged`",
            self.steps
        )))
    }
}

/// Returns the error for an optimizer whose state is sharded over the ranks.
pub(crate) fn sharded() -> Error {
    Error::misuse(
        "local training steps each rank by itself, and each rank has only a part of the state of an optimizer \
         that was prepared as `Sharded`: prepare it without `Sharded`, or train with `accelerator.backward`",
    )
}

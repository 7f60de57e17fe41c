//! The updates of replicas, which must be the same on every rank, and the rounds of local training, in which they differ.

use core::fmt;

use accelerator_host::sync::Mutex;
use accelerator_plan::mix;
use serde::{Deserialize, Serialize};

use crate::core::agreement::sides;
use crate::core::error::{Error, Kind, Result};

/// The limits that gradients were clipped by.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clips {
    digest: u64,
    last: Option<f64>,
}

impl Clips {
    pub(super) fn note(&mut self, limit: f64) {
        self.digest = mix(&[self.digest, limit.to_bits()]);
        self.last = Some(limit);
    }
}

/// The updates of a replica since its model was prepared: the same on all ranks.
#[derive(Debug, Default)]
pub(crate) struct Updates(Mutex<SeenUpdates>);

impl Updates {
    pub(super) fn note(&self, rate: Option<f64>, clips: Clips) {
        let mut seen = self.0.lock();
        // The last bits of a schedule's `cos` are each machine's own, and too small to count in `f32`.
        let digest = [
            seen.digest,
            u64::from((rate.unwrap_or(f64::NAN) as f32).to_bits()),
            clips.digest,
        ];
        seen.digest = mix(&digest);
        seen.rate = rate.filter(|rate| !rate.is_nan());
        seen.clip = clips.last.filter(|clip| !clip.is_nan());
        seen.count += 1;
    }

    pub(crate) fn seen(&self) -> SeenUpdates {
        *self.0.lock()
    }
}

/// The updates of a replica up to now, as ranks tell each other.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct SeenUpdates {
    count: u64,
    pub(super) digest: u64,
    rate: Option<f64>,
    clip: Option<f64>,
}

impl SeenUpdates {
    /// Fails where those of the ranks, in their order, are not the same.
    pub(crate) fn check(ranks: &[Self]) -> Result<()> {
        if ranks.iter().all(|seen| seen.digest == ranks[0].digest) {
            return Ok(());
        }
        Err(Error::new(
            Kind::Drift,
            format!(
                "the ranks have not updated their replicas of a model alike ({}), so that each has another one: step \
                 at the same places, with the same learning rate and the same clip on every rank, and continue from a \
                 checkpoint",
                sides(ranks)
            ),
        ))
    }
}

impl fmt::Display for SeenUpdates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let noun = if self.count == 1 { "update" } else { "updates" };
        write!(f, "{} {noun} since `prepare`", self.count)?;
        if let Some(rate) = self.rate.filter(|_| self.count > 0) {
            write!(f, ", the last with the learning rate {rate}")?;
        }
        match self.clip.filter(|_| self.count > 0) {
            Some(limit) => write!(f, ", clipped at {limit}"),
            None => Ok(()),
        }
    }
}

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
    /// Counts a window that has ended.
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

    pub(crate) fn is_apart(&self) -> bool {
        self.apart
    }

    /// Notes that a sharded optimizer was to step, and did not.
    pub(crate) fn meet_shards(&mut self) {
        self.met_shards = true;
    }

    /// Fails once if a sharded optimizer was to step.
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

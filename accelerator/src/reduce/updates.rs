//! The updates of replicas, which must be the same on every rank.

use core::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

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
pub(crate) struct Updates {
    count: AtomicU64,
    /// The digest of all updates.
    digest: AtomicU64,
    /// The bits of the last rate and the last clip.
    rate: AtomicU64,
    clip: AtomicU64,
}

impl Updates {
    pub(super) fn note(&self, rate: Option<f64>, clips: Clips) {
        let (rate, clip) = (rate.unwrap_or(f64::NAN), clips.last.unwrap_or(f64::NAN));
        // The last bits of a schedule's `cos` are each machine's own, and too small to count in `f32`.
        let digest = [
            self.seen().digest,
            u64::from((rate as f32).to_bits()),
            clips.digest,
        ];
        self.digest.store(mix(&digest), Ordering::Relaxed);
        self.rate.store(rate.to_bits(), Ordering::Relaxed);
        self.clip.store(clip.to_bits(), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn seen(&self) -> SeenUpdates {
        let value = |bits: &AtomicU64| {
            let value = f64::from_bits(bits.load(Ordering::Relaxed));
            (!value.is_nan()).then_some(value)
        };
        SeenUpdates {
            count: self.count.load(Ordering::Relaxed),
            digest: self.digest.load(Ordering::Relaxed),
            rate: value(&self.rate),
            clip: value(&self.clip),
        }
    }
}

/// The updates of a replica up to now, as ranks tell each other.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
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
                 at the same places, with the same learning rate and the same clip on every rank, and go on from a \
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

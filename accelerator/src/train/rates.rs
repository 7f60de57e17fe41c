//! Learning rates as functions of the number of the update.

use core::f64::consts::PI;

use serde::{Deserialize, Serialize};

use super::words::words;

words! {
    /// The course of the learning rate over a training, by the names of Hugging Face.
    ///
    /// `T` is the number of updates, `w` the number of those of the warm-up, in which the rate grows linearly from 0, and
    /// `p = (k - w) / (T - w)` how far update `k` is after it. The rate is that of the arguments, times
    ///
    /// | name | after the warm-up |
    /// |---|---|
    /// | `linear` | `1 - p` |
    /// | `cosine` | `(1 + cos(2π · num_cycles · p)) / 2`, with half a cycle unless said otherwise |
    /// | `cosine_with_restarts` | `(1 + cos(π · (num_cycles · p mod 1))) / 2`, and 0 at the end |
    /// | `polynomial` | from 1 to `lr_end`, by `(1 - p)^power` |
    /// | `constant` | 1, without warm-up |
    /// | `constant_with_warmup` | 1 |
    /// | `inverse_sqrt` | `1 / √((k + t - w) / t)`, with `timescale` t: w, or 10,000 without warm-up |
    /// | `cosine_with_min_lr` | as `cosine`, down to `min_lr` or `min_lr_rate` |
    /// | `warmup_stable_decay` | 1, and as `cosine` over the last `num_decay_steps` |
    pub enum LrSchedulerType: "lr_scheduler_type" {
        Linear = "linear",
        Cosine = "cosine",
        CosineWithRestarts = "cosine_with_restarts",
        Polynomial = "polynomial",
        Constant = "constant",
        ConstantWithWarmup = "constant_with_warmup",
        InverseSqrt = "inverse_sqrt",
        CosineWithMinLr = "cosine_with_min_lr",
        WarmupStableDecay = "warmup_stable_decay",
    }
}

/// The settings of a [`LrSchedulerType`] besides the rate and the warm-up. On a command line, they are JSON:
/// `--lr-scheduler-kwargs '{"power": 2}'`.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct LrSchedulerKwargs {
    /// The last rate of `polynomial`. Default: 1e-7.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_end: Option<f64>,
    /// The last rate of `cosine_with_min_lr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_lr: Option<f64>,
    /// The last rate of `cosine_with_min_lr`, as a fraction of the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_lr_rate: Option<f64>,
    /// The number of waves of the cosine. Default: 0.5, or 1 with restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_cycles: Option<f64>,
    /// The number of updates at the end over which `warmup_stable_decay` decays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_decay_steps: Option<u64>,
    /// The exponent of `polynomial`. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<f64>,
    /// The number of updates over which `inverse_sqrt` falls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timescale: Option<u64>,
}

impl LrSchedulerKwargs {
    /// Returns the names of the options that are set and that such a schedule does not read.
    pub(super) fn set_but_unused(
        &self,
        kind: LrSchedulerType,
    ) -> impl Iterator<Item = &'static str> + use<> {
        use LrSchedulerType as T;
        const COSINES: &[LrSchedulerType] = &[
            T::Cosine,
            T::CosineWithRestarts,
            T::CosineWithMinLr,
            T::WarmupStableDecay,
        ];
        let readers: [(&str, bool, &[LrSchedulerType]); 7] = [
            ("lr_end", self.lr_end.is_some(), &[T::Polynomial]),
            ("min_lr", self.min_lr.is_some(), &[T::CosineWithMinLr]),
            (
                "min_lr_rate",
                self.min_lr_rate.is_some(),
                &[T::CosineWithMinLr],
            ),
            ("num_cycles", self.num_cycles.is_some(), COSINES),
            (
                "num_decay_steps",
                self.num_decay_steps.is_some(),
                &[T::WarmupStableDecay],
            ),
            ("power", self.power.is_some(), &[T::Polynomial]),
            ("timescale", self.timescale.is_some(), &[T::InverseSqrt]),
        ];
        let unused = readers.into_iter();
        unused
            .filter(move |(_, is_set, readers)| *is_set && !readers.contains(&kind))
            .map(|(name, ..)| name)
    }
}

/// The learning rate of each update of a training.
#[derive(Clone, Copy, Debug)]
pub(super) struct LrSchedule {
    pub(super) kind: LrSchedulerType,
    pub(super) kwargs: LrSchedulerKwargs,
    pub(super) rate: f64,
    pub(super) updates: u64,
    pub(super) warmup: u64,
}

impl LrSchedule {
    /// Returns the rate of update `k`, from 0.
    ///
    /// The functions are those of `optimization.py` in transformers 5.23.
    pub(super) fn rate(&self, k: u64) -> f64 {
        self.rate * self.factor(k)
    }

    fn factor(&self, k: u64) -> f64 {
        let Self {
            kind,
            kwargs,
            updates,
            warmup,
            ..
        } = *self;
        if kind == LrSchedulerType::Constant {
            return 1.0;
        }
        if k < warmup {
            return k as f64 / warmup as f64;
        }
        let after = (k - warmup) as f64;
        let rest = updates.saturating_sub(warmup).max(1) as f64;
        let progress = after / rest;
        match kind {
            LrSchedulerType::Linear => (updates.saturating_sub(k) as f64 / rest).max(0.0),
            LrSchedulerType::Cosine => cosine(progress, kwargs.num_cycles),
            LrSchedulerType::CosineWithRestarts => {
                if progress >= 1.0 {
                    return 0.0;
                }
                let wave = (kwargs.num_cycles.unwrap_or(1.0) * progress) % 1.0;
                (0.5 * (1.0 + libm::cos(PI * wave))).max(0.0)
            }
            LrSchedulerType::Polynomial => {
                let end = kwargs.lr_end.unwrap_or(POLYNOMIAL_END);
                if k > updates {
                    return end / self.rate;
                }
                let left = libm::pow(1.0 - progress, kwargs.power.unwrap_or(1.0));
                ((self.rate - end) * left + end) / self.rate
            }
            LrSchedulerType::Constant | LrSchedulerType::ConstantWithWarmup => 1.0,
            LrSchedulerType::InverseSqrt => {
                let scale = kwargs.timescale.unwrap_or(match warmup {
                    0 => INVERSE_SQRT_SCALE,
                    warmup => warmup,
                });
                let scale = scale.max(1) as f64;
                1.0 / ((k as f64 + scale - warmup as f64) / scale).sqrt()
            }
            LrSchedulerType::CosineWithMinLr => {
                let least = kwargs.min_lr.map(|rate| rate / self.rate);
                let least = kwargs.min_lr_rate.or(least).unwrap_or(0.0);
                cosine(progress, kwargs.num_cycles) * (1.0 - least) + least
            }
            LrSchedulerType::WarmupStableDecay => {
                let decay = kwargs
                    .num_decay_steps
                    .unwrap_or(updates - warmup.min(updates));
                let begin = updates.saturating_sub(decay).max(warmup);
                if k < begin {
                    return 1.0;
                }
                if k >= updates {
                    return 0.0;
                }
                cosine((k - begin) as f64 / decay.max(1) as f64, kwargs.num_cycles)
            }
        }
    }
}

fn cosine(progress: f64, cycles: Option<f64>) -> f64 {
    let wave = 2.0 * cycles.unwrap_or(0.5) * progress;
    (0.5 * (1.0 + libm::cos(PI * wave))).max(0.0)
}

const POLYNOMIAL_END: f64 = 1e-7;
const INVERSE_SQRT_SCALE: u64 = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(kind: LrSchedulerType, kwargs: LrSchedulerKwargs) -> Vec<f64> {
        let schedule = LrSchedule {
            kind,
            kwargs,
            rate: 1.0,
            updates: 8,
            warmup: 2,
        };
        (0..=8).map(|k| schedule.rate(k)).collect()
    }

    #[track_caller]
    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (k, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!(
                (found - expected).abs() < 1e-6,
                "{k}: {found}, not {expected}"
            );
        }
    }

    /// Compares with the rates of transformers 5.23, for 8 updates with 2 of warm-up.
    #[test]
    #[expect(
        clippy::approx_constant,
        reason = "the square root of a half is one of the rates"
    )]
    fn rates_are_those_of_hugging_face() {
        use LrSchedulerType::*;
        let none = LrSchedulerKwargs::default();
        let cases: [(_, _, [f64; 9]); 9] = [
            (
                Linear,
                none,
                [
                    0.0, 0.5, 1.0, 0.833333, 0.666667, 0.5, 0.333333, 0.166667, 0.0,
                ],
            ),
            (
                Cosine,
                none,
                [0.0, 0.5, 1.0, 0.933013, 0.75, 0.5, 0.25, 0.066987, 0.0],
            ),
            (
                CosineWithRestarts,
                LrSchedulerKwargs {
                    num_cycles: Some(2.0),
                    ..none
                },
                [0.0, 0.5, 1.0, 0.75, 0.25, 1.0, 0.75, 0.25, 0.0],
            ),
            (
                Polynomial,
                LrSchedulerKwargs {
                    lr_end: Some(0.1),
                    power: Some(2.0),
                    ..none
                },
                [0.0, 0.5, 1.0, 0.725, 0.5, 0.325, 0.2, 0.125, 0.1],
            ),
            (Constant, none, [1.0; 9]),
            (
                ConstantWithWarmup,
                none,
                [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            ),
            (
                InverseSqrt,
                none,
                [
                    0.0, 0.5, 1.0, 0.816497, 0.7071068, 0.632456, 0.57735, 0.534522, 0.5,
                ],
            ),
            (
                CosineWithMinLr,
                LrSchedulerKwargs {
                    min_lr_rate: Some(0.1),
                    ..none
                },
                [0.0, 0.5, 1.0, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1],
            ),
            (
                WarmupStableDecay,
                LrSchedulerKwargs {
                    num_decay_steps: Some(4),
                    ..none
                },
                [0.0, 0.5, 1.0, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0],
            ),
        ];
        for (kind, kwargs, expected) in cases {
            assert_close(&factors(kind, kwargs), &expected);
        }
    }
}

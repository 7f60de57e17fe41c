use core::fmt;

use serde::{Deserialize, Serialize};

use crate::core::error::{Error, Result};

/// The scaling of the loss with [`Precision::F16`](super::Precision::F16), as PyTorch's `GradScaler`
/// does it, with the same defaults. Rank 0 logs the first step that is skipped, and warns of the first 16 in a row.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct LossScale {
    initial: f64,
    growth: f64,
    backoff: f64,
    interval: u64,
}

impl LossScale {
    /// Begins with 65536, doubles after 2000 good steps in a row, and halves when gradients are not
    /// finite.
    pub fn new() -> Self {
        Self {
            initial: 65536.0,
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
        }
    }

    /// The scale at first, from 2⁻⁴⁰ to 2⁴⁰, within which it stays. A power of two adds no rounding error.
    /// Default: 65536.
    pub fn with_initial(mut self, scale: f64) -> Self {
        self.initial = scale;
        self
    }

    /// Sets the factor of the scale after so many good steps, from 1 to 65536. Default: 2.
    pub fn with_growth(mut self, factor: f64) -> Self {
        self.growth = factor;
        self
    }

    /// Sets the factor of the scale after a skipped step, from 1/65536 to less than 1. Default: 0.5.
    pub fn with_backoff(mut self, factor: f64) -> Self {
        self.backoff = factor;
        self
    }

    /// Sets the number of good steps in a row after which the scale grows, at least 1. Default: 2000.
    pub fn with_growth_interval(mut self, steps: u64) -> Self {
        self.interval = steps;
        self
    }

    /// Refuses what leads nowhere.
    pub(crate) fn check(&self) -> Result<()> {
        let Self {
            initial,
            growth,
            backoff,
            interval,
        } = *self;
        let bounds = [
            (
                "beginning",
                initial,
                (SMALLEST..=LARGEST).contains(&initial),
                "from 2^-40 to 2^40",
            ),
            (
                "growth",
                growth,
                (1.0..=STEEPEST).contains(&growth),
                "from 1 to 65536",
            ),
            (
                "backoff",
                backoff,
                (1.0 / STEEPEST..1.0).contains(&backoff),
                "from 1/65536 to less than 1",
            ),
        ];
        for (of, value, is_within, range) in bounds {
            if !is_within {
                return Err(Error::config(format!(
                    "the {of} of the loss scale is {value:e}; expected a number {range} (the default is: {})",
                    Self::new()
                )));
            }
        }
        if interval == 0 {
            return Err(Error::config(format!(
                "the loss scale is to grow after 0 good steps; expected 1 or more (the default is: {})",
                Self::new()
            )));
        }
        Ok(())
    }
}

impl Default for LossScale {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for LossScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} at first, times {} after {} good steps, times {} after a bad one",
            self.initial, self.growth, self.interval, self.backoff
        )
    }
}

/// The bounds of a scale: its products with sums stay within the range of `f32`.
const LARGEST: f64 = (1_u64 << 40) as f64;
const SMALLEST: f64 = 1.0 / LARGEST;

/// The largest factor of one move: with a larger one, the scale would jump from bound to bound, and never fit.
const STEEPEST: f64 = (1_u64 << 16) as f64;

/// The finiteness of all gradients of a window.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Finiteness {
    Finite,
    NotFinite,
}

/// A scale as it stands. It moves by what all ranks see alike, and so is the same on each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scaler {
    rule: LossScale,
    state: ScalerState,
    skips: Skips,
}

/// Steps that were skipped in this process.
#[derive(Clone, Copy, Debug, Default)]
struct Skips {
    in_row: u64,
    /// The longest row before this one.
    most: u64,
    total: u64,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum SkipNotice {
    First,
    Many(u64),
}

/// The number of skipped steps in a row that is too many: the default scale is 1 after them.
const MANY_SKIPS: u64 = 16;

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct ScalerState {
    scale: f64,
    /// Good steps since the scale changed, or a step was skipped.
    good_steps: u64,
}

impl Scaler {
    pub(crate) fn new(rule: LossScale) -> Self {
        let state = ScalerState {
            scale: rule.initial,
            good_steps: 0,
        };
        Self {
            rule,
            state,
            skips: Skips::default(),
        }
    }

    pub(crate) fn with_state(self, state: ScalerState) -> Self {
        Self { state, ..self }
    }

    pub(crate) fn scale(&self) -> f64 {
        self.state.scale
    }

    pub(crate) fn state(&self) -> ScalerState {
        self.state
    }

    pub(crate) fn skip_notice(&self) -> Option<SkipNotice> {
        let Skips {
            in_row,
            most,
            total,
        } = self.skips;
        match (total, in_row) {
            (1, 1) => Some(SkipNotice::First),
            (_, MANY_SKIPS) if most < MANY_SKIPS => Some(SkipNotice::Many(in_row)),
            _ => None,
        }
    }

    /// A window was reduced.
    pub(crate) fn update(&mut self, gradients: Finiteness) {
        let ScalerState { scale, good_steps } = &mut self.state;
        if gradients == Finiteness::NotFinite {
            *scale = (*scale * self.rule.backoff).max(SMALLEST);
            *good_steps = 0;
            self.skips.in_row += 1;
            self.skips.total += 1;
            return;
        }
        self.skips.most = self.skips.most.max(self.skips.in_row);
        self.skips.in_row = 0;
        *good_steps += 1;
        if *good_steps >= self.rule.interval {
            *scale = (*scale * self.rule.growth).min(LARGEST);
            *good_steps = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Finiteness::{Finite, NotFinite};
    use super::*;

    #[test]
    fn the_scale_grows_after_good_steps_in_a_row_and_backs_off_at_once() {
        let mut scaler = Scaler::new(LossScale::new().with_initial(8.0).with_growth_interval(3));
        let mut after = |gradients| {
            scaler.update(gradients);
            scaler.scale()
        };
        assert_eq!([Finite; 3].map(&mut after), [8.0, 8.0, 16.0]);
        // A bad step begins the count again.
        let bad = [Finite, Finite, NotFinite];
        assert_eq!(bad.map(&mut after), [16.0, 16.0, 8.0]);
        assert_eq!([Finite; 3].map(&mut after), [8.0, 8.0, 16.0]);
    }

    #[test]
    fn the_first_skipped_step_and_the_first_long_row_are_noticed() {
        let mut scaler = Scaler::new(LossScale::new());
        let mut notices = |skips: u64| {
            scaler.update(Finite);
            assert_eq!(scaler.skip_notice(), None);
            (1..=skips)
                .filter_map(|skip| {
                    scaler.update(NotFinite);
                    scaler.skip_notice().map(|notice| (skip, notice))
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(notices(3), [(1, SkipNotice::First)]);
        assert_eq!(notices(15), []);
        assert_eq!(notices(40), [(16, SkipNotice::Many(16))]);
        assert_eq!(notices(40), []);
    }

    #[test]
    fn the_defaults_are_those_of_pytorch() {
        let mut scaler = Scaler::new(LossScale::new());
        assert_eq!(scaler.scale(), 65536.0);
        for _ in 0..1999 {
            scaler.update(Finite);
        }
        assert_eq!(scaler.scale(), 65536.0);
        scaler.update(Finite);
        assert_eq!(scaler.scale(), 131_072.0);
        scaler.update(NotFinite);
        assert_eq!(scaler.scale(), 65536.0);
    }

    #[test]
    fn what_leads_nowhere_is_refused_and_bounds_hold() {
        let bad = [
            LossScale::new().with_initial(0.0),
            LossScale::new().with_initial(f64::NAN),
            LossScale::new().with_initial(1e-300),
            LossScale::new().with_initial(2.0 * LARGEST),
            LossScale::new().with_growth(0.5),
            LossScale::new().with_growth(1e300),
            LossScale::new().with_growth(f64::NAN),
            LossScale::new().with_backoff(1.0),
            LossScale::new().with_backoff(1e-300),
            LossScale::new().with_backoff(f64::NAN),
            LossScale::new().with_growth_interval(0),
        ];
        for rule in bad {
            assert!(rule.check().unwrap_err().is_config(), "{rule}");
        }
        let text = bad[3].check().unwrap_err().to_string();
        assert!(
            text.contains("the beginning of the loss scale is 2.1"),
            "{text}"
        );
        let good = [
            LossScale::new(),
            LossScale::new().with_initial(LARGEST).with_growth(1.0),
            LossScale::new()
                .with_initial(SMALLEST)
                .with_backoff(1.0 / STEEPEST),
        ];
        for rule in good {
            rule.check().unwrap();
        }
        let mut scaler = Scaler::new(LossScale::new().with_growth_interval(1));
        (0..200).for_each(|_| scaler.update(Finite));
        assert_eq!(scaler.scale(), LARGEST);
        (0..200).for_each(|_| scaler.update(NotFinite));
        assert_eq!(scaler.scale(), SMALLEST);
    }
}

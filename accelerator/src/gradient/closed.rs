use std::sync::Arc;

use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use super::bucket;
use super::clip::Clip;
use super::rank::with_rank;
use super::slot::Slot;
use super::sums::Sums;
use super::undo::Undo;
use super::values::Values as Elements;
use crate::error::{Error, Result};

/// The averaged gradients of a window that has ended.
pub(super) struct Closed {
    pub(super) device: Device,
    pub(super) epoch: Option<u64>,
    /// By parameter: what its elements are multiplied by in the end; empty where they stay as they
    /// are.
    pub(super) factors: Vec<f64>,
    /// Before clipping.
    pub(super) norm: Option<f64>,
    /// By parameter: the sum of the squares of its elements, before clipping.
    pub(super) squares: Option<Vec<f64>>,
    pub(super) slot: Arc<Slot>,
    /// Of gradients of this rank alone: held until they are used.
    pub(super) tie: Option<Arc<()>>,
    /// What is taken back where no step comes of it; `None` once that was done.
    pub(super) undo: Option<Undo>,
    pub(super) values: Values,
}

#[allow(clippy::large_enum_variant, reason = "it lies in a box already")]
pub(super) enum Values {
    /// Sums over all ranks.
    Reduced(Sums),
    /// One rank, no accumulation: as Burn made them.
    Untouched {
        gradients: GradientsParams,
        loss: Tensor<1>,
        samples: f64,
    },
}

impl Closed {
    /// By parameter: whether it is clipped.
    pub(super) fn chosen(&self, clip: &Clip<'_>) -> Vec<bool> {
        let parameters = self.slot.parameters().iter();
        parameters.map(|known| clip.covers(&known.path)).collect()
    }

    fn factor(&self, parameter: usize) -> Option<f64> {
        self.factors.get(parameter).copied()
    }

    /// The L2 norm of everything, before clipping. All ranks call it where their sums are spread and it is
    /// not [known](Self::knows_norm).
    #[track_caller]
    pub(super) fn whole_norm(&mut self) -> Result<f64> {
        self.slot.note_norm_wanted();
        match self.norm {
            Some(norm) => Ok(norm),
            None => {
                let norm = self.squares()?.iter().sum::<f64>().sqrt();
                self.norm = Some(norm);
                Ok(norm)
            }
        }
    }

    /// Whether the L2 norm can be had without the other ranks.
    pub(super) fn knows_norm(&self) -> bool {
        let is_spread = match &self.values {
            Values::Reduced(sums) => sums.is_spread(),
            Values::Untouched { .. } => false,
        };
        self.norm.is_some() || self.squares.is_some() || !is_spread
    }

    #[track_caller]
    fn squares(&mut self) -> Result<&[f64]> {
        let squares = match self.squares.take() {
            Some(squares) => squares,
            None => self
                .values
                .powers(&self.slot, &self.device, 2.0, |_| true)?,
        };
        Ok(self.squares.insert(squares))
    }

    /// The norm of what is chosen, as it is now. All ranks call it where their sums are spread.
    #[track_caller]
    pub(super) fn norm_of(&mut self, order: f64, chosen: &[bool]) -> Result<f64> {
        if order == 2.0 {
            let squares = self.squares()?.to_vec();
            let scaled = |(at, square): (usize, f64)| match self.factor(at) {
                _ if !chosen[at] => 0.0,
                Some(factor) => square * factor * factor,
                None => square,
            };
            let sum: f64 = squares.into_iter().enumerate().map(scaled).sum();
            return Ok(sum.sqrt());
        }
        let powers = self
            .values
            .powers(&self.slot, &self.device, order, |at| chosen[at])?;
        let scaled = powers.into_iter().enumerate().map(|(at, power)| {
            let factor = self.factor(at).unwrap_or(1.0);
            power
                * if order.is_infinite() {
                    factor
                } else {
                    libm::pow(factor, order)
                }
        });
        Ok(if order.is_infinite() {
            scaled.fold(0.0, bucket::larger)
        } else {
            libm::pow(scaled.sum::<f64>(), 1.0 / order)
        })
    }

    /// Scales what is chosen down to the norm `max`, where it is longer. All ranks call it where their sums are
    /// spread.
    #[track_caller]
    pub(super) fn clip_norm(&mut self, max: f64, order: f64, chosen: &[bool]) -> Result<()> {
        if order == 2.0 {
            self.whole_norm()?;
        }
        let factor = max / (self.norm_of(order, chosen)? + 1e-6);
        // Also when the norm is NaN: nothing is hidden then.
        if factor.is_nan() || factor < 1.0 {
            self.multiply(factor, chosen);
        }
        Ok(())
    }

    /// What the other ranks wait for does not come: they are told, and no step takes place.
    pub(super) fn give_up(&mut self, error: &Error) {
        if let Values::Reduced(sums) = &self.values {
            sums.give_up(error);
        }
        self.undo.take().into_iter().for_each(Undo::undo);
    }

    fn multiply(&mut self, factor: f64, chosen: &[bool]) {
        if self.factors.is_empty() {
            self.factors = vec![1.0; chosen.len()];
        }
        for (mine, chosen) in self.factors.iter_mut().zip(chosen) {
            if *chosen {
                *mine *= factor;
            }
        }
    }

    /// Holds the chosen elements within a range, where they lie. All ranks call it where their sums are
    /// spread.
    #[track_caller]
    pub(super) fn clamp(&mut self, max: f64, chosen: &[bool]) -> Result<()> {
        // It can be had later no more.
        self.whole_norm()?;
        if max.is_nan() {
            self.multiply(max, chosen);
            return Ok(());
        }
        self.apply_factors();
        self.squares = None;
        match &mut self.values {
            Values::Reduced(sums) => sums.change(|at, value| {
                if chosen[at] {
                    value.clamp(-max, max)
                } else {
                    value
                }
            }),
            Values::Untouched { gradients, .. } => {
                for (at, parameter) in self.slot.parameters().iter().enumerate() {
                    if chosen[at] {
                        with_rank!(parameter.shape.len(), D => {
                            if let Some(gradient) = gradients.remove::<D>(parameter.id) {
                                gradients.register(parameter.id, gradient.clamp(-max, max));
                            }
                        });
                    }
                }
            }
        }
        Ok(())
    }

    /// Multiplies now what would be multiplied in the end.
    pub(super) fn apply_factors(&mut self) {
        let factors = core::mem::take(&mut self.factors);
        if factors.is_empty() {
            return;
        }
        self.squares = None;
        match &mut self.values {
            Values::Reduced(sums) => sums.change(|at, value| value * factors[at]),
            Values::Untouched { gradients, .. } => {
                for (parameter, factor) in self.slot.parameters().iter().zip(factors) {
                    with_rank!(parameter.shape.len(), D => {
                        if let Some(gradient) = gradients.remove::<D>(parameter.id) {
                            gradients.register(parameter.id, gradient.mul_scalar(factor));
                        }
                    });
                }
            }
        }
    }
}

impl Values {
    /// By parameter: the sum of `|x|^order` of its elements, or the largest magnitude where the order is
    /// infinite; 0 for what has no gradient, or is not asked for.
    #[track_caller]
    fn powers(
        &mut self,
        slot: &Slot,
        device: &Device,
        order: f64,
        asked: impl Fn(usize) -> bool,
    ) -> Result<Vec<f64>> {
        match self {
            Self::Reduced(sums) => sums.powers(order, asked),
            Self::Untouched { gradients, .. } => {
                let mut powers = vec![0.0; slot.parameters().len()];
                for (at, parameter) in slot.parameters().iter().enumerate() {
                    if !asked(at) {
                        continue;
                    }
                    with_rank!(parameter.shape.len(), D => {
                        if let Some(gradient) = gradients.remove::<D>(parameter.id) {
                            // Taken out and put back, the data is nobody else's and not copied.
                            let data = gradient.into_data();
                            powers[at] = bucket::power_of(Elements::of(&data), order);
                            let dtype = data.dtype();
                            let gradient = Tensor::<D>::from_data(data, (device, dtype));
                            gradients.register(parameter.id, gradient);
                        }
                    });
                }
                Ok(powers)
            }
        }
    }
}

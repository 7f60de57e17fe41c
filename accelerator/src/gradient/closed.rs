use core::ops::Range;
use std::sync::Arc;

use accelerator_collective::Buffer;
use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use super::bucket::{self, Place};
use super::clip::Clip;
use super::ledger::Ledger;
use super::rank::with_rank;
use super::slot::Slot;
use super::values::Values as Elements;
use crate::data::Mark;
use crate::model::Trainable;
use crate::precision::ScalerState;

/// The averaged gradients of a window that has ended.
pub(super) struct Closed {
    pub(super) device: Device,
    pub(super) epoch: Option<u64>,
    /// By parameter: what its elements are multiplied by in the end; empty where they stay as they
    /// are.
    pub(super) factors: Vec<f64>,
    /// Where the batches end that are in it; empty where nothing can be undone.
    pub(super) marks: Vec<Mark>,
    /// Before clipping.
    pub(super) norm: Option<f64>,
    /// How the scale of losses stood before this window; `None` where nothing can be undone.
    pub(super) scaler: Option<ScalerState>,
    /// By parameter: the sum of the squares of its elements, before clipping.
    pub(super) squares: Option<Vec<f64>>,
    pub(super) slot: Arc<Slot>,
    /// Of gradients of this rank alone: held until they are used.
    pub(super) tie: Option<Arc<()>>,
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

/// Sums, whose ledger goes back to its slot.
pub(super) struct Sums {
    /// There until it is dropped.
    pub(super) ledger: Option<Ledger>,
    /// What sums are divided by: the total weight, times the scale of the loss.
    pub(super) divisor: f64,
    pub(super) loss: f64,
    pub(super) slot: Arc<Slot>,
    pub(super) total: f64,
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

    /// The L2 norm of everything, before clipping.
    pub(super) fn whole_norm(&mut self) -> f64 {
        if self.norm.is_none() {
            let norm = self.squares().iter().sum::<f64>().sqrt();
            self.norm = Some(norm);
        }
        self.norm.unwrap_or(f64::NAN)
    }

    fn squares(&mut self) -> &[f64] {
        let (slot, device, values) = (&self.slot, &self.device, &mut self.values);
        self.squares
            .get_or_insert_with(|| values.powers(slot, device, 2.0, |_| true))
    }

    /// The norm of what is chosen, as it is now.
    pub(super) fn norm_of(&mut self, order: f64, chosen: &[bool]) -> f64 {
        if order == 2.0 {
            let squares = self.squares().to_vec();
            let scaled = |(at, square): (usize, f64)| match self.factor(at) {
                _ if !chosen[at] => 0.0,
                Some(factor) => square * factor * factor,
                None => square,
            };
            let sum: f64 = squares.into_iter().enumerate().map(scaled).sum();
            return sum.sqrt();
        }
        let powers = self
            .values
            .powers(&self.slot, &self.device, order, |at| chosen[at]);
        let scaled = powers.into_iter().enumerate().map(|(at, power)| {
            let factor = self.factor(at).unwrap_or(1.0);
            power
                * if order.is_infinite() {
                    factor
                } else {
                    libm::pow(factor, order)
                }
        });
        if order.is_infinite() {
            scaled.fold(0.0, bucket::larger)
        } else {
            libm::pow(scaled.sum::<f64>(), 1.0 / order)
        }
    }

    pub(super) fn multiply(&mut self, factor: f64, chosen: &[bool]) {
        if self.factors.is_empty() {
            self.factors = vec![1.0; chosen.len()];
        }
        for (mine, chosen) in self.factors.iter_mut().zip(chosen) {
            if *chosen {
                *mine *= factor;
            }
        }
    }

    /// Holds the chosen elements within a range, where they lie.
    pub(super) fn clamp(&mut self, max: f64, chosen: &[bool]) {
        // It can be had later no more.
        self.whole_norm();
        if max.is_nan() {
            return self.multiply(max, chosen);
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
    fn powers(
        &mut self,
        slot: &Slot,
        device: &Device,
        order: f64,
        asked: impl Fn(usize) -> bool,
    ) -> Vec<f64> {
        let mut powers = vec![0.0; slot.parameters().len()];
        match self {
            Self::Reduced(sums) => {
                for (at, _, buffer, range) in sums.there() {
                    if asked(at) {
                        powers[at] = bucket::power(buffer, range, sums.divisor, order);
                    }
                }
            }
            Self::Untouched { gradients, .. } => {
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
            }
        }
        powers
    }
}

impl Sums {
    /// The parameters that have a gradient, in path order, and where its sum lies.
    pub(super) fn there(
        &self,
    ) -> impl Iterator<Item = (usize, &Trainable, &Buffer, &Range<usize>)> {
        let parameters = self.slot.parameters().iter().enumerate();
        parameters.filter_map(|(index, parameter)| {
            let (sums, range) = self.place(index)?;
            Some((index, parameter, sums, range))
        })
    }

    /// Where the sum of a parameter lies, if it has a gradient.
    pub(super) fn place(&self, index: usize) -> Option<(&Buffer, &Range<usize>)> {
        let ledger = self.ledger.as_ref()?;
        let place = ledger.layout.place(index);
        let sums = ledger.sums(place.bucket)?;
        ledger.present[index].then_some((sums, &place.range))
    }

    /// The same, to be changed.
    pub(super) fn place_mut(&mut self, index: usize) -> Option<(&mut Buffer, Range<usize>)> {
        let ledger = self.ledger.as_mut()?;
        if !ledger.present[index] {
            return None;
        }
        let Place { bucket, range } = ledger.layout.place(index).clone();
        Some((ledger.sums_mut(bucket)?, range))
    }

    /// Replaces every element, given the number of its parameter and the element of the average.
    fn change(&mut self, new: impl Fn(usize, f64) -> f64) {
        let Some(ledger) = &mut self.ledger else {
            return;
        };
        let layout = ledger.layout.clone();
        for index in 0..self.slot.parameters().len() {
            let place = layout.place(index);
            if ledger.present[index]
                && let Some(sums) = ledger.sums_mut(place.bucket)
            {
                bucket::change(sums, &place.range, |value| new(index, value / self.divisor));
            }
        }
        self.divisor = 1.0;
    }

    /// The gradients of the parameters that are asked for. Elements are multiplied by the factor of their
    /// parameter, where there are any.
    pub(super) fn params(
        &self,
        device: &Device,
        factors: &[f64],
        asked: impl Fn(ParamId) -> bool,
    ) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for (index, parameter, buffer, range) in self.there() {
            if !asked(parameter.id) {
                continue;
            }
            let factor = factor(factors, index);
            let (float, shape) = (parameter.float, &parameter.shape);
            let data = bucket::read(buffer, range, float, shape, self.divisor, factor);
            let dtype = data.dtype();
            with_rank!(parameter.shape.len(), D => {
                let gradient = Tensor::<D>::from_data(data, (device, dtype));
                gradients.register(parameter.id, gradient);
            });
        }
        gradients
    }
}

/// What the elements of a parameter are multiplied by. What is 1 changes no bit, and costs nothing where
/// it is left out.
pub(super) fn factor(factors: &[f64], index: usize) -> Option<f64> {
    factors.get(index).copied().filter(|&factor| factor != 1.0)
}

impl Drop for Sums {
    fn drop(&mut self) {
        if let Some(ledger) = self.ledger.take() {
            self.slot.take_back(ledger);
        }
    }
}
